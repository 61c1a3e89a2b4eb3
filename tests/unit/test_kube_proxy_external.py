"""kube-proxy's rules for what comes from outside: load balancers, NodePort addresses, families.

The rules are written from the branches of syncProxyRules, v1.24 to v1.36.
"""

from __future__ import annotations

from dataclasses import replace
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_interface,
)

import pytest

from netlab.kube_proxy.iptables import render
from netlab.kube_proxy.rules import Rules, endpoint_chain
from netlab.kube_proxy.state import (
    Endpoint,
    LoadBalancerIP,
    LocalDetector,
    ProxyState,
    ServicePort,
)
from netlab.model import Version
from netlab.plan import Table

LOCAL = Endpoint(IPv4Address("10.233.100.3"), 8080, "node1")
REMOTE = Endpoint(IPv4Address("10.233.200.2"), 8080, "node2")
POD_CIDR = LocalDetector("ClusterCIDR", "10.233.64.0/18")
EXTERNAL = "KUBE-EXTERNAL-SERVICES"
LAST = (
    '-m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in '
    'this chain"'
)


def web(*endpoints: Endpoint, **settings: object) -> ServicePort:
    """NodePort default/web:http, 80 to 8080 on the given endpoints."""
    given: dict[str, object] = {"port": 80, "name": "http", "node_port": 32456, **settings}
    return ServicePort(
        "default", "web", IPv4Address("10.233.0.100"), endpoints=tuple(endpoints), **given
    )


def rules(*services: ServicePort, version: str = "v1.33", **settings: object) -> Rules:
    given: dict[str, object] = {
        "detector": POD_CIDR,
        "node_ip": IPv4Address("172.16.1.2"),
        "node_addresses": (IPv4Address("127.0.0.1"), IPv4Address("172.16.1.2")),
        **settings,
    }
    return render(ProxyState(Version.parse(version), "node1", services=services, **given))


def chain(written: Rules, table: Table, name: str) -> list[str]:
    """A chain's rules without the Service's hash, which every chain but KUBE-SEP shares."""
    lines = written.by_chain()[table, name]
    return [line.text.replace("-CDGGSHYLG3RE2FKL", "") for line in lines]


def own(written: Rules, prefix: str) -> list[str]:
    return chain(written, "nat", f"KUBE-{prefix}-CDGGSHYLG3RE2FKL")


def has(written: Rules, prefix: str) -> bool:
    return ("nat", f"KUBE-{prefix}-CDGGSHYLG3RE2FKL") in written.chains


def destinations(written: Rules) -> set[str]:
    return {
        line.text.rpartition(" ")[2]
        for line in written.lines
        if line.chain.startswith("KUBE-SEP") and "-j DNAT" in line.text
    }


def balanced(*endpoints: Endpoint, **settings: object) -> ServicePort:
    ips = (LoadBalancerIP(IPv4Address("192.0.2.10")), LoadBalancerIP(IPv4Address("192.0.2.11")))
    return web(*endpoints, **{"load_balancer_ips": ips, **settings})


def test_external_and_load_balancer_ips() -> None:
    written = rules(balanced(LOCAL, external_ips=(IPv4Address("198.51.100.7"),)))
    assert chain(written, "nat", "KUBE-SERVICES")[1:4] == [
        (
            '-m comment --comment "default/web:http external IP" '
            "-m tcp -p tcp -d 198.51.100.7 --dport 80 -j KUBE-EXT"
        ),
        (
            '-m comment --comment "default/web:http loadbalancer IP" '
            "-m tcp -p tcp -d 192.0.2.10 --dport 80 -j KUBE-EXT"
        ),
        (
            '-m comment --comment "default/web:http loadbalancer IP" '
            "-m tcp -p tcp -d 192.0.2.11 --dport 80 -j KUBE-EXT"
        ),
    ]
    none = rules(balanced(external_ips=(IPv4Address("198.51.100.7"),)))
    assert len(chain(none, "filter", EXTERNAL)) == 4
    assert all(text.endswith("-j REJECT") for text in chain(none, "filter", EXTERNAL))


def test_source_ranges() -> None:
    ranges = (IPv4Interface("203.0.113.0/24"),)
    written = rules(balanced(LOCAL, source_ranges=ranges))
    said = '-m comment --comment "default/web:http loadbalancer IP"'
    assert own(written, "FW") == [
        f"{said} -s 203.0.113.0/24 -j KUBE-EXT",
        (
            '-m comment --comment "other traffic to default/web:http will be dropped by '
            'KUBE-PROXY-FIREWALL"'
        ),
    ]
    assert chain(written, "nat", "KUBE-SERVICES")[1] == (
        f"{said} -m tcp -p tcp -d 192.0.2.10 --dport 80 -j KUBE-FW"
    )
    assert chain(written, "filter", "KUBE-PROXY-FIREWALL") == [
        '-m comment --comment "default/web:http traffic not accepted by KUBE-FW" '
        f"-m tcp -p tcp -d {address} --dport 80 -j DROP"
        for address in ("192.0.2.10", "192.0.2.11")
    ]
    for version, count in (("v1.26", 1), ("v1.27", 2)):
        assert (
            len(own(rules(balanced(LOCAL, source_ranges=ranges), version=version), "FW")) == count
        )


def test_source_range_with_the_node_in_it_lets_the_balancers_ip_in() -> None:
    service = balanced(LOCAL, source_ranges=(IPv4Interface("172.16.1.0/24"),))
    addresses = (IPv4Address("172.16.1.2"), IPv4Address("172.17.1.2"))
    behind = own(rules(service, node_addresses=addresses), "FW")
    assert [text.split(" -s ")[1] for text in behind[1:3]] == [
        "192.0.2.10 -j KUBE-EXT",
        "192.0.2.11 -j KUBE-EXT",
    ]
    # Only the node's own IP counts, not that of another of its devices.
    elsewhere = {"node_ip": IPv4Address("172.17.1.2"), "node_addresses": addresses}
    assert len(own(rules(service, **elsewhere), "FW")) == 2


def test_v124_source_ranges_end_in_a_mark_for_each_ip() -> None:
    service = balanced(LOCAL, source_ranges=(IPv4Interface("172.16.1.0/24"),))
    said = '-m comment --comment "default/web:http loadbalancer IP"'
    assert own(rules(service, version="v1.24"), "FW") == [
        f"{said} {text}"
        for address in ("192.0.2.10", "192.0.2.11")
        for text in (
            "-s 172.16.1.0/24 -j KUBE-EXT",
            f"-s {address} -j KUBE-EXT",
            "-j KUBE-MARK-DROP",
        )
    ]


@pytest.mark.parametrize(
    ("version", "shown"), [("v1.29", "203.0.113.9/24"), ("v1.30", "203.0.113.0/24")]
)
def test_host_bits_of_a_source_range(version: str, shown: str) -> None:
    service = balanced(LOCAL, source_ranges=(IPv4Interface("203.0.113.9/24"),))
    assert f"-s {shown} -j" in own(rules(service, version=version), "FW")[0]


@pytest.mark.parametrize(("version", "firewalled"), [("v1.33", True), ("v1.34", False)])
def test_a_source_range_of_everything_is_none_from_v134_on(
    version: str, *, firewalled: bool
) -> None:
    ranges = (IPv4Interface("203.0.113.0/24"), IPv4Interface("0.0.0.0/0"))
    assert has(rules(balanced(LOCAL, source_ranges=ranges), version=version), "FW") is firewalled


@pytest.mark.parametrize(("version", "skipped"), [("v1.29", False), ("v1.30", True)])
def test_load_balancer_of_mode_proxy(version: str, *, skipped: bool) -> None:
    ips = (LoadBalancerIP(IPv4Address("192.0.2.10"), "Proxy"),)
    written = rules(balanced(LOCAL, load_balancer_ips=ips), version=version)
    found = [text for text in chain(written, "nat", "KUBE-SERVICES") if "192.0.2.10" in text]
    assert (found == []) is skipped


def test_health_check_node_port() -> None:
    written = rules(balanced(REMOTE, health_check_node_port=31999, external_local=True))
    assert chain(written, "filter", "KUBE-NODEPORTS") == [
        (
            '-m comment --comment "default/web:http health check node port" '
            "-m tcp -p tcp --dport 31999 -j ACCEPT"
        )
    ]
    elsewhere = rules(balanced(REMOTE, health_check_node_port=31999))
    assert chain(elsewhere, "filter", "KUBE-NODEPORTS") == []


def served(version: str = "v1.33", family: int = 4, **settings: object) -> list[str]:
    """The ends of nat KUBE-SERVICES' NodePort rules."""
    given = {"family": family, **settings}
    texts = chain(rules(web(LOCAL), version=version, **given), "nat", "KUBE-SERVICES")
    return [
        text.removeprefix(f"{LAST} ").removesuffix(" -j KUBE-NODEPORTS")
        for text in texts
        if text.startswith(LAST)
    ]


def test_node_port_addresses() -> None:
    everywhere = ["-m addrtype --dst-type LOCAL"]
    assert served() == everywhere
    assert served(node_port_addresses=(IPv4Network("0.0.0.0/0"),)) == everywhere
    assert served(node_port_addresses=(IPv6Network("2001:db8::/64"),)) == everywhere
    assert served(node_port_addresses=(IPv4Network("172.16.0.0/16"),)) == ["-d 172.16.1.2"]
    assert served(node_port_addresses=(IPv4Network("127.0.0.0/8"),)) == ["-d 127.0.0.1"]


def test_localhost_node_ports() -> None:
    off = {"localhost_node_ports": False}
    assert served("v1.26", **off) == ["-m addrtype --dst-type LOCAL ! -d 127.0.0.0/8"]
    assert served(node_port_addresses=(IPv4Network("127.0.0.0/8"),), **off) == []
    # v1.25 has no such flag.
    assert served("v1.25", **off) == ["-m addrtype --dst-type LOCAL"]


def test_ipv6_never_serves_loopback_from_v126_on() -> None:
    loopback = {
        "node_port_addresses": (IPv6Network("::1/128"),),
        "node_addresses": (IPv6Address("::1"),),
    }
    assert served(family=6) == ["-m addrtype --dst-type LOCAL ! -d ::1/128"]
    assert served("v1.25", family=6) == ["-m addrtype --dst-type LOCAL"]
    assert served(family=6, **loopback) == []
    assert served("v1.25", family=6, **loopback) == ["-d ::1"]


@pytest.mark.parametrize(("version", "written"), [("v1.26", 0), ("v1.27", 1)])
def test_node_port_rules_without_a_matching_address(version: str, written: int) -> None:
    nowhere = {"node_port_addresses": (IPv4Network("203.0.113.0/24"),)}
    found = rules(web(LOCAL), version=version, **nowhere)
    assert len(chain(found, "nat", "KUBE-NODEPORTS")) == written
    refused = rules(web(), version=version, **nowhere)
    assert len(chain(refused, "filter", EXTERNAL)) == written


@pytest.mark.parametrize(
    ("version", "settings", "guarded"),
    [
        ("v1.26", {}, False),
        ("v1.27", {}, True),
        ("v1.33", {"localhost_node_ports": False}, False),
        ("v1.33", {"node_port_addresses": (IPv4Network("172.16.0.0/16"),)}, False),
        ("v1.33", {"node_port_addresses": (IPv4Network("127.0.0.5/32"),)}, True),
        ("v1.33", {"family": 6}, False),
    ],
)
def test_localnet_guard(version: str, settings: dict[str, object], *, guarded: bool) -> None:
    written = rules(version=version, **settings)
    assert (("filter", "KUBE-FIREWALL") in written.chains) is guarded
    if guarded:
        assert chain(written, "filter", "KUBE-FIREWALL") == [
            (
                '-m comment --comment "block incoming localnet connections" -d 127.0.0.0/8 '
                "! -s 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
            )
        ]


def test_ipv6() -> None:
    endpoint = Endpoint(IPv6Address("fd00:10:64::3"), 8080, "node1")
    port = replace(web(endpoint, LOCAL), cluster_ip=IPv6Address("fd00:10:96::100"))
    detector = LocalDetector("ClusterCIDR", "fd00:10:64::/56")
    written = rules(port, web(LOCAL), family=6, detector=detector)
    assert destinations(written) == {"[fd00:10:64::3]:8080"}
    assert not [line for line in written.lines if "10.233." in line.text]
    assert own(written, "SVC")[0].endswith("! -s fd00:10:64::/56 -j KUBE-MARK-MASQ")


def test_addresses_of_the_other_family_are_ignored() -> None:
    mixed = balanced(
        LOCAL,
        external_ips=(IPv6Address("2001:db8::7"),),
        load_balancer_ips=(LoadBalancerIP(IPv6Address("2001:db8::10")),),
        source_ranges=(ip_interface("2001:db8::/64"),),
    )
    assert rules(mixed).lines == [
        line._replace(service=mixed if line.service else None) for line in rules(web(LOCAL)).lines
    ]


@pytest.mark.parametrize(("count", "commented"), [(1000, True), (1001, False)])
def test_large_clusters_have_no_comments_on_endpoints(count: int, *, commented: bool) -> None:
    first = int(IPv4Address("10.233.64.1"))
    many = [Endpoint(IPv4Address(first + index), 80) for index in range(count)]
    written = rules(web(*many))
    assert ("-m comment" in own(written, "SVC")[1]) is commented
    name = endpoint_chain(web(), many[0])
    assert ("-m comment" in chain(written, "nat", name)[0]) is commented
    assert ("-m comment" in chain(written, "nat", "KUBE-NODEPORTS")[0]) is True
