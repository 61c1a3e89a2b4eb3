"""Felix' chains, hooks and sets against what Felix itself has written.

Sources of the literal values: dumps of real clusters (AKS with Calico v3.2x, an IPVS cluster with
Calico VXLAN, as published) and projectcalico/calico felix/iptables/table_test.go,
felix/hashutils/id_test.go and felix/rules/endpoints_test.go.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network

import pytest

from netlab.cni import felix
from netlab.cni.felix_chains import Body, Endpoint, Renderer, Rule, chain_name
from netlab.model import Calico, Felix, IPPool, Version
from netlab.plan import Table

POOL = IPPool("default", IPv4Network("10.233.64.0/18"))
ALL_VERSIONS = ("v3.27", "v3.28.0", "v3.28.2", "v3.29", "v3.30", "v3.31.0", "v3.31.6", "v3.32.1")


def calico(version: str = "v3.30", *pools: IPPool, **settings: str | int) -> Calico:
    return Calico(Version.parse(version), pools or (POOL,), felix=Felix(**settings))


def renderer(
    version: str = "v3.30",
    interfaces: Sequence[str] = (),
    lowest_mark: int = 0x10000,
    **given: str | int,
) -> Renderer:
    endpoints = [Endpoint(name, "default", name.removeprefix("cali")) for name in interfaces]
    return Renderer(calico(version, **given), endpoints, lowest_mark)


def bodies(made: Renderer, table: Table) -> dict[str, Body]:
    return {body.name: body for body in made.chains(table)}


def lines(made: Renderer, table: Table, chain: str) -> list[str]:
    return [rule.render() for rule in bodies(made, table)[chain].rules]


def hashes_of(made: Renderer, table: Table, chain: str) -> list[str]:
    return felix.rule_hashes(chain, bodies(made, table)[chain].rules)


# --- names and hashes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "suffix", "length", "name"),
    [
        ("felix", "1234", 10, "felix1234"),
        ("felix", "123456", 11, "felix123456"),
        ("felix", "_2345", 10, "felix_kMQI"),
        ("felix", "_234", 10, "felix_234"),
        ("felix", "12345678910", 13, "felix_Y2QCZIS"),
        ("cali-pri-", "kns.calico-system", 28, "cali-pri-kns.calico-system"),
        ("cali-pri-", "ksa.kube-system.coredns", 28, "cali-pri-_u2Tn2rSoAPffvE7JO6"),
        ("cali-pri-", "ksa.kube-system.metrics-server", 28, "cali-pri-_CVSZITRyIpEmH8AB6H"),
        ("cali-pro-", "ksa.kube-system.konnectivity-agent", 28, "cali-pro-_b-WIgmNvlBH1FuEYm2"),
        ("cali-po-", "aaa-allow-konnectivity-agent", 28, "cali-po-_j5sVgQTfF-APgMw0kN9"),
    ],
)
def test_a_chain_name_that_is_too_long_becomes_a_hash(
    prefix: str, suffix: str, length: int, name: str
) -> None:
    assert chain_name(prefix, suffix, length) == name


@pytest.mark.parametrize(
    ("chain", "rules", "hashes"),
    [
        (
            "FORWARD",
            ["--jump DROP", "--jump ACCEPT", "--jump DROP", "--jump ACCEPT"],
            ["hecdSCslEjdBPBPo", "plvr29-ZiKUwbzDV", "BMJ7gfua-eMLZ8Gu", "rmnR1gc8haxMy_0W"],
        ),
        ("cali-foobar", ["--jump ACCEPT", "--jump DROP"], ["42h7Q64_2XDzpwKe", "0sUFHicPNNqNyNx8"]),
        ("cali-correct", ["--jump ACCEPT"], ["dCKeL4JtUEDC2GQu"]),
    ],
)
def test_a_hash_covers_the_rules_before_it(chain: str, rules: list[str], hashes: list[str]) -> None:
    assert felix.rule_hashes(chain, [Rule("", rule) for rule in rules]) == hashes


STATIC_HASHES = {
    ("filter", "cali-FORWARD"): [
        "vjrMJCRpqwy5oRoX",
        "A_sPAO0mcxbT9mOV",
        "8ZoYfO5HKXWbB3pk",
        "jdEuaPBe14V2hutn",
        "12bc6HljsMKsmfr-",
        "NOSxoaGx8OIstr1z",
    ],
    ("filter", "cali-wl-to-host"): ["Ee9Sbo10IpVujdIY", "nSZbcOoG1xPONxb8"],
    ("nat", "cali-PREROUTING"): ["r6XmIziWUJsdOK6Z"],
    ("nat", "cali-OUTPUT"): ["GBTAv2p5CwevEyJm"],
    ("nat", "cali-POSTROUTING"): ["Z-c7XtVd2Bq7s_hA", "nYKhEzDlr11Jccal", "e9dnSgSVNmIcpVhP"],
    ("nat", "cali-nat-outgoing"): ["flqWnvo8yq4ULQLa"],
}


@pytest.mark.parametrize(("table", "chain"), STATIC_HASHES)
def test_static_chains_have_the_hashes_of_real_clusters(table: Table, chain: str) -> None:
    assert hashes_of(renderer("v3.27"), table, chain) == STATIC_HASHES[table, chain]


def test_a_node_without_workloads_drops_every_unknown_interface() -> None:
    assert hashes_of(renderer("v3.27"), "filter", "cali-from-wl-dispatch") == ["zTj6P0TIgYvgz-md"]
    assert hashes_of(renderer("v3.27"), "filter", "cali-to-wl-dispatch") == ["7KNphB1nNHw80nIO"]


def test_dispatch_has_the_hashes_of_a_real_cluster() -> None:
    names = (
        "calif6abb148530",
        "cali112d888c0c2",
        "cali26cecacb712",
        "cali55f439ddb0e",
        "cali9d7310e16e7",
        "calic5a1f1aa0ed",
    )
    assert hashes_of(renderer("v3.27", names), "filter", "cali-from-wl-dispatch") == [
        "887K6j2m0yTxV8XZ",
        "-1f18nv9_J5o_MPL",
        "X28EvX2q55aZM8gM",
        "CxKCBaJmNdZnWGOY",
        "ZPC1pWieGIBIr5A7",
        "xDvXvF5yVFq7Y1QJ",
        "FUqQW1upEuPXcL7s",
    ]


def test_endpoint_chains_have_the_hashes_of_a_real_cluster() -> None:
    made = renderer("v3.27")
    profiles = ("kns.kube-system", "ksa.kube-system.metrics-server")
    to = felix.rule_hashes("cali-tw-cali112d888c0c2", made.to_workload(profiles))
    out = felix.rule_hashes("cali-fw-cali112d888c0c2", made.from_workload(profiles))
    assert to == [
        "YxaG793HT-1CxTcX",
        "6MWAWkG1GPepwS3w",
        "eIp1vw91xx2wo3h9",
        "K1Och8e13hDKqGqa",
        "DaY0j0z-ccvgA-ec",
        "mvAbsTsA6HsCQ9sG",
        "Boyr3WCDIS7eKocL",
        "8hG8SflKnG26l5GH",
    ]
    assert out == [
        "gxYrST51OJyfBgWw",
        "6xENQhO2T0QW5LgN",
        "O7MDTYmYN54jUWVF",
        "pJp4jdAzPgU1geph",
        "rM5VAS66uaB9uI7_",
        "s_9J1YgpafK_gEIJ",
        "djdRyha1SrYGGpRJ",
        "Agp1xuefUF89n6q7",
        "ctlnSZ9l6AD7YocC",
        "ThfJzx8K_BY2PCkD",
    ]


def test_profiles_have_the_hashes_of_a_real_cluster() -> None:
    endpoint = Endpoint("cali112d888c0c2", "kube-system", "metrics-server-0")
    made = Renderer(calico("v3.27"), [endpoint])
    assert hashes_of(made, "filter", "cali-pri-kns.kube-system") == [
        "J1TyxtHWd0qaBGK-",
        "QIB6k7eEKdIg73Jp",
    ]
    assert hashes_of(made, "filter", "cali-pro-kns.kube-system") == [
        "tgOR2S8DVHZW3F1M",
        "HVEEtYPJsiGRXCIt",
    ]


@pytest.mark.parametrize(
    ("version", "to", "out"),
    [
        (
            "v3.27.5",
            ["1pP47gk_8pyVarO3", "KttutfyOi13aOyl_", "iXWxyviwrhOXpJ7A", "xKc-4-hNiaY_WHpD"],
            ["UfyAmT83jjV7v3Hs", "SyNz8k3zN2qhzGcW", "f3rzAtfC6UhPq-9c"],
        ),
    ],
)
def test_endpoint_chains_as_in_felix_own_test(version: str, to: list[str], out: list[str]) -> None:
    made = renderer(version, lowest_mark=0x8)
    assert felix.rule_hashes("cali-tw-cali1234", made.to_workload(())) == to
    assert felix.rule_hashes("cali-fw-cali1234", made.from_workload(()))[3:] == out


# --- versions and settings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "every", "workload"),
    [
        ("v3.27", "0xf0000", "0x40000"),
        ("v3.29", "0xf0000", "0x40000"),
        ("v3.30", "0x1b0000", "0x80000"),
        ("v3.32", "0x1b0000", "0x80000"),
    ],
)
def test_a_mark_bit_is_reserved_from_v3_30(version: str, every: str, workload: str) -> None:
    rules = lines(renderer(version), "raw", "cali-PREROUTING")
    assert rules[0] == f"--jump MARK --set-mark 0/{every}"
    assert f"--in-interface cali+ --jump MARK --set-mark {workload}/{workload}" in rules
    invert = f"-m mark --mark {workload}/{workload} -m rpfilter --invert --validmark --jump DROP"
    assert invert in rules


@pytest.mark.parametrize("version", ALL_VERSIONS)
def test_vxlan_is_untracked_from_v3_29(version: str) -> None:
    rule = "-p udp --dport 4789 --jump NOTRACK"
    there = Version.parse(version) >= Version(3, 29, 0)
    made = renderer(version)
    prerouting, output = (lines(made, "raw", f"cali-{hook}") for hook in ("PREROUTING", "OUTPUT"))
    assert [index for index, line in enumerate(prerouting) if line == rule] == [1] * there
    assert [index for index, line in enumerate(output) if line == rule] == [2] * there


@pytest.mark.parametrize("version", ALL_VERSIONS)
def test_a_dscp_is_looked_up_from_v3_31(version: str) -> None:
    there = Version.parse(version) >= Version(3, 31, 0)
    made = renderer(version)
    first = lines(made, "mangle", "cali-POSTROUTING")[0]
    pools = made.traits.all_pools
    assert first == (
        '-m comment --comment "set dscp for traffic leaving cluster." '
        f"-m set --match-set cali40dscp-src-net src -m set ! --match-set {pools} dst "
        "-m set ! --match-set cali40this-host dst --jump cali-egress-dscp"
        if there
        else "-m mark --mark 0x10000/0x10000 --jump RETURN"
    )
    assert ("cali-egress-dscp" in bodies(made, "mangle")) == there


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("v3.30", "cali40all-ipam-pools"),
        ("v3.31.5", "cali40all-ipam-pools"),
        ("v3.31.6", "cali40network-ip-pools"),
        ("v3.31", "cali40network-ip-pools"),
        ("v3.32.0", "cali40all-ipam-pools"),
        ("v3.32.1", "cali40network-ip-pools"),
    ],
)
def test_the_set_of_all_pools_was_renamed_in_patch_releases(version: str, name: str) -> None:
    (rule,) = lines(renderer(version), "nat", "cali-nat-outgoing")
    assert f"! --match-set {name} dst" in rule


@pytest.mark.parametrize("version", ["v3.27", "v3.28.0", "v3.30"])
def test_profiles_return_up_to_v3_27_and_chains_clear_pass_later(version: str) -> None:
    old = version == "v3.27"
    made = renderer(version, ["cali0d7763386da"])
    profile = lines(made, "filter", "cali-pri-kns.default")
    assert profile[1:] == ["-m mark --mark 0x10000/0x10000 --jump RETURN"] * old
    cleared = "--jump MARK --set-mark 0/0x10000" if old else "--jump MARK --set-mark 0/0x30000"
    assert lines(made, "filter", "cali-tw-cali0d7763386da")[2] == cleared


def test_names_that_share_a_character_get_a_chain_of_their_own() -> None:
    made = bodies(renderer("v3.30", ["cali6b2", "cali1aa", "cali6a1"]), "filter")
    unknown = '-m comment --comment "Unknown interface" --jump DROP'
    assert [rule.render() for rule in made["cali-to-wl-dispatch"].rules] == [
        "--out-interface cali1aa --goto cali-tw-cali1aa",
        "--out-interface cali6+ --goto cali-to-wl-dispatch-6",
        unknown,
    ]
    assert [rule.render() for rule in made["cali-to-wl-dispatch-6"].rules] == [
        "--out-interface cali6a1 --goto cali-tw-cali6a1",
        "--out-interface cali6b2 --goto cali-tw-cali6b2",
        unknown,
    ]


def test_the_common_prefix_may_be_longer_than_cali() -> None:
    made = bodies(renderer("v3.30", ["cali6b22", "cali6b13", "cali6b14"]), "filter")
    assert [rule.match for rule in made["cali-from-wl-dispatch"].rules[:-1]] == [
        "--in-interface cali6b1+",
        "--in-interface cali6b22",
    ]
    assert "cali-from-wl-dispatch-1" in made


def test_disable_conntrack_invalid_check_removes_just_the_endpoints_rules() -> None:
    def chains(disabled: bool) -> dict[tuple[str, str], list[str]]:  # noqa: FBT001 - the setting
        made = renderer("v3.30", ["cali1a"], disable_conntrack_invalid_check=disabled)
        tables = ("raw", "mangle", "nat", "filter")
        return {(t, name): lines(made, t, name) for t in tables for name in bodies(made, t)}

    with_check, without = chains(disabled=False), chains(disabled=True)
    changed = {key for key in with_check if with_check[key] != without[key]}
    assert changed == {("filter", "cali-tw-cali1a"), ("filter", "cali-fw-cali1a")}
    for key in changed:
        gone = "-m conntrack --ctstate INVALID --jump DROP"
        assert [line for line in with_check[key] if line != gone] == without[key]


@pytest.mark.parametrize(
    ("setting", "comment"),
    [
        ("allow_vxlan_packets_from_workloads", "Drop VXLAN encapped"),
        ("allow_ipip_packets_from_workloads", "Drop IPinIP encapped"),
    ],
)
def test_encapsulation_by_workloads_can_be_allowed(setting: str, comment: str) -> None:
    def comments(**given: str | int) -> list[str]:
        return [rule.comment for rule in renderer("v3.30", **given).from_workload(())]

    assert any(text.startswith(comment) for text in comments())
    assert not any(text.startswith(comment) for text in comments(**{setting: True}))


@pytest.mark.parametrize(
    ("action", "reason"), [("Accept", None), ("Return", None), ("Drop", "endpoint-to-host")]
)
def test_default_endpoint_to_host_action(action: str, reason: str | None) -> None:
    made = renderer("v3.30", default_endpoint_to_host_action=action)
    rule = bodies(made, "filter")["cali-wl-to-host"].rules[-1]
    assert rule.action == f"--jump {action.upper()}"
    assert (rule.reason if rule.reason in felix.REASONS else None) == reason


def test_another_vxlan_port_is_the_one_in_every_rule() -> None:
    made = renderer("v3.30", ["cali1a"], vxlan_port=8472)
    every = [
        line
        for table in felix.TABLES
        for name in bodies(made, table)
        for line in lines(made, table, name)
    ]
    assert not [line for line in every if "4789" in line]
    assert len([line for line in every if "8472" in line]) == 6


@pytest.mark.parametrize("version", ALL_VERSIONS)
def test_every_chain_that_is_jumped_to_exists_and_is_reached(version: str) -> None:
    made = renderer(version, ["cali6a1", "cali6b2", "cali1aa"])
    for table in felix.TABLES:
        own = bodies(made, table)
        rules = [rule for body in own.values() for rule in body.rules]
        rules += [rule for hooked in made.hooks(table) for rule in hooked.rules]
        targets = {rule.action.split()[1] for rule in rules if rule.action}
        assert {name for name in targets if name.startswith("cali-")} == set(own)
