"""Setting paths: ``cluster.kubeProxy.version``, ``services.web.ports[http].nodePort``.

After ``sysctl.`` (or ``sysctls.``, ``sysctlAtStart.``) the rest is one key. A list item is named
by its index or by its ``name``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from netlab.errors import Problem
from netlab.spec.checking import nearest, path_of
from netlab.spec.document import Document, join
from netlab.spec.language import Schema, schema

Steps = Sequence[str | int]

_ONE_KEY = {"sysctl", "sysctls", "sysctlAtStart"}
_STEP = re.compile(r"([^.\[\]]+)|\[([^\]]+)\]")


def changed(document: Document, changes: Mapping[str, Any], where: str) -> Document:
    """A copy of *document* with *changes* (path -> plain value; None removes) made.

    *where* is the path of the changes themselves (``variants.x.set``): the place of new values.
    Paths that the language does not know become problems of the copy.
    """
    made = Document(copy.deepcopy(document.data), dict(document.values), dict(document.keys), [])
    for path, value in changes.items():
        origin = join(where, path)
        steps = _steps(path)
        problem = _unknown(path, steps) or _set(made.data, steps, value)
        if problem:
            made.problems.append(Problem(*document.keys.get(origin, (1, 1)), origin, problem))
            continue
        _move_places(made, path_of(_resolved(made.data, steps)), origin, document)
    return made


def _steps(path: str) -> list[str | int]:
    found: list[str | int] = []
    position = 0
    while position < len(path):
        if found and found[-1] in _ONE_KEY and path[position] == ".":
            return [*found, path[position + 1 :]]
        position += path[position] == "."
        match = _STEP.match(path, position)
        if match is None:
            return [*found, path[position:]]
        name, index = match[1], match[2]
        found.append(name or (int(index) if index.isdigit() else f"[{index}]"))
        position = match.end()
    return found


def _unknown(path: str, steps: Steps) -> str | None:
    """Why the language has no such path; None where it has."""
    part: Schema = schema()
    for number, step in enumerate(steps):
        below = _child(part, step)
        if below is None:
            known = list(part.get("properties", {}))
            before = path_of(steps[:number])
            hint = nearest(str(step), known)
            inside = f" in {before}" if before else ""
            choices = f"; there are: {', '.join(known)}" if known and not hint else ""
            return f"{path}: no setting {str(step)!r}{inside}{hint}{choices}"
        part = below
    return None


def _child(part: Schema, step: str | int) -> Schema | None:
    if isinstance(step, int) or step.startswith("["):
        items = part.get("items")
        return items if isinstance(items, dict) else None
    known = part.get("properties", {})
    if step in known:
        return dict(known[step])
    more = part.get("additionalProperties")
    return more if isinstance(more, dict) else None


def _resolved(data: Any, steps: Steps) -> list[str | int]:  # noqa: ANN401 - plain data
    """*steps* with items given by name turned into indices."""
    found: list[str | int] = []
    for step in steps:
        if isinstance(step, str) and step.startswith("[") and isinstance(data, list):
            names = [item.get("name") if isinstance(item, dict) else item for item in data]
            step = names.index(step[1:-1]) if step[1:-1] in names else step  # noqa: PLW2901
        found.append(step)
        try:
            data = data[step]
        except (LookupError, TypeError):
            data = None
    return found


def _set(data: Any, steps: Steps, value: Any) -> str | None:  # noqa: ANN401 - plain data
    """Set or (None) remove; what does not exist on the way is a problem, but for settings."""
    resolved = _resolved(data, steps)
    for number, step in enumerate(resolved[:-1]):
        if isinstance(data, dict) and step not in data:
            before = resolved[:number]
            if before and before[-1] in {"pods", "nodes", "services", "networkAttachments"}:
                return f"no {str(step)!r} in {path_of(before)}{nearest(str(step), data)}"
            data[step] = {}
        try:
            data = data[step]
        except (LookupError, TypeError):
            return f"no {step!r} in {path_of(resolved[:number]) or 'the lab'}"
    last = resolved[-1]
    if isinstance(data, list):
        if not isinstance(last, int) or last >= len(data):
            return f"no item {last} in {path_of(resolved[:-1])}"
        if value is None:
            del data[last]
        else:
            data[last] = value
    elif isinstance(data, dict):
        if value is None:
            data.pop(last, None)
        else:
            data[last] = copy.deepcopy(value)
    else:
        return f"{path_of(resolved[:-1])} has no settings of its own"
    return None


def _move_places(made: Document, path: str, origin: str, document: Document) -> None:
    """What *path* held is gone; what it holds now stands at *origin*."""
    for places in (made.values, made.keys):
        for old in [
            old for old in places if old == path or old.startswith((f"{path}.", f"{path}["))
        ]:
            del places[old]
    for places, source in ((made.values, document.values), (made.keys, document.keys)):
        for new, place in source.items():
            if new == origin or new.startswith((f"{origin}.", f"{origin}[")):
                places[path + new[len(origin) :]] = place
