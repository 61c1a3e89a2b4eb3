"""The lab language: what a file says, what its defaults are, what probes and variants mean."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path

import pytest

from netlab import spec
from netlab.compile import compile_lab
from netlab.model import Lab, PolicyRoute, RawNeighbour, RawRoute, RawRule, Version

FILE = Path("small.yaml")
SMALL = Path(__file__).with_name("small.yaml").read_text()


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
        "expect: [{id: one, probe: curl a -> b}]\n",
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
        " felix: {chainInsertMode: Append}},"
        " sysctl: {net.ipv4.tcp_sack: 1, net.ipv4.ip_forward: 1}}",
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
        " coordinator: {podMACPrefix: '0a:04',"
        " policyRoutes: [{dst: 198.18.0.0/15, gw: 172.16.0.9}]}}}",
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
        nodes="{node1: {nics: {eth0: {network: lan, address: 172.16.1.2}},"
        " extra: {before: {sysctls: {net.ipv4.conf.eth0.rp_filter: 1}},"
        " after: {routes: [{dst: default, dev: eth0,"
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
