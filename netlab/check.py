"""One run of a lab's expectations: observe everything, then judge."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from threading import Lock

from netlab import kernel, lifecycle, spec
from netlab import probe as probes
from netlab.compile import compile_lab
from netlab.errors import UsageError
from netlab.judge import Facts, Verdict, judge
from netlab.model import Expectation, Lab, Probe, State
from netlab.outcome import Outcome
from netlab.plan import Plan
from netlab.report import Options, unknown_name

Progress = Callable[[int, int], None]

MAX_TRIES = 3


@dataclass(frozen=True, slots=True)
class Run:
    """A lab in one variant, with a verdict on each expectation; *kept*: the instance left up."""

    lab: Lab
    verdicts: tuple[Verdict, ...]
    seconds: float
    kept: str | None = None


def select_runs(file: Path, variants: tuple[str, ...]) -> list[tuple[Lab, Plan]]:
    """The base and every variant of *file* (or those named), each compiled.

    Raises:
        LabError, UsageError: no such variant.
    """
    labs = spec.load_all(file)
    for name in variants:
        if name not in labs:
            raise UsageError(unknown_name(name, labs, f"among the variants of {labs['base'].name}"))
    return [
        (lab, compile_lab(lab)) for name, lab in labs.items() if not variants or name in variants
    ]


def run(
    lab: Lab, plan: Plan, instance: str | None, options: Options, progress: Progress | None
) -> Run:
    """Observe and judge the expectations of *lab* that *options* select.

    The base runs on the lab where it is up and not stale; everything else on an instance of its
    own, removed afterwards (unless options.keep and something is not as expected).
    """
    wanted = _selected(lab, options.select)
    started = time.perf_counter()
    place = _existing(lab, plan, instance)
    if place is not None:
        verdicts = _judged(lab, wanted, place, options, progress)
        return Run(lab, verdicts, time.perf_counter() - started, place)
    private = f"{lab.name[:24]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    with lifecycle.private(lab, plan, private) as keep:
        verdicts = _judged(lab, wanted, private, options, progress)
        if options.keep and not all(verdict.ok for verdict in verdicts):
            keep()
            return Run(lab, verdicts, time.perf_counter() - started, private)
    return Run(lab, verdicts, time.perf_counter() - started)


def observe(probe: Probe, instance: str) -> Outcome:
    """One probe, once."""
    return probes.run(probe, instance)


def _existing(lab: Lab, plan: Plan, instance: str | None) -> str | None:
    """The running instance that the base can be tested on."""
    if lab.variant != spec.BASE:
        return None
    found = lifecycle.find(instance or lab.name)
    fits = found is not None and found.state == "up" and found.plan_hash == plan.hash
    if instance is not None and not fits:
        raise UsageError(f"{instance} is not up as the file says: `up` it again, or leave it out")
    return found.name if found is not None and fits else None


def _selected(lab: Lab, select: tuple[str, ...]) -> tuple[Expectation, ...]:
    """Expectations by id or tag (all by default).

    Raises:
        UsageError: something that no expectation is called or tagged.
    """
    if not select:
        return lab.expect
    known = {entry.id for entry in lab.expect} | {t for entry in lab.expect for t in entry.tags}
    for name in select:
        if name not in known:
            raise UsageError(unknown_name(name, sorted(known), "among ids and tags"))
    chosen = {e.id for e in lab.expect if e.id in select or set(e.tags) & set(select)}
    controls = {entry.control for entry in lab.expect if entry.id in chosen}
    return tuple(entry for entry in lab.expect if entry.id in chosen | controls)


def _judged(
    lab: Lab,
    wanted: tuple[Expectation, ...],
    instance: str,
    options: Options,
    progress: Progress | None,
) -> tuple[Verdict, ...]:
    done = _Counter(len(wanted), progress)
    states = [entry for entry in wanted if entry.state]
    facts = {entry.id: _facts(entry.state, instance, done) for entry in states if entry.state}
    jobs = [(entry, entry.probe) for entry in wanted if entry.probe]
    jobs.sort(key=lambda job: job[0].result != "dropped")
    seen = probes.run_all(
        [partial(_repeat, entry, probe, instance) for entry, probe in jobs],
        sum(entry.result == "dropped" for entry, _ in jobs),
        done.count,
    )
    outcomes = {entry.id: found for (entry, _), found in zip(jobs, seen, strict=True)}
    names = {str(address): name for name, address in reversed([*lab.named_addresses()])}
    return judge(wanted, outcomes, facts, names, strict=options.strict)


def _repeat(entry: Expectation, probe: Probe, instance: str) -> tuple[Outcome, ...]:
    """*entry.count* runs in a row, each delivered one with the tries that it may have."""
    return tuple(_attempt(entry, probe, instance) for _ in range(entry.count))


def _attempt(entry: Expectation, probe: Probe, instance: str) -> Outcome:
    """One run: a delivery may be tried again, since a machine may be busy; a failure never."""
    tries = 0
    while True:
        tries += 1
        outcome = probes.run(probe, instance)
        lost = outcome.result in {"dropped", "rejected"} and not entry.expects_failure
        if not lost or tries == MAX_TRIES:
            return replace(outcome, tries=tries)


def _facts(state: State, instance: str, done: _Counter) -> Facts:
    """What the kernel holds of the state's kind."""
    where, facts = state.where, state.facts
    found: Facts
    if state.kind == "route":
        found = _routes(state, instance)
    elif state.kind == "rule":
        found = kernel.rules(instance, where)
    elif state.kind == "link":
        found = [link for link in kernel.links(instance, where) if link["name"] == facts["name"]]
    else:
        found = kernel.neighbours(instance, where)
    done.count()
    return found


def _routes(state: State, instance: str) -> Facts:
    """The kernel's choice for an address, or a table's entries for a prefix or default."""
    dst = state.facts["dst"]
    if dst == "default" or "/" in dst:
        table = state.facts.get("table", "main")
        return kernel.routes(instance, state.where, table)
    source, mark = state.facts.get("from"), state.facts.get("mark")
    chosen = kernel.route_get(
        instance,
        state.where,
        IPv4Address(dst),
        src=IPv4Address(source) if source else None,
        mark=int(mark, 0) if mark else None,
    )
    return [] if chosen.get("kind") == "unreachable" else [chosen]


class _Counter:
    """Counts what is done and tells `progress`; threads share it."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self.done = 0
        self.progress = progress
        self.lock = Lock()

    def count(self) -> None:
        with self.lock:
            self.done += 1
            if self.progress:
                self.progress(self.done, self.total)
