"""Felix' rules, loaded by both iptables programs: the kernel then has what a real node has.

The expected text is that of iptables-save on a node with Calico v3.30, VXLAN and no policy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from ipaddress import IPv4Interface, IPv4Network

import pytest

from netlab.cni import felix
from netlab.model import Calico, Coordinator, IPPool, Lab, Node, NodeNIC, Pod, PodNIC, Version
from netlab.plan import Backend, IpSet, Netns, Origin, Plan

pytestmark = pytest.mark.live

WEB_0, WEB_1, WEB_3 = "cali0d7763386da", "cali0761ccbeace", "cali4448cbddedf"
VERSIONS = ("v3.27", "v3.28.1", "v3.28", "v3.29", "v3.30", "v3.31.0", "v3.31", "v3.32")

RAW = """
-A PREROUTING -j cali-PREROUTING
-A OUTPUT -j cali-OUTPUT
-A cali-OUTPUT -j MARK --set-xmark 0x0/0x1b0000
-A cali-OUTPUT -j cali-to-host-endpoint
-A cali-OUTPUT -p udp -m udp --dport 4789 -j NOTRACK
-A cali-OUTPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-PREROUTING -j MARK --set-xmark 0x0/0x1b0000
-A cali-PREROUTING -p udp -m udp --dport 4789 -j NOTRACK
-A cali-PREROUTING -i cali+ -j MARK --set-xmark 0x80000/0x80000
-A cali-PREROUTING -m mark --mark 0x80000/0x80000 -j cali-rpf-skip
-A cali-PREROUTING -m mark --mark 0x80000/0x80000 -m rpfilter --validmark --invert -j DROP
-A cali-PREROUTING -m mark --mark 0x0/0x80000 -j cali-from-host-endpoint
-A cali-PREROUTING -m mark --mark 0x10000/0x10000 -j ACCEPT
"""

MANGLE = """
-A PREROUTING -j cali-PREROUTING
-A POSTROUTING -j cali-POSTROUTING
-A cali-POSTROUTING -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-POSTROUTING -j MARK --set-xmark 0x0/0x1b0000
-A cali-POSTROUTING -m conntrack --ctstate DNAT -j cali-to-host-endpoint
-A cali-POSTROUTING "Host endpoint policy accepted packet." -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-PREROUTING -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-PREROUTING -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-PREROUTING -j cali-from-host-endpoint
-A cali-PREROUTING "Host endpoint policy accepted packet." -m mark --mark 0x10000/0x10000 -j ACCEPT
"""

NAT = """
-A PREROUTING -j cali-PREROUTING
-A OUTPUT -j cali-OUTPUT
-A POSTROUTING -j cali-POSTROUTING
-A cali-OUTPUT -j cali-fip-dnat
-A cali-POSTROUTING -j cali-fip-snat
-A cali-POSTROUTING -j cali-nat-outgoing
-A cali-POSTROUTING -o vxlan.calico
  -m addrtype ! --src-type LOCAL --limit-iface-out -m addrtype --src-type LOCAL
  -j MASQUERADE --random-fully
-A cali-PREROUTING -j cali-fip-dnat
-A cali-nat-outgoing -m set --match-set cali40masq-ipam-pools src
  -m set ! --match-set cali40all-ipam-pools dst -j MASQUERADE --random-fully
"""

FILTER = """
-A INPUT -j cali-INPUT
-A FORWARD -j cali-FORWARD
-A FORWARD "Policy explicitly accepted packet." -m mark --mark 0x10000/0x10000 -j ACCEPT
-A FORWARD -j MARK --set-xmark 0x10000/0x10000
-A OUTPUT -j cali-OUTPUT
-A cali-FORWARD -j MARK --set-xmark 0x0/0x1a0000
-A cali-FORWARD -m mark --mark 0x0/0x10000 -j cali-from-hep-forward
-A cali-FORWARD -i cali+ -j cali-from-wl-dispatch
-A cali-FORWARD -o cali+ -j cali-to-wl-dispatch
-A cali-FORWARD -j cali-to-hep-forward
-A cali-FORWARD -j cali-cidr-block
-A cali-INPUT -p udp "Allow IPv4 VXLAN packets from allowed hosts" -m multiport --dports 4789
  -m set --match-set cali40all-vxlan-net src -m addrtype --dst-type LOCAL -j ACCEPT
-A cali-INPUT -p udp "Drop IPv4 VXLAN packets from non-allowed hosts" -m multiport --dports 4789
  -m addrtype --dst-type LOCAL -j DROP
-A cali-INPUT -i cali+ -g cali-wl-to-host
-A cali-INPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-INPUT -j MARK --set-xmark 0x0/0x1b0000
-A cali-INPUT -j cali-from-host-endpoint
-A cali-INPUT "Host endpoint policy accepted packet." -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-OUTPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-OUTPUT -o cali+ -j RETURN
-A cali-OUTPUT -p udp "Allow IPv4 VXLAN packets to other allowed hosts" -m multiport --dports 4789
  -m addrtype --src-type LOCAL -m set --match-set cali40all-vxlan-net dst -j ACCEPT
-A cali-OUTPUT -j MARK --set-xmark 0x0/0x1b0000
-A cali-OUTPUT -m conntrack ! --ctstate DNAT -j cali-to-host-endpoint
-A cali-OUTPUT "Host endpoint policy accepted packet." -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-from-wl-dispatch -i cali0+ -g cali-from-wl-dispatch-0
-A cali-from-wl-dispatch -i cali4448cbddedf -g cali-fw-cali4448cbddedf
-A cali-from-wl-dispatch "Unknown interface" -j DROP
-A cali-from-wl-dispatch-0 -i cali0761ccbeace -g cali-fw-cali0761ccbeace
-A cali-from-wl-dispatch-0 -i cali0d7763386da -g cali-fw-cali0d7763386da
-A cali-from-wl-dispatch-0 "Unknown interface" -j DROP
{from_workload}
-A cali-pri-kns.default "Profile kns.default ingress" -j MARK --set-xmark 0x10000/0x10000
-A cali-pri-ksa.default.default "Profile ksa.default.default ingress"
-A cali-pro-kns.default "Profile kns.default egress" -j MARK --set-xmark 0x10000/0x10000
-A cali-pro-ksa.default.default "Profile ksa.default.default egress"
-A cali-to-wl-dispatch -o cali0+ -g cali-to-wl-dispatch-0
-A cali-to-wl-dispatch -o cali4448cbddedf -g cali-tw-cali4448cbddedf
-A cali-to-wl-dispatch "Unknown interface" -j DROP
-A cali-to-wl-dispatch-0 -o cali0761ccbeace -g cali-tw-cali0761ccbeace
-A cali-to-wl-dispatch-0 -o cali0d7763386da -g cali-tw-cali0d7763386da
-A cali-to-wl-dispatch-0 "Unknown interface" -j DROP
{to_workload}
-A cali-wl-to-host -j cali-from-wl-dispatch
-A cali-wl-to-host "Configured DefaultEndpointToHostAction" -j ACCEPT
"""

FROM_WORKLOAD = """
-A cali-fw-{name} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-fw-{name} -m conntrack --ctstate INVALID -j DROP
-A cali-fw-{name} -j MARK --set-xmark 0x0/0x30000
-A cali-fw-{name} -p udp "Drop VXLAN encapped packets originating in workloads"
  -m multiport --dports 4789 -j DROP
-A cali-fw-{name} -p 4 "Drop IPinIP encapped packets originating in workloads" -j DROP
-A cali-fw-{name} -j cali-pro-kns.default
-A cali-fw-{name} "Return if profile accepted" -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-fw-{name} -j cali-pro-ksa.default.default
-A cali-fw-{name} "Return if profile accepted" -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-fw-{name} "Drop if no profiles matched" -j DROP
"""

TO_WORKLOAD = """
-A cali-tw-{name} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-tw-{name} -m conntrack --ctstate INVALID -j DROP
-A cali-tw-{name} -j MARK --set-xmark 0x0/0x30000
-A cali-tw-{name} -j cali-pri-kns.default
-A cali-tw-{name} "Return if profile accepted" -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-tw-{name} -j cali-pri-ksa.default.default
-A cali-tw-{name} "Return if profile accepted" -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-tw-{name} "Drop if no profiles matched" -j DROP
"""


def expected() -> dict[str, list[str]]:
    """Rules by table, each in one line."""

    def each(template: str) -> str:
        return "".join(template.format(name=name) for name in sorted((WEB_0, WEB_1, WEB_3)))

    filled = FILTER.format(from_workload=each(FROM_WORKLOAD), to_workload=each(TO_WORKLOAD))
    texts = {"raw": RAW, "mangle": MANGLE, "nat": NAT, "filter": filled}
    return {
        table: [line for line in text.replace("\n  ", " ").splitlines() if line]
        for table, text in texts.items()
    }


def lab(version: str, backend: Backend) -> Lab:
    settings = Calico(Version.parse(version), (IPPool("all", IPv4Network("10.233.64.0/18")),))

    def node(name: str, address: str, block: str) -> Node:
        return Node(
            name=name,
            nics=(NodeNIC("eth0", network="lan", address=IPv4Interface(address)),),
            gateway=None,
            calico=settings,
            kube_proxy=None,
            coordinator=Coordinator(),
            sysctl={},
            iptables_backend=backend,
            pod_cidrs=(IPv4Network(block),),
        )

    def pod(name: str, last: int) -> Pod:
        nic = PodNIC("eth0", IPv4Interface(f"10.233.100.{last}/26"))
        return Pod(name, "default", "node1", (nic,))

    return Lab(
        name="test",
        title="",
        file="test.yaml",
        networks={},
        routers={},
        hosts={},
        nodes={
            "node1": node("node1", "172.16.1.2/16", "10.233.100.0/26"),
            "node2": node("node2", "172.16.1.3/16", "10.233.101.0/26"),
        },
        pods={name: pod(name, 3 + i) for i, name in enumerate(("web-0", "web-1", "web-3"))},
        services={},
        pod_cidrs=(),
        service_cidrs=(),
    )


@pytest.fixture
def run() -> Iterator[Callable[..., str]]:
    """Runs a program in a network namespace of its own."""
    name = f"zb{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)

    def within(*argv: str, given: str = "") -> str:
        if shutil.which(argv[0]) is None:
            pytest.skip(f"needs {argv[0]}")
        command = ["nsenter", f"--net=/run/netns/{name}", *argv]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield within
    subprocess.run(["ip", "netns", "delete", name], check=True)


def plan(version: str, backend: Backend) -> Plan:
    one = lab(version, backend)
    netns = Netns(netns="node1", origin=Origin("kubelet", "test"))
    return Plan.of("test", [netns, *felix.objects(one, one.nodes["node1"])])


def load(run: Callable[..., str], planned: Plan) -> dict[str, list[str]]:
    """Load Felix' sets and rules; the rules by table, as iptables-save prints them."""
    (rules,) = planned.rulesets()
    sets = [item for item in planned.objects if isinstance(item, IpSet)]
    given = [f"create {item.name} {item.type} {item.options}" for item in sets]
    given += [f"add {item.name} {member}" for item in sets for member in item.members]
    run("ipset", "restore", given="\n".join([*given, ""]))
    run(f"iptables-{rules.backend}-restore", given=rules.restore_input())
    found = {}
    for table in felix.TABLES:
        saved = run(f"iptables-{rules.backend}-save", "-t", table)
        found[table] = [line for line in saved.splitlines() if line.startswith("-A")]
    return found


def plain(rule: str) -> str:
    """*rule* without its hash; comments as bare text; IPIP by number on every distribution."""
    rule = re.sub(r' -m comment --comment "cali:[\w-]{16}"', "", rule)
    return re.sub(r"-m comment --comment (?=\")", "", rule).replace("-p ipencap ", "-p 4 ")


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_the_kernel_has_the_rules_of_a_real_node(run: Callable[..., str], backend: Backend) -> None:
    found = load(run, plan("v3.30", backend))
    for table, rules in expected().items():
        assert [plain(rule) for rule in found[table]] == rules, table
    hashes = [re.findall(r'"cali:([\w-]{16})"', rule) for rules in found.values() for rule in rules]
    assert {len(own) for own in hashes} == {1}


@pytest.mark.parametrize("backend", ["nft", "legacy"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_rules_of_every_version_load(
    run: Callable[..., str], version: str, backend: Backend
) -> None:
    planned = plan(version, backend)
    (rules,) = planned.rulesets()
    found = load(run, planned)
    for table, saved in found.items():
        ids = sorted(re.findall(r'"(cali:[\w-]{16})"', " ".join(saved)))
        texts = " ".join(rule.text for _, rule in rules.rules[table])
        assert ids == sorted(re.findall(r'"(cali:[\w-]{16})"', texts))
