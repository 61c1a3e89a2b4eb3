"""Setting paths: ``cluster.kubeProxy.version``, ``services.web.ports[http].nodePort``.

After ``sysctl.`` (or ``sysctls.``, ``sysctlAtStart.``) the rest is one key. A list item is named
by its index, its ``name`` or ``id``, or by itself (``endpoints[ma2]``). A key that has dots of its
own (``eth0.100``) is found by what the file has, or given in brackets: ``nics[eth0.100].mtu``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from netlab.errors import Problem
from netlab.spec.checking import nearest, path_of
from netlab.spec.document import Document, join
from netlab.spec.language import schema
from netlab.spec.vocabulary import Schema

Steps = Sequence[str | int]

NOWHERE = (0, 0)
"""The place of what is not in the file."""

_ONE_KEY = {"sysctl", "sysctls", "sysctlAtStart"}
_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\]]+)\]")


class _NoSuchPathError(Exception):
    """The path leads nowhere; the message says why and what is near."""


def changed(document: Document, changes: Mapping[str, Any], where: str | None) -> Document:
    """A copy of *document* with *changes* (path -> plain value; None removes) made.

    *where* is the path of the changes themselves (``variants.x.set``): the place of new values;
    None: they are not in the file, so their place is line 0. Paths that lead nowhere become
    problems of the copy.
    """
    made = Document(
        copy.deepcopy(document.data),
        dict(document.values),
        dict(document.keys),
        list(document.problems) if where is None else [],
        removed={path: list(gone) for path, gone in document.removed.items()},
    )
    for path, value in changes.items():
        origin = path if where is None else join(where, path)
        try:
            steps = _resolve(made.data, path)
            target = made.original(path_of(steps))
            _set(made, steps, value)
        except _NoSuchPathError as error:
            place = NOWHERE if where is None else document.place(origin, at_key=True)
            made.problems.append(Problem(*place, origin, str(error)))
        else:
            _move_places(made, target, document, None if where is None else origin)
    return made


def _resolve(data: Any, path: str) -> list[str | int]:  # noqa: ANN401 - plain data
    """*path* as steps; it exists in *data*, or the language knows it."""
    steps: list[str | int] = []
    part: Schema | None = schema()
    rest = path
    while rest:
        step, rest = _step(data, steps, rest)
        part = _child(part, step) if part is not None else None
        if part is None:
            raise _NoSuchPathError(_nowhere(steps, step, data))
        steps.append(step)
        try:
            data = data[step]
        except (LookupError, TypeError):
            data = None
    if not steps:
        raise _NoSuchPathError("an empty path")
    return steps


def _step(data: Any, before: Steps, rest: str) -> tuple[str | int, str]:  # noqa: ANN401 - plain data
    """The next step of *rest*, and what is left of it."""
    key = rest.removeprefix(".") if before else rest
    if before and before[-1] in _ONE_KEY and rest.startswith("."):
        return key, ""
    if isinstance(data, Mapping):
        # The longest key that the file has: names of NICs and ids have dots of their own.
        for known in sorted(data, key=len, reverse=True):
            if key == known or key.startswith((f"{known}.", f"{known}[")):
                return known, key[len(known) :]
    match = _STEP.match(rest)
    if match is None:
        raise _NoSuchPathError(f"{rest!r} is no step of a path")
    name = match[1] or match[2]
    left = rest[match.end() :]
    if match[1] is not None or isinstance(data, Mapping):
        return name, left
    return _index(data, name, before), left


def _index(data: Any, name: str, before: Steps) -> int:  # noqa: ANN401 - plain data
    items = data if isinstance(data, list) else []
    names = [_name(item) for item in items]
    if name in names:
        return names.index(name)
    if name.isdecimal() and int(name) < len(items):
        return int(name)
    known = [known for known in names if known]
    count = f"{len(items)} item{'s' if len(items) != 1 else ''}"
    choices = f"; there are: {', '.join(known)}" if known else f"; it has {count}"
    hint = nearest(name, known) or choices
    raise _NoSuchPathError(f"no item [{name}] in {path_of(before)}{hint}")


def _name(item: object) -> str:
    if isinstance(item, Mapping):
        return str(next((item[key] for key in ("name", "id", "pod") if key in item), ""))
    return str(item)


def _child(part: Schema, step: str | int) -> Schema | None:
    if isinstance(step, int):
        items = part.get("items")
        return items if isinstance(items, dict) else None
    known = part.get("properties", {})
    if step in known:
        return dict(known[step])
    more = part.get("additionalProperties")
    return more if isinstance(more, dict) else None


def _nowhere(before: Steps, step: str | int, data: Any) -> str:  # noqa: ANN401 - plain data
    """Why the language has no *step* behind *before*."""
    part: Schema = schema()
    for known_step in before:
        part = _child(part, known_step) or {}
    known = list(part.get("properties", {}))
    inside = f" in {path_of(before)}" if before else ""
    if not known and not isinstance(data, Mapping | list):
        return f"{path_of(before)} is one value: it has no {str(step)!r}"
    choices = f"; there are: {', '.join(known)}" if known else ""
    return f"no setting {str(step)!r}{inside}{nearest(str(step), known) or choices}"


def _set(document: Document, steps: Steps, value: Any) -> None:  # noqa: ANN401 - plain data
    """Set or (None) remove; what is named, but not there, is a problem, a setting is not."""
    data = document.data
    for number, step in enumerate(steps):
        before, last = steps[:number], number == len(steps) - 1
        if isinstance(data, dict) and step not in data:
            new = last and isinstance(value, dict)
            if _is_named(before) and not new:
                hint = nearest(str(step), data)
                raise _NoSuchPathError(f"no {str(step)!r} in {path_of(before)}{hint}")
            if not last:
                data[str(step)] = {}
        elif not isinstance(data, dict | list):
            raise _NoSuchPathError(f"{path_of(before)} has no settings of its own in this lab")
        if not last:
            data = data[step]
    final: Any = steps[-1]
    if value is not None:
        data[final] = copy.deepcopy(value)
    elif isinstance(data, list):
        document.remove(path_of(steps[:-1]), final)
        del data[final]
    else:
        data.pop(final, None)


def _is_named(before: Steps) -> bool:
    """Whether the keys there are names that the file makes up, such as Pods'."""
    part: Schema | None = schema()
    for step in before:
        part = _child(part, step) if part is not None else None
    return part is not None and "propertyNames" in part and before[-1] not in _ONE_KEY


def _move_places(made: Document, path: str, document: Document, origin: str | None) -> None:
    """What *path* held is gone; what it holds now stands at *origin*, or nowhere in the file."""
    for places in (made.values, made.keys):
        gone = [old for old in places if _within(old, path)]
        for old in gone:
            del places[old]
    if origin is None:
        made.values[path] = made.keys[path] = NOWHERE
        return
    for places, source in ((made.values, document.values), (made.keys, document.keys)):
        for new, place in source.items():
            if _within(new, origin):
                places[path + new[len(origin) :]] = place


def _within(path: str, base: str) -> bool:
    return path == base or path.startswith((f"{base}.", f"{base}["))
