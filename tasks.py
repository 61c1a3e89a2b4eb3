"""`invoke lab VERB ...`, `invoke test`, `invoke lint`, `invoke bench`, `invoke fidelity`, ..."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import task

ROOT = Path(__file__).resolve().parent


def _hand_over(argv: list[str]) -> None:
    """Everything after `lab` belongs to netlab: invoke's parser would refuse its arguments."""
    if Path(argv[0]).name in {"invoke", "inv"} and argv[1:2] == ["lab"]:
        from netlab.cli import main  # noqa: PLC0415 - only this task pays for it

        sys.exit(main(argv[2:], prog="invoke lab"))


_hand_over(sys.argv)


@task
def lab(_context: Context) -> None:
    """Labs: `invoke lab --help` lists the verbs."""
    raise Exit("write it as `invoke lab VERB ...`, with nothing before `lab`", code=3)


@task(
    help={
        "unit": "only the tests that need neither root nor a kernel of one's own",
        "live": "only the tests on the real kernel (root)",
        "kernel": "debian: the live tests in QEMU on Debian's own kernel",
        "select": "pytest's -k",
    }
)
def test(
    context: Context, unit: bool = False, live: bool = False, kernel: str = "", select: str = ""
) -> None:
    """Run the tests: unit, then live ones."""
    selected = ["-k", select] if select else []
    if kernel:
        _run(context, sys.executable, "tests/qemu.py", kernel, *selected)
        return
    if not live:
        _run(context, sys.executable, "-m", "pytest", "-q", "tests/unit", *selected)
    if not unit:
        argv = [sys.executable, "-m", "pytest", "-q", "tests/live", *selected]
        _run(context, *(argv if _root_is_a_mount() else _re_rooted(argv)))


@task
def lint(context: Context) -> None:
    """Style, types, and the shell script."""
    _run(context, "ruff", "check", ".")
    _run(context, "ruff", "format", "--check", ".")
    _run(context, "mypy")
    if context.run("command -v shellcheck", hide=True, warn=True):
        _run(context, "shellcheck", "bootstrap", ".ci/run")


@task(help={"short": "one run of each instead of five"})
def bench(context: Context, short: bool = False) -> None:
    """Measure whole processes against the targets."""
    _run(context, sys.executable, "tests/bench.py", *(["--short"] if short else []))


@task(help={"data": "folder with kube-proxy/VERSION/*.input.yaml and *.expected.rules"})
def fidelity(context: Context, data: str = os.environ.get("NETLAB_FIDELITY_DATA", "")) -> None:
    """Compare rendered rules with what the real components print."""
    if not data:
        raise Exit("say --data DIR, or set NETLAB_FIDELITY_DATA", code=3)
    _run(context, sys.executable, "-m", "netlab.fidelity", "--data", data)


@task
def golden(context: Context) -> None:
    """Write tests/golden anew from the labs; review the difference before you commit it."""
    _run(context, sys.executable, "tests/golden.py")


def _root_is_a_mount() -> bool:
    """False in a bare chroot: there iproute2 refuses to enter any network namespace."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return os.geteuid() != 0 or any(line.split()[4] == "/" for line in mounts)


def _re_rooted(argv: list[str]) -> list[str]:
    """*argv* in a mount namespace of its own, with a root directory that is a mount."""
    inner = f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(argv)}"
    script = (
        'd=$(mktemp -d) && mount --rbind / "$d" || exit 2; '
        f'chroot "$d" sh -c {shlex.quote(inner)}; code=$?; '
        'umount -l "$d"; rmdir "$d"; exit $code'
    )
    return ["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", script]


def _run(context: Context, *argv: str) -> None:
    """Run a program from the checkout's root; its failure is this task's, with its exit code."""
    with context.cd(str(ROOT)):
        done = context.run(shlex.join(argv), warn=True, pty=False, in_stream=False)
    if done is None or not done.ok:
        raise Exit(code=done.exited if done is not None else 2)
