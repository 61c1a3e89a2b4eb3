"""kube-proxy and kubelet on a lab's nodes: order of jumps, sysctls, and who asked for what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    ip_address,
)

import pytest

from netlab import kube_proxy, model
from netlab.kube_proxy.rules import REASONS
from netlab.kube_proxy.state import Endpoint, LocalDetector
from netlab.model import KubeProxy, Lab, Node, NodeNIC, Service, Version
from netlab.plan import Chain, Hook, Netns, Object, Origin, Plan, Sysctl

VERSIONS = tuple(f"v1.{minor}" for minor in range(24, 37))
EXTERNAL = "KUBE-EXTERNAL-SERVICES"


def lab(version: str = "v1.33", *services: Service, **settings: object) -> Lab:
    proxy = KubeProxy(Version.parse(version), cluster_cidr=IPv4Network("10.233.64.0/18"))
    node1 = Node(
        name="node1",
        nics=(NodeNIC("eth0", network="lan", address=IPv4Interface("172.16.1.2/16")),),
        gateway=None,
        calico=model.Calico(Version(3, 30), ()),
        kube_proxy=replace(proxy, **settings),
        coordinator=None,
        sysctl={},
    )
    bare = replace(node1, name="node2", kube_proxy=None)
    return Lab(
        name="test",
        title="",
        file="test.yaml",
        networks={},
        routers={},
        hosts={},
        nodes={"node1": node1, "node2": bare},
        pods={},
        services={service.name: service for service in services},
        pod_cidrs=(),
        service_cidrs=(),
    )


def service(name: str, nodes: Iterable[str], last: int, **settings: object) -> Service:
    endpoints = tuple(
        model.Endpoint(f"pod-{node}", "eth0", IPv4Address(f"10.233.100.{last}"), node)
        for node in nodes
    )
    ports = (model.ServicePort(80, 8080, "http", node_port=30000 + last),)
    address = IPv4Address(f"10.233.0.{last}")
    return Service(name, "default", "NodePort", address, ports, endpoints, **settings)


WEB = service("web", ["node1"], 1)
NO_ENDPOINTS = service("none", [], 2)
FAR = service("far", ["node2"], 3, external_traffic_policy="Local")
FAR_INSIDE = service("inside", ["node2"], 4, internal_traffic_policy="Local")


def objects(*arguments: object, **settings: object) -> list[Object]:
    return list(kube_proxy.objects(lab(*arguments, **settings)))


def planned(version: str, *services: Service) -> dict[str, list[tuple[str, str, Origin]]]:
    """Table -> (chain, text, origin) in the order that the kernel ends up with."""
    netns = Netns(netns="node1", origin=Origin("kubelet", "test"))
    (ruleset,) = Plan.of("test", [netns, *objects(version, *services)]).rulesets()
    return {
        table: [(name, rule.text, rule.origin) for name, rule in content]
        for table, content in ruleset.rules.items()
    }


def targets(version: str, table: str, name: str) -> list[str]:
    return [text.rpartition(" ")[2] for where, text, _ in planned(version)[table] if where == name]


@pytest.mark.parametrize("version", ["v1.24", "v1.25", "v1.33"])
def test_jumps_are_in_reverse_order_of_their_creation_and_kubelets_last(version: str) -> None:
    firewall = [] if version == "v1.24" else ["KUBE-PROXY-FIREWALL"]
    assert targets(version, "filter", "INPUT") == [
        *firewall,
        "KUBE-NODEPORTS",
        EXTERNAL,
        "KUBE-FIREWALL",
    ]
    assert targets(version, "filter", "FORWARD") == [
        *firewall,
        "KUBE-FORWARD",
        "KUBE-SERVICES",
        EXTERNAL,
    ]
    assert targets(version, "filter", "OUTPUT") == [*firewall, "KUBE-SERVICES", "KUBE-FIREWALL"]
    for name in ("PREROUTING", "OUTPUT"):
        assert targets(version, "nat", name) == ["KUBE-SERVICES"]
    assert targets(version, "nat", "POSTROUTING") == ["KUBE-POSTROUTING"]


@pytest.mark.parametrize("version", VERSIONS)
def test_chains_of_kubelet(version: str) -> None:
    chains = {(o.table, o.name) for o in objects(version) if isinstance(o, Chain)}
    canaries = {
        (table, f"KUBE-{who}-CANARY")
        for table in ("mangle", "nat", "filter")
        for who in ("KUBELET", "PROXY")
    }
    assert canaries | {("mangle", "KUBE-IPTABLES-HINT"), ("filter", "KUBE-FIREWALL")} <= chains
    marks = Version.parse(version) < Version(1, 27, 0)
    assert (("nat", "KUBE-MARK-DROP") in chains) is marks
    firewall = [text for name, text, _ in planned(version)["filter"] if name == "KUBE-FIREWALL"]
    assert len(firewall) == 1 + marks
    assert firewall[-1].startswith('-m comment --comment "block incoming localnet connections"')


@pytest.mark.parametrize("version", VERSIONS)
def test_every_refusal_has_a_reason_of_the_closed_list(version: str) -> None:
    found = planned(version, WEB, NO_ENDPOINTS, FAR, FAR_INSIDE)
    origins = [o for _, text, o in found["filter"] if text.endswith(("-j DROP", "-j REJECT"))]
    known = {"kube-proxy": REASONS, "kubelet": kube_proxy.KUBELET_REASONS}
    assert {o.reason for o in origins} == {
        "invalid",
        "localnet",
        "no-endpoints",
        "no-local-endpoints",
    }
    assert all(o.reason in known[o.component] for o in origins)
    assert kube_proxy.REASONS is REASONS


def origin_of(part: str) -> Origin:
    found = planned("v1.33", WEB, NO_ENDPOINTS, FAR, FAR_INSIDE)
    (origin,) = {o for content in found.values() for _, text, o in content if part in text}
    return origin


@pytest.mark.parametrize(
    ("part", "reason", "subject", "path"),
    [
        ("--ctstate INVALID", "invalid", "node node1", "cluster.kubeProxy.version"),
        (
            "--dport 30002 -j REJECT",
            "no-endpoints",
            "Service default/none:http",
            "services.none.endpoints",
        ),
        (
            "--dport 30003 -j DROP",
            "no-local-endpoints",
            "Service default/far:http",
            "services.far.externalTrafficPolicy",
        ),
        (
            "-d 10.233.0.4 --dport 80 -j DROP",
            "no-local-endpoints",
            "Service default/inside:http",
            "services.inside.internalTrafficPolicy",
        ),
        ("block incoming", "localnet", "node node1", "cluster.kubeProxy.localhostNodePorts"),
        (
            "-d 10.233.0.1 --dport 80 ! -s",
            "a client from outside the cluster is masqueraded",
            "Service default/web:http",
            "cluster.kubeProxy.clusterCIDR",
        ),
        (
            "--dport 30001 -j KUBE-EXT",
            "the Service's NodePort",
            "Service default/web:http",
            "services.web.ports[http].nodePort",
        ),
    ],
)
def test_origins(part: str, reason: str, subject: str, path: str) -> None:
    assert origin_of(part) == Origin("kube-proxy", reason, subject, path)


def test_the_only_port_of_a_service_is_its_first() -> None:
    nameless = replace(WEB, ports=(replace(WEB.ports[0], name=""),))
    (path,) = {
        origin.path
        for _, text, origin in planned("v1.33", nameless)["nat"]
        if "--dport 30001 -j KUBE-EXT" in text
    }
    assert path == "services.web.ports[0].nodePort"


def test_the_models_endpoints_and_settings_are_the_proxiers() -> None:
    going = replace(WEB.endpoints[0], ready=False, serving=True, terminating=True)
    one = lab("v1.33", replace(WEB, endpoints=(going,)), masquerade_all=True)
    node1 = one.nodes["node1"]
    assert node1.kube_proxy is not None
    known = kube_proxy.proxy_state(one, node1, node1.kube_proxy)
    (port,) = known.services
    address = IPv4Address("10.233.100.1")
    assert port.endpoints == (
        Endpoint(address, 8080, "node1", ready=False, serving=True, terminating=True),
    )
    assert (port.port, port.node_port, port.protocol) == (80, 30001, "TCP")
    assert known.masquerade_all
    assert known.detector == LocalDetector("ClusterCIDR", "10.233.64.0/18")


def test_localnet_is_kubelets_where_kube_proxy_does_not_write_it() -> None:
    for arguments, settings in ((("v1.26",), {}), (("v1.33",), {"localhost_node_ports": False})):
        (firewall,) = (
            item
            for item in objects(*arguments, **settings)
            if isinstance(item, Chain) and item.name == "KUBE-FIREWALL"
        )
        assert (firewall.rules[-1].origin.component, firewall.rules[-1].origin.reason) == (
            "kubelet",
            "localnet",
        )


def test_a_node_without_kube_proxy_and_a_headless_service_get_nothing() -> None:
    headless = replace(WEB, type="ClusterIP", cluster_ip=None)
    found = objects("v1.33", headless)
    assert {item.netns for item in found} == {"node1"}
    assert found == objects("v1.33")


def test_all_rules_are_of_the_nodes_backend() -> None:
    one = lab("v1.33", WEB)
    node1 = replace(one.nodes["node1"], iptables_backend="legacy")
    found = kube_proxy.objects(replace(one, nodes={"node1": node1}))
    assert {item.backend for item in found if isinstance(item, Chain | Hook)} == {"legacy"}


def test_the_model_decides_the_invalid_rule() -> None:
    for settings in ({"be_liberal_at_start": True}, {"conntrack_tcp_be_liberal": True}):
        for version, left_out in (("v1.28", False), ("v1.29", True)):
            (forward,) = (
                item
                for item in objects(version, **settings)
                if isinstance(item, Chain) and item.name == "KUBE-FORWARD"
            )
            texts = [rule.text for rule in forward.rules]
            assert ("-m conntrack --ctstate INVALID -j DROP" in texts) is not left_out


def sysctls(*arguments: object, **settings: object) -> dict[str, str]:
    found = objects(*arguments, **settings)
    return {item.name: item.value for item in found if isinstance(item, Sysctl)}


TIMEOUTS = {
    "net.netfilter.nf_conntrack_tcp_timeout_established": "86400",
    "net.netfilter.nf_conntrack_tcp_timeout_close_wait": "3600",
}
LOCALNET = {"net.ipv4.conf.all.route_localnet": "1"}


def test_sysctls() -> None:
    liberal = {"net.netfilter.nf_conntrack_tcp_be_liberal": "1"}
    assert sysctls() == TIMEOUTS | LOCALNET
    assert sysctls("v1.29", conntrack_tcp_be_liberal=True) == TIMEOUTS | LOCALNET | liberal
    # Read at its start, which is not to write; and v1.28 has no such field.
    assert sysctls(be_liberal_at_start=True) == TIMEOUTS | LOCALNET
    assert sysctls("v1.28", conntrack_tcp_be_liberal=True) == TIMEOUTS | LOCALNET


def test_route_localnet_is_set_only_for_node_ports_on_loopback() -> None:
    assert sysctls(localhost_node_ports=False) == TIMEOUTS
    assert sysctls(node_port_addresses=(IPv4Network("172.16.0.0/16"),)) == TIMEOUTS
    for network in ("0.0.0.0/0", "127.0.0.0/8"):
        assert sysctls(node_port_addresses=(IPv4Network(network),)) == TIMEOUTS | LOCALNET


def test_node_addresses_are_loopbacks_and_the_nics() -> None:
    one = lab()
    node1 = one.nodes["node1"]
    assert node1.kube_proxy is not None
    known = kube_proxy.proxy_state(one, node1, node1.kube_proxy)
    assert known.node_addresses == (ip_address("127.0.0.1"), ip_address("172.16.1.2"))
    assert known.node_ip == ip_address("172.16.1.2")
