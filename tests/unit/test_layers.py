"""Imports point one way: the pure half never reaches the kernel, the kernel never the model."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "netlab"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset({"plan"}),
    frozenset({"model", "fib", "script"}),
    frozenset({"addressing", "outcome"}),
    frozenset({"wiring", "raw", "judge", "catalogue"}),
    frozenset({"cni", "kube_proxy"}),
    frozenset({"spec", "compile", "fidelity"}),
    frozenset({"kernel"}),
    frozenset({"probe", "report"}),
    frozenset({"lifecycle"}),
    frozenset({"check"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
"""A module imports from layers before its own, and within its own package."""

KERNEL_MAY = frozenset({"errors", "plan", "kernel"})
ALONE = frozenset({"agent"})
"""Run as a plain file: the standard library and nothing else."""


def imports(file: Path) -> set[str]:
    """Top-level modules of netlab that *file* imports when it runs."""
    tree = ast.parse(file.read_text())
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("netlab.")}
    return found


@cache
def modules() -> dict[str, set[str]]:
    """Top-level module -> the top-level modules that it imports."""
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name != "__init__":
            found.setdefault(name, set()).update(imports(file) - {name})
    return found


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_one_way(name: str) -> None:
    if name in ALONE:
        assert modules()[name] == set()
        return
    (level,) = [number for number, layer in enumerate(LAYERS) if name in layer]
    below = frozenset().union(*LAYERS[:level])
    assert modules()[name] <= below


def test_the_kernel_knows_errors_and_plans_only() -> None:
    assert modules()["kernel"] <= KERNEL_MAY


def test_only_the_kernel_imports_pyroute2() -> None:
    users = {
        file.relative_to(PACKAGE).parts[0]
        for file in PACKAGE.rglob("*.py")
        if any(
            (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyroute2"))
            or (
                isinstance(node, ast.Import)
                and any(a.name.startswith("pyroute2") for a in node.names)
            )
            for node in ast.walk(ast.parse(file.read_text()))
        )
    }
    assert users == {"kernel"}
