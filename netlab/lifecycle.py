"""What the verbs do to whole labs: bring up, take down, look at what is up.

The copy of the lab file under /run is a convenience for later commands (names, reasons, diff);
what is up, and whose it is, is read from the kernel.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from netlab import kernel, spec
from netlab.compile import compile_lab
from netlab.errors import KernelError, LabError, NetlabError, UsageError
from netlab.model import Lab
from netlab.plan import Difference, Plan, diff

LAB_COPY = "lab.yaml"
FACTS = "facts.json"


@dataclass(frozen=True, slots=True)
class Up:
    """What `up` did: *fresh* False: it was there already; *changes*: why it was built again."""

    instance: str
    lab: Lab
    plan: Plan
    seconds: float
    fresh: bool
    changes: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True)
class Running:
    """A lab that is up, with the file that it was made from, as it was then."""

    instance: str
    lab: Lab
    plan: Plan


def load(file: Path, variant: str = "base") -> tuple[Lab, Plan]:
    """The lab of *file* in *variant*, with its plan."""
    lab = spec.load(file, variant=variant)
    return lab, compile_lab(lab)


def up(file: Path, *, instance: str | None = None, variant: str = "base") -> Up:
    """Bring the lab up; nothing is left behind where that fails.

    Raises:
        LabError, MissingFeature, Busy, KernelError
    """
    started = time.perf_counter()
    lab, plan = load(file, variant)
    name = instance or lab.name
    with kernel.lock(name):
        running = find(name)
        if running is not None and running.state == "up" and running.plan_hash == plan.hash:
            return Up(name, lab, plan, time.perf_counter() - started, fresh=False)
        kernel.prepare(plan)
        changes: tuple[Difference, ...] = ()
        if running is not None:
            changes = _changes(name, plan)
            kernel.teardown(name)
        _apply(plan, name, file, variant)
    return Up(name, lab, plan, time.perf_counter() - started, fresh=True, changes=changes)


@contextmanager
def private(lab: Lab, plan: Plan, instance: str) -> Iterator[Callable[[], None]]:
    """*plan* as an instance of its own for the time of the block; call what it gives to keep it."""
    kept: list[bool] = []
    with kernel.lock(instance):
        kernel.prepare(plan)
        try:
            _apply(plan, instance, Path(lab.file), lab.variant)
            yield lambda: kept.append(True)
        finally:
            if not kept:
                kernel.teardown(instance)


def down(instance: str) -> bool:
    """Remove the instance, by what the kernel holds alone; False where there was none."""
    with kernel.lock(instance):
        return kernel.teardown(instance)


def find(instance: str) -> kernel.Instance | None:
    """The instance as the kernel holds it."""
    return next((found for found in kernel.instances() if found.name == instance), None)


def the_only(wanted: str | None) -> str:
    """The instance that a command means: the one named, or the only one that is up.

    Raises:
        UsageError: none or several are up, or not the one named.
    """
    names = [found.name for found in kernel.instances()]
    if wanted is not None:
        if wanted not in names:
            raise UsageError(f"no lab {wanted!r} is up; up: {', '.join(names) or 'none'}")
        return wanted
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageError("no lab is up; bring one up first, e.g. `up calico-macvlan`")
    raise UsageError(f"several labs are up, choose one with --lab: {', '.join(names)}")


def running(instance: str) -> Running:
    """The lab that *instance* was made from, read from the copy that `up` kept.

    Raises:
        KernelError: the copy is gone or unreadable; `down` still works.
    """
    facts = _facts(instance)
    text = kernel.stored(instance, LAB_COPY)
    if not facts or text is None:
        raise KernelError(f"the copy of {instance}'s lab file is gone: take it down and up again")
    lab = spec.parse(text.decode(), Path(facts["file"]), variant=facts["variant"])
    return Running(instance, lab, compile_lab(lab))


def source_file(instance: str) -> str:
    """The file that *instance* was made from; empty where that is not known any more."""
    return _facts(instance).get("file", "")


def name_in(file: Path) -> str:
    """The lab's name in *file*; the file's own where it cannot be read any more."""
    try:
        return spec.load(file).name
    except (NetlabError, OSError):
        return file.stem


def is_stale(found: kernel.Instance) -> bool:
    """Whether the file now compiles to another plan (or to none) than the one that is up."""
    facts = _facts(found.name)
    if not facts:
        return True
    try:
        _, plan = load(Path(facts["file"]), facts["variant"])
    except (NetlabError, OSError):
        return True
    return plan.hash != found.plan_hash


def _apply(plan: Plan, instance: str, file: Path, variant: str) -> None:
    facts = {"file": str(file.resolve()), "variant": variant}
    files = {LAB_COPY: file.read_bytes(), FACTS: json.dumps(facts).encode()}
    kernel.apply(plan, instance, files=files)


def _facts(instance: str) -> dict[str, str]:
    text = kernel.stored(instance, FACTS)
    return dict(json.loads(text)) if text else {}


def _changes(instance: str, plan: Plan) -> tuple[Difference, ...]:
    try:
        return diff(running(instance).plan, plan)
    except (LabError, KernelError):
        return ()
