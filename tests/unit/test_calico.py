"""What Calico's VXLAN mode writes, as iproute2 would print it.

Expected values: the routes, devices and sysctls of real nodes, and projectcalico/calico
felix/dataplane/linux, felix/vxlanfdb and cni-plugin/pkg/dataplane/linux (see the module).
"""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

import pytest

from netlab.cni import calico
from netlab.model import (
    Attachment,
    Calico,
    Coordinator,
    Extra,
    IPPool,
    Lab,
    Node,
    NodeNIC,
    Pod,
    PodNIC,
    RawObjects,
    Version,
)
from netlab.plan import (
    Address,
    Bridge,
    FdbEntry,
    Hook,
    Neighbour,
    Netns,
    Object,
    Origin,
    Plan,
    Route,
    Sysctl,
    Veth,
    Vxlan,
)

POOL = IPPool("default", IPv4Network("10.233.64.0/18"))
LAN = Attachment(
    name="lan",
    cni="macvlan",
    master="eth0",
    subnet=IPv4Network("172.16.0.0/16"),
    gateway=IPv4Address("172.16.0.1"),
    coordinator=None,
)


def node(name: str, address: str, *blocks: str, version: str = "v3.30") -> Node:
    return Node(
        name=name,
        nics=(
            NodeNIC("eth9", network="lan"),
            NodeNIC("eth0", network="lan", address=IPv4Interface(address)),
        ),
        gateway=IPv4Address("172.16.0.1"),
        calico=Calico(Version.parse(version), (POOL,)),
        kube_proxy=None,
        coordinator=Coordinator(),
        sysctl={},
        pod_cidrs=tuple(map(IPv4Network, blocks)),
    )


def pod(name: str, where: str, address: str, attachment: Attachment | None = None) -> Pod:
    return Pod(name, "default", where, (PodNIC("eth0", IPv4Interface(address), attachment),))


def lab(*pods: Pod, version: str = "v3.30", nodes: tuple[Node, ...] = ()) -> Lab:
    every = nodes or (
        node("node1", "172.16.1.2/16", "10.233.100.0/26", "10.233.102.64/26", version=version),
        node("node2", "172.16.1.3/16", "10.233.101.0/26", version=version),
    )
    return Lab(
        name="test",
        title="",
        file="test.yaml",
        networks={},
        routers={},
        hosts={},
        nodes={one.name: one for one in every},
        pods={one.name: one for one in pods},
        services={},
        pod_cidrs=(POOL.cidr,),
        service_cidrs=(IPv4Network("10.233.0.0/18"),),
    )


def one_pod(version: str = "v3.30") -> Lab:
    return lab(pod("ca1", "node1", "10.233.100.3/26"), version=version)


def routes(made: Lab, netns: str) -> list[str]:
    """Routes as ``ip -N route`` prints them, in creation order."""
    found = []
    for item in calico.objects(made):
        if isinstance(item, Route) and item.netns == netns:
            words = ["blackhole"] * (item.kind == "blackhole") + [str(item.dst)]
            words += [f"via {item.via}"] * (item.via is not None)
            words += [f"dev {item.dev}"] * (item.dev is not None)
            words += [f"proto {item.protocol}"] * (item.protocol != 3)
            words += [f"scope {item.scope}"] * (item.scope is not None)
            words += ["onlink"] * item.onlink
            words += [f"mtu {item.mtu}"] * (item.mtu is not None)
            found.append(" ".join(words))
    return found


def sysctls(made: Lab, netns: str) -> dict[str, str]:
    return {
        item.name: item.value
        for item in calico.objects(made)
        if isinstance(item, Sysctl) and item.netns == netns
    }


def only(made: Lab, kind: type[Object], netns: str) -> list[Object]:
    return [item for item in calico.objects(made) if type(item) is kind and item.netns == netns]


# --- nodes ---------------------------------------------------------------------------------------


def test_the_tunnel_device_sits_on_the_nic_with_an_address() -> None:
    (device,) = only(one_pod(), Vxlan, "node1")
    assert device == Vxlan(
        netns="node1",
        origin=Origin("", ""),
        name="vxlan.calico",
        mac="66:f9:37:c3:7e:94",
        mtu=1450,
        vni=4096,
        port=4789,
        local=IPv4Address("172.16.1.2"),
        lower="eth0",
    )
    addresses = [item.address for item in only(one_pod(), Address, "node1")]  # type: ignore[attr-defined]
    assert addresses == [IPv4Interface("10.233.100.0/32")]


@pytest.mark.parametrize(
    ("version", "mtu"),
    [("v3.27", ""), ("v3.30", ""), ("v3.31", " mtu 1450"), ("v3.32", " mtu 1450")],
)
def test_own_blocks_are_blackholes_and_others_go_by_the_peers_tunnel_end(
    version: str, mtu: str
) -> None:
    assert routes(lab(version=version), "node1") == [
        "blackhole 10.233.100.0/26 proto 80",
        "blackhole 10.233.102.64/26 proto 80",
        f"10.233.101.0/26 via 10.233.101.0 dev vxlan.calico onlink{mtu}",
    ]
    assert routes(lab(version=version), "node2") == [
        "blackhole 10.233.101.0/26 proto 80",
        f"10.233.100.0/26 via 10.233.100.0 dev vxlan.calico onlink{mtu}",
        f"10.233.102.64/26 via 10.233.100.0 dev vxlan.calico onlink{mtu}",
    ]


def test_the_peers_tunnel_end_is_known_for_good() -> None:
    mac = "66:f9:37:c3:7e:94"
    assert only(lab(), Neighbour, "node2") == [
        Neighbour(
            netns="node2",
            origin=Origin("", ""),
            dev="vxlan.calico",
            address=IPv4Address("10.233.100.0"),
            mac=mac,
        )
    ]
    assert only(lab(), FdbEntry, "node2") == [
        FdbEntry(
            netns="node2",
            origin=Origin("", ""),
            dev="vxlan.calico",
            mac=mac,
            dst=IPv4Address("172.16.1.2"),
        )
    ]


def test_a_borrowed_address_has_a_route_of_its_own_on_every_other_node() -> None:
    borrower = pod("ca2", "node2", "10.233.100.9/26")
    assert routes(lab(borrower), "node1")[-1] == (
        "10.233.100.9/32 via 10.233.101.0 dev vxlan.calico onlink"
    )
    control = pod("ca2", "node2", "10.233.101.9/26")
    assert not [line for line in routes(lab(control), "node1") if "/32" in line]


def test_an_address_outside_all_pools_has_no_route_between_nodes() -> None:
    foreign = pod("ca2", "node2", "192.0.2.9/32")
    assert not [line for line in routes(lab(foreign), "node1") if "192.0.2.9" in line]
    assert [line for line in routes(lab(foreign), "node2") if "192.0.2.9" in line]


@pytest.mark.parametrize(("version", "accounting"), [("v3.29", False), ("v3.30", True)])
def test_global_sysctls(version: str, accounting: bool) -> None:  # noqa: FBT001 - a parameter
    expected = {"net.ipv4.ip_forward": "1"}
    if accounting:
        expected["net.netfilter.nf_conntrack_acct"] = "1"
    assert sysctls(lab(version=version), "node1") == expected


def test_a_node_without_a_block_has_neither_tunnel_nor_peers_but_felix() -> None:
    bare = node("node3", "172.16.1.4/16")
    nodes = (*lab().nodes.values(), bare)
    made = lab(pod("ca3", "node3", "192.0.2.9/32"), nodes=nodes)
    assert only(made, Vxlan, "node3") == []
    assert only(made, Hook, "node3")
    assert sysctls(made, "node3")["net.ipv4.ip_forward"] == "1"
    assert not [line for line in routes(made, "node1") if "172.16.1.4" in line]
    assert list(calico.objects(lab(nodes=(bare,)))) == []


# --- Pods ----------------------------------------------------------------------------------------


def test_the_pods_veth_has_calicos_names_and_macs() -> None:
    (veth,) = only(one_pod(), Veth, "ca1")
    assert isinstance(veth, Veth)
    assert (veth.name, veth.peer_netns, veth.peer) == ("eth0", "node1", _cali("ca1"))
    assert (veth.mtu, veth.peer_mtu, veth.peer_mac) == (1450, 1450, "ee:ee:ee:ee:ee:ee")
    assert veth.mac is not None
    assert veth.mac != veth.peer_mac


def test_the_name_is_the_one_of_a_real_cluster() -> None:
    made = lab(pod("web-0", "node1", "10.233.100.3/26"))
    (veth,) = only(made, Veth, "web-0")
    assert isinstance(veth, Veth)
    assert veth.peer == "cali0d7763386da"


def test_a_pod_reaches_everything_through_its_node() -> None:
    assert routes(one_pod(), "ca1") == [
        "169.254.1.1/32 dev eth0 scope link",
        "0.0.0.0/0 via 169.254.1.1 dev eth0",
    ]
    addresses = [item.address for item in only(one_pod(), Address, "ca1")]  # type: ignore[attr-defined]
    assert addresses == [IPv4Interface("10.233.100.3/32")]


def test_the_node_reaches_its_pod_by_the_pods_interface() -> None:
    assert f"10.233.100.3/32 dev {_cali('ca1')} scope link" in routes(one_pod(), "node1")


def test_the_pods_interface_has_calicos_sysctls() -> None:
    device = _cali("ca1")
    assert {k: v for k, v in sysctls(one_pod(), "node1").items() if device in k} == {
        f"net.ipv4.conf.{device}.route_localnet": "1",
        f"net.ipv4.neigh.{device}.proxy_delay": "0",
        f"net.ipv4.conf.{device}.proxy_arp": "1",
        f"net.ipv4.conf.{device}.forwarding": "1",
        f"net.ipv4.conf.{device}.rp_filter": "0",
    }
    assert sysctls(one_pod(), "ca1") == {}


@pytest.mark.parametrize(
    ("cluster", "before", "value"), [("", "", "0"), ("1", "", "1"), ("1", "2", "2"), ("", "2", "2")]
)
def test_rp_filter_is_what_felix_found_as_the_default(
    cluster: str, before: str, value: str
) -> None:
    name = "net.ipv4.conf.default.rp_filter"
    own = replace(
        one_pod().nodes["node1"],
        sysctl={name: cluster} if cluster else {},
        extra=Extra(before=RawObjects(sysctls={name: before} if before else {})),
    )
    made = lab(pod("ca1", "node1", "10.233.100.3/26"), nodes=(own,))
    assert sysctls(made, "node1")[f"net.ipv4.conf.{_cali('ca1')}.rp_filter"] == value


def test_nics_of_attachments_are_not_calicos() -> None:
    macvlan = pod("ma1", "node1", "172.16.100.2/16", LAN)
    assert [item for item in calico.objects(lab(macvlan)) if item.netns == "ma1"] == []
    assert list(calico.objects(lab(macvlan))) == list(calico.objects(lab()))


def test_devices_come_in_the_order_that_decides_source_addresses() -> None:
    wire = Origin("underlay", "test")
    outside: list[Object] = [
        Netns(netns=name, origin=wire) for name in ("ca1", "node1", "node2", "ca2")
    ]
    outside += [Bridge(netns=name, origin=wire, name="eth0") for name in ("node1", "node2")]
    made = lab(pod("ca1", "node1", "10.233.100.3/26"), pod("ca2", "node2", "10.233.101.2/26"))
    plan = Plan.of("test", [*outside, *calico.objects(made)])
    devices = [
        item.peer if isinstance(item, Veth) else item.name
        for item in plan.objects
        if isinstance(item, Bridge | Vxlan | Veth) and item.netns != "node2"
    ]
    assert devices[:3] == ["eth0", "vxlan.calico", _cali("ca1")]


def test_objects_say_whom_they_serve() -> None:
    (veth,) = only(one_pod(), Veth, "ca1")
    assert veth.origin.component == "calico"
    assert (veth.origin.subject, veth.origin.path) == ("Pod default/ca1", "pods.ca1.nics.eth0")
    components = {item.origin.component for item in calico.objects(one_pod())}
    assert components == {"calico", "felix"}


def _cali(name: str) -> str:
    (veth,) = only(lab(pod(name, "node1", "10.233.100.3/26")), Veth, name)
    assert isinstance(veth, Veth)
    return veth.peer
