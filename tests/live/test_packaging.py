"""A wheel has what a checkout has: the same catalogue, by the same program."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

ROOT = Path(__file__).resolve().parents[2]


def run(*argv: str, cwd: Path) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_checkout_and_wheel_give_the_same_list(tmp_path: Path) -> None:
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(ROOT),
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("cni_netlab-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    lock = ROOT / "requirements.lock"
    run(str(python), "-m", "pip", "install", "-q", "-c", str(lock), str(wheel), cwd=tmp_path)
    installed = run(str(python.with_name("cni-netlab")), "list", "--format", "json", cwd=tmp_path)
    as_module = run(str(python), "-m", "netlab", "list", "--format", "json", cwd=tmp_path)
    checkout = run(sys.executable, "-m", "netlab", "list", "--format", "json", cwd=ROOT)
    assert installed == as_module == checkout
    assert '"calico-macvlan"' in checkout


def test_every_dependency_is_used() -> None:
    text = "\n".join(file.read_text() for file in (ROOT / "netlab").rglob("*.py"))
    text += (ROOT / "tasks.py").read_text()
    for module in ("click", "invoke", "jsonschema_rs", "pyroute2", "yaml", "tabulate"):
        assert f"import {module}" in text or f"from {module}" in text, module
