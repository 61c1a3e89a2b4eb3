"""kube-proxy on every node of a lab: its rules, kubelet's beside them, and its sysctls.

Counters of nfacct (v1.31) are left out: a rule that names one cannot be loaded without the
object, and a kube-proxy that could not create it leaves it out too.
"""

from __future__ import annotations

from collections.abc import Iterator

from netlab.kube_proxy.iptables import JUMPS, LOCALNET_RULE, REASONS, Line, Rules, render
from netlab.kube_proxy.state import Endpoint, LocalDetector, ProxyState, ServicePort
from netlab.model import KubeProxy, Lab, Node, Version
from netlab.plan import Chain, Hook, IptablesRule, Object, Origin, Sysctl, Table

__all__ = ["REASONS", "objects", "proxy_state"]

_BASE_TABLES: tuple[Table, ...] = ("mangle", "nat", "filter")
_DROP_MARK = "0x00008000"
_IPTABLES_OWNERSHIP = Version(1, 27, 0)


def objects(lab: Lab) -> Iterator[Object]:
    """Chains, jumps and sysctls of kubelet and kube-proxy, node by node."""
    for node in lab.nodes.values():
        if node.kube_proxy is None:
            continue
        yield from _kubelet(node, node.kube_proxy)
        yield from _proxier(node, render(proxy_state(lab, node, node.kube_proxy)), node.kube_proxy)
        yield from _sysctls(node, node.kube_proxy)


def proxy_state(lab: Lab, node: Node, settings: KubeProxy) -> ProxyState:
    """What the kube-proxy of *node* would know."""
    detector = None
    if settings.cluster_cidr is not None:
        detector = LocalDetector("ClusterCIDR", str(settings.cluster_cidr))
    return ProxyState(
        version=settings.version,
        node=node.name,
        node_addresses=tuple(nic.address.ip for nic in node.nics if nic.address),
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


def _kubelet(node: Node, settings: KubeProxy) -> Iterator[Object]:
    """What kubelet has made before kube-proxy starts (pkg/kubelet/kubelet_network_linux.go)."""
    origin = Origin("kubelet", "chains that tell of a flush", f"node {node.name}")
    yield _chain(node, "mangle", "KUBE-IPTABLES-HINT", origin)
    for component in ("KUBELET", "PROXY"):
        for table in _BASE_TABLES:
            yield _chain(node, table, f"KUBE-{component}-CANARY", origin)
    localnet = Origin("kubelet", "localnet", f"node {node.name}", "cluster.kubeProxy.version")
    rules = [IptablesRule(LOCALNET_RULE, localnet)]
    if settings.version < _IPTABLES_OWNERSHIP:
        dropping = Origin("kubelet", "drops what was marked for it", f"node {node.name}")
        comment = '-m comment --comment "kubernetes firewall for dropping marked packets"'
        text = f"{comment} -m mark --mark {_DROP_MARK}/{_DROP_MARK} -j DROP"
        rules.insert(0, IptablesRule(text, dropping))
        mark = IptablesRule(f"-j MARK --or-mark {_DROP_MARK}", dropping)
        yield _chain(node, "nat", "KUBE-MARK-DROP", dropping, mark)
    yield _chain(node, "filter", "KUBE-FIREWALL", localnet, *rules)
    for chain in ("OUTPUT", "INPUT"):
        yield _jump(node, "filter", chain, "-j KUBE-FIREWALL", localnet)


def _proxier(node: Node, rules: Rules, settings: KubeProxy) -> Iterator[Object]:
    """kube-proxy's own chains with their rules, then the jumps to them."""
    own = Origin("kube-proxy", "chain", f"node {node.name}", "cluster.kubeProxy")
    for table, name in rules.chains:
        if name == "KUBE-FIREWALL":
            continue
        lines = [line for line in rules.lines if (line.table, line.chain) == (table, name)]
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
        path += f".ports[{line.service.name}]"
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


def _sysctls(node: Node, settings: KubeProxy) -> Iterator[Object]:
    """What kube-proxy writes under net (cmd/kube-proxy/app/server_linux.go, proxier.go).

    nf_conntrack_max is left out: kernels before 6.13 share it with the host.
    """
    values = {
        "net.netfilter.nf_conntrack_tcp_timeout_established": ("86400", "conntrack"),
        "net.netfilter.nf_conntrack_tcp_timeout_close_wait": ("3600", "conntrack"),
    }
    if settings.conntrack_tcp_be_liberal:
        liberal = ("1", "conntrack.tcpBeLiberal")
        values["net.netfilter.nf_conntrack_tcp_be_liberal"] = liberal
    if settings.localhost_node_ports and not settings.node_port_addresses:
        values["net.ipv4.conf.all.route_localnet"] = ("1", "localhostNodePorts")
    for name, (value, setting) in values.items():
        path = f"cluster.kubeProxy.{setting}"
        origin = Origin("kube-proxy", "sysctl at its start", f"node {node.name}", path)
        yield Sysctl(netns=node.name, origin=origin, name=name, value=value)
