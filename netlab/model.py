"""A lab as Kubernetes sees it: nodes, Pods, attachments, Services, and what is expected of them.

Field names are those of Kubernetes, Calico and Spiderpool in snake_case. Everything is frozen and
complete: `netlab.spec` has filled every default and checked every reference, so the translation
layer never asks whether a name exists. Addresses are `ipaddress` values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Literal, TypeAlias

Result: TypeAlias = Literal["delivered", "rejected", "dropped", "unknown", "error"]
ProbeKind: TypeAlias = Literal["ping", "curl", "tcp", "udp"]
Behaviour: TypeAlias = Literal["released", "pr5683-rev1", "none"]
Policy: TypeAlias = Literal["Cluster", "Local"]
Sources: TypeAlias = Mapping[str, tuple[int, int]]
"""Setting path -> (line, column) in the lab's file, both from 1."""

NEWEST_PATCH = 999


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A component's version; a missing patch is the newest of its minor (``v1.28``)."""

    major: int
    minor: int
    patch: int = NEWEST_PATCH

    @classmethod
    def parse(cls, text: str) -> Version:
        """``v1.28`` or ``v1.28.3``, the ``v`` optional; ValueError for anything else."""
        match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
        if not match:
            raise ValueError(f"{text!r} is not a version such as v1.28 or v1.28.3")
        major, minor, patch = match.groups()
        return cls(int(major), int(minor), NEWEST_PATCH if patch is None else int(patch))

    def __str__(self) -> str:
        tail = "" if self.patch == NEWEST_PATCH else f".{self.patch}"
        return f"v{self.major}.{self.minor}{tail}"


# --- raw objects of the user's own -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RawRoute:
    """A route as in ``ip route``; *dst* 0.0.0.0/0 is the default route."""

    dst: IPv4Network
    dev: str | None = None
    via: IPv4Address | None = None
    src: IPv4Address | None = None
    table: int = 254
    kind: Literal["unicast", "blackhole", "unreachable", "prohibit"] = "unicast"
    scope: Literal["global", "link", "host"] | None = None
    onlink: bool = False
    metric: int | None = None
    mtu: int | None = None
    place: Literal["add", "append", "prepend"] = "add"


@dataclass(frozen=True, slots=True)
class RawRule:
    """A policy rule as in ``ip rule``."""

    table: int
    priority: int | None = None
    src: IPv4Network | None = None
    dst: IPv4Network | None = None
    fwmark: int | None = None
    iif: str | None = None


@dataclass(frozen=True, slots=True)
class RawNeighbour:
    """A permanent neighbour entry."""

    address: IPv4Address
    dev: str
    mac: str


@dataclass(frozen=True, slots=True)
class RawObjects:
    """Objects added on one side of the components' own.

    *iptables* lines are complete rules as ``iptables-save`` prints them, with their table in
    front: ``-t filter -A FORWARD -s 10.0.0.1 -j DROP`` (``-I`` inserts).
    """

    sysctls: Mapping[str, str] = field(default_factory=dict, hash=False)
    routes: tuple[RawRoute, ...] = ()
    rules: tuple[RawRule, ...] = ()
    neighbours: tuple[RawNeighbour, ...] = ()
    iptables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Extra:
    """The user's own objects: *before* the components' (only netns and NICs exist) and *after*."""

    before: RawObjects = RawObjects()
    after: RawObjects = RawObjects()


# --- the world outside the cluster -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Network:
    """One L2 segment (a switch); several *subnets* may share the wire."""

    name: str
    subnets: tuple[IPv4Network, ...]
    mtu: int = 1500
    extra: Extra = Extra()


@dataclass(frozen=True, slots=True)
class Router:
    """Forwards between its own networks: one NIC per network (eth0, eth1, …), in order."""

    name: str
    addresses: Mapping[str, tuple[IPv4Interface, ...]] = field(hash=False)
    send_redirects: bool = False
    extra: Extra = Extra()


@dataclass(frozen=True, slots=True)
class Host:
    """A machine outside the cluster, with one NIC eth0. *gateway* None: no default route."""

    name: str
    network: str
    address: IPv4Interface
    gateway: IPv4Address | None
    ports: tuple[int, ...] = (80,)
    command: tuple[str, ...] = ()
    extra: Extra = Extra()


# --- cluster settings --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IPPool:
    """A Calico IPPool. *block_size* is the prefix length of a node's block."""

    name: str
    cidr: IPv4Network
    nat_outgoing: bool = True
    disabled: bool = False
    block_size: int = 26
    encapsulation: Literal["VXLAN", "VXLANCrossSubnet", "IPIP", "IPIPCrossSubnet", "None"] = "VXLAN"


@dataclass(frozen=True, slots=True)
class Felix:
    """The fields of FelixConfiguration that a path can depend on."""

    disable_conntrack_invalid_check: bool = False
    chain_insert_mode: Literal["Insert", "Append"] = "Insert"
    default_endpoint_to_host_action: Literal["Accept", "Drop", "Return"] = "Accept"
    allow_vxlan_packets_from_workloads: bool = False
    allow_ipip_packets_from_workloads: bool = False
    vxlan_vni: int = 4096
    vxlan_port: int = 4789


@dataclass(frozen=True, slots=True)
class Calico:
    version: Version
    ip_pools: tuple[IPPool, ...]
    mtu: int = 1450
    felix: Felix = Felix()


@dataclass(frozen=True, slots=True)
class KubeProxy:
    """*cluster_cidr* None: no local traffic detector, so off-cluster clients are not masqueraded.

    *be_liberal_at_start* is what kube-proxy read from
    ``net.netfilter.nf_conntrack_tcp_be_liberal`` when it started; it decides the INVALID rule
    from v1.29 on (kubernetes PR 120412).
    """

    version: Version
    mode: Literal["iptables"] = "iptables"
    cluster_cidr: IPv4Network | None = None
    masquerade_all: bool = False
    conntrack_tcp_be_liberal: bool = False
    be_liberal_at_start: bool = False
    localhost_node_ports: bool = True
    node_port_addresses: tuple[IPv4Network, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyRoute:
    dst: IPv4Network
    gw: IPv4Address


@dataclass(frozen=True, slots=True)
class Coordinator:
    """Spiderpool's coordinator, with *overlay_pod_cidr* and *service_cidr* already resolved.

    ``auto`` is every Calico pool that is not disabled, and the cluster's serviceCIDR.
    """

    behaviour: Behaviour = "released"
    pod_default_route_nic: str = ""
    tune_pod_routes: bool = True
    host_rule_table: int = 500
    pod_rp_filter: int = 0
    overlay_pod_cidr: tuple[IPv4Network, ...] = ()
    service_cidr: tuple[IPv4Network, ...] = ()
    hijack_cidr: tuple[IPv4Network, ...] = ()
    mark_rules: bool = True
    source_rules: bool = True
    veth_link_address: IPv4Address | None = None
    veth_mtu: int = 1500
    pod_mac_prefix: str = ""
    policy_routes: tuple[PolicyRoute, ...] = ()


# --- nodes, Pods, Services ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeNIC:
    """A node's NIC: plugged into *network*, or a VLAN *vlan* of the NIC *link*."""

    name: str
    network: str | None = None
    address: IPv4Interface | None = None
    link: str | None = None
    vlan: int | None = None
    mtu: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A node with the cluster's settings as they apply to it. *gateway*: its default route."""

    name: str
    nics: tuple[NodeNIC, ...]
    gateway: IPv4Address | None
    calico: Calico
    kube_proxy: KubeProxy | None
    coordinator: Coordinator | None
    sysctl: Mapping[str, str] = field(hash=False)
    iptables_backend: Literal["nft", "legacy"] = "nft"
    pod_cidrs: tuple[IPv4Network, ...] = ()
    """The Calico blocks that are affine to this node, in the order of their allocation."""
    extra: Extra = Extra()

    @property
    def address(self) -> IPv4Address:
        """The InternalIP: the first address of the first NIC that has one."""
        return next(nic.address.ip for nic in self.nics if nic.address)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A NetworkAttachmentDefinition: a main CNI, then the coordinator (None: not chained)."""

    name: str
    cni: Literal["macvlan"]
    master: str
    subnet: IPv4Network
    gateway: IPv4Address | None
    coordinator: Mapping[str, object] | None = field(hash=False)
    mode: Literal["bridge", "private", "vepa", "passthru"] = "bridge"
    mtu: int | None = None


@dataclass(frozen=True, slots=True)
class PodNIC:
    """*attachment* None: Calico, the cluster's default network.

    *coordinator*: the settings that apply to this NIC (node, attachment and Pod annotation
    merged), None where the coordinator is not chained or the NIC is Calico's.
    """

    name: str
    address: IPv4Interface
    attachment: Attachment | None = None
    coordinator: Coordinator | None = None
    default_route: Literal["add", "append", "prepend"] = "prepend"


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    namespace: str
    node: str
    nics: tuple[PodNIC, ...]
    ports: tuple[int, ...] = (80,)
    command: tuple[str, ...] = ()
    extra: Extra = Extra()

    def nic(self, name: str) -> PodNIC:
        return next(nic for nic in self.nics if nic.name == name)


@dataclass(frozen=True, slots=True)
class ServicePort:
    port: int
    target_port: int
    name: str = ""
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"
    node_port: int | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint of a Service: one NIC's address of a Pod."""

    pod: str
    nic: str
    address: IPv4Address
    node: str
    ready: bool = True
    serving: bool = True
    terminating: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """*cluster_ip* None: headless."""

    name: str
    namespace: str
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    cluster_ip: IPv4Address | None
    ports: tuple[ServicePort, ...]
    endpoints: tuple[Endpoint, ...]
    external_traffic_policy: Policy = "Cluster"
    internal_traffic_policy: Policy = "Cluster"


# --- expectations ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """Where a probe starts: an actor, optionally bound to one of its NICs or addresses."""

    actor: str
    nic: str | None = None
    address: IPv4Address | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where a probe goes, resolved: *address* and, but for ping, *port*.

    *actor* is the node, Pod or host addressed (None for a Service's ClusterIP or an address that
    nobody in the lab owns); *service* is ``namespace/name`` for ClusterIP and NodePort targets.
    """

    text: str
    address: IPv4Address
    port: int = 80
    actor: str | None = None
    service: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    kind: ProbeKind
    source: Source
    target: Target

    def __str__(self) -> str:
        nic = self.source.nic or (f"@{self.source.address}" if self.source.address else "")
        source = self.source.actor + (f".{nic}" if self.source.nic else nic)
        return f"{self.kind} {source} -> {self.target.text}"


@dataclass(frozen=True, slots=True)
class State:
    """A fact about one namespace (*where*): exactly one of route, rule, link, neighbour.

    *facts* holds the wanted fields in the words of iproute2, every value as text:
    route: dst plus dev, via, src, table, from, mark (``ip route get`` when *dst* is an address,
    a table's entry when it has a prefix or is ``default``); rule: from, fwmark, table, priority;
    link: name plus mac, mtu, kind, up; neighbour: address plus dev, mac, state. *absent* turns
    it round.
    """

    where: str
    kind: Literal["route", "rule", "link", "neighbour"]
    facts: Mapping[str, str] = field(hash=False)
    absent: bool = False


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a lab promises. Exactly one of *probe* and *state* is set.

    *seen_as*: text as in the file; *seen_as_address* is what it stands for. *hops*: how many
    routers the request passes (64 minus the TTL that the server saw). *count*: the probe runs
    that many times, one after another, and each must come out so. *control* names the
    expectation whose delivery proves that a negative one could have come out otherwise.
    """

    id: str
    why: str = ""
    probe: Probe | None = None
    state: State | None = None
    result: Result = "delivered"
    seen_as: str | None = None
    seen_as_address: IPv4Address | None = None
    at: str | None = None
    by: str | None = None
    hops: int | None = None
    count: int = 1
    control: str | None = None
    tags: tuple[str, ...] = ()
    path: str = ""

    @property
    def expects_failure(self) -> bool:
        return self.result in {"rejected", "dropped"}


@dataclass(frozen=True, slots=True)
class Lab:
    """One lab in one variant (``base``: as written). *sources* maps setting paths to the file."""

    name: str
    title: str
    file: str
    networks: Mapping[str, Network] = field(hash=False)
    routers: Mapping[str, Router] = field(hash=False)
    hosts: Mapping[str, Host] = field(hash=False)
    nodes: Mapping[str, Node] = field(hash=False)
    pods: Mapping[str, Pod] = field(hash=False)
    services: Mapping[str, Service] = field(hash=False)
    pod_cidrs: tuple[IPv4Network, ...]
    service_cidrs: tuple[IPv4Network, ...]
    expect: tuple[Expectation, ...] = ()
    variant: str = "base"
    variants: tuple[str, ...] = ()
    changes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What the variant sets: path -> value as text, for the headline of a report."""
    allow: frozenset[str] = frozenset()
    sources: Sources = field(default_factory=dict, compare=False, repr=False, hash=False)

    @property
    def actors(self) -> tuple[str, ...]:
        """Everything that can probe or be probed: nodes, Pods, outside hosts and routers."""
        return (*self.nodes, *self.pods, *self.hosts, *self.routers)

    def named_addresses(self) -> Iterator[tuple[str, IPv4Address]]:
        """Every name that ``seenAs`` may give an address: an actor's own, then ``actor.device``."""
        for node in self.nodes.values():
            yield node.name, node.address
            for nic in node.nics:
                if nic.address:
                    yield f"{node.name}.{nic.name}", nic.address.ip
            if node.pod_cidrs:
                yield f"{node.name}.vxlan.calico", node.pod_cidrs[0].network_address
        for pod in self.pods.values():
            yield pod.name, pod.nics[0].address.ip
            yield from ((f"{pod.name}.{nic.name}", nic.address.ip) for nic in pod.nics)
        for host in self.hosts.values():
            yield host.name, host.address.ip
        for router in self.routers.values():
            for index, addresses in enumerate(router.addresses.values()):
                yield from ((f"{router.name}.eth{index}", address.ip) for address in addresses)

    def name_of(self, address: IPv4Address) -> str:
        """The shortest name of *address* in this lab, else the address itself."""
        return next((name for name, own in self.named_addresses() if own == address), str(address))
