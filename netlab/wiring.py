"""The world that a cluster stands in: switches, routers, outside hosts and the nodes' own NICs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import IPv4Network

from netlab.addressing import mac, port_name
from netlab.model import Host, Lab, Network, Node, NodeNIC, Router
from netlab.plan import (
    Address,
    Bridge,
    Command,
    Listener,
    Netns,
    Object,
    Origin,
    Route,
    Sysctl,
    Veth,
    Vlan,
)

BRIDGE = "br0"
EVERYWHERE = IPv4Network("0.0.0.0/0")

_PER_DEVICE: Mapping[str, str] = {
    "rp_filter": "0",
    "accept_local": "0",
    "accept_redirects": "1",
    "secure_redirects": "1",
    "send_redirects": "1",
    "accept_source_route": "1",
    "arp_accept": "0",
    "arp_announce": "0",
    "arp_filter": "0",
    "arp_ignore": "0",
    "arp_notify": "0",
    "log_martians": "0",
    "proxy_arp": "0",
    "proxy_arp_pvlan": "0",
    "route_localnet": "0",
    "src_valid_mark": "0",
    "disable_policy": "0",
    "disable_xfrm": "0",
}

BASELINE: Mapping[str, str] = {
    "net.ipv4.ip_forward": "0",
    **{
        f"net.ipv4.conf.{scope}.{name}": value
        for scope in ("all", "default")
        for name, value in _PER_DEVICE.items()
    },
    "net.ipv6.conf.all.disable_ipv6": "1",
    "net.ipv6.conf.default.disable_ipv6": "1",
}
"""The kernel's own defaults, written into every namespace: a new one would copy the host's.

Order matters: writing ip_forward resets other settings of ``conf.all`` (Documentation/networking/
ip-sysctl.rst). IPv6 is off: labs are IPv4, and its autoconfiguration would only add packets.
"""


def namespace(name: str, origin: Origin, **sysctls: str) -> Netns:
    """A namespace with the baseline; *sysctls* replaces values by the last part of their names."""
    changed = {
        f"net.ipv4.conf.{scope}.{key}": value
        for scope in ("all", "default")
        for key, value in sysctls.items()
    }
    return Netns(netns=name, origin=origin, sysctls={**BASELINE, **changed})


def objects(lab: Lab) -> Iterator[Object]:
    """Switches, routers, hosts and nodes with their NICs, addresses and default routes."""
    for network in lab.networks.values():
        yield from _switch(network)
    for router in lab.routers.values():
        yield from _router(lab, router)
    for host in lab.hosts.values():
        yield from _host(lab, host)
    for node in lab.nodes.values():
        yield from _node(lab, node)


def _switch(network: Network) -> Iterator[Object]:
    origin = Origin(
        "underlay",
        "switch of one L2 segment",
        f"network {network.name}",
        f"underlay.networks.{network.name}",
    )
    yield namespace(network.name, origin)
    # br_netfilter sends bridged packets through iptables in every new namespace; a switch has none.
    yield Sysctl(
        netns=network.name,
        origin=origin,
        name="net.bridge.bridge-nf-call-iptables",
        value="0",
        optional=True,
    )
    yield Bridge(
        netns=network.name,
        origin=origin,
        name=BRIDGE,
        mac=mac(network.name, BRIDGE),
        mtu=network.mtu,
    )


def _plug(
    network: Network, netns: str, device: str, origin: Origin, mtu: int | None = None
) -> Veth:
    """A NIC *device* of *netns*, plugged into the switch of *network*."""
    port = port_name(netns, device)
    return Veth(
        netns=netns,
        origin=origin,
        name=device,
        mac=mac(netns, device),
        mtu=mtu or network.mtu,
        peer_netns=network.name,
        peer=port,
        peer_mac=mac(network.name, port),
        peer_mtu=network.mtu,
        peer_master=BRIDGE,
    )


def _router(lab: Lab, router: Router) -> Iterator[Object]:
    path = f"underlay.routers.{router.name}"
    origin = Origin("underlay", "router between its own networks", f"router {router.name}", path)
    redirects = "1" if router.send_redirects else "0"
    yield namespace(router.name, origin, send_redirects=redirects)
    yield Sysctl(netns=router.name, origin=origin, name="net.ipv4.ip_forward", value="1")
    for index, (network, addresses) in enumerate(router.addresses.items()):
        device = f"eth{index}"
        yield _plug(lab.networks[network], router.name, device, origin)
        for address in addresses:
            yield Address(netns=router.name, origin=origin, dev=device, address=address)


def _host(lab: Lab, host: Host) -> Iterator[Object]:
    path = f"underlay.hosts.{host.name}"
    origin = Origin("underlay", "machine outside the cluster", f"host {host.name}", path)
    yield namespace(host.name, origin)
    yield _plug(lab.networks[host.network], host.name, "eth0", origin)
    yield Address(netns=host.name, origin=origin, dev="eth0", address=host.address)
    if host.gateway:
        yield Route(netns=host.name, origin=origin, dst=EVERYWHERE, via=host.gateway, dev="eth0")
    yield server(host.name, host.ports, host.command, path)


def _node(lab: Lab, node: Node) -> Iterator[Object]:
    path = f"nodes.{node.name}"
    origin = Origin("underlay", "node with its own NICs", f"node {node.name}", path)
    yield namespace(node.name, origin)
    forwarding = Origin("kubelet", "a node forwards for its Pods", f"node {node.name}", path)
    yield Sysctl(netns=node.name, origin=forwarding, name="net.ipv4.ip_forward", value="1")
    for nic in node.nics:
        yield from _nic(lab, node, nic)
    if node.gateway:
        dev = next(
            nic.name for nic in node.nics if nic.address and node.gateway in nic.address.network
        )
        yield Route(netns=node.name, origin=origin, dst=EVERYWHERE, via=node.gateway, dev=dev)
    yield server(node.name, (80,), (), path)


def _nic(lab: Lab, node: Node, nic: NodeNIC) -> Iterator[Object]:
    path = f"nodes.{node.name}.nics.{nic.name}"
    if nic.link and nic.vlan is not None:
        origin = Origin("underlay", f"VLAN {nic.vlan} of {nic.link}", f"node {node.name}", path)
        yield Vlan(
            netns=node.name,
            origin=origin,
            name=nic.name,
            mac=mac(node.name, nic.link),
            mtu=nic.mtu,
            lower=nic.link,
            vlan=nic.vlan,
        )
    elif nic.network:
        origin = Origin("underlay", f"NIC in network {nic.network}", f"node {node.name}", path)
        yield _plug(lab.networks[nic.network], node.name, nic.name, origin, nic.mtu)
    if nic.address:
        origin = Origin("underlay", "the node's address", f"node {node.name}", path)
        yield Address(netns=node.name, origin=origin, dev=nic.name, address=nic.address)


def server(netns: str, ports: tuple[int, ...], command: tuple[str, ...], path: str) -> Object:
    """The user's own program if there is one, else the lab's server."""
    if command:
        origin = Origin("user", "program of the lab's own", netns, f"{path}.command")
        return Command(netns=netns, origin=origin, argv=command)
    origin = Origin("underlay", "answers HTTP, TCP and UDP and says whom it saw", netns, path)
    return Listener(netns=netns, origin=origin, ports=ports)
