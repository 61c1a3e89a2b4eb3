"""What a kube-proxy knows when it writes its rules, in Kubernetes' words."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_address,
)
from typing import Literal, TypeAlias

from netlab.kube_proxy.versions import Traits, traits
from netlab.model import Version

IPAddress: TypeAlias = IPv4Address | IPv6Address
IPInterface: TypeAlias = IPv4Interface | IPv6Interface
IPNetwork: TypeAlias = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of an EndpointSlice, with its port. *node* empty: unknown, never local."""

    address: IPAddress
    port: int
    node: str = ""
    ready: bool = True
    serving: bool = True
    terminating: bool = False

    def __str__(self) -> str:
        host = f"[{self.address}]" if self.address.version == 6 else str(self.address)
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class LoadBalancerIP:
    """A status.loadBalancer.ingress entry; ``Proxy`` leaves it to the load balancer (v1.30)."""

    ip: IPAddress
    mode: Literal["VIP", "Proxy"] = "VIP"


@dataclass(frozen=True, slots=True)
class ServicePort:
    """One port of one Service, with the Service's own settings.

    Addresses of the other family are ignored, as kube-proxy's two proxiers of a dual-stack node
    do. *source_ranges* keep their host bits: versions before v1.30 print them. Topology hints
    (trafficDistribution) are not part of it: every endpoint counts for every node.
    """

    namespace: str
    service: str
    cluster_ip: IPAddress
    port: int
    name: str = ""
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"
    node_port: int = 0
    external_ips: tuple[IPAddress, ...] = ()
    load_balancer_ips: tuple[LoadBalancerIP, ...] = ()
    source_ranges: tuple[IPInterface, ...] = ()
    health_check_node_port: int = 0
    affinity_seconds: int = 0
    external_local: bool = False
    internal_local: bool = False
    endpoints: tuple[Endpoint, ...] = ()

    @property
    def port_name(self) -> str:
        """``namespace/name:port``, as comments say it (ServicePortName.String)."""
        tail = f":{self.name}" if self.name else ""
        return f"{self.namespace}/{self.service}{tail}"


@dataclass(frozen=True, slots=True)
class LocalDetector:
    """How traffic from this cluster's Pods is told (``--detect-local-mode``)."""

    kind: Literal["ClusterCIDR", "InterfaceNamePrefix", "BridgeInterface"]
    value: str

    @property
    def is_local(self) -> str:
        return {
            "ClusterCIDR": f"-s {self.value}",
            "InterfaceNamePrefix": f"-i {self.value}+",
            "BridgeInterface": f"-i {self.value}",
        }[self.kind]

    @property
    def is_not_local(self) -> str:
        return f"! {self.is_local}"


@dataclass(frozen=True, slots=True)
class ProxyState:
    """Everything that decides the rules of one node's kube-proxy for one *family*.

    *node_ip*: the node's own address (``--bind-address`` or its InternalIP); *node_addresses*:
    all of its devices', loopback's included. *node_port_addresses* of the other family are
    ignored; none, or a /0, stands for every address. *be_liberal*: the value of
    nf_conntrack_tcp_be_liberal when the proxier was made. *nfacct*: the counters that exist; a
    rule that names a missing one cannot be loaded. *mark*: as kube-proxy prints it (``%#08x``;
    the unit tests of v1.31 and later print ``0x4000``).
    """

    version: Version
    node: str
    node_ip: IPAddress | None = None
    node_addresses: tuple[IPAddress, ...] = ()
    services: tuple[ServicePort, ...] = ()
    family: Literal[4, 6] = 4
    detector: LocalDetector | None = None
    masquerade_all: bool = False
    mark: str = "0x00004000"
    node_port_addresses: tuple[IPNetwork, ...] = ()
    localhost_node_ports: bool = True
    random_fully: bool = True
    be_liberal: bool = False
    nfacct: frozenset[str] = frozenset()

    @property
    def traits(self) -> Traits:
        return traits(self.version)

    @property
    def own_services(self) -> tuple[ServicePort, ...]:
        """The Service ports of this family."""
        return tuple(port for port in self.services if port.cluster_ip.version == self.family)

    @property
    def matches_all_node_addresses(self) -> bool:
        """NodePorts are served on every local address (NodePortAddresses.MatchAll)."""
        return not self._node_port_networks or any(
            network.prefixlen == 0 for network in self._node_port_networks
        )

    @property
    def matched_node_addresses(self) -> tuple[IPAddress, ...]:
        """The node's addresses in *node_port_addresses* (NodePortAddresses.GetNodeIPs)."""
        return tuple(
            address
            for address in dict.fromkeys(self.node_addresses)
            if any(address in network for network in self._node_port_networks)
        )

    @property
    def localhost_allowed(self) -> bool:
        """IPv4 NodePorts may be served on loopback: the flag, where there is one."""
        return self.localhost_node_ports or not self.traits.localhost_flag

    @property
    def serves_loopback(self) -> bool:
        """NodePorts on 127.0.0.0/8 are: route_localnet and the guard of it come with them."""
        if self.family == 6 or not self.localhost_allowed:
            return False
        start = ip_address("127.0.0.0")
        return self.matches_all_node_addresses or any(
            network.network_address.is_loopback or start in network
            for network in self._node_port_networks
        )

    @property
    def _node_port_networks(self) -> tuple[IPNetwork, ...]:
        return tuple(n for n in self.node_port_addresses if n.version == self.family)
