"""The rules of one Service port on one node (the per-service loop of `syncProxyRules`)."""

from __future__ import annotations

from collections.abc import Iterator

from netlab.kube_proxy.rules import Line, Rules, endpoint_chain, service_chain
from netlab.kube_proxy.state import Endpoint, IPAddress, IPInterface, ProxyState, ServicePort
from netlab.plan import Table

LOCALHOST_COUNTER = "localhost_nps_accepted_pkts"


class ServiceRules:
    """What *state*'s node writes for *port*; *comments* False: endpoints' rules carry none.

    *cluster* and *local* are the endpoints of policies Cluster and Local, in rule order
    (CategorizeEndpoints, pkg/proxy/topology.go).
    """

    def __init__(self, state: ProxyState, port: ServicePort, *, comments: bool) -> None:
        self.state = state
        self.traits = state.traits
        self.port = port
        self.comments = comments
        own = tuple(e for e in port.endpoints if e.address.version == state.family)
        self.cluster = self._usable(own)
        self.local = self._usable(tuple(e for e in own if e.node == state.node))
        self.external_ips = tuple(ip for ip in port.external_ips if ip.version == state.family)
        self.load_balancer_ips = self._virtual_ips()
        self.source_ranges = self._source_ranges()
        self.external = bool(port.node_port or self.external_ips or self.load_balancer_ips)
        self.firewalled = bool(self.load_balancer_ips and self.source_ranges)

    def _usable(self, endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
        """Ready ones, or (v1.26) serving and terminating ones where none is ready; sorted."""
        ready = [endpoint for endpoint in endpoints if endpoint.ready]
        if not ready and self.traits.terminating_endpoints:
            ready = [e for e in endpoints if e.serving and e.terminating]
        return tuple(sorted(ready, key=str))

    def _virtual_ips(self) -> tuple[IPAddress, ...]:
        """The load balancer's IPs that kube-proxy answers for."""
        modes = {"VIP"} if self.traits.mode_proxy_skipped else {"VIP", "Proxy"}
        return tuple(
            entry.ip
            for entry in self.port.load_balancer_ips
            if entry.mode in modes and entry.ip.version == self.state.family
        )

    def _source_ranges(self) -> tuple[IPInterface, ...]:
        own = tuple(r for r in self.port.source_ranges if r.version == self.state.family)
        unrestricted = any(entry.network.prefixlen == 0 for entry in own)
        return () if unrestricted and self.traits.open_ranges else own

    # Which chains there are (ServicePort.UsesClusterEndpoints and UsesLocalEndpoints).

    @property
    def has_endpoints(self) -> bool:
        """Some node has a usable endpoint."""
        return bool(self.cluster)

    @property
    def uses_cluster(self) -> bool:
        return not self.port.internal_local or self.external

    @property
    def uses_local(self) -> bool:
        return self.port.internal_local or (self.port.external_local and self.external)

    @property
    def has_local_chain(self) -> bool:
        """v1.24 has it without local endpoints too: it leads to KUBE-MARK-DROP then."""
        wanted = self.uses_local and self.has_endpoints
        return wanted and (bool(self.local) or not self.traits.drops_in_filter)

    @property
    def has_node_port(self) -> bool:
        matched = self.state.matches_all_node_addresses or self.state.matched_node_addresses
        return bool(self.port.node_port and (matched or self.traits.unmatched_node_ports))

    def write(self, rules: Rules) -> None:
        """Add everything to *rules*."""
        rules.lines += self._entries()
        rules.lines += self._refusals()
        rules.lines += self._health_check()
        if not self.has_endpoints:
            return
        rules.declare("nat", self._chains())
        rules.lines += self._external()
        rules.lines += self._firewall()
        rules.lines += self._policies()
        for endpoint in self._reachable():
            rules.declare("nat", (endpoint_chain(self.port, endpoint),))
            rules.lines += self._endpoint(endpoint)

    def _chains(self) -> Iterator[str]:
        if self.uses_cluster:
            yield service_chain("SVC", self.port)
        if self.has_local_chain:
            yield service_chain("SVL", self.port)
        if self.external:
            yield service_chain("EXT", self.port)
        if self.firewalled:
            yield service_chain("FW", self.port)

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

    # KUBE-SERVICES and KUBE-NODEPORTS.

    def _entries(self) -> Iterator[Line]:
        """What leads to this Service.

        External entries are there as soon as any node has an endpoint: with policy Local and no
        local endpoint, Pods and the node itself are still served.
        """
        port = self.port
        internal = self.has_local_chain if port.internal_local else self.has_endpoints
        if internal:
            target = service_chain("SVL" if port.internal_local else "SVC", port)
            text = f"{self._cluster_ip} -j {target}"
            yield self._line("KUBE-SERVICES", text, "the Service's ClusterIP", "clusterIP")
        if not self.has_endpoints:
            return
        target = service_chain("EXT", port)
        for address in self.external_ips:
            text = f"{self._named('external IP')} {self._match(port.port, address)} -j {target}"
            yield self._line("KUBE-SERVICES", text, "an external IP", "externalIPs")
        entry = service_chain("FW", port) if self.firewalled else target
        for address in self.load_balancer_ips:
            match = self._match(port.port, address)
            text = f"{self._named('loadbalancer IP')} {match} -j {entry}"
            yield self._line("KUBE-SERVICES", text, "a load balancer's IP", "loadBalancerIPs")
        if self.has_node_port:
            yield from self._node_port(target)

    @property
    def _cluster_ip(self) -> str:
        match = self._match(self.port.port, self.port.cluster_ip)
        return f"{self._named('cluster IP')} {match}"

    def _node_port(self, target: str) -> Iterator[Line]:
        port = self.port
        counted = self.traits.nfacct_counters and LOCALHOST_COUNTER in self.state.nfacct
        if counted and self.state.serves_loopback:
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

    # What filter refuses: no endpoint, no local one under policy Local, a foreign source.

    def _refusals(self) -> Iterator[Line]:
        port = self.port
        internal = self._refusal("internalTrafficPolicy", local=port.internal_local)
        if internal:
            comment, target, reason, setting = internal
            text = f"{comment} {self._match(port.port, port.cluster_ip)} -j {target}"
            yield self._line("KUBE-SERVICES", text, reason, setting, "filter")
        external = self._refusal("externalTrafficPolicy", local=port.external_local)
        if external:
            comment, target, reason, setting = external
            for match in self._external_matches():
                text = f"{comment} {match} -j {target}"
                yield self._line("KUBE-EXTERNAL-SERVICES", text, reason, setting, "filter")
        if self.firewalled and self.traits.drops_in_filter and self.has_endpoints:
            comment = self._named(f"traffic not accepted by {service_chain('FW', port)}")
            setting = "loadBalancerSourceRanges"
            for address in self.load_balancer_ips:
                text = f"{comment} {self._match(port.port, address)} -j DROP"
                reason = "load-balancer-source-ranges"
                yield self._line("KUBE-PROXY-FIREWALL", text, reason, setting, "filter")

    def _refusal(self, setting: str, *, local: bool) -> tuple[str, str, str, str] | None:
        """(comment, target, reason, setting) where traffic of this policy is refused."""
        if not self.has_endpoints:
            return self._named("has no endpoints"), "REJECT", "no-endpoints", "endpoints"
        if local and not self.local and self.traits.drops_in_filter:
            return self._named("has no local endpoints"), "DROP", "no-local-endpoints", setting
        return None

    def _external_matches(self) -> Iterator[str]:
        for address in (*self.external_ips, *self.load_balancer_ips):
            yield self._match(self.port.port, address)
        if self.has_node_port:
            yield f"-m addrtype --dst-type LOCAL {self._match(self.port.node_port)}"

    # KUBE-EXT: what external clients get, by externalTrafficPolicy.

    def _external(self) -> Iterator[Line]:
        if not self.external:
            return
        if self.port.external_local:
            yield from self._external_to_local()
            return
        chain, setting = service_chain("EXT", self.port), "externalTrafficPolicy"
        comment = self._to_external("masquerade traffic")
        reason = "an external client is masqueraded, so that the answer comes back here"
        yield self._line(chain, f"{comment} -j KUBE-MARK-MASQ", reason, setting)
        text = f"-j {service_chain('SVC', self.port)}"
        yield self._line(chain, text, "then any endpoint", setting)

    def _external_to_local(self) -> Iterator[Line]:
        """Pods and the node itself may use any endpoint, others only one of this node."""
        port, setting = self.port, "externalTrafficPolicy"
        chain, cluster = service_chain("EXT", port), service_chain("SVC", port)
        if self.state.detector:
            text = f"{self._to_external('pod traffic')} {self.state.detector.is_local} -j {cluster}"
            yield self._line(chain, text, "a Pod may use any endpoint", setting)
        node = "-m addrtype --src-type LOCAL"
        reason = "the node itself may use any endpoint"
        text = f"{self._to_external('masquerade LOCAL traffic')} {node} -j KUBE-MARK-MASQ"
        yield self._line(chain, text, reason, setting)
        text = f"{self._to_external('route LOCAL traffic')} {node} -j {cluster}"
        yield self._line(chain, text, reason, setting)
        if self.has_local_chain:
            reason = "others only an endpoint of this node, and keep their address"
            yield self._line(chain, f"-j {service_chain('SVL', port)}", reason, setting)

    def _to_external(self, what: str) -> str:
        return f'-m comment --comment "{what} for {self.port.port_name} external destinations"'

    # KUBE-FW: loadBalancerSourceRanges, and the node behind the load balancer's IP.

    def _firewall(self) -> Iterator[Line]:
        if not self.firewalled:
            return
        if not self.traits.drops_in_filter:
            yield from self._firewall_by_mark()
            return
        yield from self._admitted(self.load_balancer_ips)
        if self.traits.firewall_comment:
            text = (
                f'-m comment --comment "other traffic to {self.port.port_name} '
                'will be dropped by KUBE-PROXY-FIREWALL"'
            )
            chain = service_chain("FW", self.port)
            yield self._line(chain, text, "a note only", "loadBalancerSourceRanges")

    def _firewall_by_mark(self) -> Iterator[Line]:
        """v1.24: a block for each IP, which ends in KUBE-MARK-DROP."""
        text = f"{self._named('loadbalancer IP')} -j KUBE-MARK-DROP"
        for address in self.load_balancer_ips:
            yield from self._admitted((address,))
            reason, setting = "load-balancer-source-ranges", "loadBalancerSourceRanges"
            yield self._line(service_chain("FW", self.port), text, reason, setting)

    def _admitted(self, addresses: tuple[IPAddress, ...]) -> Iterator[Line]:
        chain, target = service_chain("FW", self.port), service_chain("EXT", self.port)
        comment, setting = self._named("loadbalancer IP"), "loadBalancerSourceRanges"
        for source in self.source_ranges:
            shown = source.network if self.traits.canonical_ranges else source
            text = f"{comment} -s {shown} -j {target}"
            yield self._line(chain, text, "a source range that is let in", setting)
        node_ip = self.state.node_ip
        if node_ip and any(node_ip in source.network for source in self.source_ranges):
            for address in addresses:
                text = f"{comment} -s {address} -j {target}"
                yield self._line(chain, text, "the node behind the load balancer", setting)

    # KUBE-SVC, KUBE-SVL and KUBE-SEP: the masquerading and the choice of an endpoint.

    def _policies(self) -> Iterator[Line]:
        port = self.port
        if self.uses_cluster:
            yield from self._policy(service_chain("SVC", port), self.cluster, local=False)
        if not self.has_local_chain:
            return
        chain = service_chain("SVL", port)
        yield from self._policy(chain, self.local, local=True)
        if not self.local:
            text = f"{self._named('has no local endpoints')} -j KUBE-MARK-DROP"
            setting = "internalTrafficPolicy" if port.internal_local else "externalTrafficPolicy"
            yield self._line(chain, text, "no-local-endpoints", setting)

    def _policy(
        self, chain: str, endpoints: tuple[Endpoint, ...], *, local: bool
    ) -> Iterator[Line]:
        if local == self.port.internal_local:
            yield from self._cluster_ip_masquerade(chain)
        seconds = self.port.affinity_seconds
        for endpoint in endpoints if seconds else ():
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
        if self.state.masquerade_all:
            text = f"{self._cluster_ip} -j KUBE-MARK-MASQ"
            yield self._line(chain, text, "every client is masqueraded", "masqueradeAll")
        elif self.state.detector:
            text = f"{self._cluster_ip} {self.state.detector.is_not_local} -j KUBE-MARK-MASQ"
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
        yield self._line(
            chain, f"{comment}{affinity}{target}", f"translates to {endpoint}", "endpoints"
        )
