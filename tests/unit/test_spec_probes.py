"""What a lab asks: the probe grammar, expectations and states."""

# Tables of cases read better with one case a line.
# ruff: noqa: E501

from __future__ import annotations

from ipaddress import IPv4Address
from pathlib import Path

import pytest

from netlab import spec
from netlab.errors import LabError, UsageError
from netlab.model import Lab

FILE = Path("small.yaml")
SMALL = Path(__file__).with_name("small.yaml").read_text()


def parse(text: str = "", variant: str = "base") -> Lab:
    return spec.parse(SMALL + text, FILE, variant=variant)


def problems(text: str, variant: str = "base") -> list[str]:
    with pytest.raises(LabError) as caught:
        parse(text, variant)
    return [f"{problem.path}: {problem.message}" for problem in caught.value.problems]


# --- probes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "source", "target"),
    [
        ("curl ma1 -> ca1", "curl", ("ma1", None, None), ("10.233.100.3", 80, "ca1", None)),
        ("ma1 -> ca1", "curl", ("ma1", None, None), ("10.233.100.3", 80, "ca1", None)),
        ("ping ma1->ca1", "ping", ("ma1", None, None), ("10.233.100.3", 80, "ca1", None)),
        ("tcp du2.net1 -> ma1:8080", "tcp", ("du2", "net1", None), ("172.16.100.2", 8080, "ma1", None)),
        ("udp ma1 -> du2.net1", "udp", ("ma1", None, None), ("172.16.0.2", 80, "du2", None)),
        ("curl du2@172.16.0.2 -> node1", "curl", ("du2", None, "172.16.0.2"), ("172.16.1.2", 80, "node1", None)),
        ("curl node1.vxlan.calico -> ca2", "curl", ("node1", "vxlan.calico", None), ("10.233.64.1", 80, "ca2", None)),
        ("curl ma1 -> node2.eth0:22", "curl", ("ma1", None, None), ("172.16.1.3", 22, "node2", None)),
        ("ping ma1 -> gw.eth1", "ping", ("ma1", None, None), ("1.1.1.254", 80, "gw", None)),
        ("ping gw -> rem", "ping", ("gw", None, None), ("1.1.1.1", 80, "rem", None)),
        ("curl ext -> rem:443", "curl", ("ext", None, None), ("1.1.1.1", 443, "rem", None)),
        ("curl ma1 -> 8.8.8.8:53", "curl", ("ma1", None, None), ("8.8.8.8", 53, None, None)),
        ("curl ma1 -> 172.16.1.3", "curl", ("ma1", None, None), ("172.16.1.3", 80, "node2", None)),
        ("curl ma1 -> web", "curl", ("ma1", None, None), ("10.233.1.0", 80, None, "default/web")),
        ("curl ma1 -> svc/web:81", "curl", ("ma1", None, None), ("10.233.1.0", 81, None, "default/web")),
        ("udp ma1 -> dns", "udp", ("ma1", None, None), ("10.233.1.1", 53, None, "default/dns")),
        ("tcp ma1 -> svc/dns:tcp", "tcp", ("ma1", None, None), ("10.233.1.1", 53, None, "default/dns")),
        ("ping ma1 -> dns", "ping", ("ma1", None, None), ("10.233.1.1", 53, None, "default/dns")),
        ("curl ext -> node2:web", "curl", ("ext", None, None), ("172.16.1.3", 30086, "node2", "default/web")),
        ("curl ext -> node2.eth0:web:80", "curl", ("ext", None, None), ("172.16.1.3", 30086, "node2", "default/web")),
    ],
)  # fmt: skip
def test_probe(
    text: str,
    kind: str,
    source: tuple[str, str | None, str | None],
    target: tuple[str, int, str | None, str | None],
) -> None:
    probe = spec.parse_probe(text, parse())
    bound = probe.source.address
    assert probe.kind == kind
    assert (probe.source.actor, probe.source.nic, bound and str(bound)) == source
    goal = probe.target
    assert (str(goal.address), goal.port, goal.actor, goal.service) == target
    assert goal.text == text.split("->")[1].strip()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected [ping|curl|tcp|udp] SRC -> TARGET"),
        ("curl ma1", "expected [ping|curl|tcp|udp] SRC -> TARGET"),
        ("curl ma1 -> ca1 -> ca2", "expected [ping|curl|tcp|udp] SRC -> TARGET"),
        ("crul ma1 -> ca1", "no probe 'crul' (did you mean 'curl'?)"),
        ("curl web -> ca1", "no node, Pod, host or router 'web'"),
        ("curl lan -> ca1", "no node, Pod, host or router 'lan'"),
        ("curl ma1 -> ca1:0", "a port is 1..65535"),
        ("curl ma1 -> ca1:", "expected TARGET[:port]"),
        ("curl ma1 -> ca1:80:80", "expected one port"),
        ("curl ma1 -> 1.2.3.444", "'1.2.3.444' is not an IPv4 address"),
        ("curl ma1 -> bare", "Service bare is headless"),
        ("curl ma1 -> node1:dns", "Service dns is not of type NodePort"),
        ("curl ma1 -> web:https", "Service web has no port https/TCP, it has 80/TCP"),
        ("udp ma1 -> node1:web", "Service web has no port any/UDP"),
        ("curl ma1 -> ca1.net1", "ca1 has no address on 'net1': it has eth0"),
        ("curl ma1@10.0.0.1 -> ca1", "ma1 has no address 10.0.0.1: it has 172.16.100.2"),
        ("curl ma1 -> svc/wep", "no Service 'wep' (did you mean 'web'?)"),
    ],
)
def test_no_probe(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec.parse_probe(text, parse())
    assert said in str(caught.value)


def test_a_pod_hides_a_service_of_its_name() -> None:
    text = SMALL.replace("  bare: {clusterIP: None, ", "  ma1: {")
    lab = spec.parse(text, FILE)
    assert spec.parse_probe("curl ca1 -> ma1", lab).target.actor == "ma1"
    assert spec.parse_probe("curl ca1 -> svc/ma1", lab).target.service == "default/ma1"


# --- expectations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("ma1", "172.16.100.2"),
        ("du2.net1", "172.16.0.2"),
        ("node1", "172.16.1.2"),
        ("node1.vxlan.calico", "10.233.100.0"),
        ("gw.eth1", "1.1.1.254"),
        ("9.9.9.9", "9.9.9.9"),
    ],
)
def test_seen_as(name: str, address: str) -> None:
    (entry,) = parse(f"expect: [{{id: a, probe: curl ma1 -> ca1, seenAs: {name}}}]\n").expect
    assert (entry.seen_as, entry.seen_as_address) == (name, IPv4Address(address))
    assert (entry.result, entry.count, entry.path) == ("delivered", 1, "expect[0]")


@pytest.mark.parametrize(
    ("text", "kind", "facts", "absent"),
    [
        ("route: 8.8.8.8, dev: eth0", "route", {"dst": "8.8.8.8", "dev": "eth0"}, False),
        ("route: default, table: 100, absent: true", "route", {"dst": "default", "table": "100"}, True),
        ("rule: {from: 10.0.0.1, table: 100}", "rule", {"from": "10.0.0.1", "table": "100"}, False),
        ("rule: {fwmark: 0x1}", "rule", {"fwmark": "0x1"}, False),
        ("link: eth0, mtu: 1450, up: true", "link", {"name": "eth0", "mtu": "1450", "up": "true"}, False),
        ("neighbour: 1.2.3.4, state: PERMANENT", "neighbour", {"address": "1.2.3.4", "state": "PERMANENT"}, False),
    ],
)  # fmt: skip
def test_state(text: str, kind: str, facts: dict[str, str], absent: bool) -> None:  # noqa: FBT001 - a case
    (entry,) = parse(f"expect: [{{id: a, state: {{in: du2, {text}}}}}]\n").expect
    assert entry.state is not None
    assert (entry.state.where, entry.state.kind) == ("du2", kind)
    assert entry.state.facts == facts
    assert entry.state.absent is absent


def test_a_broken_entry_is_not_told_again_by_those_that_need_it() -> None:
    found = problems(
        "expect:\n  - {id: a, probe: curl ma1 -> bad, seenAs: ma1}\n"
        "  - {id: b, probe: curl bad -> ma1}\n  - {id: c, state: {in: bad, link: eth0}}\n"
        "variants: {v: {set: {pods.bad: {node: node9, nics: {eth0: {attach: calico}}}}}}\n",
        variant="v",
    )
    assert found == ["pods.bad.node: no node 'node9' (did you mean 'node2'?)"]


def test_reasons_are_a_closed_list_of_component_and_reason() -> None:
    known = spec.reasons()
    assert {
        *("kube-proxy/invalid", "kube-proxy/no-local-endpoints", "felix/invalid", "felix/rpfilter"),
        *("kernel/no-route", "kernel/rp-filter", "kernel/neighbour-failed", "kernel/no-listener"),
    } <= known.keys()
    assert all(name.count("/") == 1 and meaning for name, meaning in known.items())
