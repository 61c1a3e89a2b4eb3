"""Order, differences and rulesets of a plan: values in, values out."""

from __future__ import annotations

import random
from dataclasses import replace
from ipaddress import IPv4Interface

import pytest

from netlab.errors import PlanError
from netlab.plan import (
    Address,
    Bridge,
    Chain,
    Difference,
    Hook,
    IptablesRule,
    Netns,
    Object,
    Origin,
    Plan,
    Sysctl,
    Veth,
    diff,
)

ORIGIN = Origin("user", "test")
OTHER = Origin("kube-proxy", "another reason", "Service default/web", "services.web")


def netns(name: str) -> Netns:
    return Netns(netns=name, origin=ORIGIN)


def address(text: str, dev: str = "eth0") -> Address:
    return Address(netns="a", origin=ORIGIN, dev=dev, address=IPv4Interface(text))


def hook(text: str, *, place: str = "append", order: int = 0) -> Hook:
    return Hook(
        netns="a",
        origin=ORIGIN,
        table="filter",
        chain="FORWARD",
        text=text,
        place=place,  # type: ignore[arg-type]
        order=order,
    )


def wire() -> list[Object]:
    return [
        netns("a"),
        netns("lan"),
        Bridge(netns="lan", origin=ORIGIN, name="br0"),
        Veth(
            netns="a",
            origin=ORIGIN,
            name="eth0",
            peer_netns="lan",
            peer="a.eth0",
            peer_master="br0",
        ),
        address("10.0.0.1/24"),
    ]


def test_what_is_required_comes_first_whatever_the_order_given() -> None:
    shuffled = wire()
    for seed in range(20):
        random.Random(seed).shuffle(shuffled)  # noqa: S311 - not for secrets
        seen: set[tuple[str, ...]] = set()
        for item in Plan.of("x", shuffled).objects:
            assert set(item.requires) <= seen
            seen.update(item.provides)


def test_what_is_ready_keeps_the_order_given() -> None:
    objects = [*wire(), address("10.0.0.9/24"), address("10.0.0.3/24")]
    assert Plan.of("x", objects).objects == tuple(objects)


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ([netns("a"), netns("a")], "planned twice: netns a"),
        ([*wire(), address("10.0.0.1/24")], "planned twice: address a eth0 10.0.0.1/24"),
        ([address("10.0.0.1/24")], "address a eth0 10.0.0.1/24 needs link a eth0"),
        (
            [
                netns("a"),
                Bridge(netns="a", origin=ORIGIN, name="b0", master="b1"),
                Bridge(netns="a", origin=ORIGIN, name="b1", master="b0"),
            ],
            "link a b0 waits for itself in a circle",
        ),
    ],
)
def test_a_plan_that_cannot_be_ordered_names_the_object(
    objects: list[Object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.of("x", objects)


def test_the_hash_changes_with_values_and_order_but_not_with_reasons() -> None:
    plan = Plan.of("x", wire())
    reasons = Plan.of("x", [replace(item, origin=OTHER) for item in wire()])
    values = Plan.of("x", [*wire()[:-1], address("10.0.0.2/24")])
    more = [*wire(), address("10.0.0.3/24"), address("10.0.0.4/24")]
    order = [*wire(), address("10.0.0.4/24"), address("10.0.0.3/24")]
    assert reasons.hash == plan.hash
    assert values.hash != plan.hash
    assert Plan.of("x", more).hash != Plan.of("x", order).hash


def test_a_difference_is_a_change_an_addition_or_a_removal() -> None:
    setting = Sysctl(netns="a", origin=ORIGIN, name="net.ipv4.ip_forward", value="0")
    old = Plan.of("x", [netns("a"), setting])
    new = Plan.of("x", [netns("a"), netns("b"), replace(setting, value="1")])
    assert diff(old, old) == ()
    assert diff(old, new) == (
        Difference(None, netns("b")),
        Difference(old.objects[1], new.objects[2]),
    )
    assert diff(new, old)[-1] == Difference(netns("b"), None)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("net.ipv4.conf.eth0.rp_filter", "eth0"),
        ("net.ipv4.conf.eth0/100.rp_filter", "eth0.100"),
        ("net.ipv4.neigh.eth0.gc_stale_time", "eth0"),
        ("net.ipv4.conf.all.rp_filter", None),
        ("net.ipv4.conf.default.rp_filter", None),
        ("net.ipv4.ip_forward", None),
        ("net.netfilter.nf_conntrack_tcp_be_liberal", None),
    ],
)
def test_a_sysctl_of_a_device_waits_for_it(name: str, device: str | None) -> None:
    item = Sysctl(netns="a", origin=ORIGIN, name=name, value="1")
    assert item.device == device
    assert item.requires == ((("link", "a", device),) if device else (("netns", "a"),))


def test_hooks_are_placed_at_their_turn_and_by_their_order() -> None:
    objects: list[Object] = [
        netns("a"),
        hook("-j first"),
        hook("-j in-front", place="insert"),
        hook("-j before-all", order=-10),
        hook("-j behind-all", order=100),
        hook("-j last"),
    ]
    (ruleset,) = Plan.of("x", objects).rulesets()
    assert [rule.text for _, rule in ruleset.rules["filter"]] == [
        "-j in-front",
        "-j before-all",
        "-j first",
        "-j last",
        "-j behind-all",
    ]


def test_a_ruleset_is_what_iptables_restore_reads() -> None:
    rules = (IptablesRule("-j ACCEPT", OTHER), IptablesRule("-j DROP", OTHER))
    objects: list[Object] = [
        netns("a"),
        Chain(netns="a", origin=OTHER, table="nat", name="KUBE-X", rules=rules),
        Chain(netns="a", origin=ORIGIN, table="filter", name="INPUT", policy="DROP"),
        hook("-j KUBE-F"),
        Chain(netns="a", origin=OTHER, table="filter", name="KUBE-F"),
    ]
    (ruleset,) = Plan.of("x", objects).rulesets()
    assert ruleset.restore_input(reasons=True).splitlines() == [
        "*nat",
        ":PREROUTING ACCEPT [0:0]",
        ":INPUT ACCEPT [0:0]",
        ":OUTPUT ACCEPT [0:0]",
        ":POSTROUTING ACCEPT [0:0]",
        ":KUBE-X - [0:0]",
        "# kube-proxy: another reason (Service default/web)",
        "-A KUBE-X -j ACCEPT",
        "-A KUBE-X -j DROP",
        "COMMIT",
        "*filter",
        ":INPUT DROP [0:0]",
        ":FORWARD ACCEPT [0:0]",
        ":OUTPUT ACCEPT [0:0]",
        ":KUBE-F - [0:0]",
        "# user: test",
        "-A FORWARD -j KUBE-F",
        "COMMIT",
    ]


def test_rulesets_are_by_namespace_and_backend() -> None:
    objects: list[Object] = [
        netns("a"),
        netns("b"),
        hook("-j ACCEPT"),
        replace(hook("-j ACCEPT"), netns="b", backend="legacy"),
        replace(hook("-j DROP"), backend="legacy"),
    ]
    found = [(one.netns, one.backend) for one in Plan.of("x", objects).rulesets()]
    assert found == [("a", "nft"), ("b", "legacy"), ("a", "legacy")]
