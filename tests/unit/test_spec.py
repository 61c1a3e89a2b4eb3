"""The lab language: what a file says, what its defaults are, what probes and variants mean."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from netlab import spec
from netlab.compile import compile_lab
from netlab.errors import LabError, UsageError
from netlab.model import Lab, PolicyRoute, RawNeighbour, RawRoute, RawRule, Version

FILE = Path("small.yaml")
SMALL = """\
name: small
underlay:
  networks:
    lan: {subnets: [172.16.0.0/16, 172.17.0.0/16]}
    wan: {subnets: [1.1.1.0/24]}
  routers:
    gw: {lan: [172.16.0.1, 172.17.0.1], wan: [1.1.1.254]}
  hosts:
    ext: {network: lan, address: 172.16.1.100}
    rem: {network: wan, address: 1.1.1.1, gateway: null, ports: [443]}
cluster:
  podCIDR: 10.233.64.0/18
  serviceCIDR: 10.233.0.0/18
nodes:
  node1: {nics: {eth0: {network: lan, address: 172.16.1.2}}}
  node2: {nics: {eth0: {network: lan, address: 172.16.1.3}, eth0.100: {link: eth0, vlan: 100}}}
networkAttachments:
  macvlan-lan: {cni: macvlan, master: eth0, subnet: 172.16.0.0/16}
pods:
  ca1: {node: node1, nics: {eth0: {attach: calico, address: 10.233.100.3}}}
  ca2: {node: node2, nics: {eth0: {attach: calico}}}
  ma1: {node: node1, nics: {eth0: {attach: macvlan-lan, address: 172.16.100.2}}}
  du2: {node: node2, nics: {eth0: {attach: calico}, net1: {attach: macvlan-lan}}}
services:
  web: {type: NodePort, ports: [{port: 80, targetPort: 8080}], endpoints: [ma1, {pod: du2, nic: net1}]}
  dns: {ports: [{name: udp, port: 53, protocol: UDP}, {name: tcp, port: 53}], endpoints: [ca1]}
  bare: {clusterIP: None, ports: [{port: 80}], endpoints: [ca1]}
"""


def parse(text: str = "", variant: str = "base", **replaced: str) -> Lab:
    """`SMALL` with *text* behind it; *replaced*: a top-level key's own text instead."""
    lab = SMALL
    for key, value in replaced.items():
        start = lab.index(f"\n{key}:") + 1
        rest = lab[start:].split("\n")
        length = next(i for i, line in enumerate(rest) if i and not line.startswith(" "))
        lab = lab[:start] + f"{key}: {value}\n" + "\n".join(rest[length:])
    return spec.parse(lab + text, FILE, variant=variant)


def cluster(settings: str) -> Lab:
    return parse(cluster=f"{{podCIDR: 10.233.64.0/18, serviceCIDR: 10.233.0.0/18, {settings}}}")


def problems(text: str, variant: str = "base") -> list[str]:
    with pytest.raises(LabError) as caught:
        parse(text, variant)
    return [f"{problem.path}: {problem.message}" for problem in caught.value.problems]


# --- defaults ------------------------------------------------------------------------------------


def test_defaults_of_the_cluster() -> None:
    node = parse().nodes["node1"]
    assert node.calico.version == Version(3, 30)
    assert [(p.cidr, p.nat_outgoing, p.block_size) for p in node.calico.ip_pools] == [
        (IPv4Network("10.233.64.0/18"), True, 26)
    ]
    assert node.calico.mtu == 1450
    assert node.iptables_backend == "nft"
    assert node.sysctl == {}
    proxy = node.kube_proxy
    assert proxy is not None
    assert proxy.version == Version(1, 33)
    assert proxy.cluster_cidr == IPv4Network("10.233.64.0/18")
    assert not proxy.be_liberal_at_start
    coordinator = node.coordinator
    assert coordinator is not None
    assert coordinator.overlay_pod_cidr == (IPv4Network("10.233.64.0/18"),)
    assert coordinator.service_cidr == (IPv4Network("10.233.0.0/18"),)
    assert coordinator.hijack_cidr == (IPv4Network("169.254.0.0/16"),)
    assert coordinator.host_rule_table == 500


def test_default_routes_are_the_router_in_the_subnet() -> None:
    lab = parse()
    assert lab.nodes["node1"].gateway == IPv4Address("172.16.0.1")
    assert lab.hosts["ext"].gateway == IPv4Address("172.16.0.1")
    attachment = lab.pods["ma1"].nics[0].attachment
    assert attachment is not None
    assert attachment.gateway == IPv4Address("172.16.0.1")


def test_null_is_no_default_route() -> None:
    assert parse().hosts["rem"].gateway is None


def test_servers_listen_on_80_on_target_ports_and_on_what_is_asked() -> None:
    lab = parse()
    assert lab.pods["ma1"].ports == (80, 8080)
    assert lab.pods["ca1"].ports == (80, 53)
    assert lab.hosts["rem"].ports == (80, 443)


@pytest.mark.parametrize("value", ["false", "null"])
def test_kube_proxy_can_be_off(value: str) -> None:
    assert cluster(f"kubeProxy: {value}").nodes["node1"].kube_proxy is None


def test_cluster_cidr_null_is_no_detector() -> None:
    proxy = cluster("kubeProxy: {clusterCIDR: null}").nodes["node1"].kube_proxy
    assert proxy is not None
    assert proxy.cluster_cidr is None


def test_a_lab_without_a_cluster() -> None:
    lab = spec.parse(
        "name: wire\nunderlay: {networks: {lan: {subnets: [10.0.0.0/24]}},"
        " hosts: {a: {network: lan, address: 10.0.0.1}, b: {network: lan, address: 10.0.0.2}}}\n"
        "expect: [{id: 1, probe: curl a -> b}]\n".replace("id: 1", "id: one"),
        FILE,
    )
    assert lab.actors == ("a", "b")
    assert compile_lab(lab).netns == ("lan", "a", "b")


# --- what kube-proxy found when it started -------------------------------------------------------

LIBERAL = "net.netfilter.nf_conntrack_tcp_be_liberal"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (f"sysctl: {{{LIBERAL}: 1}}", True),
        (f"sysctl: {{{LIBERAL}: 0}}", False),
        (f"sysctl: {{{LIBERAL}: 1}}, kubeProxy: {{sysctlAtStart: {{}}}}", False),
        (f"sysctl: {{{LIBERAL}: 1}}, kubeProxy: {{sysctlAtStart: {{{LIBERAL}: 0}}}}", False),
        (f"kubeProxy: {{sysctlAtStart: {{{LIBERAL}: 1}}}}", True),
    ],
)
def test_be_liberal_at_start(settings: str, expected: bool) -> None:  # noqa: FBT001 - a case
    proxy = cluster(settings).nodes["node1"].kube_proxy
    assert proxy is not None
    assert proxy.be_liberal_at_start is expected


# --- overrides -----------------------------------------------------------------------------------


def test_a_node_overrides_the_cluster_field_by_field() -> None:
    lab = parse(
        cluster="{podCIDR: 10.233.64.0/18, serviceCIDR: 10.233.0.0/18, calico: {mtu: 1400,"
        " felix: {chainInsertMode: Append}}, sysctl: {net.ipv4.tcp_sack: 1, net.ipv4.ip_forward: 1}}",
        nodes="{node1: {nics: {eth0: {network: lan, address: 172.16.1.2}}, iptablesBackend: Legacy,"
        " kubeProxy: {version: v1.24}, sysctl: {net.ipv4.tcp_sack: 0},"
        " calico: {natOutgoing: false, felix: {vxlanPort: 8472}}},"
        " node2: {nics: {eth0: {network: lan, address: 172.16.1.3}}}}",
    )
    one, two = lab.nodes["node1"], lab.nodes["node2"]
    assert (one.iptables_backend, two.iptables_backend) == ("legacy", "nft")
    assert one.calico.mtu == two.calico.mtu == 1400
    assert (one.calico.felix.vxlan_port, two.calico.felix.vxlan_port) == (8472, 4789)
    assert one.calico.felix.chain_insert_mode == two.calico.felix.chain_insert_mode == "Append"
    assert (one.calico.ip_pools[0].nat_outgoing, two.calico.ip_pools[0].nat_outgoing) == (
        False,
        True,
    )
    assert one.kube_proxy is not None
    assert one.kube_proxy.version == Version(1, 24)
    assert one.sysctl == {"net.ipv4.tcp_sack": "0", "net.ipv4.ip_forward": "1"}
    assert two.sysctl == {"net.ipv4.tcp_sack": "1", "net.ipv4.ip_forward": "1"}


def test_the_attachment_wins_over_the_annotation_and_that_over_node_and_cluster() -> None:
    lab = parse(
        cluster="{podCIDR: 10.233.64.0/18, serviceCIDR: 10.233.0.0/18, spiderpool: {coordinator:"
        " {hostRuleTable: 1, podRPFilter: 1, vethMTU: 1001, markRules: false}}}",
        nodes="{node1: {nics: {eth0: {network: lan, address: 172.16.1.2}}, spiderpool:"
        " {coordinator: {podRPFilter: 2, vethMTU: 1002, podMACPrefix: '0a:02'}}}}",
        networkAttachments="{mv: {cni: macvlan, master: eth0, subnet: 172.16.0.0/16,"
        " coordinator: {podMACPrefix: '0a:04', policyRoutes: [{dst: 198.18.0.0/15, gw: 172.16.0.9}]}}}",
        pods="{p: {node: node1, nics: {eth0: {attach: mv}},"
        " coordinator: {vethMTU: 1003, podMACPrefix: '0a:03'}}}",
        services="{}",
    )
    made = lab.pods["p"].nics[0].coordinator
    assert made is not None
    assert made.host_rule_table == 1
    assert made.pod_rp_filter == 2
    assert made.veth_mtu == 1003
    assert made.pod_mac_prefix == "0a:04"
    assert not made.mark_rules
    assert made.policy_routes == (
        PolicyRoute(IPv4Network("198.18.0.0/15"), IPv4Address("172.16.0.9")),
    )


@pytest.mark.parametrize("off", ["false", "{behaviour: none}"])
def test_an_attachment_without_coordinator(off: str) -> None:
    lab = parse(
        networkAttachments="{macvlan-lan: {cni: macvlan, master: eth0, subnet: 172.16.0.0/16,"
        f" coordinator: {off}}}}}"
    )
    assert lab.pods["ma1"].nics[0].coordinator is None
    assert lab.nodes["node1"].coordinator is not None


def test_behaviour_none_for_the_whole_cluster() -> None:
    lab = cluster("spiderpool: {coordinator: {behaviour: none}}")
    assert lab.nodes["node1"].coordinator is None
    assert lab.pods["ma1"].nics[0].coordinator is None


def test_pools_beside_the_pod_cidr() -> None:
    lab = parse(
        cluster="{serviceCIDR: 10.233.0.0/18, calico: {natOutgoing: false, ipPools: {old: {cidr:"
        " 10.250.0.0/16, disabled: true}, new: {cidr: 10.233.64.0/18, natOutgoing: true}}}}"
    )
    node = lab.nodes["node2"]
    assert [(p.name, p.nat_outgoing, p.disabled) for p in node.calico.ip_pools] == [
        ("old", False, True),
        ("new", True, False),
    ]
    assert node.coordinator is not None
    assert node.coordinator.overlay_pod_cidr == (IPv4Network("10.233.64.0/18"),)
    assert all(block.subnet_of(IPv4Network("10.233.64.0/18")) for block in node.pod_cidrs)
    assert lab.pods["ca2"].nics[0].address.ip in IPv4Network("10.233.64.0/18")


# --- addresses that the file leaves out ----------------------------------------------------------


def test_calico_gives_the_lowest_free_address_of_the_nodes_block() -> None:
    lab = parse()
    assert lab.nodes["node1"].pod_cidrs == (IPv4Network("10.233.100.0/26"),)
    assert lab.nodes["node2"].pod_cidrs == (IPv4Network("10.233.64.0/26"),)
    # The block's first address is the tunnel's.
    assert lab.pods["ca2"].nics[0].address == IPv4Interface("10.233.64.1/32")
    assert lab.pods["du2"].nics[0].address == IPv4Interface("10.233.64.2/32")


def test_a_full_block_is_followed_by_another() -> None:
    many = "".join(
        f"  p{number}: {{node: node1, nics: {{eth0: {{attach: calico}}}}}}\n"
        for number in range(130)
    )
    lab = parse(pods=f"\n{many}", services="{}")
    addresses = [pod.nics[0].address.ip for pod in lab.pods.values()]
    assert len(set(addresses)) == 130
    assert len(lab.nodes["node1"].pod_cidrs) == 3
    assert lab.nodes["node1"].pod_cidrs[0].network_address not in addresses
    assert all(any(a in block for block in lab.nodes["node1"].pod_cidrs) for a in addresses)


def test_an_attachment_gives_the_lowest_address_that_nobody_has() -> None:
    # 172.16.0.1 is the router's.
    assert parse().pods["du2"].nics[1].address == IPv4Interface("172.16.0.2/16")


def test_cluster_ips_and_node_ports_begin_where_kubernetes_chooses_by_itself() -> None:
    lab = parse()
    assert lab.services["web"].cluster_ip == IPv4Address("10.233.1.0")
    assert lab.services["dns"].cluster_ip == IPv4Address("10.233.1.1")
    assert lab.services["bare"].cluster_ip is None
    assert lab.services["web"].ports[0].node_port == 30086
    assert lab.services["dns"].ports[0].node_port is None


def test_endpoints_carry_the_address_of_their_nic() -> None:
    first, second = parse().services["web"].endpoints
    assert (first.pod, first.nic, first.node) == ("ma1", "eth0", "node1")
    assert (second.pod, second.nic, second.address) == ("du2", "net1", IPv4Address("172.16.0.2"))
    assert (first.ready, first.serving, first.terminating) == (True, True, False)


def test_the_same_file_gives_the_same_addresses() -> None:
    assert parse() == parse()


# --- text is what it looks like ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.30", "1.30"),
        ("yes", "yes"),
        ("0o17", "0o17"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("1e3", "1e3"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("'true'", "true"),
        ("'17'", "17"),
        ("|\n    kept", "kept\n"),
    ],
)
def test_no_scalar_changes_its_meaning(text: str, expected: str) -> None:
    assert parse(f"title: {text}\n").title == expected


def test_a_version_keeps_its_zero() -> None:
    proxy = cluster("kubeProxy: {version: 1.30}").nodes["node1"].kube_proxy
    assert proxy is not None
    assert proxy.version == Version(1, 30)


def test_aliases_repeat_a_value() -> None:
    lab = parse(
        networkAttachments="{a: &mv {cni: macvlan, master: eth0, subnet: 172.16.0.0/16}, b: *mv}",
        pods="{ma1: {node: node1, nics: {eth0: {attach: a}, net1: {attach: b}}}}",
        services="{}",
    )
    one, two = (nic.attachment for nic in lab.pods["ma1"].nics)
    assert one is not None
    assert two is not None
    assert (one.name, two.name) == ("a", "b")
    assert one.subnet == two.subnet


# --- underlay ------------------------------------------------------------------------------------


def test_a_vlan_is_on_its_link_and_may_have_subnets_of_its_own() -> None:
    lab = parse(
        nodes="{node1: {nics: {eth0: {network: lan, address: 172.16.1.2},"
        " eth0.100: {link: eth0, vlan: 100, address: 10.100.0.2/24, mtu: 1400}}},"
        " node2: {nics: {eth0: {network: lan, address: 172.16.1.3}}}}"
    )
    vlan = lab.nodes["node1"].nics[1]
    assert (vlan.network, vlan.link, vlan.vlan, vlan.mtu) == (None, "eth0", 100, 1400)
    assert vlan.address == IPv4Interface("10.100.0.2/24")
    assert lab.nodes["node1"].address == IPv4Address("172.16.1.2")


def test_allowed_mistakes_are_no_problems() -> None:
    lab = parse(
        "allow: [duplicate-address, foreign-address]\n",
        pods="{ca1: {node: node1, nics: {eth0: {attach: calico, address: 10.244.0.1}}},"
        " ma1: {node: node1, nics: {eth0: {attach: macvlan-lan, address: 172.16.1.2}}},"
        " du2: {node: node2, nics: {eth0: {attach: calico}, net1: {attach: macvlan-lan}}}}",
    )
    assert lab.pods["ma1"].nics[0].address == IPv4Interface("172.16.1.2/16")
    assert lab.allow == {"duplicate-address", "foreign-address"}


def test_extra_objects() -> None:
    lab = parse(
        "",
        nodes="{node1: {nics: {eth0: {network: lan, address: 172.16.1.2}}, extra: {before: {sysctls:"
        " {net.ipv4.conf.eth0.rp_filter: 1}}, after: {routes: [{dst: default, dev: eth0,"
        " via: 172.16.0.9, table: 100}, {dst: 10.9.0.0/16, type: blackhole}], rules: [{from:"
        " 10.0.0.0/8, fwmark: 0x10, table: main}], neighbours: [{address: 172.16.1.9, dev: eth0,"
        " mac: 'AA:00:00:00:00:01'}], iptables: ['-t filter -A FORWARD -j DROP']}}},"
        " node2: {nics: {eth0: {network: lan, address: 172.16.1.3}}}}",
    )
    extra = lab.nodes["node1"].extra
    assert extra.before.sysctls == {"net.ipv4.conf.eth0.rp_filter": "1"}
    assert extra.after.routes == (
        RawRoute(IPv4Network("0.0.0.0/0"), "eth0", IPv4Address("172.16.0.9"), table=100),
        RawRoute(IPv4Network("10.9.0.0/16"), kind="blackhole"),
    )
    assert extra.after.rules == (RawRule(254, src=IPv4Network("10.0.0.0/8"), fwmark=0x10),)
    assert extra.after.neighbours == (
        RawNeighbour(IPv4Address("172.16.1.9"), "eth0", "aa:00:00:00:00:01"),
    )
    assert extra.after.iptables == ("-t filter -A FORWARD -j DROP",)
    assert compile_lab(lab)


# --- probes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "source", "target"),
    [
        ("curl ma1 -> ca1", "curl", ("ma1", None, None), ("10.233.100.3", 80, "ca1", None)),
        ("ma1 -> ca1", "curl", ("ma1", None, None), ("10.233.100.3", 80, "ca1", None)),
        ("ping ma1->ca1", "ping", ("ma1", None, None), ("10.233.100.3", 80, "ca1", None)),
        ("tcp du2.net1 -> ma1:8080", "tcp", ("du2", "net1", None), ("172.16.100.2", 8080, "ma1", None)),
        ("udp ma1 -> du2.net1", "udp", ("ma1", None, None), ("172.16.0.2", 80, "du2", None)),
        ("curl du2@172.16.0.2 -> node1", "curl", ("du2", None, "172.16.0.2"), ("172.16.1.2", 80, "node1", None)),
        ("curl node1.vxlan.calico -> ca2", "curl", ("node1", "vxlan.calico", None), ("10.233.64.1", 80, "ca2", None)),
        ("curl ma1 -> node2.eth0:22", "curl", ("ma1", None, None), ("172.16.1.3", 22, "node2", None)),
        ("ping ma1 -> gw.eth1", "ping", ("ma1", None, None), ("1.1.1.254", 80, "gw", None)),
        ("ping gw -> rem", "ping", ("gw", None, None), ("1.1.1.1", 80, "rem", None)),
        ("curl ext -> rem:443", "curl", ("ext", None, None), ("1.1.1.1", 443, "rem", None)),
        ("curl ma1 -> 8.8.8.8:53", "curl", ("ma1", None, None), ("8.8.8.8", 53, None, None)),
        ("curl ma1 -> 172.16.1.3", "curl", ("ma1", None, None), ("172.16.1.3", 80, "node2", None)),
        ("curl ma1 -> web", "curl", ("ma1", None, None), ("10.233.1.0", 80, None, "default/web")),
        ("curl ma1 -> svc/web:81", "curl", ("ma1", None, None), ("10.233.1.0", 81, None, "default/web")),
        ("udp ma1 -> dns", "udp", ("ma1", None, None), ("10.233.1.1", 53, None, "default/dns")),
        ("tcp ma1 -> svc/dns:tcp", "tcp", ("ma1", None, None), ("10.233.1.1", 53, None, "default/dns")),
        ("ping ma1 -> dns", "ping", ("ma1", None, None), ("10.233.1.1", 53, None, "default/dns")),
        ("curl ext -> node2:web", "curl", ("ext", None, None), ("172.16.1.3", 30086, "node2", "default/web")),
        ("curl ext -> node2.eth0:web:80", "curl", ("ext", None, None), ("172.16.1.3", 30086, "node2", "default/web")),
    ],
)  # fmt: skip
def test_probe(
    text: str,
    kind: str,
    source: tuple[str, str | None, str | None],
    target: tuple[str, int, str | None, str | None],
) -> None:
    probe = spec.parse_probe(text, parse())
    bound = probe.source.address
    assert probe.kind == kind
    assert (probe.source.actor, probe.source.nic, bound and str(bound)) == source
    goal = probe.target
    assert (str(goal.address), goal.port, goal.actor, goal.service) == target
    assert goal.text == text.split("->")[1].strip()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected [ping|curl|tcp|udp] SRC -> TARGET"),
        ("curl ma1", "expected [ping|curl|tcp|udp] SRC -> TARGET"),
        ("curl ma1 -> ca1 -> ca2", "expected [ping|curl|tcp|udp] SRC -> TARGET"),
        ("crul ma1 -> ca1", "no probe 'crul' (did you mean 'curl'?)"),
        ("curl web -> ca1", "no node, Pod, host or router 'web'"),
        ("curl lan -> ca1", "no node, Pod, host or router 'lan'"),
        ("curl ma1 -> ca1:0", "a port is 1..65535"),
        ("curl ma1 -> ca1:", "expected TARGET[:port]"),
        ("curl ma1 -> ca1:80:80", "expected one port"),
        ("curl ma1 -> 1.2.3.444", "'1.2.3.444' is not an IPv4 address"),
        ("curl ma1 -> bare", "Service bare is headless"),
        ("curl ma1 -> node1:dns", "Service dns is not of type NodePort"),
        ("curl ma1 -> web:https", "Service web has no port https/TCP, it has 80/TCP"),
        ("udp ma1 -> node1:web", "Service web has no port any/UDP"),
        ("curl ma1 -> ca1.net1", "ca1 has no address on 'net1': it has eth0"),
        ("curl ma1@10.0.0.1 -> ca1", "ma1 has no address 10.0.0.1: it has 172.16.100.2"),
        ("curl ma1 -> svc/wep", "no Service 'wep' (did you mean 'web'?)"),
    ],
)
def test_no_probe(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec.parse_probe(text, parse())
    assert said in str(caught.value)


def test_a_pod_hides_a_service_of_its_name() -> None:
    lab = parse(services="{ma1: {ports: [{port: 80}], endpoints: [ca1]}}")
    assert spec.parse_probe("curl ca1 -> ma1", lab).target.actor == "ma1"
    assert spec.parse_probe("curl ca1 -> svc/ma1", lab).target.service == "default/ma1"


# --- expectations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("ma1", "172.16.100.2"),
        ("du2.net1", "172.16.0.2"),
        ("node1", "172.16.1.2"),
        ("node1.vxlan.calico", "10.233.100.0"),
        ("gw.eth1", "1.1.1.254"),
        ("9.9.9.9", "9.9.9.9"),
    ],
)
def test_seen_as(name: str, address: str) -> None:
    (entry,) = parse(f"expect: [{{id: a, probe: curl ma1 -> ca1, seenAs: {name}}}]\n").expect
    assert (entry.seen_as, entry.seen_as_address) == (name, IPv4Address(address))
    assert (entry.result, entry.count, entry.path) == ("delivered", 1, "expect[0]")


@pytest.mark.parametrize(
    ("text", "kind", "facts", "absent"),
    [
        ("route: 8.8.8.8, dev: eth0", "route", {"dst": "8.8.8.8", "dev": "eth0"}, False),
        ("route: default, table: 100, absent: true", "route", {"dst": "default", "table": "100"}, True),
        ("rule: {from: 10.0.0.1, table: 100}", "rule", {"from": "10.0.0.1", "table": "100"}, False),
        ("rule: {fwmark: 0x1}", "rule", {"fwmark": "0x1"}, False),
        ("link: eth0, mtu: 1450, up: true", "link", {"name": "eth0", "mtu": "1450", "up": "true"}, False),
        ("neighbour: 1.2.3.4, state: PERMANENT", "neighbour", {"address": "1.2.3.4", "state": "PERMANENT"}, False),
    ],
)  # fmt: skip
def test_state(text: str, kind: str, facts: dict[str, str], absent: bool) -> None:  # noqa: FBT001 - a case
    (entry,) = parse(f"expect: [{{id: a, state: {{in: du2, {text}}}}}]\n").expect
    assert entry.state is not None
    assert (entry.state.where, entry.state.kind) == ("du2", kind)
    assert entry.state.facts == facts
    assert entry.state.absent is absent


def test_a_broken_entry_is_not_told_again_by_those_that_need_it() -> None:
    found = problems(
        "expect:\n  - {id: a, probe: curl ma1 -> bad, seenAs: ma1}\n"
        "  - {id: b, probe: curl bad -> ma1}\n  - {id: c, state: {in: bad, link: eth0}}\n"
        "variants: {v: {set: {pods.bad: {node: node9, nics: {eth0: {attach: calico}}}}}}\n",
        variant="v",
    )
    assert found == ["pods.bad.node: no node 'node9' (did you mean 'node2'?)"]


def test_reasons_are_a_closed_list_of_component_and_reason() -> None:
    known = spec.reasons()
    assert {
        *("kube-proxy/invalid", "kube-proxy/no-local-endpoints", "felix/invalid", "felix/rpfilter"),
        *("kernel/no-route", "kernel/rp-filter", "kernel/neighbour-failed", "kernel/no-listener"),
    } <= known.keys()
    assert all(name.count("/") == 1 and meaning for name, meaning in known.items())


# --- variants ------------------------------------------------------------------------------------


def variant(sets: str, expect: str = "[]", base: str = "[]") -> Lab:
    return parse(f"expect: {base}\nvariants: {{v: {{set: {{{sets}}}, expect: {expect}}}}}\n", "v")


@pytest.mark.parametrize(
    ("path", "value", "read"),
    [
        ("cluster.kubeProxy.version", "v1.28", lambda lab: lab.nodes["node1"].kube_proxy.version),
        ("cluster.kubeProxy", "false", lambda lab: lab.nodes["node1"].kube_proxy),
        (f"cluster.sysctl.{LIBERAL}", "1", lambda lab: lab.nodes["node1"].sysctl[LIBERAL]),
        ("nodes.node1.calico.mtu", "1300", lambda lab: lab.nodes["node1"].calico.mtu),
        ("nodes.node2.nics.eth0.100.mtu", "1300", lambda lab: lab.nodes["node2"].nics[1].mtu),
        ("'nodes.node2.nics[eth0.100].mtu'", "1300", lambda lab: lab.nodes["node2"].nics[1].mtu),
        ("'services.dns.ports[tcp].port'", "54", lambda lab: lab.services["dns"].ports[1].port),
        ("'services.dns.ports[0].port'", "54", lambda lab: lab.services["dns"].ports[0].port),
        ("'services.web.endpoints[ma1]'", "ca1", lambda lab: lab.services["web"].endpoints[0].pod),
        ("'services.web.endpoints[du2].ready'", "false", lambda lab: lab.services["web"].endpoints[1].ready),
    ],
)  # fmt: skip
def test_set(path: str, value: str, read: Any) -> None:  # noqa: ANN401 - reads any setting
    expected: dict[str, object] = {"v1.28": Version(1, 28), "false": None, "1": "1"}
    before = None if LIBERAL in path else read(parse())
    after = read(variant(f"{path}: {value}"))
    assert str(after) != str(before)
    if path.endswith("ready'"):
        assert after is False
    else:
        assert str(after) == str(expected.get(value, value))


def test_null_removes() -> None:
    lab = variant("pods.ca2: null, 'services.web.endpoints[du2]': null, 'underlay.hosts': null")
    assert "ca2" not in lab.pods
    assert [endpoint.pod for endpoint in lab.services["web"].endpoints] == ["ma1"]
    assert lab.hosts == {}


def test_a_variant_can_add_what_the_base_lacks() -> None:
    lab = variant("pods.new: {node: node1, nics: {eth0: {attach: calico}}}")
    assert lab.pods["new"].node == "node1"


def test_changes_do_not_leak_into_other_variants() -> None:
    text = "variants: {a: {set: {cluster.calico.mtu: 1300}}, b: {set: {cluster.podCIDR: 10.64.0.0/12}}}"
    first = parse(f"{text}\n", "a")
    with pytest.raises(LabError, match="in no pool"):
        parse(f"{text}\n", "b")
    assert first.nodes["node1"].calico.mtu == 1300
    assert parse(f"{text}\n").nodes["node1"].calico.mtu == 1450


def test_a_variants_entry_replaces_the_bases_in_its_place() -> None:
    base = (
        "[{id: a, probe: curl ma1 -> ca1, seenAs: ma1, tags: [t], count: 2, why: w},"
        " {id: b, probe: ping ma1 -> ca1}]"
    )
    lab = variant(
        "", base=base, expect="[{id: c, probe: ping ca1 -> ma1}, {id: a, result: dropped}]"
    )
    assert [entry.id for entry in lab.expect] == ["a", "b", "c"]
    replaced = lab.expect[0]
    # What is asked stays, what was expected of it does not.
    assert str(replaced.probe) == "curl ma1 -> ca1"
    assert (replaced.count, replaced.tags) == (2, ("t",))
    assert (replaced.result, replaced.seen_as, replaced.why) == ("dropped", None, "")
    assert replaced.path == "variants.v.expect[1]"


def test_what_a_variant_sets_is_kept_for_the_headline() -> None:
    lab = variant(
        "cluster.kubeProxy: {version: v1.28, masqueradeAll: true}, cluster.calico.mtu: 1400"
    )
    assert lab.changes == {
        "cluster.kubeProxy": "version=v1.28, masqueradeAll=true",
        "cluster.calico.mtu": "1400",
    }
    assert (lab.variant, lab.variants) == ("v", ("v",))


def test_a_bad_value_is_pointed_at_in_the_variant() -> None:
    with pytest.raises(LabError) as caught:
        variant("cluster.calico.mtu: 20")
    (problem,) = caught.value.problems
    last = len(SMALL.splitlines()) + 2
    assert (problem.line, problem.path) == (last, "cluster.calico.mtu")


# --- places and the schema -----------------------------------------------------------------------


def test_every_setting_has_its_place() -> None:
    lab = parse()
    lines = SMALL.splitlines()
    keys = [path for path in lab.sources if path and not path.endswith("]")]
    assert len(keys) > 80
    for path in keys:
        line, column = lab.sources[path]
        key = path.rpartition(".")[2]
        assert lines[line - 1][column - 1 :].startswith((key, "eth0.100"))
    assert lab.sources["services.web.endpoints[1]"] == (25, 91)


def test_the_schema_is_a_schema_and_describes_everything() -> None:
    schema = spec.schema()
    jsonschema_rs.meta.validate(schema)
    assert list(_undescribed(schema, "")) == []


def _undescribed(part: Any, path: str) -> Any:  # noqa: ANN401 - a schema
    for name, below in part.get("properties", {}).items():
        if "description" not in below and path.rpartition(".")[2] not in {"state", "rule"}:
            yield f"{path}.{name}"
        yield from _undescribed(below, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(part.get(key), dict):
            yield from _undescribed(part[key], f"{path}.*")


def test_the_schema_lists_every_reason() -> None:
    schema = spec.schema()
    listed = {entry.get("const") for entry in schema["$defs"]["by"]["oneOf"]}
    assert set(spec.reasons()) <= listed
    validator = jsonschema_rs.Draft202012Validator(schema)
    entry = {"id": "a", "probe": "x", "by": "kube-proxy/invalid"}
    lab = {"name": "a", "underlay": {"networks": {}}, "expect": [entry]}
    assert validator.is_valid(lab)
    assert validator.is_valid({**lab, "expect": [{**entry, "by": "user/my-own"}]})
    assert not validator.is_valid({**lab, "expect": [{**entry, "by": "kube-proxy/nothing"}]})
