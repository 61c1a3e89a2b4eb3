"""kube-proxy's iptables mode: the rules that `syncProxyRules` writes, by version.

Text, names and order are those of the real proxier's input to iptables-restore. Source:
kubernetes pkg/proxy/iptables/proxier.go of v1.24 to v1.36; `netlab.fidelity` compares with what
that code prints. Services come in a random order there and in the order given here.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from netlab.kube_proxy.state import Endpoint, ProxyState, ServicePort
from netlab.model import Version
from netlab.plan import Table

REASONS = {
    "invalid": "conntrack knows no connection that the packet fits: KUBE-FORWARD drops it",
    "no-endpoints": "the Service has no usable endpoint: rejected",
    "no-local-endpoints": "policy Local, and no usable endpoint on this node: dropped",
    "load-balancer-source-ranges": "the client is outside loadBalancerSourceRanges: dropped",
    "localnet": "a martian to 127.0.0.0/8 from another machine: dropped",
}
"""Why kube-proxy's rules drop or reject: the reasons that its Origins carry."""

LARGE_CLUSTER_ENDPOINTS = 1000
LOCALHOST_COUNTER = "localhost_nps_accepted_pkts"
INVALID_COUNTER = "ct_state_invalid_dropped_pkts"


class Line(NamedTuple):
    """One rule of one of kube-proxy's own chains.

    *reason*: a key of `REASONS` for a rule that drops or rejects, else a phrase; *setting*: the
    field of the Service or of the proxy behind it (``externalTrafficPolicy``, ``version``).
    """

    table: Table
    chain: str
    text: str
    reason: str
    service: ServicePort | None = None
    setting: str = ""


class Jump(NamedTuple):
    """A jump from a kernel chain, put in front of what is there, in this order."""

    table: Table
    chain: str
    text: str
    since: Version


@dataclass(frozen=True, slots=True)
class Traits:
    """What differs between versions, by behaviour."""

    proxy_firewall: bool
    localnet_firewall: bool
    ipv6_loopback_guard: bool
    firewall_comment: bool
    terminating_endpoints: bool
    liberal_skips_invalid: bool
    mode_proxy_skipped: bool

    @classmethod
    def of(cls, version: Version) -> Traits:
        minor = (version.major, version.minor)
        return cls(
            proxy_firewall=minor >= (1, 25),
            localnet_firewall=minor >= (1, 27),
            ipv6_loopback_guard=minor >= (1, 26),
            firewall_comment=minor >= (1, 27),
            terminating_endpoints=minor >= (1, 26),
            liberal_skips_invalid=minor >= (1, 29),
            mode_proxy_skipped=minor >= (1, 30),
        )


_NEW = "-m conntrack --ctstate NEW "
_EXTERNAL = (
    f'{_NEW}-m comment --comment "kubernetes externally-visible service portals" '
    "-j KUBE-EXTERNAL-SERVICES"
)
_HEALTH = '-m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS'
_PORTALS = '-m comment --comment "kubernetes service portals" -j KUBE-SERVICES'
_FORWARD = '-m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD'
_FIREWALL = f'{_NEW}-m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL'
_POSTROUTING = '-m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING'
_ALWAYS, _V125 = Version(1, 24, 0), Version(1, 25, 0)

JUMPS: tuple[Jump, ...] = (
    Jump("filter", "INPUT", _EXTERNAL, _ALWAYS),
    Jump("filter", "FORWARD", _EXTERNAL, _ALWAYS),
    Jump("filter", "INPUT", _HEALTH, _ALWAYS),
    Jump("filter", "FORWARD", f"{_NEW}{_PORTALS}", _ALWAYS),
    Jump("filter", "OUTPUT", f"{_NEW}{_PORTALS}", _ALWAYS),
    Jump("filter", "FORWARD", _FORWARD, _ALWAYS),
    Jump("filter", "INPUT", _FIREWALL, _V125),
    Jump("filter", "OUTPUT", _FIREWALL, _V125),
    Jump("filter", "FORWARD", _FIREWALL, _V125),
    Jump("nat", "OUTPUT", _PORTALS, _ALWAYS),
    Jump("nat", "PREROUTING", _PORTALS, _ALWAYS),
    Jump("nat", "POSTROUTING", _POSTROUTING, _ALWAYS),
)
"""kube-proxy's jumps in the order of their creation (iptablesJumpChains).

From v1.27 it would also make kubelet's jumps to KUBE-FIREWALL, which are there already.
"""

LOCALNET_RULE = (
    '-m comment --comment "block incoming localnet connections" '
    "-d 127.0.0.0/8 ! -s 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)


def hash16(text: str) -> str:
    """First 16 characters of base32(sha256(text)) (``portProtoHash``)."""
    return base64.b32encode(hashlib.sha256(text.encode()).digest()).decode()[:16]


def service_chain(prefix: Literal["SVC", "SVL", "EXT", "FW"], port: ServicePort) -> str:
    """``KUBE-SVC-…``: one hash for all of a Service port's chains."""
    return f"KUBE-{prefix}-{hash16(port.port_name + port.protocol.lower())}"


def endpoint_chain(port: ServicePort, endpoint: Endpoint) -> str:
    """``KUBE-SEP-…`` of one endpoint."""
    return f"KUBE-SEP-{hash16(port.port_name + port.protocol.lower() + str(endpoint))}"


@dataclass(slots=True)
class Rules:
    """Chains (in order of declaration) and lines of one synchronisation."""

    chains: dict[tuple[Table, str], None] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def declare(self, table: Table, name: str) -> None:
        self.chains.setdefault((table, name))


def render(state: ProxyState) -> Rules:
    """Every chain and rule that one full synchronisation of *state* writes."""
    traits = Traits.of(state.version)
    rules = Rules()
    filter_chains = ["SERVICES", "EXTERNAL-SERVICES", "FORWARD", "NODEPORTS"]
    filter_chains += ["PROXY-FIREWALL"] if traits.proxy_firewall else []
    for name in filter_chains:
        rules.declare("filter", f"KUBE-{name}")
    for name in ("SERVICES", "NODEPORTS", "POSTROUTING", "MARK-MASQ"):
        rules.declare("nat", f"KUBE-{name}")
    if traits.localnet_firewall and state.serves_loopback:
        rules.declare("filter", "KUBE-FIREWALL")
        rules.lines.append(Line("filter", "KUBE-FIREWALL", LOCALNET_RULE, "localnet"))
    rules.lines += _masquerade(state)
    total = sum(len(port.endpoints) for port in state.services)
    for port in state.services:
        _Service(state, traits, port, comments=total < LARGE_CLUSTER_ENDPOINTS).write(rules)
    rules.lines += _node_ports(state, traits)
    rules.lines += _forwarding(state, traits)
    return rules


def _masquerade(state: ProxyState) -> Iterator[Line]:
    """KUBE-POSTROUTING and KUBE-MARK-MASQ."""
    mark = state.mark
    reason = "masquerades what was marked for it"
    post = "KUBE-POSTROUTING"
    yield Line("nat", post, f"-m mark ! --mark {mark}/{mark} -j RETURN", reason)
    yield Line("nat", post, f"-j MARK --xor-mark {mark}", reason)
    comment = '-m comment --comment "kubernetes service traffic requiring SNAT"'
    fully = " --random-fully" if state.random_fully else ""
    yield Line("nat", post, f"{comment} -j MASQUERADE{fully}", reason)
    marks = "marks for masquerading"
    yield Line("nat", "KUBE-MARK-MASQ", f"-j MARK --or-mark {mark}", marks)


def _node_ports(state: ProxyState, traits: Traits) -> Iterator[Line]:
    """The last rules of nat KUBE-SERVICES: which local addresses serve NodePorts."""
    comment = (
        '-m comment --comment "kubernetes service nodeports; '
        'NOTE: this must be the last rule in this chain"'
    )
    reason = "NodePorts on the node's own addresses"
    if state.matches_all_node_addresses:
        guard = ""
        if state.family == 6 and traits.ipv6_loopback_guard:
            guard = " ! -d ::1/128"
        elif state.family == 4 and not state.localhost_node_ports:
            guard = " ! -d 127.0.0.0/8"
        text = f"{comment} -m addrtype --dst-type LOCAL{guard} -j KUBE-NODEPORTS"
        yield Line("nat", "KUBE-SERVICES", text, reason, setting="nodePortAddresses")
        return
    for address in state.node_addresses:
        if not any(address in network for network in state.node_port_addresses):
            continue
        if address.is_loopback and not state.serves_loopback:
            continue
        text = f"{comment} -d {address} -j KUBE-NODEPORTS"
        yield Line("nat", "KUBE-SERVICES", text, reason, setting="nodePortAddresses")


def _forwarding(state: ProxyState, traits: Traits) -> Iterator[Line]:
    """KUBE-FORWARD; the INVALID rule is left out where liberal (kubernetes PR 120412)."""
    chain = "KUBE-FORWARD"
    if not (traits.liberal_skips_invalid and state.be_liberal):
        counted = INVALID_COUNTER in state.nfacct
        counter = f" -m nfacct --nfacct-name {INVALID_COUNTER}" if counted else ""
        text = f"-m conntrack --ctstate INVALID{counter} -j DROP"
        yield Line("filter", chain, text, "invalid", setting="version")
    marked = f"-m mark --mark {state.mark}/{state.mark} -j ACCEPT"
    comment = '-m comment --comment "kubernetes forwarding rules"'
    yield Line("filter", chain, f"{comment} {marked}", "accepts what was marked for masquerading")
    comment = '-m comment --comment "kubernetes forwarding conntrack rule"'
    text = f"{comment} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
    yield Line("filter", chain, text, "accepts known connections")


class _Service:
    """The rules of one Service port on one node."""

    def __init__(
        self, state: ProxyState, traits: Traits, port: ServicePort, *, comments: bool
    ) -> None:
        self.state = state
        self.traits = traits
        self.port = port
        self.comments = comments
        self.cluster = self._usable(port.endpoints)
        self.local = self._usable(tuple(e for e in port.endpoints if e.node == state.node))
        if not traits.terminating_endpoints:
            self.local = tuple(e for e in self.cluster if e.node == state.node)
        modes = ("VIP",) if traits.mode_proxy_skipped else ("VIP", "Proxy")
        self.load_balancer_ips = tuple(i.ip for i in port.load_balancer_ips if i.mode in modes)
        self.external = bool(port.node_port or port.external_ips or self.load_balancer_ips)
        self.firewalled = bool(self.load_balancer_ips and port.source_ranges)

    def _usable(self, endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
        """Ready ones, or (v1.26) serving and terminating ones where none is ready; sorted."""
        ready = [endpoint for endpoint in endpoints if endpoint.ready]
        if not ready and self.traits.terminating_endpoints:
            ready = [e for e in endpoints if e.serving and e.terminating]
        return tuple(sorted(ready, key=str))

    # Which chains lead where (ServicePort.UsesClusterEndpoints and UsesLocalEndpoints).

    @property
    def uses_cluster(self) -> bool:
        return not self.port.internal_local or self.external

    @property
    def uses_local(self) -> bool:
        return self.port.internal_local or (self.port.external_local and self.external)

    @property
    def drops_in_chain(self) -> bool:
        """Before v1.25 policy Local without local endpoints ended in KUBE-MARK-DROP."""
        return not self.traits.proxy_firewall

    @property
    def has_local_chain(self) -> bool:
        wanted = self.uses_local and bool(self.cluster)
        return wanted and (bool(self.local) or self.drops_in_chain)

    def write(self, rules: Rules) -> None:
        """Add everything to *rules*."""
        port = self.port
        if self.cluster or self.local:
            if self.uses_cluster and self.cluster:
                rules.declare("nat", service_chain("SVC", port))
            if self.has_local_chain:
                rules.declare("nat", service_chain("SVL", port))
            if self.external:
                rules.declare("nat", service_chain("EXT", port))
            if self.firewalled:
                rules.declare("nat", service_chain("FW", port))
        lines = [*self._entries(), *self._refusals()]
        if self.cluster or self.local:
            lines += [*self._external(), *self._firewall(), *self._policies()]
        for endpoint in self._reachable():
            rules.declare("nat", endpoint_chain(port, endpoint))
            lines += self._endpoint(endpoint)
        rules.lines += lines

    def _line(
        self, chain: str, text: str, reason: str, setting: str = "", table: Table = "nat"
    ) -> Line:
        return Line(table, chain, text, reason, self.port, setting)

    def _match(self, port: int, address: object = None) -> str:
        protocol = self.port.protocol.lower()
        destination = f" -d {address}" if address is not None else ""
        return f"-m {protocol} -p {protocol}{destination} --dport {port}"

    def _named(self, suffix: str) -> str:
        return f'-m comment --comment "{self.port.port_name} {suffix}"'

    @property
    def _plain(self) -> str:
        return f"-m comment --comment {self.port.port_name}"

    def _entries(self) -> Iterator[Line]:
        """Rules of KUBE-SERVICES and KUBE-NODEPORTS that lead to this Service."""
        port = self.port
        internal = self.local if port.internal_local else self.cluster
        if internal or (port.internal_local and self.has_local_chain):
            target = service_chain("SVL" if port.internal_local else "SVC", port)
            match = self._match(port.port, port.cluster_ip)
            text = f"{self._named('cluster IP')} {match} -j {target}"
            yield self._line("KUBE-SERVICES", text, "the Service's ClusterIP", "clusterIP")
        if not self._external_reachable:
            yield from self._health_check()
            return
        target = service_chain("EXT", port)
        for address in port.external_ips:
            text = f"{self._named('external IP')} {self._match(port.port, address)} -j {target}"
            yield self._line("KUBE-SERVICES", text, "an external IP", "externalIPs")
        entry = service_chain("FW", port) if self.firewalled else target
        for address in self.load_balancer_ips:
            match = self._match(port.port, address)
            text = f"{self._named('loadbalancer IP')} {match} -j {entry}"
            yield self._line("KUBE-SERVICES", text, "a load balancer's IP", "loadBalancerIPs")
        if port.node_port:
            yield from self._node_port(target)
        yield from self._health_check()

    @property
    def _external_reachable(self) -> bool:
        """Whether external entries have somewhere to lead: any endpoint of the cluster will do.

        With policy Local and no local endpoint, Pods and the node itself are still served.
        """
        return self.external and bool(self.cluster or self.local)

    def _node_port(self, target: str) -> Iterator[Line]:
        port = self.port
        if self.state.serves_loopback and LOCALHOST_COUNTER in self.state.nfacct:
            counter = f"-m nfacct --nfacct-name {LOCALHOST_COUNTER}"
            match = self._match(port.node_port, "127.0.0.0/8")
            text = f"{self._plain} {match} {counter} -j {target}"
            yield self._line("KUBE-NODEPORTS", text, "NodePort on loopback, counted", "nodePort")
        text = f"{self._plain} {self._match(port.node_port)} -j {target}"
        yield self._line("KUBE-NODEPORTS", text, "the Service's NodePort", "nodePort")

    def _health_check(self) -> Iterator[Line]:
        number = self.port.health_check_node_port
        if number and self.port.external_local:
            comment = self._named("health check node port")
            text = f"{comment} -m tcp -p tcp --dport {number} -j ACCEPT"
            reason = "answers load balancers' health checks"
            yield self._line("KUBE-NODEPORTS", text, reason, "healthCheckNodePort", "filter")

    def _refusals(self) -> Iterator[Line]:
        """What filter refuses: no endpoint, or no local one under policy Local."""
        port = self.port
        internal = self._refusal("internalTrafficPolicy", local=port.internal_local)
        if internal:
            comment, target, reason, setting = internal
            match = self._match(port.port, port.cluster_ip)
            text = f"{comment} {match} -j {target}"
            yield self._line("KUBE-SERVICES", text, reason, setting, "filter")
        external = self._refusal("externalTrafficPolicy", local=port.external_local)
        if external:
            comment, target, reason, setting = external
            for address in (*port.external_ips, *self.load_balancer_ips):
                text = f"{comment} {self._match(port.port, address)} -j {target}"
                yield self._line("KUBE-EXTERNAL-SERVICES", text, reason, setting, "filter")
            if port.node_port:
                match = self._match(port.node_port)
                text = f"{comment} -m addrtype --dst-type LOCAL {match} -j {target}"
                yield self._line("KUBE-EXTERNAL-SERVICES", text, reason, setting, "filter")
        if self.firewalled and self.traits.proxy_firewall and (self.cluster or self.local):
            comment = self._named(f"traffic not accepted by {service_chain('FW', port)}")
            for address in self.load_balancer_ips:
                text = f"{comment} {self._match(port.port, address)} -j DROP"
                reason = "load-balancer-source-ranges"
                setting = "loadBalancerSourceRanges"
                yield self._line("KUBE-PROXY-FIREWALL", text, reason, setting, "filter")

    def _refusal(self, setting: str, *, local: bool) -> tuple[str, str, str, str] | None:
        """(comment, target, reason, setting) where traffic of this policy is refused."""
        if not self.cluster and not self.local:
            return self._named("has no endpoints"), "REJECT", "no-endpoints", "endpoints"
        if local and not self.local and not self.drops_in_chain:
            return self._named("has no local endpoints"), "DROP", "no-local-endpoints", setting
        return None

    def _external(self) -> Iterator[Line]:
        """KUBE-EXT: what external clients get, by externalTrafficPolicy."""
        if not self.external:
            return
        port = self.port
        chain, cluster = service_chain("EXT", port), service_chain("SVC", port)
        setting = "externalTrafficPolicy"
        destinations = f"for {port.port_name} external destinations"
        if not port.external_local:
            comment = f'-m comment --comment "masquerade traffic {destinations}"'
            reason = "an external client is masqueraded, so that the answer comes back here"
            yield self._line(chain, f"{comment} -j KUBE-MARK-MASQ", reason, setting)
            yield self._line(chain, f"-j {cluster}", "then any endpoint", setting)
            return
        if self.state.detector:
            comment = f'-m comment --comment "pod traffic {destinations}"'
            text = f"{comment} {self.state.detector.is_local} -j {cluster}"
            yield self._line(chain, text, "a Pod may use any endpoint", setting)
        node = "-m addrtype --src-type LOCAL"
        comment = f'-m comment --comment "masquerade LOCAL traffic {destinations}"'
        reason = "the node itself may use any endpoint"
        yield self._line(chain, f"{comment} {node} -j KUBE-MARK-MASQ", reason, setting)
        comment = f'-m comment --comment "route LOCAL traffic {destinations}"'
        yield self._line(chain, f"{comment} {node} -j {cluster}", reason, setting)
        if self.has_local_chain:
            reason = "others only an endpoint of this node, and keep their address"
            yield self._line(chain, f"-j {service_chain('SVL', port)}", reason, setting)

    def _firewall(self) -> Iterator[Line]:
        """KUBE-FW: loadBalancerSourceRanges, and the node behind the load balancer's IP."""
        if not self.firewalled:
            return
        addresses = self.load_balancer_ips
        if self.drops_in_chain:
            for address in addresses:
                yield from self._admitted((address,))
                comment = self._named("loadbalancer IP")
                text = f"{comment} -j KUBE-MARK-DROP"
                chain = service_chain("FW", self.port)
                reason = "load-balancer-source-ranges"
                yield self._line(chain, text, reason, "loadBalancerSourceRanges")
            return
        yield from self._admitted(addresses)
        if self.traits.firewall_comment:
            text = (
                f'-m comment --comment "other traffic to {self.port.port_name} '
                'will be dropped by KUBE-PROXY-FIREWALL"'
            )
            chain = service_chain("FW", self.port)
            yield self._line(chain, text, "a note only", "loadBalancerSourceRanges")

    def _admitted(self, addresses: tuple[object, ...]) -> Iterator[Line]:
        port = self.port
        chain, target = service_chain("FW", port), service_chain("EXT", port)
        comment = self._named("loadbalancer IP")
        setting = "loadBalancerSourceRanges"
        for network in port.source_ranges:
            text = f"{comment} -s {network} -j {target}"
            yield self._line(chain, text, "a source range that is let in", setting)
        if any(own in network for network in port.source_ranges for own in self._node_ips):
            for address in addresses:
                text = f"{comment} -s {address} -j {target}"
                yield self._line(chain, text, "the node behind the load balancer", setting)

    @property
    def _node_ips(self) -> tuple[object, ...]:
        return tuple(a for a in self.state.node_addresses if not a.is_loopback)

    def _policies(self) -> Iterator[Line]:
        """KUBE-SVC and KUBE-SVL: the ClusterIP's masquerading and the choice of an endpoint."""
        port = self.port
        if self.uses_cluster and self.cluster:
            yield from self._policy(
                service_chain("SVC", port), self.cluster, internal=not port.internal_local
            )
        if self.has_local_chain:
            chain = service_chain("SVL", port)
            if self.local:
                yield from self._policy(chain, self.local, internal=port.internal_local)
            else:
                if port.internal_local:
                    yield from self._cluster_ip_masquerade(chain)
                text = f"{self._named('has no local endpoints')} -j KUBE-MARK-DROP"
                yield self._line(chain, text, "no-local-endpoints", "externalTrafficPolicy")

    def _policy(
        self, chain: str, endpoints: tuple[Endpoint, ...], *, internal: bool
    ) -> Iterator[Line]:
        if internal:
            yield from self._cluster_ip_masquerade(chain)
        if self.port.affinity_seconds:
            seconds = self.port.affinity_seconds
            for endpoint in endpoints:
                name = endpoint_chain(self.port, endpoint)
                recent = f"-m recent --name {name} --rcheck --seconds {seconds} --reap"
                text = f"{self._to(endpoint)}{recent} -j {name}"
                yield self._line(chain, text, "a client keeps its endpoint", "sessionAffinity")
        for index, endpoint in enumerate(endpoints):
            rest = len(endpoints) - index
            share = f"-m statistic --mode random --probability {1 / rest:.10f} " if rest > 1 else ""
            text = f"{self._to(endpoint)}{share}-j {endpoint_chain(self.port, endpoint)}"
            yield self._line(chain, text, f"to endpoint {endpoint}", "endpoints")

    def _to(self, endpoint: Endpoint) -> str:
        if not self.comments:
            return ""
        return f'-m comment --comment "{self.port.port_name} -> {endpoint}" '

    def _cluster_ip_masquerade(self, chain: str) -> Iterator[Line]:
        port = self.port
        match = f"{self._named('cluster IP')} {self._match(port.port, port.cluster_ip)}"
        if self.state.masquerade_all:
            text = f"{match} -j KUBE-MARK-MASQ"
            yield self._line(chain, text, "every client is masqueraded", "masqueradeAll")
        elif self.state.detector:
            text = f"{match} {self.state.detector.is_not_local} -j KUBE-MARK-MASQ"
            reason = "a client from outside the cluster is masqueraded"
            yield self._line(chain, text, reason, "clusterCIDR")

    def _reachable(self) -> tuple[Endpoint, ...]:
        """Endpoints that a chain leads to."""
        found: dict[str, Endpoint] = {}
        if self.uses_cluster:
            found |= {str(endpoint): endpoint for endpoint in self.cluster}
        if self.has_local_chain:
            found |= {str(endpoint): endpoint for endpoint in self.local}
        return tuple(found[name] for name in sorted(found))

    def _endpoint(self, endpoint: Endpoint) -> Iterator[Line]:
        """KUBE-SEP: the hairpin mark and the translation."""
        chain = endpoint_chain(self.port, endpoint)
        comment = f"{self._plain} " if self.comments else ""
        text = f"{comment}-s {endpoint.address} -j KUBE-MARK-MASQ"
        yield self._line(chain, text, "an endpoint that calls itself is masqueraded", "endpoints")
        affinity = f"-m recent --name {chain} --set " if self.port.affinity_seconds else ""
        protocol = self.port.protocol.lower()
        target = f"-m {protocol} -p {protocol} -j DNAT --to-destination {endpoint}"
        reason = f"translates to {endpoint}"
        yield self._line(chain, f"{comment}{affinity}{target}", reason, "endpoints")
