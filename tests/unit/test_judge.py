"""Verdicts over recorded outcomes; a negative result without its control never passes."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Any

import pytest

from netlab.judge import Verdict, judge, words
from netlab.model import Expectation, Probe, Source, State, Target
from netlab.outcome import Outcome

NAMES = {"10.0.0.1": "a", "10.0.0.2": "b"}
GOOD = Outcome("delivered", "answered", IPv4Address("10.0.0.1"), "b", 0)
LOST = Outcome("dropped", "no answer")


def expect(
    name: str,
    kind: str = "curl",
    pair: tuple[str, str] = ("a", "b"),
    **fields: Any,  # noqa: ANN401 - an Expectation's own
) -> Expectation:
    target = Target(pair[1], IPv4Address("10.0.0.2"), 80, pair[1])
    if pair[1] != "b":
        target = Target(pair[1], IPv4Address("10.0.0.3"), 80, pair[1])
    service = fields.pop("service", None)
    if service:
        target = Target(service, IPv4Address("10.9.9.9"), 80, None, service)
    return Expectation(id=name, probe=Probe(kind, Source(pair[0]), target), **fields)  # type: ignore[arg-type]


def verdicts(*seen: tuple[Expectation, Outcome], strict: bool = False) -> dict[str, Verdict]:
    entries = [entry for entry, _ in seen]
    outcomes = {entry.id: (outcome,) for entry, outcome in seen}
    return {v.id: v for v in judge(entries, outcomes, {}, NAMES, strict=strict)}


def test_delivered_as_expected() -> None:
    entry = expect("x", seen_as="a", seen_as_address=IPv4Address("10.0.0.1"), hops=0)
    verdict = verdicts((entry, GOOD))["x"]
    assert (verdict.status, verdict.ok, verdict.observed["seenAs"]) == ("passed", True, "a")
    assert set(verdict.expected) == set(verdict.observed)


@pytest.mark.parametrize(
    ("fields", "outcome", "words_in_reason"),
    [
        ({"seen_as_address": IPv4Address("10.0.0.2")}, GOOD, "saw a (10.0.0.1)"),
        ({"hops": 1}, GOOD, "passed 0 routers"),
        ({}, LOST, "dropped: no answer"),
        ({"result": "dropped"}, GOOD, "delivered"),
        (
            {},
            Outcome("rejected", "refused", rejected_by=IPv4Address("10.0.0.2")),
            "rejected by b: refused",
        ),
        ({"seen_as_address": IPv4Address("10.0.0.1")}, Outcome("delivered"), "did not say"),
    ],
)
def test_not_as_expected(fields: dict[str, Any], outcome: Outcome, words_in_reason: str) -> None:
    verdict = verdicts((expect("x", **fields), outcome))["x"]
    assert (verdict.status, verdict.ok) == ("failed", False)
    assert words_in_reason in verdict.reason


def test_an_instrument_that_failed_is_an_error_whatever_was_expected() -> None:
    broken = Outcome("error", "no curl")
    for result in ("delivered", "dropped"):
        verdict = verdicts((expect("x", result=result), broken))["x"]
        assert (verdict.status, verdict.reason) == ("error", "no curl")


DROPPED = expect("drop", result="dropped")


@pytest.mark.parametrize(
    ("controls", "status"),
    [
        ([], "error"),
        ([(expect("ping", "ping"), GOOD)], "passed"),
        ([(expect("ping", "ping"), LOST)], "error"),
        ([(expect("ping", "ping", ("a", "c")), GOOD)], "error"),
        ([(expect("ping", "ping", ("c", "b")), GOOD)], "error"),
        (
            [(expect("from", pair=("a", "c")), GOOD), (expect("to", pair=("c", "b")), GOOD)],
            "passed",
        ),
        ([(expect("from", pair=("a", "c")), GOOD), (expect("to", pair=("c", "b")), LOST)], "error"),
        ([(expect("curl"), GOOD)], "passed"),
    ],
)
def test_a_drop_counts_only_with_its_control(
    controls: list[tuple[Expectation, Outcome]], status: str
) -> None:
    assert verdicts((DROPPED, LOST), *controls)["drop"].status == status


def test_a_service_is_a_target_too() -> None:
    dropped = expect("drop", result="dropped", service="default/web")
    from_source = (expect("from", pair=("a", "c")), GOOD)
    to_service = (expect("to", pair=("c", "x"), service="default/web"), GOOD)
    other = (expect("to", pair=("c", "x"), service="default/other"), GOOD)
    assert verdicts((dropped, LOST), from_source, to_service)["drop"].status == "passed"
    other_address = judge(
        [dropped, from_source[0], expect("to", pair=("c", "x"))],
        {"drop": (LOST,), "from": (GOOD,), "to": (GOOD,)},
        {},
        NAMES,
    )
    assert other_address[0].status == "error"
    assert other[0].id == "to"


def test_a_named_control_is_the_only_one_that_counts() -> None:
    dropped = expect("drop", result="dropped", control="special")
    ping = (expect("ping", "ping"), GOOD)
    special = expect("special", pair=("c", "d"))
    assert verdicts((dropped, LOST), ping, (special, LOST))["drop"].status == "error"
    assert verdicts((dropped, LOST), ping, (special, GOOD))["drop"].status == "passed"


def test_another_negative_is_no_control() -> None:
    other = expect("ping", "ping", result="dropped")
    found = verdicts((DROPPED, LOST), (other, LOST))
    assert {verdict.status for verdict in found.values()} == {"error"}


def test_strict_refuses_a_second_try() -> None:
    twice = Outcome("delivered", seen_as=IPv4Address("10.0.0.1"), tries=2)
    assert verdicts((expect("x"), twice))["x"].status == "passed"
    assert verdicts((expect("x"), twice), strict=True)["x"].status == "failed"


def test_every_repetition_must_come_out_so() -> None:
    entry = expect("x", hops=0, count=2)
    far = Outcome("delivered", "answered", IPv4Address("10.0.0.1"), "b", 1)
    (verdict,) = judge([entry], {"x": (GOOD, far)}, {}, NAMES)
    assert (verdict.status, verdict.observed["hops"]) == ("failed", 1)
    (verdict,) = judge([entry], {"x": (GOOD, GOOD)}, {}, NAMES)
    assert verdict.ok


def state(kind: str, *, absent: bool = False, **facts: str) -> Expectation:
    named = {key.rstrip("_"): value for key, value in facts.items()}
    return Expectation(id="s", state=State("a", kind, named, absent))  # type: ignore[arg-type]


RULES = [
    {"priority": "0", "from": "all", "table": "local"},
    {"priority": "1000", "from": "all", "fwmark": "0x1", "table": "100"},
    {"priority": "32765", "from": "10.0.0.9", "table": "101"},
]


@pytest.mark.parametrize(
    ("entry", "facts", "status"),
    [
        (state("rule", fwmark="1", table="100"), RULES, "passed"),
        (state("rule", from_="10.0.0.9/32", table="101"), RULES, "passed"),
        (state("rule", from_="10.0.0.9", table="100"), RULES, "failed"),
        (state("rule", table="255", priority="0"), RULES, "passed"),
        (state("rule", absent=True, table="500"), RULES, "passed"),
        (state("rule", absent=True, table="101"), RULES, "failed"),
        (
            state("link", name="eth0", mac="AA:00:00:00:00:01"),
            [{"name": "eth0", "mac": "aa:00:00:00:00:01"}],
            "passed",
        ),
        (state("link", name="eth0", mtu="1450"), [{"name": "eth0", "mtu": "1500"}], "failed"),
        (state("link", name="eth0"), [], "failed"),
        (
            state("neighbour", address="10.0.0.2", state="PERMANENT"),
            [{"address": "10.0.0.2", "state": "permanent"}],
            "passed",
        ),
        (
            state("route", dst="8.8.8.8", dev="eth0", mark="1"),
            [{"dst": "8.8.8.8", "dev": "eth0"}],
            "passed",
        ),
    ],
)
def test_states(entry: Expectation, facts: list[dict[str, str]], status: str) -> None:
    (verdict,) = judge([entry], {}, {"s": facts}, NAMES)
    assert verdict.status == status
    assert set(verdict.expected) == set(verdict.observed)


def test_a_wrong_state_says_what_is_there_instead() -> None:
    facts = [{"name": "eth0", "mtu": "1500"}]
    (verdict,) = judge([state("link", name="eth0", mtu="1450")], {}, {"s": facts}, NAMES)
    assert verdict.reason == "mtu is 1500"


def test_states_in_words() -> None:
    entry = state("route", dst="8.8.8.8", dev="eth0")
    assert entry.state is not None
    assert words(entry.state) == "route 8.8.8.8 dev eth0 in a"
