"""kube-proxy on every node of a lab: its rules, kubelet's beside them, and its sysctls.

Counters of nfacct (v1.31) are left out: a rule that names one cannot be loaded without the
object, and a kube-proxy that could not create it leaves it out too. IPv6, and the mode nftables,
are not written: a lab's model has neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address

from netlab.kube_proxy.iptables import JUMPS, LOCALNET_RULE, render
from netlab.kube_proxy.rules import REASONS, Line, Rules
from netlab.kube_proxy.state import Endpoint, IPAddress, LocalDetector, ProxyState, ServicePort
from netlab.model import KubeProxy, Lab, Node, Version
from netlab.plan import Chain, Hook, IptablesRule, Object, Origin, Sysctl, Table

__all__ = ["KUBELET_REASONS", "REASONS", "objects", "proxy_state"]

KUBELET_REASONS: Mapping[str, str] = {
    "localnet": REASONS["localnet"],
    "no-local-endpoints": "kube-proxy v1.24 marked it in KUBE-MARK-DROP: dropped in KUBE-FIREWALL",
}
"""Why kubelet's own rules drop.

The mark has one cause in a lab, policy Local without a local endpoint; source ranges of load
balancers, the other one, are not part of a lab.
"""

_BASE_TABLES: tuple[Table, ...] = ("mangle", "nat", "filter")
_DROP_MARK = "0x00008000"
_LOOPBACK: IPAddress = ip_address("127.0.0.1")
_IPTABLES_OWNERSHIP = Version(1, 27, 0)
"""From here on kubelet leaves marking and dropping to kube-proxy (KEP 3178)."""


def objects(lab: Lab) -> Iterator[Object]:
    """Chains, jumps and sysctls of kubelet and kube-proxy, node by node.

    A node without kube-proxy gets nothing, kubelet's chains included. `Plan.of` takes them with
    the Netns that they are in; the first that is there is kubelet's, as on a real node.
    """
    for node in lab.nodes.values():
        if node.kube_proxy is None:
            continue
        state = proxy_state(lab, node, node.kube_proxy)
        rules = render(state)
        yield from _kubelet(node, node.kube_proxy, rules)
        yield from _proxier(node, rules, node.kube_proxy)
        yield from _sysctls(node, node.kube_proxy, state)


def proxy_state(lab: Lab, node: Node, settings: KubeProxy) -> ProxyState:
    """What the kube-proxy of *node* would know.

    Its addresses are loopback's and those of its NICs, not a tunnel device's.
    """
    detector = None
    if settings.cluster_cidr is not None:
        detector = LocalDetector("ClusterCIDR", str(settings.cluster_cidr))
    addresses = (_LOOPBACK, *(nic.address.ip for nic in node.nics if nic.address))
    return ProxyState(
        version=settings.version,
        node=node.name,
        node_ip=node.address,
        node_addresses=addresses,
        services=tuple(_service_ports(lab)),
        detector=detector,
        masquerade_all=settings.masquerade_all,
        node_port_addresses=settings.node_port_addresses,
        localhost_node_ports=settings.localhost_node_ports,
        be_liberal=settings.be_liberal_at_start or settings.conntrack_tcp_be_liberal,
    )


def _service_ports(lab: Lab) -> Iterator[ServicePort]:
    for service in lab.services.values():
        if service.cluster_ip is None:
            continue
        for port in service.ports:
            yield ServicePort(
                namespace=service.namespace,
                service=service.name,
                cluster_ip=service.cluster_ip,
                port=port.port,
                name=port.name,
                protocol=port.protocol,
                node_port=port.node_port or 0,
                external_local=service.external_traffic_policy == "Local",
                internal_local=service.internal_traffic_policy == "Local",
                endpoints=tuple(
                    Endpoint(
                        endpoint.address,
                        port.target_port,
                        endpoint.node,
                        ready=endpoint.ready,
                        serving=endpoint.serving,
                        terminating=endpoint.terminating,
                    )
                    for endpoint in service.endpoints
                ),
            )


def _kubelet(node: Node, settings: KubeProxy, rules: Rules) -> Iterator[Object]:
    """What kubelet has made before kube-proxy starts (pkg/kubelet/kubelet_network_linux.go).

    A kube-proxy that writes the localnet rule itself has flushed KUBE-FIREWALL: it is its then.
    """
    subject = f"node {node.name}"
    origin = Origin("kubelet", "chains that tell of a flush", subject)
    yield _chain(node, "mangle", "KUBE-IPTABLES-HINT", origin)
    for component in ("KUBELET", "PROXY"):
        for table in _BASE_TABLES:
            yield _chain(node, table, f"KUBE-{component}-CANARY", origin)
    localnet = Origin("kubelet", "localnet", subject, "cluster.kubeProxy.version")
    firewall = [IptablesRule(LOCALNET_RULE, localnet)]
    if own := rules.by_chain().get(("filter", "KUBE-FIREWALL")):
        firewall = [IptablesRule(line.text, _origin(node, line)) for line in own]
    elif settings.version < _IPTABLES_OWNERSHIP:
        path = "cluster.kubeProxy.version"
        dropping = Origin("kubelet", "no-local-endpoints", subject, path)
        comment = '-m comment --comment "kubernetes firewall for dropping marked packets"'
        text = f"{comment} -m mark --mark {_DROP_MARK}/{_DROP_MARK} -j DROP"
        firewall.insert(0, IptablesRule(text, dropping))
        marking = Origin("kubelet", "marks for dropping", subject, path)
        mark = IptablesRule(f"-j MARK --or-mark {_DROP_MARK}", marking)
        yield _chain(node, "nat", "KUBE-MARK-DROP", marking, mark)
    yield _chain(node, "filter", "KUBE-FIREWALL", localnet, *firewall)
    for chain in ("OUTPUT", "INPUT"):
        yield _jump(node, "filter", chain, "-j KUBE-FIREWALL", localnet)


def _proxier(node: Node, rules: Rules, settings: KubeProxy) -> Iterator[Object]:
    """kube-proxy's own chains with their rules, then the jumps to them."""
    own = Origin("kube-proxy", "chain", f"node {node.name}", "cluster.kubeProxy")
    for (table, name), lines in rules.by_chain().items():
        if name == "KUBE-FIREWALL":
            continue
        content = (IptablesRule(line.text, _origin(node, line)) for line in lines)
        yield _chain(node, table, name, own, *content)
    for jump in JUMPS:
        if settings.version >= jump.since:
            origin = Origin("kube-proxy", "jump", f"node {node.name}", "cluster.kubeProxy")
            yield _jump(node, jump.table, jump.chain, jump.text, origin)


def _origin(node: Node, line: Line) -> Origin:
    proxy = f"cluster.kubeProxy.{line.setting}" if line.setting else "cluster.kubeProxy"
    if line.service is None:
        return Origin("kube-proxy", line.reason, f"node {node.name}", proxy)
    subject = f"Service {line.service.port_name}"
    if line.setting in {"masqueradeAll", "clusterCIDR"}:
        return Origin("kube-proxy", line.reason, subject, proxy)
    path = f"services.{line.service.service}"
    if line.setting == "nodePort":
        # A port without a name is the only one.
        path += f".ports[{line.service.name or 0}]"
    return Origin("kube-proxy", line.reason, subject, f"{path}.{line.setting}")


def _chain(node: Node, table: Table, name: str, origin: Origin, *rules: IptablesRule) -> Chain:
    return Chain(
        netns=node.name,
        origin=origin,
        table=table,
        name=name,
        rules=rules,
        backend=node.iptables_backend,
    )


def _jump(node: Node, table: Table, chain: str, text: str, origin: Origin) -> Hook:
    return Hook(
        netns=node.name,
        origin=origin,
        table=table,
        chain=chain,
        text=text,
        place="insert",
        backend=node.iptables_backend,
    )


def _sysctls(node: Node, settings: KubeProxy, state: ProxyState) -> Iterator[Object]:
    """What kube-proxy writes under net (cmd/kube-proxy/app/server_linux.go, proxier.go).

    nf_conntrack_max is left out: kernels before 6.13 share it with the host.
    """
    values = {
        "net.netfilter.nf_conntrack_tcp_timeout_established": ("86400", "conntrack"),
        "net.netfilter.nf_conntrack_tcp_timeout_close_wait": ("3600", "conntrack"),
    }
    if settings.conntrack_tcp_be_liberal and state.traits.conntrack_be_liberal:
        liberal = ("1", "conntrack.tcpBeLiberal")
        values["net.netfilter.nf_conntrack_tcp_be_liberal"] = liberal
    if state.serves_loopback:
        values["net.ipv4.conf.all.route_localnet"] = ("1", "localhostNodePorts")
    for name, (value, setting) in values.items():
        path = f"cluster.kubeProxy.{setting}"
        origin = Origin("kube-proxy", "sysctl at its start", f"node {node.name}", path)
        yield Sysctl(netns=node.name, origin=origin, name=name, value=value)
