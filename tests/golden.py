"""`invoke golden`: the whole plan of every lab as text, for people to review and tests to hold."""

from __future__ import annotations

import difflib
from pathlib import Path

from netlab import catalogue, script
from netlab.compile import compile_lab
from netlab.spec import load_all

FOLDER = Path(__file__).resolve().parent / "golden"


def plans() -> dict[str, str]:
    """File name -> text: each lab's plan, and what each variant changes of it."""
    found: dict[str, str] = {}
    for path in catalogue.paths():
        labs = {name: script.render(compile_lab(lab)) for name, lab in load_all(path).items()}
        base = labs.pop("base")
        found[f"{path.stem}.plan"] = base
        for name, text in labs.items():
            lines = difflib.unified_diff(
                base.splitlines(), text.splitlines(), "base", name, lineterm="", n=1
            )
            found[f"{path.stem}.{name}.diff"] = "\n".join([*lines, ""])
    return found


if __name__ == "__main__":
    for old in FOLDER.glob("*.*"):
        old.unlink()
    for file, content in plans().items():
        (FOLDER / file).write_text(content)
