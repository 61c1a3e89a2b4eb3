"""Spiderpool's coordinator: the plugin chained behind an attachment's main CNI.

Behaviour ``released`` (v1.1.2 to v1.2.2). Sources, at commit a7fbd3b of spidernet-io/spiderpool:
cmd/coordinator/cmd/command_add.go (order of the steps), cmd/coordinator/cmd/utils.go (the steps),
pkg/networking/networking/route.go (``AddRoute`` ignores EEXIST, ``moveRouteTable``), and
pkg/networking/sysctl/sysctl.go (what the agent sets on nodes).

ADD acts on what is there when it runs, so `tune` gets every object planned so far and answers
with what is added and what leaves; nothing is changed in place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from netlab import fib
from netlab.addressing import cali_interface, mac, sandbox_interface
from netlab.model import Coordinator, Node, Pod, PodNIC
from netlab.plan import (
    MAIN_TABLE,
    Address,
    Backend,
    Hook,
    Key,
    Neighbour,
    Object,
    Origin,
    PolicyRule,
    Route,
    Sysctl,
    Veth,
)
from netlab.wiring import EVERYWHERE

VETH = "veth0"
"""The auxiliary NIC of underlay mode, in the Pod."""

FIRST_NIC = "eth0"
RULE_PRIORITY = 1000
DEFAULT_TABLE = 100
MARK = "0x000001"
CALI_MAC = "ee:ee:ee:ee:ee:ee"

_NOT_NODE_DEVICES = re.compile(
    r"^docker|^cbr|^dummy|^virbr|^lxcbr|^veth|^lo$|^cali|^flannel|^kube-ipvs|^cni|^vx-submariner|^cilium*"
)
"""Host devices whose addresses ``GetAllHostIPRouteForPod`` leaves out."""

SETTINGS = "cluster.spiderpool.coordinator"


@dataclass(frozen=True, slots=True)
class Tuning:
    """What one ADD changes: objects that come, and keys of planned objects that go."""

    added: tuple[Object, ...]
    removed: frozenset[Key] = frozenset()


def node_objects(node: Node) -> Iterator[Object]:
    """Sysctls that spiderpool-agent sets on every node (``tuneSysctlConfig``, on by default).

    gc_thresh3 is left out: it belongs to the host's namespace, which a lab never touches.
    """
    origin = Origin(
        "spiderpool-agent", "tuneSysctlConfig", f"node {node.name}", "cluster.spiderpool"
    )
    for name, value in (("arp_notify", "1"), ("forwarding", "1"), ("rp_filter", "0")):
        yield Sysctl(netns=node.name, origin=origin, name=f"net.ipv4.conf.all.{name}", value=value)


def tune(pod: Pod, nic: PodNIC, backend: Backend, planned: Sequence[Object]) -> Tuning:
    """The coordinator's ADD for *nic*, whose main CNI has just run.

    Args:
        pod: the Pod, with all its NICs; only those already in *planned* exist.
        nic: the NIC that the plugin is called for; its ``coordinator`` is not None.
        backend: the iptables that the Pod's mark rules are written with.
        planned: every object planned so far, of the node and of the Pod, in order.
    """
    call = _call(pod, nic, backend, tuple(planned))
    added: list[Object] = []
    if not call.overlay and call.first:
        added += _veth(call)
    added += _rp_filter(call)
    added += _neighbours(call)
    added += _node_routes(call, added)
    added += _hijack_routes(call, added)
    if not call.overlay and call.first and call.settings.mark_rules:
        added += _mark_rules(call)
    removed: frozenset[Key] = frozenset()
    if call.settings.tune_pod_routes and (call.overlay or not call.first):
        moved = _move_routes(call, added)
        added += moved.added
        removed = moved.removed
    added += _policy_routes(call, added)
    return Tuning(tuple(added), removed)


@dataclass(frozen=True, slots=True)
class _Call:
    """One ADD: what the plugin finds out before it acts."""

    pod: Pod
    nic: PodNIC
    settings: Coordinator
    backend: Backend
    planned: tuple[Object, ...]
    overlay: bool
    first: bool
    table: int
    pod_device: str
    host_device: str
    host_ips: tuple[IPv4Address, ...]
    source: IPv4Address | None

    def origin(self, reason: str, setting: str = "") -> Origin:
        subject = f"Pod {self.pod.namespace}/{self.pod.name} {self.nic.name}"
        path = f"{SETTINGS}.{setting}" if setting else f"pods.{self.pod.name}.nics.{self.nic.name}"
        return Origin("coordinator", reason, subject, path)

    def route(self, reason: str, setting: str = "", **fields: object) -> Route:
        return Route(netns=self.pod.name, origin=self.origin(reason, setting), **fields)  # type: ignore[arg-type]

    def present(self, added: Sequence[Object]) -> tuple[Object, ...]:
        return (*self.planned, *added)


def _call(pod: Pod, nic: PodNIC, backend: Backend, planned: tuple[Object, ...]) -> _Call:
    """Mode and table number (``coordinatorModeAndFirstInvoke``), host addresses and sources."""
    if nic.coordinator is None:
        raise ValueError(f"no coordinator is chained to {pod.name}.{nic.name}")
    devices = fib.device_names(planned, pod.name)
    overlay = nic.name != FIRST_NIC and VETH not in devices
    first = len(devices) == 2 if overlay else nic.name == FIRST_NIC
    table = DEFAULT_TABLE + 1 if first else len(devices) + (99 if overlay else 98)
    underlay_host = sandbox_interface(pod.namespace, pod.name)
    own = [item for item in fib.addresses(planned, pod.name) if item.dev == FIRST_NIC]
    return _Call(
        pod=pod,
        nic=nic,
        settings=nic.coordinator,
        backend=backend,
        planned=planned,
        overlay=overlay,
        first=first,
        table=table,
        pod_device=FIRST_NIC if overlay else VETH,
        host_device=cali_interface(pod.namespace, pod.name) if overlay else underlay_host,
        host_ips=host_ips(planned, pod.node, pod.name),
        source=own[0].address.ip if own else None,
    )


def host_ips(planned: Sequence[Object], node: str, pod: str) -> tuple[IPv4Address, ...]:
    """The addresses that the Pod reaches its node by (``GetAllHostIPRouteForPod``).

    First the sources of ``ip route get`` on the node for each of the Pod's addresses, then every
    other address of the node's devices but bridges and Pods' host sides; the first one is the
    next hop of hijack routes.
    """
    found: dict[IPv4Address, None] = {}
    for own in fib.addresses(planned, pod):
        source = fib.source_address(planned, node, own.address.ip)
        if source is not None:
            found[source] = None
    for other in fib.addresses(planned, node):
        if not _NOT_NODE_DEVICES.match(other.dev) and not other.address.ip.is_link_local:
            found[other.address.ip] = None
    return tuple(found)


def _veth(call: _Call) -> Iterator[Object]:
    """``setupVeth``: the path between the Pod and its own node that macvlan does not give."""
    origin = call.origin("veth past the isolation of a macvlan from its master")
    yield Veth(
        netns=call.pod.name,
        origin=origin,
        name=VETH,
        mac=mac(call.pod.name, VETH),
        mtu=call.settings.veth_mtu,
        peer_netns=call.pod.node,
        peer=call.host_device,
        peer_mac=mac(call.pod.node, call.host_device),
        peer_mtu=call.settings.veth_mtu,
    )
    address = call.settings.veth_link_address
    if address:
        yield Address(
            netns=call.pod.name,
            origin=call.origin("address for REDIRECT on veth0", "vethLinkAddress"),
            dev=VETH,
            address=_interface(address),
        )


def _rp_filter(call: _Call) -> Iterator[Object]:
    if call.settings.pod_rp_filter >= 0:
        yield Sysctl(
            netns=call.pod.name,
            origin=call.origin("replies may come in by another NIC", "podRPFilter"),
            name="net.ipv4.conf.all.rp_filter",
            value=str(call.settings.pod_rp_filter),
        )


def _neighbours(call: _Call) -> Iterator[Object]:
    """``setupNeighborhood``: neither side asks by ARP; a neighbour entry already there is kept."""
    pod_mac, host_mac = _macs(call)
    yield Neighbour(
        netns=call.pod.node,
        origin=call.origin(f"the Pod's {call.nic.name} is behind {call.host_device}"),
        dev=call.host_device,
        address=call.nic.address.ip,
        mac=pod_mac,
    )
    if not call.first:
        return
    for address in call.host_ips:
        yield Neighbour(
            netns=call.pod.name,
            origin=call.origin(f"the node is behind {call.pod_device}"),
            dev=call.pod_device,
            address=address,
            mac=host_mac,
        )


def _macs(call: _Call) -> tuple[str, str]:
    """MACs of the two ends of the path between Pod and node: (Pod side, host side)."""
    if not call.overlay:
        return mac(call.pod.name, VETH), mac(call.pod.node, call.host_device)
    for item in call.planned:
        if isinstance(item, Veth) and {item.name, item.peer} == {FIRST_NIC, call.host_device}:
            ends = {item.netns: item.mac, item.peer_netns: item.peer_mac}
            return ends[call.pod.name] or mac(call.pod.name, FIRST_NIC), ends[
                call.pod.node
            ] or CALI_MAC
    return mac(call.pod.name, FIRST_NIC), CALI_MAC


def _node_routes(call: _Call, added: Sequence[Object]) -> list[Object]:
    """``setupHostRoutes``: the Pod to its node, and the node to the Pod by the host rule table."""
    routes: list[Object] = []
    for address in call.host_ips:
        for table in (call.table, MAIN_TABLE) if call.first else (call.table,):
            route = call.route(
                f"the Pod's own node goes by {call.pod_device}",
                dst=IPv4Network(address),
                dev=call.pod_device,
                src=call.source,
                scope="link",
                table=table,
            )
            routes += _unless_there(call, (*added, *routes), route)
    rule = PolicyRule(
        netns=call.pod.node,
        origin=call.origin("the node looks for underlay Pods first", "hostRuleTable"),
        table=call.settings.host_rule_table,
        priority=RULE_PRIORITY,
    )
    if all(item.key != rule.key for item in call.planned):
        routes.append(rule)
    routes.append(
        Route(
            netns=call.pod.node,
            origin=call.origin(f"the Pod's {call.nic.name} from its own node", "hostRuleTable"),
            dst=IPv4Network(call.nic.address.ip),
            dev=call.host_device,
            scope="link",
            table=call.settings.host_rule_table,
        )
    )
    return routes


def _hijack_routes(call: _Call, added: Sequence[Object]) -> list[Object]:
    """``setupHijackRoutes``: cluster traffic goes through the node; main only at the first NIC."""
    if not call.host_ips:
        return []
    settings = call.settings
    hijacked = (
        *((cidr, "overlayPodCIDR") for cidr in settings.overlay_pod_cidr),
        *((cidr, "serviceCIDR") for cidr in settings.service_cidr),
        *((cidr, "hijackCIDR") for cidr in settings.hijack_cidr),
    )
    routes: list[Object] = []
    for cidr, setting in hijacked:
        route = call.route(
            f"{setting} goes through the node",
            setting,
            dst=cidr,
            via=call.host_ips[0],
            dev=call.pod_device,
            src=call.source,
            table=MAIN_TABLE if call.first else call.table,
        )
        routes += _unless_there(call, (*added, *routes), route)
    return routes


def _mark_rules(call: _Call) -> Iterator[Object]:
    """``makeReplyPacketViaVeth``: what came in by veth0 is answered by veth0 (PR 2078)."""
    origin = call.origin("what came in by veth0 is answered by veth0", "markRules")
    new = f"-i {VETH} -m conntrack --ctstate NEW -j MARK --set-xmark {MARK}"
    for chain, text in (
        ("PREROUTING", new),
        ("PREROUTING", f"-m mark --mark {MARK} -j CONNMARK --save-mark"),
        ("OUTPUT", "-j CONNMARK --restore-mark"),
    ):
        yield Hook(
            netns=call.pod.name,
            origin=origin,
            table="mangle",
            chain=chain,
            text=text,
            backend=call.backend,
        )
    yield PolicyRule(
        netns=call.pod.name,
        origin=origin,
        table=DEFAULT_TABLE,
        priority=RULE_PRIORITY,
        fwmark=1,
    )
    yield Route(
        netns=call.pod.name,
        origin=origin,
        dst=EVERYWHERE,
        via=call.host_ips[0] if call.host_ips else None,
        dev=VETH,
        src=call.source,
        table=DEFAULT_TABLE,
    )


def _move_routes(call: _Call, added: Sequence[Object]) -> Tuning:
    """``tunePodRoutes``: one NIC keeps the default in main, the other answers by its own table."""
    default_nic = _default_route_nic(call)
    if default_nic is None:
        return Tuning(())
    wanted = call.settings.pod_default_route_nic or default_nic
    moving = call.nic.name if wanted == default_nic else default_nic
    answering = default_nic if wanted == call.nic.name else call.nic.name
    rules = [_source_rule(call, answering, call.table)]
    eth0: list[Object] = []
    if wanted != call.nic.name and call.overlay and call.first and call.settings.source_rules:
        rules.append(_source_rule(call, default_nic, DEFAULT_TABLE))
        reason = f"replies of {FIRST_NIC} leave by {FIRST_NIC}"
        eth0 = [
            call.route(reason, "sourceRules", dst=r.dst, via=r.via, dev=r.dev, table=DEFAULT_TABLE)
            for r in _main_routes(call, added, FIRST_NIC)
            if r.dst == EVERYWHERE
        ]
    copies: list[Object] = []
    removed: set[Key] = set()
    for route in _main_routes(call, added, moving):
        copy = call.route(
            f"what {moving} answers leaves by {moving}",
            "tunePodRoutes",
            dst=route.dst,
            via=route.via,
            dev=route.dev,
            src=None if route.dst == EVERYWHERE else route.src,
            scope=route.scope,
            table=call.table,
        )
        copies += _unless_there(call, (*added, *copies), copy)
        if route.dst == EVERYWHERE:
            removed.add(route.key)
    return Tuning((*rules, *eth0, *copies), frozenset(removed))


def _source_rule(call: _Call, nic: str, table: int) -> Object:
    """``ip rule add from ADDRESS lookup TABLE``; the kernel picks the priority."""
    setting = "sourceRules" if table == DEFAULT_TABLE else "tunePodRoutes"
    return PolicyRule(
        netns=call.pod.name,
        origin=call.origin(f"{nic} answers by its own table", setting),
        table=table,
        src=IPv4Network(call.pod.nic(nic).address.ip),
    )


def _default_route_nic(call: _Call) -> str | None:
    """The first other device that has a default route in main (``GetDefaultRouteInterface``)."""
    with_default = {
        item.dev
        for item in call.planned
        if isinstance(item, Route)
        and item.netns == call.pod.name
        and item.dst == EVERYWHERE
        and item.table == MAIN_TABLE
    }
    devices = fib.device_names(call.planned, call.pod.name)
    return next((name for name in devices if name != call.nic.name and name in with_default), None)


def _main_routes(call: _Call, added: Sequence[Object], device: str) -> Iterator[Route]:
    """Routes of *device* in the Pod's main table, the kernel's connected ones included."""
    for item in call.present(added):
        if isinstance(item, Address) and item.netns == call.pod.name and item.dev == device:
            if item.address.network.prefixlen < item.address.max_prefixlen:
                yield fib.connected(item)
        elif (
            isinstance(item, Route)
            and item.netns == call.pod.name
            and item.dev == device
            and item.table == MAIN_TABLE
        ):
            yield item


def _policy_routes(call: _Call, added: Sequence[Object]) -> list[Object]:
    """``setupPolicyRoutes``: main for the first underlay NIC, else the NIC's own table."""
    main = call.first and not call.overlay
    routes: list[Object] = []
    for wanted in call.settings.policy_routes:
        route = call.route(
            "policyRoutes of the attachment",
            "policyRoutes",
            dst=wanted.dst,
            via=wanted.gw,
            dev=call.nic.name,
            table=MAIN_TABLE if main else call.table,
        )
        routes += _unless_there(call, (*added, *routes), route)
    return routes


def _unless_there(call: _Call, added: Sequence[Object], route: Route) -> list[Object]:
    """*route*, unless its table has one of equal prefix: ``AddRoute`` ignores EEXIST."""
    if route.table == MAIN_TABLE:
        for own in fib.addresses(call.present(added), route.netns):
            if own.address.network == route.dst and own.address.network.prefixlen < 32:
                return []
    for item in call.present(added):
        if (
            isinstance(item, Route)
            and (item.netns, item.table, item.dst) == (route.netns, route.table, route.dst)
            and item.metric is None
        ):
            return []
    return [route]


def _interface(address: IPv4Address) -> IPv4Interface:
    return IPv4Interface((address, 32))
