"""Calico with VXLAN: tunnel device, blocks, Pods' veths, and Felix' rules beside them.

Sources: projectcalico/calico felix/dataplane/linux/vxlan_mgr.go and route_mgr (device, routes,
neighbours, fdb), felix/dataplane/linux/endpoint_mgr.go (``configureInterface``),
cni-plugin/pkg/dataplane/linux/dataplane_linux.go (``DoNetworking``), tag v3.30. IPv6 settings are
left out: labs are IPv4.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from netlab.addressing import cali_interface, mac, vtep_mac
from netlab.cni import felix
from netlab.model import Lab, Node, Pod, PodNIC
from netlab.plan import (
    Address,
    FdbEntry,
    Neighbour,
    Object,
    Origin,
    Route,
    Sysctl,
    Veth,
    Vxlan,
)
from netlab.wiring import EVERYWHERE

DEVICE = "vxlan.calico"
HOST_MAC = "ee:ee:ee:ee:ee:ee"
GATEWAY = IPv4Address("169.254.1.1")
FELIX_PROTOCOL = 80
"""RTPROT of Felix' own routes (``DefaultRouteProtocol``); device routes are RTPROT_BOOT."""

_INTERFACE_SYSCTLS = (
    ("net.ipv4.conf.{}.route_localnet", "1"),
    ("net.ipv4.neigh.{}.proxy_delay", "0"),
    ("net.ipv4.conf.{}.proxy_arp", "1"),
    ("net.ipv4.conf.{}.forwarding", "1"),
)


def objects(lab: Lab) -> Iterator[Object]:
    """Everything that Calico writes in *lab*, nodes first, then its Pods in the file's order."""
    nodes = [node for node in lab.nodes.values() if node.pod_cidrs]
    for node in nodes:
        yield from _node(node)
        yield from _tunnel(lab, node)
    for pod in lab.pods.values():
        for nic in pod.nics:
            if nic.attachment is None:
                yield from _pod(lab.nodes[pod.node], pod, nic)
    for node in nodes:
        yield from felix.objects(lab, node)


def vtep_address(node: Node) -> IPv4Address:
    """The tunnel's address: the first of the node's first block."""
    return node.pod_cidrs[0].network_address


def _origin(reason: str, subject: str, path: str = "cluster.calico") -> Origin:
    return Origin("calico", reason, subject, path)


def _node(node: Node) -> Iterator[Object]:
    """Felix' global sysctls."""
    origin = _origin("a node forwards for its Pods", f"node {node.name}")
    yield Sysctl(netns=node.name, origin=origin, name="net.ipv4.ip_forward", value="1")
    origin = _origin("flow logs need the counters", f"node {node.name}")
    name = "net.netfilter.nf_conntrack_acct"
    yield Sysctl(netns=node.name, origin=origin, name=name, value="1")


def _tunnel(lab: Lab, node: Node) -> Iterator[Object]:
    subject = f"node {node.name}"
    device = next(nic.name for nic in node.nics if nic.address)
    settings = node.calico.felix
    yield Vxlan(
        netns=node.name,
        origin=_origin("tunnel device", subject, "cluster.calico.encapsulation"),
        name=DEVICE,
        mac=vtep_mac(node.name),
        mtu=node.calico.mtu,
        vni=settings.vxlan_vni,
        port=settings.vxlan_port,
        local=node.address,
        lower=device,
    )
    yield Address(
        netns=node.name,
        origin=_origin("the tunnel's address: the first of the node's block", subject),
        dev=DEVICE,
        address=IPv4Interface((vtep_address(node), 32)),
    )
    for block in node.pod_cidrs:
        yield Route(
            netns=node.name,
            origin=_origin("no loop for addresses of the block that no Pod has", subject),
            dst=block,
            kind="blackhole",
            protocol=FELIX_PROTOCOL,
        )
    for peer in lab.nodes.values():
        if peer.name != node.name and peer.pod_cidrs:
            yield from _peer(lab, node, peer)


def _peer(lab: Lab, node: Node, peer: Node) -> Iterator[Object]:
    """How *node* reaches the blocks of *peer*, and Pods of peer with a borrowed address."""
    subject = f"node {peer.name}"
    vtep = vtep_address(peer)
    origin = _origin("the other node's tunnel end", subject)
    yield Neighbour(
        netns=node.name, origin=origin, dev=DEVICE, address=vtep, mac=vtep_mac(peer.name)
    )
    yield FdbEntry(
        netns=node.name, origin=origin, dev=DEVICE, mac=vtep_mac(peer.name), dst=peer.address
    )
    borrowed = (
        IPv4Network(nic.address.ip)
        for pod in lab.pods.values()
        if pod.node == peer.name
        for nic in pod.nics
        if nic.attachment is None and not _in_blocks(nic.address.ip, peer)
    )
    for dst in (*peer.pod_cidrs, *borrowed):
        yield Route(
            netns=node.name,
            origin=_origin(f"block of {peer.name}", subject, "cluster.calico.encapsulation"),
            dst=dst,
            via=vtep,
            dev=DEVICE,
            onlink=True,
            protocol=FELIX_PROTOCOL,
        )


def _in_blocks(address: IPv4Address, node: Node) -> bool:
    return any(address in block for block in node.pod_cidrs)


def _pod(node: Node, pod: Pod, nic: PodNIC) -> Iterator[Object]:
    subject = f"Pod {pod.namespace}/{pod.name}"
    path = f"pods.{pod.name}.nics.{nic.name}"
    host = cali_interface(pod.namespace, pod.name)
    yield Veth(
        netns=pod.name,
        origin=_origin("the Pod's veth", subject, path),
        name=nic.name,
        mac=mac(pod.name, nic.name),
        mtu=node.calico.mtu,
        peer_netns=node.name,
        peer=host,
        peer_mac=HOST_MAC,
        peer_mtu=node.calico.mtu,
    )
    sysctls = _origin("the node answers ARP for the Pod and forwards", subject, path)
    for name, value in _INTERFACE_SYSCTLS:
        yield Sysctl(netns=node.name, origin=sysctls, name=name.format(host), value=value)
    yield Route(
        netns=node.name,
        origin=_origin("the Pod from its own node", subject, path),
        dst=IPv4Network(nic.address.ip),
        dev=host,
        scope="link",
    )
    yield Address(
        netns=pod.name,
        origin=_origin("address from the node's block", subject, path),
        dev=nic.name,
        address=IPv4Interface((nic.address.ip, 32)),
    )
    gateway = _origin("everything goes through the node", subject, path)
    yield Route(
        netns=pod.name, origin=gateway, dst=IPv4Network(GATEWAY), dev=nic.name, scope="link"
    )
    yield Route(netns=pod.name, origin=gateway, dst=EVERYWHERE, via=GATEWAY, dev=nic.name)
