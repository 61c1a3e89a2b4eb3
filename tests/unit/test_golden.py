"""The whole plan of every lab, as reviewed: `invoke golden` writes it anew."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
PLANS: dict[str, str] = runpy.run_path(str(GOLDEN.with_suffix(".py")))["plans"]()


@pytest.mark.parametrize("name", sorted(PLANS))
def test_plan_is_as_reviewed(name: str) -> None:
    assert PLANS[name] == (GOLDEN / name).read_text()


def test_no_file_is_left_of_a_lab_that_is_gone() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(PLANS)
