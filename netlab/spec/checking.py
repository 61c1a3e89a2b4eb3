"""Schema problems in words, each at its place; and the data without what is wrong in it.

What is left still has everything that is required, so the checks after the schema can go on and
tell all mistakes at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import jsonschema_rs

from netlab.errors import Problem
from netlab.spec.document import Document, join
from netlab.spec.language import Schema, formats, schema

Steps = Sequence[str | int]


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest of *known*, else nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check(document: Document) -> bool:
    """Add the schema's problems to *document* and take what is wrong out of its data.

    Returns:
        Whether enough is left to go on.
    """
    while True:
        errors = list(_validator().iter_errors(document.data))
        if not errors:
            return True
        for error in errors:
            document.problems += _problems(document, error)
        doomed = [steps for error in errors for steps in _doomed(error)]
        if any(not steps for steps in doomed):
            return False
        for steps in sorted(doomed, key=_depth, reverse=True):
            _remove(document.data, steps)


@cache
def _validator() -> Any:  # noqa: ANN401 - the library's class
    return jsonschema_rs.Draft202012Validator(
        schema(), formats=dict(formats()), validate_formats=True
    )


def path_of(steps: Steps) -> str:
    path = ""
    for step in steps:
        path = join(path, step)
    return path


def _depth(steps: Steps) -> tuple[int, int]:
    """Deepest first, and of one list the last item first, so that indices stay true."""
    last = steps[-1]
    return (len(steps), last if isinstance(last, int) else 0)


def _doomed(error: Any) -> list[Steps]:  # noqa: ANN401 - the library's class
    """What must go for the rest to be valid: the value, or an unknown key, or a misnamed one."""
    steps = list(error.instance_path)
    if error.kind.name == "additionalProperties":
        return [[*steps, key] for key in error.kind.unexpected]
    if error.kind.name == "propertyNames":
        return [[*steps, error.kind.error.instance]]
    return [steps]


def _remove(data: Any, steps: Steps) -> None:  # noqa: ANN401 - plain data
    for step in steps[:-1]:
        try:
            data = data[step]
        except (LookupError, TypeError):
            return
    last = steps[-1]
    if isinstance(data, list) and isinstance(last, int) and last < len(data):
        del data[last]
    elif isinstance(data, dict):
        data.pop(str(last), None)


def _problems(document: Document, error: Any) -> list[Problem]:  # noqa: ANN401 - the library's class
    path = path_of(error.instance_path)
    kind = error.kind.name
    if kind == "additionalProperties":
        known = _rule(error.schema_path[:-1]).get("properties", {})
        return [
            _at_key(document, join(path, key), f"no such setting{nearest(key, known)}")
            for key in error.kind.unexpected
        ]
    if kind == "propertyNames":
        name = error.kind.error.instance
        expected = _rule(error.schema_path).get("expected", "another name")
        return [_at_key(document, join(path, name), f"{name!r} is not {expected}")]
    place = document.place(path)
    if kind == "required":
        return [Problem(*place, path, f"{error.kind.property!r} is missing")]
    return [Problem(*place, path, _message(error))]


def _at_key(document: Document, path: str, message: str) -> Problem:
    return Problem(*document.keys.get(path, document.place(path)), path, message)


def _message(error: Any) -> str:  # noqa: ANN401 - the library's class
    rule = _rule(error.schema_path[:-1])
    got = _shown(error.instance)
    if error.kind.name == "enum":
        options = [str(option) for option in rule["enum"]]
        return f"{got} is not {rule['expected']}{nearest(str(error.instance), options)}"
    if error.kind.name == "minItems":
        return "is empty: expected at least one"
    return f"{got} is not {rule.get('expected', 'valid')}"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return repr(text) if len(text) <= 60 else repr(text[:57] + "...")


def _rule(steps: Steps) -> Schema:
    """The part of the schema at *steps*."""
    part: Any = schema()
    for step in steps:
        part = part[step]
    return part if isinstance(part, dict) else {}
