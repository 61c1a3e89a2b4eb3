"""From what was seen to a verdict on each expectation: pure, over one run's records.

A negative result proves nothing by itself: a probe that could not have been delivered anyway is
"dropped" too. So it counts only with a control of the same run that was delivered: the one that
the expectation names, else a ping of the same pair, else one delivered probe from the same source
and one to the same target. Without one, the verdict is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Literal, TypeAlias

from netlab.model import Expectation, Probe, State
from netlab.outcome import Outcome

Status: TypeAlias = Literal["passed", "failed", "skipped", "error"]
Facts: TypeAlias = Sequence[Mapping[str, str]]
"""What the kernel holds of a state expectation's kind, in iproute2's words."""

KEYS = ("result", "seenAs", "at", "by", "hops", "tries")


@dataclass(frozen=True, slots=True)
class Verdict:
    """*expected* and *observed* have the same keys; what was not observed is None.

    *kind*: ``probe`` or ``state``, *text*: it in words. *reason*: why it is not as expected.
    """

    id: str
    kind: Literal["probe", "state"]
    text: str
    why: str
    status: Status
    expected: Mapping[str, object]
    observed: Mapping[str, object]
    reason: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == "passed"


def judge(
    expectations: Sequence[Expectation],
    outcomes: Mapping[str, Sequence[Outcome]],
    facts: Mapping[str, Facts],
    names: Mapping[str, str],
    *,
    strict: bool = False,
) -> tuple[Verdict, ...]:
    """A verdict on each of *expectations*.

    Args:
        expectations: those of this run, in the file's order.
        outcomes: by id, what each repetition of a probe came to.
        facts: by id, what the kernel said for a state expectation.
        names: address -> name, for what the server saw.
        strict: whether more than one try counts as failed.
    """
    delivered = [
        entry
        for entry in expectations
        if entry.probe and all(o.result == "delivered" for o in outcomes[entry.id])
    ]
    verdicts = []
    for entry in expectations:
        if entry.probe is not None:
            control = _control(entry, entry.probe, delivered) if entry.expects_failure else ""
            seen = outcomes[entry.id]
            verdicts.append(_on_probe(entry, entry.probe, seen, names, control, strict=strict))
        elif entry.state is not None:
            verdicts.append(_on_state(entry, entry.state, facts[entry.id]))
    return tuple(verdicts)


def _control(entry: Expectation, probe: Probe, delivered: Sequence[Expectation]) -> str | None:
    """What proves that *probe* could have been delivered; None where nothing does."""
    if entry.control is not None:
        return entry.control if any(other.id == entry.control for other in delivered) else None
    probes = [(other.id, other.probe) for other in delivered if other.probe]
    source, target = probe.source.actor, probe.target
    for name, other in probes:
        same_pair = other.source.actor == source and _same_target(other, probe)
        if other.kind == "ping" and same_pair:
            return name
    from_source = next((name for name, other in probes if other.source.actor == source), None)
    to_target = next(
        (
            name
            for name, other in probes
            if (target.service and other.target.service == target.service)
            or _same_target(other, probe)
        ),
        None,
    )
    return f"{from_source} and {to_target}" if from_source and to_target else None


def _same_target(one: Probe, other: Probe) -> bool:
    if one.target.actor and other.target.actor:
        return one.target.actor == other.target.actor and one.target.address == other.target.address
    return one.target.address == other.target.address


def _on_probe(
    entry: Expectation,
    probe: Probe,
    seen: Sequence[Outcome],
    names: Mapping[str, str],
    control: str | None,
    *,
    strict: bool,
) -> Verdict:
    """The first repetition that is not as expected decides, else the last."""
    shown, reason = seen[-1], ""
    for outcome in seen:
        reason = _difference(entry, outcome, names, strict=strict)
        if reason:
            shown = outcome
            break
    status: Status = "failed" if reason else "passed"
    if shown.result == "error":
        status, reason = "error", shown.reason
    elif not reason and entry.expects_failure and control is None:
        status, reason = "error", _no_control(entry)
    expected = dict.fromkeys(KEYS) | {
        "result": entry.result,
        "seenAs": entry.seen_as,
        "at": entry.at,
        "by": entry.by,
        "hops": entry.hops,
    }
    observed = dict.fromkeys(KEYS) | {
        "result": shown.result,
        "seenAs": _name(shown, names),
        "hops": shown.hops,
        "tries": shown.tries,
    }
    seconds = sum(outcome.seconds for outcome in seen)
    return Verdict(
        entry.id, "probe", str(probe), entry.why, status, expected, observed, reason, seconds
    )


def _name(outcome: Outcome, names: Mapping[str, str]) -> str | None:
    if outcome.seen_as is None:
        return None
    return names.get(str(outcome.seen_as), str(outcome.seen_as))


def _no_control(entry: Expectation) -> str:
    if entry.control is not None:
        return f"its control {entry.control} was not delivered in this run: this proves nothing"
    return (
        "no control: neither a ping of the same pair nor one probe from the same source and one "
        "to the same target was delivered in this run; name one with `control:`"
    )


def _difference(
    entry: Expectation, outcome: Outcome, names: Mapping[str, str], *, strict: bool
) -> str:
    """Why *outcome* is not what *entry* expects; empty where it is."""
    if outcome.result != entry.result:
        by = (
            f" by {names.get(str(outcome.rejected_by), str(outcome.rejected_by))}"
            if outcome.rejected_by
            else ""
        )
        return f"{outcome.result}{by}: {outcome.reason}"
    if entry.seen_as_address is not None and outcome.seen_as != entry.seen_as_address:
        saw = "the server did not say whom it saw" if outcome.seen_as is None else ""
        return saw or f"the server saw {_name(outcome, names)} ({outcome.seen_as})"
    if entry.hops is not None and outcome.hops != entry.hops:
        return f"the request passed {outcome.hops} routers"
    if strict and outcome.tries > 1:
        return f"needed {outcome.tries} tries"
    return ""


# --- state ---------------------------------------------------------------------------------------

_TABLES = {"255": "local", "254": "main", "253": "default", "0": "all"}


def _on_state(entry: Expectation, state: State, facts: Facts) -> Verdict:
    """Whether one of *facts* has every wanted field (or, with absent, none has)."""
    matches = [fact for fact in facts if not _missing(state, fact)]
    good = bool(matches) != state.absent
    reason, shown = "", matches[0] if matches else {}
    if not good and state.absent:
        reason = "it is there"
    elif not good:
        near = min(facts, key=lambda fact: len(_missing(state, fact)), default=None)
        shown = near or {}
        wrong = _missing(state, shown) if near is not None else []
        reason = (
            "nothing like it"
            if near is None
            else "; ".join(f"{key} is {shown.get(key, 'not set')}" for key in wrong)
        )
    observed = {key: shown.get(key) for key in state.facts}
    return Verdict(
        entry.id,
        "state",
        words(state),
        entry.why,
        "passed" if good else "failed",
        dict(state.facts) | {"absent": state.absent},
        observed | {"absent": not matches},
        reason,
    )


def _missing(state: State, fact: Mapping[str, str]) -> list[str]:
    return [
        key
        for key, value in state.facts.items()
        if not (state.kind == "route" and key in {"from", "mark"})
        and _plain(key, fact.get(key)) != _plain(key, value)
    ]


def _plain(key: str, value: str | None) -> str | None:
    """One spelling for values that have several: case of MACs and states, /32, table names."""
    if value is None:
        return None
    if key == "table":
        return _TABLES.get(value, value)
    if key in {"dst", "from", "to", "address"} and value not in {"default", "all"}:
        try:
            return str(ip_network(value, strict=False)).removesuffix("/32")
        except ValueError:
            return value
    if key == "fwmark":
        return "/".join(hex(int(part, 0)) for part in value.split("/"))
    return value.lower()


def words(state: State) -> str:
    """``route 8.8.8.8 dev eth0 in du2``, as the tables show it."""
    facts = dict(state.facts)
    first = next((facts.pop(key) for key in ("dst", "name", "address") if key in facts), "")
    parts = [state.kind, *([first] if first else [])]
    parts += [f"{key} {value}" for key, value in facts.items()]
    absent = ["absent"] if state.absent else []
    return " ".join([*parts, *absent, "in", state.where])
