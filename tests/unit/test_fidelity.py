"""The comparison with what the real components print: that it can fail, and that nothing does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from netlab.fidelity import compare, main

DATA = os.environ.get("NETLAB_FIDELITY_DATA", "")
needs_data = pytest.mark.skipif(not DATA, reason="needs NETLAB_FIDELITY_DATA")

PRINTED = """\
*filter
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x00004000/0x00004000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-SERVICES -m comment --comment "a/first has no endpoints" -m tcp -p tcp -d 10.0.0.9 --dport 80 -j REJECT
-A KUBE-SERVICES -m comment --comment "b/second has no endpoints" -m udp -p udp -d 10.0.0.2 --dport 53 -j REJECT
COMMIT
*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
-A KUBE-MARK-MASQ -j MARK --or-mark 0x00004000
-A KUBE-POSTROUTING -m mark ! --mark 0x00004000/0x00004000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x00004000
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL ! -d 127.0.0.0/8 -j KUBE-NODEPORTS
COMMIT
"""  # noqa: E501 - the lines of iptables-restore

SERVICES = [
    {
        "namespace": namespace,
        "name": name,
        "type": "ClusterIP",
        "clusterIP": address,
        "ports": [{"name": "", "protocol": protocol, "port": port}],
    }
    for namespace, name, address, protocol, port in (
        ("b", "second", "10.0.0.2", "UDP", 53),
        ("a", "first", "10.0.0.9", "TCP", 80),
    )
]

PROXY = {
    "ipFamily": "IPv4",
    "nodeName": "node1",
    "nodeIP": "172.16.1.1",
    "nodeAddresses": ["127.0.0.1/8", "172.16.1.1/24"],
    "localDetector": {"clusterCIDR": "10.233.64.0/18"},
    "masqueradeAll": False,
    "masqueradeMark": "0x4000",
    "nodePortAddresses": [],
    "localhostNodePorts": False,
    "randomFully": True,
}


def pair(
    folder: Path,
    name: str = "iptables-two",
    version: str = "1.28.3",
    printed: str = PRINTED,
    **changes: object,
) -> None:
    case = {
        "case": name,
        "mode": "iptables",
        "version": version,
        "proxy": PROXY,
        "services": SERVICES,
        "endpointSlices": [],
        **changes,
    }
    place = folder / "kube-proxy" / version
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.input.yaml").write_text(yaml.safe_dump(case))
    (place / f"{name}.expected.rules").write_text(printed)


def test_an_equal_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair(tmp_path)
    assert [case.status for case in compare(tmp_path).cases] == ["equal"]
    assert main(["--data", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split()[-7:] == [
        *("1.28.3", "iptables", "1", "1", "0", "0", "0")
    ]


def test_a_different_pair_is_shown_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair(tmp_path, printed=PRINTED.replace("--ctstate INVALID -j DROP", "--ctstate INVALID"))
    report = compare(tmp_path)
    (case,) = report.different
    assert case.detail.splitlines()[-2:] == [
        "--A KUBE-FORWARD -m conntrack --ctstate INVALID",
        "+-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP",
    ]
    assert report.counts() == {("1.28.3", "iptables"): {"different": 1}}
    assert main(["--data", str(tmp_path)]) == 1
    assert case.detail in capsys.readouterr().out


def test_the_order_of_rules_in_a_chain_counts(tmp_path: Path) -> None:
    lines = PRINTED.splitlines(keepends=True)
    (first,) = (index for index, line in enumerate(lines) if "POSTROUTING -j MARK" in line)
    lines[first - 1 : first + 1] = reversed(lines[first - 1 : first + 1])
    pair(tmp_path, printed="".join(lines))
    assert [case.status for case in compare(tmp_path).cases] == ["different"]


def test_what_the_input_says_beyond_the_renderer_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair(tmp_path, services=[SERVICES[0] | {"trafficDistribution": "PreferClose"}])
    pair(tmp_path, "nftables-two")
    assert main(["--data", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "not covered: services.trafficDistribution (1 pairs)" in shown
    assert "not covered: mode nftables (1 pairs)" in shown


def test_an_empty_text_is_right_only_for_a_proxier_without_services(tmp_path: Path) -> None:
    pair(tmp_path, "iptables-nothing", printed="\n", services=[])
    pair(tmp_path, "iptables-something", printed="\n")
    assert [(case.name, case.status) for case in compare(tmp_path).cases] == [
        ("iptables-nothing", "not printed"),
        ("iptables-something", "different"),
    ]


def test_versions_are_chosen_and_in_order(tmp_path: Path) -> None:
    for version in ("1.28.10", "1.28.3"):
        pair(tmp_path, version=version)
    assert [case.version for case in compare(tmp_path).cases] == ["1.28.3", "1.28.10"]
    assert [case.version for case in compare(tmp_path, ["1.28.10"]).cases] == ["1.28.10"]


def test_a_folder_without_pairs_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path)]) == 1
    assert "no pairs" in capsys.readouterr().err


def test_conditions_that_are_not_said_are_ready_and_serving(tmp_path: Path) -> None:
    """So discovery.k8s.io/v1 says; the rule would be REJECT otherwise, as it is in PRINTED."""
    pieces = [
        {
            "namespace": "a",
            "service": "first",
            "slice": "first-1",
            "addressType": "IPv4",
            "ports": [{"name": "", "protocol": "TCP", "port": 80}],
            "endpoints": [conditions | {"addresses": ["10.233.64.9"], "nodeName": "node1"}],
        }
        for conditions in ({}, {"ready": False, "terminating": True}, {"ready": False})
    ]
    for number, piece in enumerate(pieces):
        pair(tmp_path, f"iptables-{number}", endpointSlices=[piece])
    served = ["+-A KUBE-SVC" in case.detail for case in compare(tmp_path).cases]
    assert served == [True, True, False]


@needs_data
@pytest.mark.parametrize("version", [f"1.{minor}" for minor in range(24, 37)])
def test_every_printed_ruleset_of_a_version(version: str) -> None:
    found = [p.name for p in (Path(DATA) / "kube-proxy").iterdir() if p.name.startswith(version)]
    assert found
    report = compare(Path(DATA), found)
    assert report.cases
    assert not report.different, str(report)
    assert not [case for case in report.cases if case.status == "not covered"]
