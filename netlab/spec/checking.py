"""Schema problems in words, each at its place; and the data without what is wrong in it.

What is left still has everything that is required, so the checks after the schema can go on and
tell all mistakes at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

from netlab.spec.document import Document, join
from netlab.spec.language import schema
from netlab.spec.vocabulary import Schema, formats

Steps = Sequence[str | int]

_EMPTY = {"minItems", "minProperties"}


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest of *known*, else nothing."""
    return _nearest(name, tuple(known))


@lru_cache
def _nearest(name: str, known: tuple[str, ...]) -> str:
    """One mistake is often met many times: in every expectation, in every variant."""
    lower = {word.lower(): word for word in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    return f" (did you mean {lower[near[0]]!r}?)" if near else ""


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
            _tell(document, error)
        doomed = {tuple(steps) for error in errors for steps in _doomed(document, error)}
        if () in doomed:
            return False
        for steps in sorted(doomed, key=_depth, reverse=True):
            _remove(document, steps)


@cache
def _validator() -> Any:  # noqa: ANN401 - the library's class
    import jsonschema_rs  # noqa: PLC0415 - 30 ms that commands without a lab file do not need

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


def _steps(document: Document, error: Any) -> list[str | int]:  # noqa: ANN401 - the library's class
    """Where the error is; the library takes a key of digits for an index."""
    data = document.data
    found: list[str | int] = []
    for step in error.instance_path:
        found.append(step if isinstance(data, list) else str(step))
        data = data[found[-1]]
    return found


def _doomed(document: Document, error: Any) -> list[Steps]:  # noqa: ANN401 - the library's class
    """What must go for the rest to be valid: the value, or an unknown key, or a misnamed one."""
    steps = _steps(document, error)
    if error.kind.name == "additionalProperties":
        return [[*steps, key] for key in error.kind.unexpected]
    if error.kind.name == "propertyNames":
        return [[*steps, error.kind.error.instance]]
    return [steps]


def _remove(document: Document, steps: Steps) -> None:
    data = document.data
    for step in steps[:-1]:
        try:
            data = data[step]
        except (LookupError, TypeError):
            return
    last = steps[-1]
    if isinstance(data, list) and isinstance(last, int) and last < len(data):
        document.remove(path_of(steps[:-1]), last)
        del data[last]
    elif isinstance(data, dict):
        data.pop(str(last), None)


def _tell(document: Document, error: Any) -> None:  # noqa: ANN401 - the library's class
    path = path_of(_steps(document, error))
    kind = error.kind.name
    if kind == "additionalProperties":
        known = _rule(error.schema_path[:-1]).get("properties", {})
        for key in error.kind.unexpected:
            message = f"no such setting{nearest(key, known) or _choices(known)}"
            document.problem(join(path, key), message, at_key=True)
    elif kind == "propertyNames":
        name = error.kind.error.instance
        expected = _rule(error.schema_path[:-1])["expected"]
        document.problem(join(path, name), f"{name!r} is not {expected}", at_key=True)
    elif kind == "required":
        # What the file gives, but wrongly, has been told already.
        if not document.gave(join(path, error.kind.property)):
            document.problem(path, f"{error.kind.property!r} is missing", at_key=True)
    elif kind not in _EMPTY or not document.gave_within(path):
        document.problem(path, _message(error))


def _choices(known: Iterable[str]) -> str:
    return f"; there are: {', '.join(sorted(known))}"


def _message(error: Any) -> str:  # noqa: ANN401 - the library's class
    rule = _rule(error.schema_path[:-1])
    got = _shown(error.instance)
    if error.kind.name == "enum":
        options = [str(option) for option in rule["enum"]]
        return f"{got} is not {rule['expected']}{nearest(str(error.instance), options)}"
    if error.kind.name in _EMPTY:
        return "is empty: expected at least one"
    return f"{got} is not {rule.get('expected', 'valid')}"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool | int):
        return str(value).lower()
    text = str(value)
    return repr(text) if len(text) <= 60 else repr(text[:57] + "...")


def _rule(steps: Steps) -> Schema:
    """The part of the schema at *steps*."""
    part: Any = schema()
    for step in steps:
        part = part[step]
    return part if isinstance(part, dict) else {}
