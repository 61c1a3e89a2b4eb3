"""What people and scripts read: values in, text out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from netlab.catalogue import folder as catalogue_folder
from netlab.plan import Difference, Object, Origin, Plan, attributes, describe

if TYPE_CHECKING:
    from netlab.check import Run
    from netlab.judge import Verdict
    from netlab.kernel import Drift
    from netlab.lifecycle import Up
    from netlab.model import Lab, Probe
    from netlab.outcome import Outcome

_STATUS_COLOUR = {"passed": None, "failed": "red", "error": "yellow", "skipped": "blue"}
_RESULT_COLOUR = {"delivered": "green", "rejected": "red", "dropped": "red"}


@dataclass(frozen=True, slots=True)
class Options:
    """How `test` was asked to run and to speak."""

    variants: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    strict: bool = False
    fail_fast: bool = False
    keep: bool = False
    verbose: bool = False
    json: bool = False


def table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """Aligned columns without rules; numbers stay as they were given."""
    from tabulate import tabulate  # noqa: PLC0415 - 25 ms that `up` has no use for

    return tabulate(list(rows), headers=headers, tablefmt="plain", disable_numparse=True)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def place(path: str, lab: Lab) -> str:
    """Where *path* stands in the lab's file: ``calico-macvlan.yaml:31``; itself if nowhere."""
    while path:
        if path in lab.sources:
            return f"{lab.file.rsplit('/', 1)[-1]}:{lab.sources[path][0]}"
        path = path.rpartition("[" if path.endswith("]") else ".")[0]
    return ""


def unknown_name(name: str, known: Iterable[str], where: str) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"no {name!r} {where}{hint}; there are: {', '.join(names)}"


# --- labs ----------------------------------------------------------------------------------------


def catalogue(rows: Sequence[Mapping[str, object]]) -> str:
    lines = []
    for row in rows:
        variants = row["variants"]
        names = ", ".join(variants) if isinstance(variants, list) else ""
        lines.append((row["name"], row["title"], row["expectations"], names))
    return table(lines, ("lab", "title", "expectations", "variants"))


def validated(lab: Lab, plan: Plan, variants: int) -> str:
    return (
        f"{lab.name}: {plural(len(lab.expect), 'expectation')}, {plural(variants, 'variant')}, "
        f"{plural(len(plan.objects), 'object')} in {len(plan.netns)} netns: all good"
    )


def up(done: Up) -> str:
    lab, name = done.lab, done.instance
    if not done.fresh:
        return f"{click.style(name, bold=True)}   is up already, and as its file says"
    counts = ", ".join(
        plural(len(items), noun)
        for items, noun in (
            (lab.nodes, "node"),
            (lab.pods, "Pod"),
            (lab.services, "Service"),
            (lab.hosts, "outside host"),
        )
    )
    variant = f" ({lab.variant})" if lab.variant != "base" else ""
    lines = [f"was up with another plan: {plural(len(done.changes), 'object')} differ, built again"]
    lines += [f"  {line}" for line in _difference_lines(done.changes[:5], lab)]
    if len(done.changes) > 5:
        lines.append(f"  ... and {len(done.changes) - 5} more")
    head = (
        f"{click.style(name, bold=True)}{variant}   {counts}    {len(done.plan.netns)} netns, "
        f"{len(done.plan.objects)} objects    up in {done.seconds:.2f} s"
    )
    first = next(iter(lab.pods), next(iter(lab.nodes)))
    own = Path(lab.file).resolve().parent != catalogue_folder()
    prove = f"prove it   invoke lab test {lab.file if own else lab.name}"
    hints = f"  {prove:<45}look inside   invoke lab shell {first}\n"
    hints += f"  remove     invoke lab down {name}"
    return "\n".join([*(lines if done.changes else ()), head, hints])


def status(rows: Sequence[Mapping[str, object]]) -> str:
    if not rows:
        return "no lab is up"
    lines = [
        (
            row["name"],
            row["state"],
            row["netns"],
            str(row["upSince"] or "-").replace("T", " ").split(".")[0].split("+")[0],
            "changed since" if row["stale"] else "as it is",
            row["file"] or "-",
        )
        for row in rows
    ]
    return table(lines, ("lab", "state", "netns", "up since", "file is", "file"))


# --- differences and drift -----------------------------------------------------------------------


def named(item: Object) -> str:
    """One object in words: kind, namespace and the fields that are set."""
    parts = [
        f"{name}={value}"
        for name, value in attributes(item)
        if name not in {"netns", "rules", "sysctls"} and value not in {None, "", False, ()}
    ]
    return f"{type(item).__name__.lower()} in {item.netns}: {' '.join(parts)}"


def differences(found: Sequence[Difference], lab: Lab) -> str:
    if not found:
        return "the running lab is what the file says"
    return "\n".join([*_difference_lines(found, lab), f"{plural(len(found), 'object')} differ"])


def _difference_lines(found: Iterable[Difference], lab: Lab) -> list[str]:
    lines = []
    for change in found:
        sign = "+" if change.old is None else "-" if change.new is None else "~"
        item = change.new or change.old
        if item is not None:
            lines.append(f"{sign} {named(item)}   {_reason(item.origin, lab)}")
    return lines


def _reason(origin: Origin, lab: Lab) -> str:
    where = place(origin.path, lab)
    return f"[{describe(origin)}{', ' + where if where else ''}]"


def differences_json(found: Iterable[Difference]) -> list[dict[str, object]]:
    return [
        {
            "key": " ".join((change.new or change.old).key),  # type: ignore[union-attr]
            "old": named(change.old) if change.old else None,
            "new": named(change.new) if change.new else None,
        }
        for change in found
    ]


def drift(found: Sequence[Drift], lab: Lab, plan: Plan) -> str:
    if not found:
        return f"{plural(len(plan.objects), 'object')}: the kernel has them all, and nothing else"
    lines = []
    for item in found:
        reason = f"   {_reason(item.origin, lab)}" if item.origin else ""
        lines.append(f"{item.netns}: {item.text}{reason}")
    return "\n".join([*lines, f"{plural(len(found), 'drift')}"])


def drift_json(found: Iterable[Drift]) -> list[dict[str, object]]:
    return [
        {
            "netns": item.netns,
            "kind": item.kind,
            "text": item.text,
            "component": item.origin.component if item.origin else None,
            "reason": item.origin.reason if item.origin else None,
        }
        for item in found
    ]


def features(
    found: Mapping[str, str], needs: Mapping[str, Sequence[str]], notes: Sequence[str]
) -> str:
    rows = [
        (
            name,
            click.style("missing", fg="red") if problem else "ok",
            problem or "",
            ", ".join(needs.get(name, ())),
        )
        for name, problem in found.items()
    ]
    return "\n".join([table(rows, ("feature", "here", "why", "needed by")), *notes])


def features_json(
    found: Mapping[str, str], needs: Mapping[str, Sequence[str]]
) -> list[dict[str, object]]:
    return [
        {
            "name": name,
            "ok": not problem,
            "problem": problem or None,
            "labs": list(needs.get(name, ())),
        }
        for name, problem in found.items()
    ]


# --- probes and expectations ---------------------------------------------------------------------


def outcome(probe: Probe, seen: Outcome, lab: Lab) -> str:
    result = click.style(seen.result, fg=_RESULT_COLOUR.get(seen.result, "yellow"), bold=True)
    details = []
    if seen.seen_as is not None:
        name = lab.name_of(seen.seen_as)
        details.append(
            f"seen as {name}" + (f" ({seen.seen_as})" if name != str(seen.seen_as) else "")
        )
    if seen.hops is not None:
        details.append(f"{plural(seen.hops, 'router')} passed")
    if seen.rejected_by is not None:
        details.append(f"by {lab.name_of(seen.rejected_by)}")
    if seen.result != "delivered" and seen.reason:
        details.append(seen.reason)
    return (
        f"{probe} ({probe.target.address})   {result}   {', '.join(details)}   {seen.seconds:.2f} s"
    )


def outcome_json(probe: Probe, seen: Outcome) -> dict[str, object]:
    return {
        "probe": str(probe),
        "address": str(probe.target.address),
        "result": seen.result,
        "seenAs": str(seen.seen_as) if seen.seen_as else None,
        "hops": seen.hops,
        "rejectedBy": str(seen.rejected_by) if seen.rejected_by else None,
        "reason": seen.reason,
        "seconds": round(seen.seconds, 3),
    }


def run(done: Run, base: Run, options: Options) -> str:
    """One variant's table: a line each, what is not as expected in full."""
    lab = done.lab
    good = sum(verdict.ok for verdict in done.verdicts)
    total = len(done.verdicts)
    changed = ", ".join(f"{path}={value}" for path, value in lab.changes.items())
    counts = click.style(f"{good} of {total} as expected", fg="green" if good == total else "red")
    head = f"{click.style('variant ' + lab.variant, bold=True)}   {counts}   {done.seconds:.1f} s"
    lines = [head]
    if changed:
        lines.append(f"  set {changed}")
    shown = [v for v in done.verdicts if _is_shown(v, done, base, options)]
    probes = [_row(verdict, options) for verdict in shown if verdict.kind == "probe"]
    states = [_state_row(verdict, options) for verdict in shown if verdict.kind == "state"]
    if probes:
        lines.append(table(probes, ("id", "probe", "result", "seen as", "at", "by", "")))
    if states:
        lines.append(table(states, ("id", "state", "", "")))
    flipped = flips(done, base)
    if done is not base:
        lines.append(f"  flipped by it: {', '.join(flipped) or 'nothing'}")
    lines += (_failure(verdict, done) for verdict in done.verdicts if not verdict.ok)
    return "\n".join(lines) + "\n"


def _is_shown(verdict: Verdict, done: Run, base: Run, options: Options) -> bool:
    """The base in full; of a variant what it flips and what is not as expected."""
    return done is base or options.verbose or not verdict.ok or verdict.id in flips(done, base)


def flips(done: Run, base: Run) -> list[str]:
    """Ids whose observed result or source differs from the base's, in the file's order."""
    before = {verdict.id: _essence(verdict) for verdict in base.verdicts}
    return [v.id for v in done.verdicts if v.id in before and before[v.id] != _essence(v)]


def _essence(verdict: Verdict) -> tuple[object, ...]:
    return tuple(verdict.observed.get(key) for key in ("result", "seenAs"))


def _row(verdict: Verdict, options: Options) -> tuple[str, ...]:
    seen, wanted = verdict.observed, verdict.expected
    colour = _STATUS_COLOUR[verdict.status]
    unchecked = [
        f"({wanted[key]})" if wanted.get(key) and not seen.get(key) else str(seen.get(key) or "")
        for key in ("at", "by")
    ]
    note: str = "" if verdict.ok else verdict.status
    if options.verbose and verdict.ok:
        note = verdict.why
    cells = (
        verdict.id,
        verdict.text,
        str(seen.get("result") or ""),
        str(seen.get("seenAs") or ""),
        *unchecked,
        note,
    )
    return tuple(click.style(cell, fg=colour) if colour else cell for cell in cells)


def _state_row(verdict: Verdict, options: Options) -> tuple[str, ...]:
    colour = _STATUS_COLOUR[verdict.status]
    note = verdict.why if options.verbose and verdict.ok else ""
    cells = (verdict.id, verdict.text, "so" if verdict.ok else "not so", note)
    return tuple(click.style(cell, fg=colour) if colour else cell for cell in cells)


def _failure(verdict: Verdict, done: Run) -> str:
    """Expected and observed under each other, the lab's why, and the command to look closer."""
    keys = [key for key in verdict.expected if verdict.expected[key] is not None]
    rows = [
        ("expected", *(str(verdict.expected[key]) for key in keys)),
        ("observed", *(str(verdict.observed.get(key) or "-") for key in keys)),
    ]
    lines = [click.style(f"{verdict.id}   {verdict.text}   {verdict.status}", fg="red")]
    lines += (f"  {line}" for line in table(rows, ("", *keys)).splitlines())
    if verdict.reason:
        lines.append(f"  {verdict.reason}")
    if verdict.why:
        lines.append(f"  expected because {verdict.why}")
    if done.kept:
        lines.append(f'  look closer: invoke lab probe --lab {done.kept} "{verdict.text}"')
    return "\n".join(lines)


def summary(runs: Sequence[Run]) -> str:
    counts = {"passed": 0, "failed": 0, "skipped": 0, "error": 0}
    for done in runs:
        for verdict in done.verdicts:
            counts[verdict.status] += 1
    unchecked = any(
        verdict.expected.get(key) and not verdict.observed.get(key)
        for done in runs
        for verdict in done.verdicts
        for key in ("at", "by")
    )
    text = (
        f"{counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['skipped']} skipped, {plural(counts['error'], 'error')}"
    )
    if unchecked:
        text += (
            "\n(in brackets: declared, not checked: only a packet walk observes where and by what)"
        )
    return text


def test_json(name: str, runs: Sequence[Run]) -> dict[str, object]:
    statuses = [verdict.status for done in runs for verdict in done.verdicts]
    return {
        "lab": name,
        "runs": [
            {"variant": done.lab.variant, "expectations": [_verdict_json(v) for v in done.verdicts]}
            for done in runs
        ],
        "passed": statuses.count("passed"),
        "failed": statuses.count("failed"),
        "skipped": statuses.count("skipped"),
        "errors": statuses.count("error"),
    }


def _verdict_json(verdict: Verdict) -> dict[str, object]:
    return {
        "id": verdict.id,
        verdict.kind: verdict.text,
        "status": verdict.status,
        "ok": verdict.ok,
        "expected": dict(verdict.expected),
        "observed": dict(verdict.observed),
        "reason": verdict.reason,
        "seconds": round(verdict.seconds, 3),
    }


def exit_code(runs: Sequence[Run]) -> int:
    """Any error beats failures; nothing run, or all skipped, is not green."""
    statuses = {verdict.status for done in runs for verdict in done.verdicts}
    if "error" in statuses or not statuses - {"skipped"}:
        return 2
    return 1 if "failed" in statuses else 0
