"""kube-proxy's rules by hand: names, the paths of a Service, versions, and who asked for what.

Names and hashes are those of kubernetes pkg/proxy/iptables/proxier_test.go and of real clusters;
the rules are written from the branches of syncProxyRules.
"""

from __future__ import annotations

from dataclasses import replace
from ipaddress import (
    IPv4Address,
)
from typing import Literal

import pytest

from netlab.kube_proxy.iptables import render
from netlab.kube_proxy.rules import Rules, endpoint_chain, service_chain
from netlab.kube_proxy.state import (
    Endpoint,
    LocalDetector,
    ProxyState,
    ServicePort,
)
from netlab.model import Version
from netlab.plan import Table

VERSIONS = tuple(f"v1.{minor}" for minor in range(24, 37))
LOCAL = Endpoint(IPv4Address("10.233.100.3"), 8080, "node1")
REMOTE = Endpoint(IPv4Address("10.233.200.2"), 8080, "node2")
LOCAL_CHAIN, REMOTE_CHAIN = "KUBE-SEP-A35VRAPKIP6NA3O5", "KUBE-SEP-GASEMRHS65PARQYV"
POD_CIDR = LocalDetector("ClusterCIDR", "10.233.64.0/18")
CLUSTER_IP = '-m comment --comment "default/web:http cluster IP" -m tcp -p tcp -d 10.233.0.100'
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


@pytest.mark.parametrize(
    ("namespace", "service", "name", "protocol", "expected"),
    [
        ("ns1", "svc1", "p80", "TCP", "XPGD46QRK7WJZT7O"),
        ("default", "kubernetes", "https", "TCP", "NPX46M4PTMTKRN6Y"),
        ("kube-system", "kube-dns", "dns", "UDP", "TCOU7JCQXEZGVUNU"),
        ("default", "web", "http", "TCP", "CDGGSHYLG3RE2FKL"),
    ],
)
def test_one_hash_names_all_chains_of_a_port(
    namespace: str, service: str, name: str, protocol: Literal["TCP", "UDP"], expected: str
) -> None:
    address = IPv4Address("10.0.0.1")
    port = ServicePort(namespace, service, address, 80, name=name, protocol=protocol)
    assert {service_chain(p, port) for p in ("SVC", "SVL", "EXT", "FW")} == {
        f"KUBE-SVC-{expected}",
        f"KUBE-SVL-{expected}",
        f"KUBE-EXT-{expected}",
        f"KUBE-FW-{expected}",
    }


def test_endpoint_chain_name() -> None:
    port = ServicePort("ns1", "svc1", IPv4Address("172.30.0.41"), 80, name="p80")
    endpoint = Endpoint(IPv4Address("10.180.0.1"), 80)
    assert endpoint_chain(port, endpoint) == "KUBE-SEP-SXIVWICOYRO3J4NJ"


def test_port_without_name_has_no_colon() -> None:
    port = ServicePort("default", "web", IPv4Address("10.0.0.1"), 80)
    assert port.port_name == "default/web"


@pytest.mark.parametrize("version", VERSIONS[4:])
def test_worked_example(version: str) -> None:
    """The text is the same from v1.28 to v1.36."""
    written = rules(web(LOCAL, REMOTE), version=version)
    assert chain(written, "nat", "KUBE-SERVICES") == [
        f"{CLUSTER_IP} --dport 80 -j KUBE-SVC",
        f"{LAST} -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS",
    ]
    assert chain(written, "nat", "KUBE-NODEPORTS") == [
        "-m comment --comment default/web:http -m tcp -p tcp --dport 32456 -j KUBE-EXT"
    ]
    assert own(written, "EXT") == [
        (
            '-m comment --comment "masquerade traffic for default/web:http external destinations" '
            "-j KUBE-MARK-MASQ"
        ),
        "-j KUBE-SVC",
    ]
    assert own(written, "SVC") == [
        f"{CLUSTER_IP} --dport 80 ! -s 10.233.64.0/18 -j KUBE-MARK-MASQ",
        (
            '-m comment --comment "default/web:http -> 10.233.100.3:8080" '
            f"-m statistic --mode random --probability 0.5000000000 -j {LOCAL_CHAIN}"
        ),
        f'-m comment --comment "default/web:http -> 10.233.200.2:8080" -j {REMOTE_CHAIN}',
    ]
    assert chain(written, "nat", LOCAL_CHAIN) == [
        "-m comment --comment default/web:http -s 10.233.100.3 -j KUBE-MARK-MASQ",
        (
            "-m comment --comment default/web:http -m tcp -p tcp "
            "-j DNAT --to-destination 10.233.100.3:8080"
        ),
    ]
    assert not has(written, "SVL")
    for name in ("KUBE-SERVICES", EXTERNAL, "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL"):
        assert chain(written, "filter", name) == []


def test_what_every_node_has() -> None:
    written = rules()
    assert chain(written, "nat", "KUBE-POSTROUTING") == [
        "-m mark ! --mark 0x00004000/0x00004000 -j RETURN",
        "-j MARK --xor-mark 0x00004000",
        (
            '-m comment --comment "kubernetes service traffic requiring SNAT" '
            "-j MASQUERADE --random-fully"
        ),
    ]
    assert chain(written, "nat", "KUBE-MARK-MASQ") == ["-j MARK --or-mark 0x00004000"]
    assert chain(written, "filter", "KUBE-FORWARD") == [
        "-m conntrack --ctstate INVALID -j DROP",
        (
            '-m comment --comment "kubernetes forwarding rules" '
            "-m mark --mark 0x00004000/0x00004000 -j ACCEPT"
        ),
        (
            '-m comment --comment "kubernetes forwarding conntrack rule" '
            "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
        ),
    ]
    old = rules(random_fully=False)
    assert chain(old, "nat", "KUBE-POSTROUTING")[2].endswith("-j MASQUERADE")


def test_each_endpoint_gets_an_equal_share() -> None:
    third = Endpoint(IPv4Address("10.233.101.9"), 8080, "node2")
    shares = own(rules(web(REMOTE, third, LOCAL)), "SVC")[1:]
    assert [text.rpartition("http -> ")[2].partition(":")[0] for text in shares] == [
        "10.233.100.3",
        "10.233.101.9",
        "10.233.200.2",
    ]
    assert "--probability 0.3333333333 " in shares[0]
    assert "--probability 0.5000000000 " in shares[1]
    assert "--probability" not in shares[2]


def test_endpoints_are_sorted_as_text() -> None:
    ten, nine = (Endpoint(IPv4Address(f"10.233.100.{last}"), 80, "node1") for last in (10, 9))
    first, second = own(rules(web(nine, ten)), "SVC")[1:]
    assert "10.233.100.10:80" in first
    assert "10.233.100.9:80" in second


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "! -s 10.233.64.0/18 -j KUBE-MARK-MASQ"),
        ({"masquerade_all": True}, "-j KUBE-MARK-MASQ"),
        ({"masquerade_all": True, "detector": None}, "-j KUBE-MARK-MASQ"),
        (
            {"detector": LocalDetector("InterfaceNamePrefix", "cali")},
            "! -i cali+ -j KUBE-MARK-MASQ",
        ),
        ({"detector": LocalDetector("BridgeInterface", "cni0")}, "! -i cni0 -j KUBE-MARK-MASQ"),
    ],
)
def test_cluster_ip_masquerade(settings: dict[str, object], expected: str) -> None:
    written = rules(web(LOCAL), **settings)
    assert own(written, "SVC")[0] == f"{CLUSTER_IP} --dport 80 {expected}"


def test_without_detector_nobody_is_masqueraded_on_the_cluster_ip() -> None:
    assert own(rules(web(LOCAL), detector=None), "SVC") == [
        f'-m comment --comment "default/web:http -> 10.233.100.3:8080" -j {LOCAL_CHAIN}'
    ]


def test_no_endpoints_are_rejected() -> None:
    written = rules(web())
    said = '-m comment --comment "default/web:http has no endpoints"'
    assert chain(written, "filter", "KUBE-SERVICES") == [
        f"{said} -m tcp -p tcp -d 10.233.0.100 --dport 80 -j REJECT"
    ]
    assert chain(written, "filter", EXTERNAL) == [
        f"{said} -m addrtype --dst-type LOCAL -m tcp -p tcp --dport 32456 -j REJECT"
    ]
    assert chain(written, "nat", "KUBE-NODEPORTS") == []
    assert not any(has(written, prefix) for prefix in ("SVC", "SVL", "EXT"))


def external_local(cluster: str = "-s 10.233.64.0/18 ") -> list[str]:
    said = "for default/web:http external destinations"
    pods = [f'-m comment --comment "pod traffic {said}" {cluster}-j KUBE-SVC'] if cluster else []
    node = "-m addrtype --src-type LOCAL"
    return [
        *pods,
        f'-m comment --comment "masquerade LOCAL traffic {said}" {node} -j KUBE-MARK-MASQ',
        f'-m comment --comment "route LOCAL traffic {said}" {node} -j KUBE-SVC',
    ]


def test_external_policy_local() -> None:
    written = rules(web(LOCAL, REMOTE, external_local=True))
    assert own(written, "EXT") == [*external_local(), "-j KUBE-SVL"]
    assert own(written, "SVL") == [
        f'-m comment --comment "default/web:http -> 10.233.100.3:8080" -j {LOCAL_CHAIN}'
    ]
    assert len(own(written, "SVC")) == 3
    assert chain(written, "filter", EXTERNAL) == []


def test_external_policy_local_without_detector() -> None:
    written = rules(web(LOCAL, external_local=True), detector=None)
    assert own(written, "EXT") == [*external_local(""), "-j KUBE-SVL"]


@pytest.mark.parametrize("version", ["v1.25", "v1.33"])
def test_external_policy_local_without_local_endpoint(version: str) -> None:
    """Dropped in filter, after Pods and the node itself have been let through in nat."""
    written = rules(web(REMOTE, external_local=True), version=version)
    assert own(written, "EXT") == external_local()
    assert not has(written, "SVL")
    assert chain(written, "filter", "KUBE-SERVICES") == []
    assert chain(written, "filter", EXTERNAL) == [
        (
            '-m comment --comment "default/web:http has no local endpoints" '
            "-m addrtype --dst-type LOCAL -m tcp -p tcp --dport 32456 -j DROP"
        )
    ]
    assert len(chain(written, "nat", "KUBE-NODEPORTS")) == 1


def test_internal_policy_local() -> None:
    written = rules(web(LOCAL, REMOTE, node_port=0, internal_local=True))
    assert chain(written, "nat", "KUBE-SERVICES")[0] == f"{CLUSTER_IP} --dport 80 -j KUBE-SVL"
    assert own(written, "SVL") == [
        f"{CLUSTER_IP} --dport 80 ! -s 10.233.64.0/18 -j KUBE-MARK-MASQ",
        f'-m comment --comment "default/web:http -> 10.233.100.3:8080" -j {LOCAL_CHAIN}',
    ]
    assert not has(written, "SVC")
    assert ("nat", REMOTE_CHAIN) not in written.chains


def test_internal_policy_local_without_local_endpoint() -> None:
    written = rules(web(REMOTE, internal_local=True))
    assert chain(written, "filter", "KUBE-SERVICES") == [
        (
            '-m comment --comment "default/web:http has no local endpoints" '
            "-m tcp -p tcp -d 10.233.0.100 --dport 80 -j DROP"
        )
    ]
    assert len(chain(written, "nat", "KUBE-SERVICES")) == 1
    assert own(written, "SVC") == [
        f'-m comment --comment "default/web:http -> 10.233.200.2:8080" -j {REMOTE_CHAIN}'
    ]


def test_v124_drops_by_mark() -> None:
    written = rules(web(REMOTE, external_local=True), version="v1.24")
    assert own(written, "EXT")[-1] == "-j KUBE-SVL"
    assert own(written, "SVL") == [
        '-m comment --comment "default/web:http has no local endpoints" -j KUBE-MARK-DROP'
    ]
    assert chain(written, "filter", EXTERNAL) == []
    assert ("filter", "KUBE-PROXY-FIREWALL") not in written.chains


GOING = {"ready": False, "serving": True, "terminating": True}


def destinations(written: Rules) -> set[str]:
    return {
        line.text.rpartition(" ")[2]
        for line in written.lines
        if line.chain.startswith("KUBE-SEP") and "-j DNAT" in line.text
    }


def test_a_terminating_endpoint_serves_only_if_none_is_ready() -> None:
    going = replace(LOCAL, **GOING)
    assert destinations(rules(web(going, REMOTE))) == {"10.233.200.2:8080"}
    assert destinations(rules(web(going))) == {"10.233.100.3:8080"}
    assert destinations(rules(web(replace(going, serving=False)))) == set()
    assert destinations(rules(web(replace(LOCAL, ready=False)))) == set()


def test_a_terminating_local_endpoint_serves_policy_local_beside_ready_remote_ones() -> None:
    written = rules(web(replace(LOCAL, **GOING), REMOTE, external_local=True))
    assert own(written, "SVL") == [
        f'-m comment --comment "default/web:http -> 10.233.100.3:8080" -j {LOCAL_CHAIN}'
    ]
    assert own(written, "SVC")[1:] == [
        f'-m comment --comment "default/web:http -> 10.233.200.2:8080" -j {REMOTE_CHAIN}'
    ]
    assert destinations(written) == {"10.233.100.3:8080", "10.233.200.2:8080"}


@pytest.mark.parametrize(("version", "rejected"), [("v1.25", True), ("v1.26", False)])
def test_terminating_endpoints_serve_from_v126_on(version: str, *, rejected: bool) -> None:
    written = rules(web(replace(LOCAL, **GOING)), version=version)
    assert bool(chain(written, "filter", "KUBE-SERVICES")) is rejected


def test_an_endpoint_of_an_unknown_node_is_not_local() -> None:
    assert not has(rules(web(replace(LOCAL, node=""), external_local=True)), "SVL")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("be_liberal", [False, True])
def test_invalid_rule(version: str, *, be_liberal: bool) -> None:
    first = rules(version=version, be_liberal=be_liberal).by_chain()["filter", "KUBE-FORWARD"][0]
    left_out = be_liberal and Version.parse(version) >= Version(1, 29, 0)
    assert (first.text == "-m conntrack --ctstate INVALID -j DROP") is not left_out
    assert (first.reason == "invalid") is not left_out


COUNTERS = frozenset({"ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts"})


def test_counters() -> None:
    written = rules(web(LOCAL), nfacct=COUNTERS, version="v1.31")
    assert chain(written, "filter", "KUBE-FORWARD")[0] == (
        "-m conntrack --ctstate INVALID "
        "-m nfacct --nfacct-name ct_state_invalid_dropped_pkts -j DROP"
    )
    assert chain(written, "nat", "KUBE-NODEPORTS") == [
        (
            "-m comment --comment default/web:http -m tcp -p tcp -d 127.0.0.0/8 --dport 32456 "
            "-m nfacct --nfacct-name localhost_nps_accepted_pkts -j KUBE-EXT"
        ),
        "-m comment --comment default/web:http -m tcp -p tcp --dport 32456 -j KUBE-EXT",
    ]
    silent = rules(web(LOCAL), nfacct=COUNTERS, localhost_node_ports=False)
    assert len(chain(silent, "nat", "KUBE-NODEPORTS")) == 1
    old = rules(web(LOCAL), nfacct=COUNTERS, version="v1.30")
    assert not [line for line in old.lines if "nfacct" in line.text]


def test_session_affinity() -> None:
    written = rules(web(LOCAL, REMOTE, affinity_seconds=10800))
    comment = '-m comment --comment "default/web:http -> 10.233.100.3:8080"'
    assert own(written, "SVC")[1] == (
        f"{comment} -m recent --name {LOCAL_CHAIN} --rcheck --seconds 10800 --reap -j {LOCAL_CHAIN}"
    )
    assert len(own(written, "SVC")) == 5
    assert chain(written, "nat", LOCAL_CHAIN)[1] == (
        f"-m comment --comment default/web:http -m recent --name {LOCAL_CHAIN} --set "
        "-m tcp -p tcp -j DNAT --to-destination 10.233.100.3:8080"
    )
