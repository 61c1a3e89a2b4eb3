"""YAML text -> plain data, with the place of every key and value.

Read from the parser's events, so that nothing is built that we did not ask for: no tags, no merge
keys, no dates; an unquoted ``1.30`` stays the text that it is, and ``yes`` is a word. Every limit
is checked before anything grows: size, depth, and how often aliases repeat.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from yaml.reader import ReaderError

from netlab.errors import LabError, Problem

MAX_BYTES = 1 << 20
MAX_DEPTH = 40
MAX_VALUES = 50_000

Place: TypeAlias = tuple[int, int]
_INDEX = re.compile(r"\[(\d+)\]")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


@dataclass(slots=True)
class Document:
    """Plain *data* (dict, list, str, int, bool, None) with places.

    *values* and *keys*: by path, where a value and its key stand: (line, column), from 1.
    *names*: by kind (``pods``), every name that the file gives, also of unusable entries.
    *lost*: kinds whose names are not known, because what the file gives is no mapping.
    *removed*: by a list's path, the indices (as in the file) that are no longer in *data*; every
    method takes paths as *data* has them and tells places and paths of the file.
    """

    data: Any = None
    values: dict[str, Place] = field(default_factory=dict)
    keys: dict[str, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    names: dict[str, frozenset[str]] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    removed: dict[str, list[int]] = field(default_factory=dict)

    def place(self, path: str, *, at_key: bool = False) -> Place:
        """The place of the value (or of its key), or of its nearest parent."""
        path = self.original(path)
        first, second = (self.keys, self.values) if at_key else (self.values, self.keys)
        while path and path not in first and path not in second:
            path = parent(path)
        return first.get(path) or second.get(path, (1, 1))

    def gave(self, path: str) -> bool:
        """Whether the file has this key, usable or not."""
        return self.original(path) in self.keys

    def gave_within(self, path: str) -> bool:
        """Whether the file has anything inside the mapping or list at *path*."""
        inside = (f"{self.original(path)}.", f"{self.original(path)}[")
        return any(known.startswith(inside) for known in self.values)

    def problem(self, path: str, message: str, *, at_key: bool = False) -> None:
        place = self.place(path, at_key=at_key)
        self.problems.append(Problem(*place, self.original(path), message))

    def remove(self, path: str, index: int) -> None:
        """Remember that the item *index* of the list at *path* leaves *data*."""
        base, _, number = self.original(join(path, index)).rpartition("[")
        self.removed.setdefault(base, []).append(int(number[:-1]))

    def original(self, path: str) -> str:
        """*path* with the indices that the file has."""
        if not self.removed:
            return path
        result, position = "", 0
        for match in _INDEX.finditer(path):
            result += path[position : match.start()]
            index = int(match[1])
            for gone in sorted(self.removed.get(result, ())):
                index += gone <= index
            result += f"[{index}]"
            position = match.end()
        return result + path[position:]


def join(path: str, key: str | int) -> str:
    """The path of a child: ``a.b`` and ``a.b[0]``."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def parent(path: str) -> str:
    """The path without its last step."""
    return path.rpartition("[" if path.endswith("]") else ".")[0]


def read(file: Path) -> str:
    """The text of *file*.

    Raises:
        LabError: missing, a folder, too large, or not UTF-8.
    """
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise LabError(str(file), (Problem(0, 0, "", str(error.strerror)),)) from None
    if len(raw) > MAX_BYTES:
        message = f"more than {MAX_BYTES >> 20} MB: that is no lab file"
        raise LabError(str(file), (Problem(0, 0, "", message),))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        problem = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        raise LabError(str(file), (Problem(line, column, "", problem),)) from None


def parse(text: str, file: str) -> Document:
    """The document in *text*; duplicate keys and the like are among its problems.

    Raises:
        LabError: it is not YAML, empty, or beyond a limit.
    """
    try:
        reader = _Reader(yaml.parse(text, Loader=yaml.CSafeLoader))
        reader.read()
    except yaml.MarkedYAMLError as error:
        raise LabError(file, (_not_yaml(text, error),)) from None
    except ReaderError as error:
        before = text.encode()[: error.position].decode(errors="ignore")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = "a control character: a lab file is plain text"
        raise LabError(file, (Problem(line, column, "", message),)) from None
    except _BeyondLimitError as error:
        raise LabError(file, (Problem(*error.place, "", str(error)),)) from None
    return reader.document


def _not_yaml(text: str, error: yaml.MarkedYAMLError) -> Problem:
    """What the parser says, and what is usually behind it."""
    said = error.problem or error.context or "not YAML"
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return Problem(0, 0, "", said)
    lines = text.split("\n")
    rest = lines[mark.line][mark.column :] if mark.line < len(lines) else ""
    if rest.startswith("\t"):
        said = "a tab: YAML is indented with spaces"
    elif said.startswith("mapping values"):
        said = "a second ': ' in one line: put text that has one in quotes"
        if ": " not in lines[mark.line][: mark.column]:
            said = "this belongs to the text above: is it indented like its neighbours?"
    elif rest[:1] and rest[0] in "@`%":
        said = f"put text that starts with {rest[0]} in quotes"
    return Problem(mark.line + 1, mark.column + 1, "", said)


class _BeyondLimitError(Exception):
    def __init__(self, event: yaml.Event, message: str) -> None:
        super().__init__(message)
        self.place = _place(event)


@dataclass(slots=True)
class _Anchored:
    """What an alias repeats."""

    events: list[yaml.Event]


class _Reader:
    """One pass over the events; aliases are read again from the events that they repeat."""

    def __init__(self, events: Iterator[yaml.Event]) -> None:
        self.events = events
        self.document = Document()
        self.anchors: dict[str, _Anchored] = {}
        self.count = 0

    def read(self) -> None:
        event = next(self.events)
        while isinstance(event, yaml.StreamStartEvent | yaml.DocumentStartEvent):
            event = next(self.events)
        if isinstance(event, yaml.StreamEndEvent):
            raise _BeyondLimitError(event, "the file is empty: a lab starts with `name: ...`")
        self.document.data = self._value(event, self.events, "", 0)
        for rest in self.events:
            if isinstance(rest, yaml.DocumentStartEvent):
                raise _BeyondLimitError(rest, "a second document: a file is one lab")

    def _value(self, event: yaml.Event, events: Iterator[yaml.Event], path: str, depth: int) -> Any:  # noqa: ANN401 - plain data
        self.count += 1
        if self.count > MAX_VALUES:
            raise _BeyondLimitError(event, f"more than {MAX_VALUES} values: aliases that multiply?")
        if depth > MAX_DEPTH:
            raise _BeyondLimitError(event, f"nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, path, depth)
        anchor = getattr(event, "anchor", None)
        if anchor:
            recorded = [event, *_extent(event, events, MAX_DEPTH - depth)]
            self.anchors[anchor] = _Anchored(recorded)
            events = iter(recorded[1:])
        self.document.values.setdefault(path, _place(event))
        self._no_tag(event, path)
        value: Any = None
        if isinstance(event, yaml.MappingStartEvent):
            value = self._mapping(events, path, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(events, path, depth)
        elif isinstance(event, yaml.ScalarEvent):
            value = _scalar(event)
        return value

    def _alias(self, event: yaml.AliasEvent, path: str, depth: int) -> Any:  # noqa: ANN401 - plain data
        name = str(event.anchor)
        known = self.anchors.get(name)
        if known is None:
            raise _BeyondLimitError(event, f"no anchor &{name} before this alias")
        self.document.values[path] = _place(event)
        events = iter(known.events)
        first = next(events)
        self.anchors.pop(name)
        try:
            first.anchor = None  # type: ignore[attr-defined]
            return self._value(first, events, path, depth)
        finally:
            self.anchors[name] = known

    def _mapping(self, events: Iterator[yaml.Event], path: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            if not isinstance(event, yaml.ScalarEvent):
                raise _BeyondLimitError(event, "a key is a word, not a list, mapping or alias")
            child = join(path, event.value)
            if not re.fullmatch(r"\S+", event.value) or not event.value.isprintable():
                raise _BeyondLimitError(event, f"{event.value!r} is no key: a key is one word")
            if event.value == "<<":
                self._problem(event, child, "merge keys are not part of the language: repeat it")
            duplicate = event.value in found
            if duplicate:
                line = self.document.keys[child][0]
                self._problem(event, child, f"given twice, first in line {line}")
            self.document.keys.setdefault(child, _place(event))
            value = self._value(next(events), events, child, depth + 1)
            if not duplicate and event.value != "<<":
                found[event.value] = value
        return found

    def _sequence(self, events: Iterator[yaml.Event], path: str, depth: int) -> list[Any]:
        found: list[Any] = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            found.append(self._value(event, events, join(path, len(found)), depth + 1))
        return found

    def _no_tag(self, event: yaml.Event, path: str) -> None:
        tag = getattr(event, "tag", None)
        if tag not in {None, "!"}:
            short = str(tag).replace("tag:yaml.org,2002:", "!!")
            self._problem(event, path, f"tags such as {short} are not part of the language")

    def _problem(self, event: yaml.Event, path: str, message: str) -> None:
        self.document.problems.append(Problem(*_place(event), path, message))


def _place(event: yaml.Event) -> Place:
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


def _extent(first: yaml.Event, events: Iterator[yaml.Event], levels: int) -> list[yaml.Event]:
    """The events that belong to the value that *first* opens, at most *levels* deep."""
    opening = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
    depth = int(isinstance(first, opening))
    found: list[yaml.Event] = []
    while depth:
        event = next(events)
        found.append(event)
        if isinstance(event, opening):
            depth += 1
            if depth > levels:
                raise _BeyondLimitError(event, f"nested more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            depth -= 1
    return found


def _scalar(event: yaml.ScalarEvent) -> str | int | bool | None:
    """Quoted: text. Plain: true, false, null, a decimal integer, else the text as it stands."""
    if event.style not in {None, ""}:
        return str(event.value)
    text = str(event.value)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    return int(text) if _INTEGER.fullmatch(text) and len(text) < 19 else text
