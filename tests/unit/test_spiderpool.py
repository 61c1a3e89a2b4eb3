"""What the coordinator writes, as iproute2 would print it.

Expected values: Spiderpool's published samples and its code at commit a7fbd3b (see the module).
"""

from dataclasses import replace
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

import pytest

from netlab.cni import macvlan, spiderpool
from netlab.model import Attachment, Coordinator, Pod, PodNIC, PolicyRoute
from netlab.plan import (
    MAIN_TABLE,
    Address,
    Bridge,
    Hook,
    Neighbour,
    Object,
    Origin,
    PolicyRule,
    Route,
    Sysctl,
    Veth,
    Vxlan,
)

ORIGIN = Origin("test", "test")
SETTINGS = Coordinator(
    overlay_pod_cidr=(IPv4Network("10.233.64.0/18"),),
    service_cidr=(IPv4Network("10.233.0.0/18"),),
    hijack_cidr=(IPv4Network("169.254.0.0/16"),),
)
LAN = Attachment(
    name="lan",
    cni="macvlan",
    master="eth0",
    subnet=IPv4Network("172.16.0.0/16"),
    gateway=IPv4Address("172.16.0.1"),
    coordinator={},
)
NODE: list[Object] = [
    Bridge(netns="node1", origin=ORIGIN, name="eth0"),
    Address(netns="node1", origin=ORIGIN, dev="eth0", address=IPv4Interface("172.16.1.2/16")),
    Route(
        netns="node1",
        origin=ORIGIN,
        dst=IPv4Network("0.0.0.0/0"),
        via=IPv4Address("172.16.0.1"),
        dev="eth0",
    ),
    Vxlan(
        netns="node1",
        origin=ORIGIN,
        name="vxlan.calico",
        vni=4096,
        port=4789,
        local=IPv4Address("172.16.1.2"),
        lower="eth0",
    ),
    Address(
        netns="node1", origin=ORIGIN, dev="vxlan.calico", address=IPv4Interface("10.233.100.0/32")
    ),
]


def nic(name: str, address: str, settings: Coordinator | None = SETTINGS) -> PodNIC:
    return PodNIC(name, IPv4Interface(address), LAN if settings else None, settings)


def calico_side(pod: str, address: str) -> list[Object]:
    """What Calico leaves of a Pod, as far as the coordinator looks at it."""
    cali = spiderpool.cali_interface("default", pod)
    return [
        Veth(
            netns=pod,
            origin=ORIGIN,
            name="eth0",
            mac="02:00:00:00:00:01",
            peer_netns="node1",
            peer=cali,
            peer_mac="ee:ee:ee:ee:ee:ee",
        ),
        Address(netns=pod, origin=ORIGIN, dev="eth0", address=IPv4Interface(f"{address}/32")),
        Route(netns=pod, origin=ORIGIN, dst=IPv4Network("169.254.1.1"), dev="eth0", scope="link"),
        Route(
            netns=pod,
            origin=ORIGIN,
            dst=IPv4Network("0.0.0.0/0"),
            via=IPv4Address("169.254.1.1"),
            dev="eth0",
        ),
        Route(netns="node1", origin=ORIGIN, dst=IPv4Network(address), dev=cali, scope="link"),
    ]


def added(pod: Pod, planned: list[Object]) -> list[Object]:
    """Main CNI and coordinator for each attachment in turn; what is there in the end."""
    for entry in pod.nics:
        if entry.attachment is None:
            continue
        planned = [*planned, *macvlan.objects(pod, entry, entry.attachment)]
        tuning = spiderpool.tune(pod, entry, "nft", planned)
        planned = [item for item in planned if item.key not in tuning.removed] + [*tuning.added]
    return planned


def routes(objects: list[Object], netns: str, table: int = MAIN_TABLE) -> list[str]:
    """Routes as ``ip route`` prints them, without what is constant."""
    lines = []
    for item in objects:
        if isinstance(item, Route) and (item.netns, item.table) == (netns, table):
            dst = str(item.dst) if item.dst.prefixlen else "default"
            parts = [dst.removesuffix("/32")]
            parts += [f"via {item.via}"] if item.via else []
            parts += [f"dev {item.dev}"]
            parts += [f"scope {item.scope}"] if item.scope else []
            parts += [f"src {item.src}"] if item.src else []
            lines.append(" ".join(parts))
    return lines


def rules(objects: list[Object], netns: str) -> list[str]:
    return [
        " ".join(
            part
            for part in (
                str(item.priority or "auto"),
                f"from {item.src}".removesuffix("/32") if item.src else "",
                f"fwmark {item.fwmark}" if item.fwmark else "",
                f"lookup {item.table}",
            )
            if part
        )
        for item in objects
        if isinstance(item, PolicyRule) and item.netns == netns
    ]


def single(settings: Coordinator = SETTINGS) -> Pod:
    return Pod("ma1", "default", "node1", (nic("eth0", "172.16.100.2/16", settings),))


def dual(settings: Coordinator = SETTINGS) -> Pod:
    nics = (nic("eth0", "10.233.100.4/32", None), nic("net1", "172.16.100.21/16", settings))
    return Pod("du1", "default", "node1", nics)


def dual_objects(settings: Coordinator = SETTINGS) -> list[Object]:
    return added(dual(settings), [*NODE, *calico_side("du1", "10.233.100.4")])


def test_single_pod_main_table() -> None:
    assert routes(added(single(), NODE), "ma1") == [
        "default via 172.16.0.1 dev eth0",
        "172.16.1.2 dev veth0 scope link src 172.16.100.2",
        "10.233.100.0 dev veth0 scope link src 172.16.100.2",
        "10.233.64.0/18 via 172.16.1.2 dev veth0 src 172.16.100.2",
        "10.233.0.0/18 via 172.16.1.2 dev veth0 src 172.16.100.2",
        "169.254.0.0/16 via 172.16.1.2 dev veth0 src 172.16.100.2",
    ]


def test_single_pod_policy_tables_and_rules() -> None:
    objects = added(single(), NODE)
    assert rules(objects, "ma1") == ["1000 fwmark 1 lookup 100"]
    assert routes(objects, "ma1", 100) == ["default via 172.16.1.2 dev veth0 src 172.16.100.2"]
    assert routes(objects, "ma1", 101) == [
        "172.16.1.2 dev veth0 scope link src 172.16.100.2",
        "10.233.100.0 dev veth0 scope link src 172.16.100.2",
    ]


def test_single_pod_mark_rules_in_order() -> None:
    hooks = [item for item in added(single(), NODE) if isinstance(item, Hook)]
    assert [(hook.table, hook.chain, hook.text) for hook in hooks] == [
        (
            "mangle",
            "PREROUTING",
            "-i veth0 -m conntrack --ctstate NEW -j MARK --set-xmark 0x000001",
        ),
        ("mangle", "PREROUTING", "-m mark --mark 0x000001 -j CONNMARK --save-mark"),
        ("mangle", "OUTPUT", "-j CONNMARK --restore-mark"),
    ]


def test_single_pod_on_its_node() -> None:
    objects = added(single(), NODE)
    host = spiderpool.sandbox_interface("default", "ma1")
    assert rules(objects, "node1") == ["1000 lookup 500"]
    assert routes(objects, "node1", 500) == [f"172.16.100.2 dev {host} scope link"]
    veth = next(item for item in objects if isinstance(item, Veth))
    assert (veth.name, veth.peer_netns, veth.peer, veth.mtu) == ("veth0", "node1", host, 1500)
    neighbours = {(n.netns, str(n.address)): n.mac for n in objects if isinstance(n, Neighbour)}
    assert neighbours == {
        ("node1", "172.16.100.2"): veth.mac,
        ("ma1", "172.16.1.2"): veth.peer_mac,
        ("ma1", "10.233.100.0"): veth.peer_mac,
    }


def test_second_pod_shares_the_rule_of_the_node() -> None:
    other = replace(single(), name="ma1b", nics=(nic("eth0", "172.16.100.12/16"),))
    objects = added(other, added(single(), NODE))
    assert rules(objects, "node1") == ["1000 lookup 500"]
    assert len(routes(objects, "node1", 500)) == 2


def test_dual_pod_default_on_eth0() -> None:
    objects = dual_objects()
    assert routes(objects, "du1") == [
        "169.254.1.1 dev eth0 scope link",
        "default via 169.254.1.1 dev eth0",
        "172.16.1.2 dev eth0 scope link src 10.233.100.4",
        "10.233.100.0 dev eth0 scope link src 10.233.100.4",
        "10.233.64.0/18 via 172.16.1.2 dev eth0 src 10.233.100.4",
        "10.233.0.0/18 via 172.16.1.2 dev eth0 src 10.233.100.4",
        "169.254.0.0/16 via 172.16.1.2 dev eth0 src 10.233.100.4",
    ]
    assert routes(objects, "du1", 100) == ["default via 169.254.1.1 dev eth0"]
    assert set(routes(objects, "du1", 101)) == {
        "default via 172.16.0.1 dev net1",
        "172.16.0.0/16 dev net1 scope link src 172.16.100.21",
        "172.16.1.2 dev eth0 scope link src 10.233.100.4",
        "10.233.100.0 dev eth0 scope link src 10.233.100.4",
    }
    assert rules(objects, "du1") == [
        "auto from 172.16.100.21 lookup 101",
        "auto from 10.233.100.4 lookup 100",
    ]
    assert not [item for item in objects if isinstance(item, Hook)]


def test_dual_pod_on_its_node_goes_by_the_calico_veth() -> None:
    objects = dual_objects()
    cali = spiderpool.cali_interface("default", "du1")
    assert routes(objects, "node1", 500) == [f"172.16.100.21 dev {cali} scope link"]
    neighbours = {
        (n.netns, str(n.address)): (n.dev, n.mac) for n in objects if isinstance(n, Neighbour)
    }
    assert neighbours["node1", "172.16.100.21"] == (cali, "02:00:00:00:00:01")
    assert neighbours["du1", "172.16.1.2"] == ("eth0", "ee:ee:ee:ee:ee:ee")


def test_dual_pod_default_on_net1() -> None:
    objects = dual_objects(replace(SETTINGS, pod_default_route_nic="net1"))
    main = routes(objects, "du1")
    assert "default via 172.16.0.1 dev net1" in main
    assert "default via 169.254.1.1 dev eth0" not in main
    assert "10.233.64.0/18 via 172.16.1.2 dev eth0 src 10.233.100.4" in main
    assert rules(objects, "du1") == ["auto from 10.233.100.4 lookup 101"]
    assert routes(objects, "du1", 100) == []
    assert set(routes(objects, "du1", 101)) == {
        "default via 169.254.1.1 dev eth0",
        "169.254.1.1 dev eth0 scope link",
        "172.16.1.2 dev eth0 scope link src 10.233.100.4",
        "10.233.100.0 dev eth0 scope link src 10.233.100.4",
        "10.233.64.0/18 via 172.16.1.2 dev eth0 src 10.233.100.4",
        "10.233.0.0/18 via 172.16.1.2 dev eth0 src 10.233.100.4",
        "169.254.0.0/16 via 172.16.1.2 dev eth0 src 10.233.100.4",
    }


def test_without_tune_pod_routes_both_defaults_stay() -> None:
    objects = dual_objects(replace(SETTINGS, tune_pod_routes=False))
    assert rules(objects, "du1") == []
    defaults = [line for line in routes(objects, "du1") if line.startswith("default")]
    assert defaults == ["default via 169.254.1.1 dev eth0", "default via 172.16.0.1 dev net1"]
    net1 = next(r for r in objects if isinstance(r, Route) and r.dev == "net1")
    assert net1.place == "prepend"


def test_second_underlay_nic_counts_its_table_and_repeats_the_hijack_routes() -> None:
    pod = dual()
    pod = replace(pod, nics=(*pod.nics, nic("net2", "172.16.100.31/16")))
    objects = added(pod, [*NODE, *calico_side("du1", "10.233.100.4")])
    assert rules(objects, "du1")[-1] == "auto from 172.16.100.31 lookup 102"
    assert "10.233.0.0/18 via 172.16.1.2 dev eth0 src 10.233.100.4" in routes(objects, "du1", 102)
    assert "default via 172.16.0.1 dev net2" in routes(objects, "du1", 102)


def test_further_nic_of_an_underlay_pod() -> None:
    pod = single()
    pod = replace(pod, nics=(*pod.nics, nic("net1", "172.16.100.41/16")))
    objects = added(pod, NODE)
    host = spiderpool.sandbox_interface("default", "ma1")
    assert rules(objects, "ma1") == [
        "1000 fwmark 1 lookup 100",
        "auto from 172.16.100.41 lookup 101",
    ]
    assert f"172.16.100.41 dev {host} scope link" in routes(objects, "node1", 500)
    assert "default via 172.16.0.1 dev net1" in routes(objects, "ma1", 101)


@pytest.mark.parametrize("setting", ["mark_rules", "source_rules"])
def test_rules_of_later_releases_can_be_absent(setting: str) -> None:
    settings = replace(SETTINGS, **{setting: False})  # type: ignore[arg-type]
    if setting == "mark_rules":
        objects = added(single(settings), NODE)
        assert rules(objects, "ma1") == []
        assert routes(objects, "ma1", 100) == []
    else:
        objects = dual_objects(settings)
        assert rules(objects, "du1") == ["auto from 172.16.100.21 lookup 101"]


def test_policy_routes_go_to_main_of_a_single_pod_and_to_the_table_of_a_dual_pod() -> None:
    wanted = PolicyRoute(IPv4Network("198.18.0.0/15"), IPv4Address("172.16.0.9"))
    settings = replace(SETTINGS, policy_routes=(wanted,))
    line = "198.18.0.0/15 via 172.16.0.9 dev"
    assert f"{line} eth0" in routes(added(single(settings), NODE), "ma1")
    assert f"{line} net1" in routes(dual_objects(settings), "du1", 101)


def test_a_route_that_is_there_already_wins_over_a_hijack_route() -> None:
    own = Route(
        netns="ma1",
        origin=ORIGIN,
        dst=IPv4Network("10.233.0.0/18"),
        via=IPv4Address("172.16.0.7"),
        dev="eth0",
    )
    lines = routes(added(single(), [*NODE, own]), "ma1")
    assert [line for line in lines if line.startswith("10.233.0.0/18")] == [
        "10.233.0.0/18 via 172.16.0.7 dev eth0"
    ]


def test_veth_settings() -> None:
    settings = replace(SETTINGS, veth_mtu=1400, veth_link_address=IPv4Address("169.254.100.1"))
    objects = added(single(settings), NODE)
    veth = next(item for item in objects if isinstance(item, Veth))
    assert (veth.mtu, veth.peer_mtu) == (1400, 1400)
    assert ("veth0", "169.254.100.1/32") in {
        (item.dev, str(item.address)) for item in objects if isinstance(item, Address)
    }


@pytest.mark.parametrize(("value", "written"), [(0, ["0"]), (2, ["2"]), (-1, [])])
def test_pod_rp_filter(value: int, written: list[str]) -> None:
    objects = added(single(replace(SETTINGS, pod_rp_filter=value)), NODE)
    assert [
        item.value for item in objects if isinstance(item, Sysctl) and item.netns == "ma1"
    ] == written


def test_mac_prefix_and_address() -> None:
    objects = dual_objects(replace(SETTINGS, pod_mac_prefix="0A:1B"))
    links = {item.name: item.mac for item in objects if isinstance(item, macvlan.Macvlan)}
    assert links == {"net1": "0a:1b:ac:10:64:15"}
