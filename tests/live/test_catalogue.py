"""Every lab of the catalogue, every variant, every expectation: a test each, on a real kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from netlab import catalogue, check, report, spec
from netlab.judge import Verdict

pytestmark = pytest.mark.live

STRICT = report.Options(strict=True)
CASES = [
    pytest.param(path.stem, variant, entry.id, id=f"{path.stem}/{variant}/{entry.id}")
    for path in catalogue.paths()
    for variant, lab in spec.load_all(path).items()
    for entry in lab.expect
]


@cache
def verdicts(name: str, variant: str) -> dict[str, Verdict]:
    """One strict run of the variant, on a private instance."""
    ((lab, plan),) = check.select_runs(catalogue.find(name), (variant,))
    return {verdict.id: verdict for verdict in check.run(lab, plan, None, STRICT, None).verdicts}


@pytest.mark.parametrize(("name", "variant", "expectation"), CASES)
def test_expectation(name: str, variant: str, expectation: str) -> None:
    verdict = verdicts(name, variant)[expectation]
    assert verdict.ok, f"{verdict.text}: {verdict.reason}\n{verdict.expected}\n{verdict.observed}"


@pytest.fixture(scope="module", autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    left = [path.name for path in Path("/run/netns").glob(f"netlab.*-{os.getpid()}-*")]
    assert left == []
