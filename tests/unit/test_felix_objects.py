"""Felix' sets, chains and hooks as plan objects: order, attribution, membership."""

from __future__ import annotations

import re
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

import pytest

from netlab.cni import felix
from netlab.model import (
    Calico,
    Coordinator,
    Felix,
    IPPool,
    Lab,
    Node,
    NodeNIC,
    Pod,
    PodNIC,
    Version,
)
from netlab.plan import Chain, Hook, IpSet, Netns, Object, Origin, Plan, Table

POOL = IPPool("default", IPv4Network("10.233.64.0/18"))


def calico(version: str = "v3.30", *pools: IPPool, **settings: str | int) -> Calico:
    return Calico(Version.parse(version), pools or (POOL,), felix=Felix(**settings))


def node(name: str, address: str, block: str, settings: Calico) -> Node:
    return Node(
        name=name,
        nics=(NodeNIC("eth0", network="lan", address=IPv4Interface(address)),),
        gateway=IPv4Address("172.16.0.1"),
        calico=settings,
        kube_proxy=None,
        coordinator=Coordinator(),
        sysctl={},
        pod_cidrs=(IPv4Network(block),),
    )


def lab(settings: Calico) -> Lab:
    nic = PodNIC("eth0", IPv4Interface("10.233.100.3/32"))
    return Lab(
        name="test",
        title="",
        file="test.yaml",
        networks={},
        routers={},
        hosts={},
        nodes={
            "node1": node("node1", "172.16.1.2/16", "10.233.100.0/26", settings),
            "node2": node("node2", "172.16.1.3/16", "10.233.101.0/26", settings),
        },
        pods={"web-0": Pod("web-0", "default", "node1", (nic,))},
        services={},
        pod_cidrs=(POOL.cidr,),
        service_cidrs=(IPv4Network("10.233.0.0/18"),),
    )


def objects(settings: Calico) -> list[Object]:
    one = lab(settings)
    return list(felix.objects(one, one.nodes["node1"]))


HOOK_HASHES = {
    ("raw", "PREROUTING"): ["6gwbT8clXdHdC1b1"],
    ("raw", "OUTPUT"): ["tVnHkvAo15HuiPy0"],
    ("mangle", "PREROUTING"): ["6gwbT8clXdHdC1b1"],
    ("mangle", "POSTROUTING"): ["O3lYWMrLQYEMJtB5"],
    ("nat", "PREROUTING"): ["6gwbT8clXdHdC1b1"],
    ("nat", "OUTPUT"): ["tVnHkvAo15HuiPy0"],
    ("nat", "POSTROUTING"): ["0i8pjzKKPyA34aQD"],
    ("filter", "INPUT"): ["Cz_u1IQiXIMmKD4c"],
    ("filter", "FORWARD"): ["wUHhoiAYhphO9Mso", "S93hcgKJrXEqnTfs", "mp77cMpurHhyjLrM"],
    ("filter", "OUTPUT"): ["tVnHkvAo15HuiPy0"],
}
"""0i8pjz… is that of a rule that is always appended."""


@pytest.mark.parametrize("mode", ["Insert", "Append"])
def test_hooks_have_the_hashes_of_real_clusters_in_either_insert_mode(mode: str) -> None:
    found: dict[tuple[str, str], list[str]] = {}
    for item in objects(calico(chain_insert_mode=mode)):
        if isinstance(item, Hook):
            own = re.findall(r'"cali:(\S{16})"', item.text)
            found.setdefault((item.table, item.chain), []).extend(own)
    assert found == HOOK_HASHES


def test_the_oldest_postrouting_hook_is_hashed_as_inserted() -> None:
    hooks = [item for item in objects(calico("v3.28.1")) if isinstance(item, Hook)]
    nat = [item for item in hooks if (item.table, item.chain) == ("nat", "POSTROUTING")]
    assert [(item.place, "O3lYWMrLQYEMJtB5" in item.text) for item in nat] == [("insert", True)]


@pytest.mark.parametrize(
    ("version", "name"),
    [("v3.31.5", "cali40all-ipam-pools"), ("v3.31.6", "cali40network-ip-pools")],
)
def test_the_set_that_rules_refer_to_exists(version: str, name: str) -> None:
    sets = {item.name for item in objects(calico(version)) if isinstance(item, IpSet)}
    rules = [r.text for i in objects(calico(version)) if isinstance(i, Chain) for r in i.rules]
    referred = {name for text in rules for name in re.findall(r"--match-set (\S+)", text)}
    assert name in sets
    assert referred <= sets


def test_every_drop_has_a_reason_of_the_closed_list_and_nothing_else_has_one() -> None:
    dropping = calico("v3.32", default_endpoint_to_host_action="Drop")
    seen = set()
    for item in objects(dropping):
        rules = item.rules if isinstance(item, Chain) else ()
        for rule in rules:
            assert (rule.origin.reason in felix.REASONS) == rule.text.endswith("--jump DROP")
            seen.add(rule.origin.reason)
    assert set(felix.REASONS) <= seen


def test_rules_say_whom_they_serve_and_which_setting_is_behind_them() -> None:
    chains = {(i.table, i.name): i for i in objects(calico()) if isinstance(i, Chain)}
    invalid = chains["filter", "cali-tw-cali0d7763386da"].rules[1].origin
    assert invalid == Origin(
        "felix",
        "invalid",
        "Pod default/web-0",
        "cluster.calico.felix.disableConntrackInvalidCheck",
    )
    dispatch = chains["filter", "cali-from-wl-dispatch"].rules
    assert [rule.origin.subject for rule in dispatch] == ["Pod default/web-0", "node node1"]
    assert chains["raw", "cali-PREROUTING"].rules[1].origin.path == "cluster.calico.version"
    outgoing = chains["nat", "cali-nat-outgoing"].rules[0].origin
    assert outgoing.path == "cluster.calico.natOutgoing"


def test_sets_hold_pools_and_the_other_nodes() -> None:
    plain = IPPool("plain", IPv4Network("10.9.0.0/16"), nat_outgoing=False, disabled=True)
    sets = {i.name: i for i in objects(calico("v3.32.0", POOL, plain)) if isinstance(i, IpSet)}
    assert {name: item.members for name, item in sets.items()} == {
        "cali40all-ipam-pools": ("10.233.64.0/18", "10.9.0.0/16"),
        "cali40masq-ipam-pools": ("10.233.64.0/18",),
        "cali40all-vxlan-net": ("172.16.1.3",),
        "cali40this-host": ("127.0.0.0", "127.0.0.1", "172.16.1.2", "10.233.100.0"),
        "cali40dscp-src-net": (),
    }
    assert {item.type for name, item in sets.items() if name != "cali40this-host"} == {"hash:net"}
    assert sets["cali40this-host"].type == "hash:ip"


def test_no_pool_with_nat_outgoing_leaves_the_chain_empty() -> None:
    pool = replace(POOL, nat_outgoing=False)
    chains = {item.name: item for item in objects(calico("v3.30", pool)) if isinstance(item, Chain)}
    assert chains["cali-nat-outgoing"].rules == ()
    control = {item.name: item for item in objects(calico()) if isinstance(item, Chain)}
    assert len(control["cali-nat-outgoing"].rules) == 1


def beside_kube_proxy(settings: Calico) -> dict[tuple[str, str], list[str]]:
    """Targets in the kernel's chains, in final order, with kube-proxy's jumps inserted there."""
    origin = Origin("kube-proxy", "test")
    places: list[tuple[Table, str]] = [
        ("filter", "FORWARD"), ("filter", "INPUT"), ("nat", "PREROUTING"), ("nat", "POSTROUTING")
    ]  # fmt: skip
    jumps = [
        Hook(netns="node1", origin=origin, table=t, chain=c, text="-j KUBE", place="insert")
        for t, c in places
    ]
    netns = Netns(netns="node1", origin=origin)
    (rules,) = Plan.of("test", [netns, *objects(settings), *jumps]).rulesets()
    found: dict[tuple[str, str], list[str]] = {}
    for table, entries in rules.rules.items():
        for chain, rule in entries:
            if (table, chain) in places:
                target = re.findall(r"(?:-j|--jump) (\S+)", rule.text)[-1]
                found.setdefault((table, chain), []).append(target)
    return found


@pytest.mark.parametrize(
    ("version", "postrouting"),
    [
        ("v3.27", ["cali-POSTROUTING", "KUBE"]),
        ("v3.28.1", ["cali-POSTROUTING", "KUBE"]),
        ("v3.28.2", ["KUBE", "cali-POSTROUTING"]),
        ("v3.32", ["KUBE", "cali-POSTROUTING"]),
    ],
)
def test_felix_goes_first_but_for_postrouting(version: str, postrouting: list[str]) -> None:
    assert beside_kube_proxy(calico(version)) == {
        ("filter", "FORWARD"): ["cali-FORWARD", "KUBE", "ACCEPT", "MARK"],
        ("filter", "INPUT"): ["cali-INPUT", "KUBE"],
        ("nat", "PREROUTING"): ["cali-PREROUTING", "KUBE"],
        ("nat", "POSTROUTING"): postrouting,
    }


def test_in_append_mode_felix_goes_last() -> None:
    assert beside_kube_proxy(calico(chain_insert_mode="Append")) == {
        ("filter", "FORWARD"): ["KUBE", "cali-FORWARD", "ACCEPT", "MARK"],
        ("filter", "INPUT"): ["KUBE", "cali-INPUT"],
        ("nat", "PREROUTING"): ["KUBE", "cali-PREROUTING"],
        ("nat", "POSTROUTING"): ["KUBE", "cali-POSTROUTING"],
    }
