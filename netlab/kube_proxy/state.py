"""What a kube-proxy knows when it writes its rules, in Kubernetes' words."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Literal, TypeAlias

from netlab.model import Version

IPAddress: TypeAlias = IPv4Address | IPv6Address
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
    """One port of one Service, with the Service's own settings."""

    namespace: str
    service: str
    cluster_ip: IPAddress
    port: int
    name: str = ""
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"
    node_port: int = 0
    external_ips: tuple[IPAddress, ...] = ()
    load_balancer_ips: tuple[LoadBalancerIP, ...] = ()
    source_ranges: tuple[IPNetwork, ...] = ()
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
    """Everything that decides the rules of one node's kube-proxy for one family.

    *be_liberal*: the value of nf_conntrack_tcp_be_liberal when the proxier was made.
    *nfacct*: names of the counters that exist; a rule with a missing one cannot be loaded.
    *mark*: as kube-proxy prints it (``%#08x`` to v1.30 and in every release; unit tests of 1.31
    and later print ``0x4000``).
    """

    version: Version
    node: str
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
    nfacct: frozenset[str] = field(default_factory=frozenset)

    @property
    def matches_all_node_addresses(self) -> bool:
        """NodePorts are served on every local address."""
        everything = ip_network("0.0.0.0/0" if self.family == 4 else "::/0")
        return not self.node_port_addresses or everything in self.node_port_addresses

    @property
    def serves_loopback(self) -> bool:
        """NodePorts on 127.0.0.1: route_localnet and the localnet guard come with it."""
        if self.family == 6 or not self.localhost_node_ports:
            return False
        loopback = ip_address("127.0.0.1")
        return self.matches_all_node_addresses or any(
            loopback in network for network in self.node_port_addresses
        )
