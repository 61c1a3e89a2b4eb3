"""Broken labs: every mistake is told, at its place, with what was expected.

Each case is two files of ``errors/``: a lab with a mistake that people make, and the full text of
the message. A new case is a new pair; ``python tests/unit/test_spec_errors.py`` writes the texts
anew, to be read before they are committed.
"""

from __future__ import annotations

import os
import time
import tracemalloc
from functools import cache
from pathlib import Path

import pytest

from netlab import spec
from netlab.errors import LabError, UsageError

FOLDER = Path(__file__).parent / "errors"
CASES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
SMALL = "name: small\nunderlay: {networks: {lan: {subnets: [10.0.0.0/24]}}}\n"


@cache
def error(case: str) -> LabError:
    """What `load_all` raises for the case."""
    with pytest.raises(LabError) as caught:
        spec.load_all(FOLDER / f"{case}.yaml")
    return caught.value


def message(case: str) -> str:
    """The error's text, with the bare file name in front of each line."""
    return str(error(case)).replace(f"{FOLDER}{os.sep}", "") + "\n"


@pytest.mark.parametrize("case", CASES)
def test_every_problem_is_told_with_its_place(case: str) -> None:
    assert message(case) == (FOLDER / f"{case}.txt").read_text()


def test_no_case_lacks_its_half() -> None:
    texts = {file.stem for file in FOLDER.glob("*.txt")}
    assert texts == set(CASES)
    assert len(CASES) >= 60


@pytest.mark.parametrize("case", CASES)
def test_places_are_in_the_file(case: str) -> None:
    lines = (FOLDER / f"{case}.yaml").read_bytes().decode(errors="replace").splitlines()
    for problem in error(case).problems:
        assert 1 <= problem.line <= len(lines) + 1
        assert problem.column >= 1
        assert "\n" not in problem.message


def test_a_key_is_pointed_at_by_its_own_place() -> None:
    """The place is not taken from the text that it is compared with: it is found in the file."""
    case = "unknown-keys-everywhere"
    lines = (FOLDER / f"{case}.yaml").read_text().splitlines()
    unknown = [p for p in error(case).problems if "no such setting" in p.message]
    assert len(unknown) == 5
    for problem in unknown:
        key = problem.path.rpartition(".")[2]
        assert lines[problem.line - 1][problem.column - 1 :].startswith(f"{key}:")


# --- files that are no labs ----------------------------------------------------------------------


def told(file: Path) -> str:
    with pytest.raises(LabError) as caught:
        spec.load(file)
    return str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    assert told(tmp_path / "no.yaml").startswith(f"{tmp_path}/no.yaml  No such file or directory")


def test_folder(tmp_path: Path) -> None:
    assert "Is a directory" in told(tmp_path)


def test_a_large_file_is_refused_soon(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    file.write_bytes(b"name: large\n" + b"# filling\n" * 1_000_000)
    tracemalloc.start()
    started = time.perf_counter()
    assert "more than 1 MB: that is no lab file" in told(file)
    seconds = time.perf_counter() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000
    assert seconds < 1


def test_an_endless_file_is_refused() -> None:
    assert "more than 1 MB: that is no lab file" in told(Path("/dev/zero"))


@pytest.mark.parametrize(
    "text",
    [
        "a: &a " + "[" * 400_000,
        "a: " + "{a: " * 200_000,
        "a: " + "- " * 400_000,
        "? " * 400_000,
        "a: " + "&x " * 300_000,
        "a: " + "'" * 900_001,
        "[" + "1," * 400_000 + "]",
        "\n".join(
            f"k{number}: &k{number} [*k{number - 1}, *k{number - 1}]" for number in range(40)
        ),
        "k0: &k0 []\n" + "\n".join(f"k{n}: &k{n} [{f'*k{n - 1}, ' * 9}]" for n in range(1, 3000)),
    ],
    ids=lambda text: text[:12],
)
def test_abuse_is_refused_soon(text: str) -> None:
    started = time.perf_counter()
    with pytest.raises(LabError):
        spec.parse(text, Path("abuse.yaml"))
    assert time.perf_counter() - started < 5


def test_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "bom.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + SMALL.encode())
    assert spec.load(file).name == "small"


def test_unknown_variant_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no variant 'librl' \(did you mean 'liberal'\?\)"):
        spec.parse(f"{SMALL}variants: {{liberal: {{}}}}\n", Path("x.yaml"), variant="librl")


if __name__ == "__main__":
    for name in CASES:
        (FOLDER / f"{name}.txt").write_text(message(name))
