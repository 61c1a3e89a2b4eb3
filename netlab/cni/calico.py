"""Calico with VXLAN: tunnel device, blocks, Pods' veths, and Felix' rules beside them.

Sources: projectcalico/calico felix/dataplane/linux (vxlan_mgr.go and route_mgr.go: device, routes,
neighbours, fdb; endpoint_mgr.go ``configureInterface``; int_dataplane.go ``configureKernel``),
felix/vxlanfdb, felix/routetable, and cni-plugin/pkg/dataplane/linux/dataplane_linux.go
(``DoWorkloadNetnsSetUp``, ``SetupRoutes``), tags v3.27.0 to v3.32.1. IPv6 settings are left out:
labs are IPv4.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from netlab.addressing import cali_interface, mac, vtep_mac
from netlab.cni import felix
from netlab.cni.calico_versions import Traits
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
from netlab.wiring import BASELINE, EVERYWHERE

DEVICE = "vxlan.calico"
HOST_MAC = "ee:ee:ee:ee:ee:ee"
GATEWAY = IPv4Address("169.254.1.1")
BLACKHOLE_PROTOCOL = 80
"""Of blackhole routes (``DefaultRouteProto``). Routes by a device have DeviceRouteProtocol, whose
default is 3 (boot)."""

DEFAULT_RP_FILTER = "net.ipv4.conf.default.rp_filter"


def objects(lab: Lab) -> Iterator[Object]:
    """Everything that Calico writes in *lab*, nodes first, then its Pods in the file's order."""
    pods = [
        (lab.nodes[pod.node], pod, nic)
        for pod in lab.pods.values()
        for nic in pod.nics
        if nic.attachment is None
    ]
    hosting = {node.name for node, _, _ in pods}
    nodes = [node for node in lab.nodes.values() if node.pod_cidrs or node.name in hosting]
    for node in nodes:
        yield from _node(node)
        if node.pod_cidrs:
            yield from _tunnel(lab, node)
    for node, pod, nic in pods:
        yield from _pod(node, pod, nic)
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
    if Traits.of(node.calico.version).conntrack_accounting:
        origin = _origin("flow logs need counters", f"node {node.name}", "cluster.calico.version")
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
            protocol=BLACKHOLE_PROTOCOL,
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
    mtu = node.calico.mtu if Traits.of(node.calico.version).route_mtu else None
    reachable = [(block, f"block of {peer.name}") for block in peer.pod_cidrs]
    reachable += [
        (address, "borrowed from another node's block") for address in _borrowed(lab, peer)
    ]
    for dst, reason in reachable:
        yield Route(
            netns=node.name,
            origin=_origin(reason, subject, "cluster.calico.encapsulation"),
            dst=dst,
            via=vtep,
            dev=DEVICE,
            onlink=True,
            mtu=mtu,
        )


def _borrowed(lab: Lab, node: Node) -> Iterator[IPv4Network]:
    """Addresses of Pods of *node* that lie in another node's block.

    An address outside all pools gets no route between nodes (``IPPoolType_NONE``).
    """
    for pod in lab.pods.values():
        for nic in pod.nics:
            if pod.node != node.name or nic.attachment is not None:
                continue
            owners = (n.name for n in lab.nodes.values() if _in_blocks(nic.address.ip, n))
            if next(owners, node.name) != node.name:
                yield IPv4Network(nic.address.ip)


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
    for name, value in _interface_sysctls(node, host):
        yield Sysctl(netns=node.name, origin=sysctls, name=name, value=value)
    yield Route(
        netns=node.name,
        origin=_origin("the Pod from its own node", subject, path),
        dst=IPv4Network(nic.address.ip),
        dev=host,
        scope="link",
    )
    yield from _inside(pod, nic)


def _inside(pod: Pod, nic: PodNIC) -> Iterator[Object]:
    """What the Pod's own namespace gets besides the veth, in the plugin's order."""
    subject = f"Pod {pod.namespace}/{pod.name}"
    path = f"pods.{pod.name}.nics.{nic.name}"
    gateway = _origin("everything goes through the node", subject, path)
    yield Route(
        netns=pod.name, origin=gateway, dst=IPv4Network(GATEWAY), dev=nic.name, scope="link"
    )
    yield Route(netns=pod.name, origin=gateway, dst=EVERYWHERE, via=GATEWAY, dev=nic.name)
    yield Address(
        netns=pod.name,
        origin=_origin("address from the node's block", subject, path),
        dev=nic.name,
        address=IPv4Interface((nic.address.ip, 32)),
    )


def _interface_sysctls(node: Node, device: str) -> Iterator[tuple[str, str]]:
    """What Felix writes for a workload's *device*; rp_filter is what it read when it started.

    ``cluster.sysctl`` counts as set before that, as it does for kube-proxy.
    """
    at_start = {**node.sysctl, **node.extra.before.sysctls}
    yield f"net.ipv4.conf.{device}.route_localnet", "1"
    yield f"net.ipv4.neigh.{device}.proxy_delay", "0"
    yield f"net.ipv4.conf.{device}.proxy_arp", "1"
    yield f"net.ipv4.conf.{device}.forwarding", "1"
    default = at_start.get(DEFAULT_RP_FILTER, BASELINE[DEFAULT_RP_FILTER])
    yield f"net.ipv4.conf.{device}.rp_filter", default
