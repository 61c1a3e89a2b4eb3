"""kube-proxy's rules, loaded by both iptables programs: the kernel then has what a real node has.

The expected text is that of iptables-save on a node with kube-proxy v1.28 to v1.36 and the
Service default/web: ClusterIP 10.233.0.100, NodePort 32456, one endpoint here and one elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import get_args

import pytest

from netlab import kube_proxy
from netlab.model import (
    Calico,
    Endpoint,
    KubeProxy,
    Lab,
    Node,
    NodeNIC,
    Service,
    ServicePort,
    Version,
)
from netlab.plan import Backend, Netns, Origin, Plan

pytestmark = pytest.mark.live

VERSIONS = tuple(f"v1.{minor}" for minor in range(24, 37))

MANGLE = """
:KUBE-IPTABLES-HINT
:KUBE-KUBELET-CANARY
:KUBE-PROXY-CANARY
"""

FILTER = """
:KUBE-EXTERNAL-SERVICES
:KUBE-FIREWALL
:KUBE-FORWARD
:KUBE-KUBELET-CANARY
:KUBE-NODEPORTS
:KUBE-PROXY-CANARY
:KUBE-PROXY-FIREWALL
:KUBE-SERVICES
-A INPUT -m conntrack --ctstate NEW "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A INPUT "kubernetes health check service ports" -j KUBE-NODEPORTS
-A INPUT -m conntrack --ctstate NEW "kubernetes externally-visible service portals"
  -j KUBE-EXTERNAL-SERVICES
-A INPUT -j KUBE-FIREWALL
-A FORWARD -m conntrack --ctstate NEW "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A FORWARD "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW "kubernetes service portals" -j KUBE-SERVICES
-A FORWARD -m conntrack --ctstate NEW "kubernetes externally-visible service portals"
  -j KUBE-EXTERNAL-SERVICES
-A OUTPUT -m conntrack --ctstate NEW "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A OUTPUT -m conntrack --ctstate NEW "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 "block incoming localnet connections"
  -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD "kubernetes forwarding conntrack rule"
  -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
"""

NAT = """
:KUBE-EXT-CDGGSHYLG3RE2FKL
:KUBE-KUBELET-CANARY
:KUBE-MARK-MASQ
:KUBE-NODEPORTS
:KUBE-POSTROUTING
:KUBE-PROXY-CANARY
:KUBE-SEP-A35VRAPKIP6NA3O5
:KUBE-SEP-GASEMRHS65PARQYV
:KUBE-SERVICES
:KUBE-SVC-CDGGSHYLG3RE2FKL
-A PREROUTING "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-EXT-CDGGSHYLG3RE2FKL "masquerade traffic for default/web:http external destinations"
  -j KUBE-MARK-MASQ
-A KUBE-EXT-CDGGSHYLG3RE2FKL -j KUBE-SVC-CDGGSHYLG3RE2FKL
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODEPORTS -p tcp "default/web:http" -m tcp --dport 32456 -j KUBE-EXT-CDGGSHYLG3RE2FKL
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-SEP-A35VRAPKIP6NA3O5 -s 10.233.100.3/32 "default/web:http" -j KUBE-MARK-MASQ
-A KUBE-SEP-A35VRAPKIP6NA3O5 -p tcp "default/web:http" -m tcp
  -j DNAT --to-destination 10.233.100.3:8080
-A KUBE-SEP-GASEMRHS65PARQYV -s 10.233.200.2/32 "default/web:http" -j KUBE-MARK-MASQ
-A KUBE-SEP-GASEMRHS65PARQYV -p tcp "default/web:http" -m tcp
  -j DNAT --to-destination 10.233.200.2:8080
-A KUBE-SERVICES -d 10.233.0.100/32 -p tcp "default/web:http cluster IP" -m tcp --dport 80
  -j KUBE-SVC-CDGGSHYLG3RE2FKL
-A KUBE-SERVICES "kubernetes service nodeports; NOTE: this must be the last rule in this chain"
  -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-CDGGSHYLG3RE2FKL ! -s 10.233.64.0/18 -d 10.233.0.100/32 -p tcp
  "default/web:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-CDGGSHYLG3RE2FKL "default/web:http -> 10.233.100.3:8080"
  -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-A35VRAPKIP6NA3O5
-A KUBE-SVC-CDGGSHYLG3RE2FKL "default/web:http -> 10.233.200.2:8080" -j KUBE-SEP-GASEMRHS65PARQYV
"""


def expected() -> dict[str, list[str]]:
    """Chains and rules by table, each in one line."""
    return {
        table: text.replace("\n  ", " ").split("\n")[1:-1]
        for table, text in (("mangle", MANGLE), ("filter", FILTER), ("nat", NAT))
    }


def service(name: str, last: int, *endpoints: tuple[str, str], **settings: str) -> Service:
    addresses = tuple(
        Endpoint(f"{name}-{node}", "eth0", IPv4Address(address), node)
        for address, node in endpoints
    )
    port = ServicePort(80, 8080, "http", node_port=32356 + last)
    return Service(
        name=name,
        namespace="default",
        type="NodePort",
        cluster_ip=IPv4Address(f"10.233.0.{last}"),
        ports=(port,),
        endpoints=addresses,
        **settings,
    )


HERE, ELSEWHERE = ("10.233.100.3", "node1"), ("10.233.200.2", "node2")
WEB = service("web", 100, HERE, ELSEWHERE)
LOCAL = {"external_traffic_policy": "Local", "internal_traffic_policy": "Local"}
EVERY_KIND = (
    WEB,
    service("none", 101),
    service("local", 102, HERE, ELSEWHERE, **LOCAL),
    service("far", 103, ELSEWHERE, **LOCAL),
)


def plan(version: str, backend: Backend, *services: Service) -> Plan:
    proxy = KubeProxy(Version.parse(version), cluster_cidr=IPv4Network("10.233.64.0/18"))
    node = Node(
        name="node1",
        nics=(NodeNIC("eth0", network="lan", address=IPv4Interface("172.16.1.2/16")),),
        gateway=None,
        calico=Calico(Version(3, 30), ()),
        kube_proxy=proxy,
        coordinator=None,
        sysctl={},
        iptables_backend=backend,
    )
    lab = Lab(
        name="test",
        title="",
        file="test.yaml",
        networks={},
        routers={},
        hosts={},
        nodes={"node1": node},
        pods={},
        services={one.name: one for one in services},
        pod_cidrs=(),
        service_cidrs=(),
    )
    netns = Netns(netns="node1", origin=Origin("underlay", "test"))
    return Plan.of("test", [netns, *kube_proxy.objects(lab)])


@pytest.fixture
def run() -> Iterator[Callable[..., str]]:
    """Runs a program in a network namespace of its own."""
    name = f"za{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)

    def within(*argv: str, given: str = "") -> str:
        if shutil.which(argv[0]) is None:
            pytest.skip(f"needs {argv[0]}")
        command = ["nsenter", f"--net=/run/netns/{name}", *argv]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        yield within
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def load(run: Callable[..., str], planned: Plan) -> dict[str, list[str]]:
    """Load the rules; chains of its own and rules by table, as iptables-save prints them."""
    (rules,) = planned.rulesets()
    run(f"iptables-{rules.backend}-restore", given=rules.restore_input())
    found = {}
    for table in ("mangle", "filter", "nat"):
        saved = run(f"iptables-{rules.backend}-save", "-t", table)
        kept = (line for line in saved.splitlines() if line.startswith((":KUBE", "-A")))
        found[table] = [
            re.sub(r" - \[0:0\]$", "", line).replace("-m comment --comment ", "") for line in kept
        ]
    return found


@pytest.mark.parametrize("backend", get_args(Backend))
@pytest.mark.parametrize("version", VERSIONS[4:])
def test_the_kernel_has_what_a_real_node_has(
    run: Callable[..., str], version: str, backend: Backend
) -> None:
    assert load(run, plan(version, backend, WEB)) == expected()


@pytest.mark.parametrize("backend", get_args(Backend))
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_loads_whole_and_in_order(
    run: Callable[..., str], version: str, backend: Backend
) -> None:
    """Each rule that was given is there, in its chain and place, by its target."""
    planned = plan(version, backend, *EVERY_KIND)
    (rules,) = planned.rulesets()
    saved = load(run, planned)
    for table, content in rules.rules.items():
        given = [f"{chain} {rule.text}" for chain, rule in content]
        loaded = [line.removeprefix("-A ") for line in saved[table] if line.startswith("-A")]
        assert targets(loaded) == targets(given)


def targets(rules: list[str]) -> dict[str, list[str]]:
    """Chain -> the targets of its rules, in order."""
    found: dict[str, list[str]] = {}
    for rule in rules:
        target = re.search(r"-j (\S+)", rule)
        assert target, rule
        found.setdefault(rule.split()[0], []).append(target.group(1))
    return found
