"""Where the labs are: ``labs/`` of a checkout, or inside the installed package."""

from __future__ import annotations

import difflib
from pathlib import Path

from netlab.errors import UsageError

_PACKAGE = Path(__file__).resolve().parent


def folder() -> Path:
    """The folder of the catalogue."""
    installed = _PACKAGE / "labs"
    return installed if installed.is_dir() else _PACKAGE.parent / "labs"


def paths() -> tuple[Path, ...]:
    """The catalogue's files, by name."""
    return tuple(sorted(folder().glob("*.yaml")))


def find(name: str) -> Path:
    """The file of *name*: a path (it has a slash or ends in .yaml), else a catalogue name.

    Raises:
        UsageError: no such lab; the message has the nearest name and all of them.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        return Path(name)
    known = {path.stem: path for path in paths()}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UsageError(
        f"no lab {name!r} in the catalogue{hint}; there are: {', '.join(known)}; "
        "a file of your own is given as a path, ./lab.yaml"
    )
