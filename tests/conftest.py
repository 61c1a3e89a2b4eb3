"""Fixtures of all tests: a plan with every kind of object, instance names, and a look for leaks."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path

import pytest

from netlab.plan import (
    Address,
    Bridge,
    Chain,
    Command,
    FdbEntry,
    Hook,
    IpSet,
    IptablesRule,
    Listener,
    Macvlan,
    Neighbour,
    Netns,
    Object,
    Origin,
    Plan,
    PolicyRule,
    Route,
    Sysctl,
    Veth,
    Vxlan,
)

PREFIX = f"test-{os.getpid()}"
UNDERLAY = Origin("underlay", "wire")
CALICO = Origin("calico", "overlay")
FELIX = Origin("felix", "invalid")
PROXY = Origin("kube-proxy", "services", "Service default/web")
USER = Origin("user", "extra")

_PR_SET_CHILD_SUBREAPER = 36
_VOLATILE = re.compile(r"nf_conntrack_count|/route/gc_|netdev_rss_key|/flush$|nf_conntrack_expect")
_COUNTERS = re.compile(r"\[\d+:\d+\]|counter packets \d+ bytes \d+|valid_l?ft?\S* \w+")


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and programs pass that on: undo it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("live") and os.geteuid() != 0:
        pytest.skip("needs root")


def everything() -> list[Object]:
    """Two nodes on a switch, a macvlan Pod on one of them: every kind of object but VLANs."""
    return [*_switch(), *_node("node1", 1), *_node("node2", 2), *_pod(), *_rules(), *_servers()]


def _switch() -> Iterator[Object]:
    quiet = {"net.ipv4.ip_forward": "0", "net.ipv6.conf.all.disable_ipv6": "1"}
    for name in ("lan", "node1", "node2", "pod"):
        yield Netns(netns=name, origin=UNDERLAY, sysctls=quiet)
    yield Bridge(netns="lan", origin=UNDERLAY, name="br0", mac="02:00:00:00:00:01", mtu=1500)


def _node(name: str, number: int) -> Iterator[Object]:
    other = 3 - number
    yield Veth(
        netns=name,
        origin=UNDERLAY,
        name="eth0",
        mac=f"02:00:00:00:01:{number:02x}",
        mtu=1500,
        tx_queue_len=500,
        peer_netns="lan",
        peer=f"{name}.eth0",
        peer_mac=f"02:00:00:00:02:{number:02x}",
        peer_mtu=1500,
        peer_master="br0",
    )
    for address in (f"172.16.1.{number}/16", f"172.17.1.{number}/16"):
        yield Address(netns=name, origin=UNDERLAY, dev="eth0", address=IPv4Interface(address))
    yield Sysctl(netns=name, origin=UNDERLAY, name="net.ipv4.ip_forward", value="1")
    yield Route(
        netns=name,
        origin=UNDERLAY,
        dst=IPv4Network("0.0.0.0/0"),
        via=IPv4Address("172.16.0.1"),
        dev="eth0",
        mtu=1400,
    )
    yield Vxlan(
        netns=name,
        origin=CALICO,
        name="vxlan.calico",
        mac=f"66:00:00:00:00:{number:02x}",
        mtu=1450,
        vni=4096,
        port=4789,
        local=IPv4Address(f"172.16.1.{number}"),
        lower="eth0",
    )
    yield Address(
        netns=name,
        origin=CALICO,
        dev="vxlan.calico",
        address=IPv4Interface(f"10.233.10{number}.0/32"),
        scope="link",
    )
    yield FdbEntry(
        netns=name,
        origin=CALICO,
        dev="vxlan.calico",
        mac=f"66:00:00:00:00:{other:02x}",
        dst=IPv4Address(f"172.16.1.{other}"),
    )
    yield Neighbour(
        netns=name,
        origin=CALICO,
        dev="vxlan.calico",
        address=IPv4Address(f"10.233.10{other}.0"),
        mac=f"66:00:00:00:00:{other:02x}",
    )
    yield Route(
        netns=name,
        origin=CALICO,
        dst=IPv4Network(f"10.233.10{other}.0/26"),
        via=IPv4Address(f"10.233.10{other}.0"),
        dev="vxlan.calico",
        protocol=80,
        onlink=True,
    )
    block = IPv4Network(f"10.233.10{number}.0/26")
    yield Route(netns=name, origin=CALICO, dst=block, kind="blackhole", protocol=80)


def _pod() -> Iterator[Object]:
    yield Macvlan(
        netns="pod",
        origin=USER,
        name="net1",
        mac="02:00:00:00:03:01",
        lower_netns="node1",
        lower="eth0",
    )
    yield Address(netns="pod", origin=USER, dev="net1", address=IPv4Interface("172.16.100.2/16"))
    far = IPv4Network("10.0.0.0/8")
    for place, gateway in (("add", 1), ("append", 2), ("prepend", 3)):
        yield Route(
            netns="pod",
            origin=USER,
            dst=far,
            via=IPv4Address(f"172.16.0.{gateway}"),
            dev="net1",
            place=place,  # type: ignore[arg-type]
        )
    yield Route(
        netns="pod",
        origin=USER,
        dst=IPv4Network("0.0.0.0/0"),
        dev="net1",
        src=IPv4Address("172.16.100.2"),
        table=500,
        scope="link",
        metric=7,
    )
    yield PolicyRule(netns="pod", origin=USER, table=500, src=IPv4Network("172.16.100.2/32"))
    yield PolicyRule(netns="pod", origin=USER, table=500, fwmark=0x10, fwmask=0xF0)
    yield PolicyRule(
        netns="pod",
        origin=USER,
        table=501,
        priority=1000,
        dst=IPv4Network("10.1.0.0/16"),
        iif="net1",
    )
    yield Sysctl(netns="pod", origin=USER, name="net.ipv4.conf.net1.rp_filter", value="2")
    yield Sysctl(netns="pod", origin=USER, name="net.no.such", value="2", optional=True)


def _rules() -> Iterator[Object]:
    for node in ("node1", "node2"):
        yield IpSet(netns=node, origin=FELIX, name="cali40all", members=("10.233.64.0/18",))
        services = tuple(
            IptablesRule(f"-d 10.233.0.{number}/32 -p tcp -j MARK --set-xmark 0x4000/0x4000", PROXY)
            for number in range(1, 6)
        )
        yield Chain(netns=node, origin=PROXY, table="nat", name="KUBE-SERVICES", rules=services)
        yield Hook(
            netns=node, origin=PROXY, table="nat", chain="PREROUTING", text="-j KUBE-SERVICES"
        )
        yield Hook(
            netns=node,
            origin=FELIX,
            table="filter",
            chain="FORWARD",
            text="-m set --match-set cali40all src -m conntrack --ctstate INVALID -j DROP",
        )
        yield Sysctl(
            netns=node,
            origin=PROXY,
            name="net.netfilter.nf_conntrack_tcp_be_liberal",
            value="1",
        )
    yield Hook(
        netns="pod",
        origin=USER,
        table="mangle",
        chain="PREROUTING",
        text="-j MARK --set-xmark 0x1/0xffffffff",
        backend="legacy",
    )


def _servers() -> Iterator[Object]:
    for netns in ("node1", "node2"):
        yield Listener(netns=netns, origin=UNDERLAY, ports=(80, 8080))
    yield Command(netns="pod", origin=USER, argv=("sleep", "infinity"))


@pytest.fixture
def plan() -> Plan:
    return Plan.of("everything", everything())


@pytest.fixture
def new_instance() -> Callable[[], str]:
    """Instance names that no other test and no other run has."""
    return lambda: f"{PREFIX}-{next(_numbers)}"


_numbers = itertools.count()


@pytest.fixture
def no_leaks(new_instance: Callable[[], str]) -> Iterator[Callable[[], str]]:
    """The host before and after the test: equal, and nothing of this run's own is left.

    The value makes instance names. Namespaces and processes of other programs on the same
    machine may come and go.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = _host()
    yield new_instance
    _reap()
    after = _host()
    for key, value in before.items():
        assert after[key] == value, key
    assert {key: after[key] for key in after if key not in before} == {}
    assert [name for name in _names() if PREFIX in name] == []
    assert _descendants() == set()
    assert [thread.name for thread in threading.enumerate() if thread.name == "netlab"] == []
    assert _open_namespaces() == []


def _host() -> dict[str, str]:
    state = {
        command: _COUNTERS.sub("", _output(command.split()))
        for command in (
            "ip -d link",
            "ip address",
            "ip route show table all",
            "ip -6 route show table all",
            "ip rule",
            "nft list ruleset",
            "iptables-legacy-save",
            "ip6tables-legacy-save",
            "ipset save",
        )
    }
    for file in Path("/proc/sys/net").rglob("*"):
        if not _VOLATILE.search(str(file)) and file.is_file():
            with suppress(OSError, UnicodeDecodeError):
                state[str(file)] = file.read_text()
    return state


def _output(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    # The dates of iptables-save and the ages of addresses are not state.
    return "\n".join(line for line in done.stdout.splitlines() if not line.startswith("#"))


def _names() -> list[str]:
    """What is in /run/netns and /run/netlab, and what is mounted there."""
    found: list[str] = []
    for directory in ("/run/netns", "/run/netlab"):
        with suppress(FileNotFoundError):
            found += (entry.name for entry in Path(directory).iterdir())
    return found + Path("/proc/self/mountinfo").read_text().splitlines()


def _reap() -> None:
    """Collect orphans that have ended: they became this process' children."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _descendants() -> set[str]:
    """Command lines of the children of this process, and of their children."""
    parent: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parent[int(entry.name)] = int(fields[1])
    found: set[str] = set()
    family = {os.getpid()}
    while more := {pid for pid, above in parent.items() if above in family} - family:
        family |= more
        for pid in more:
            with suppress(OSError):
                found.add(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return found


def _open_namespaces() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(entry.readlink()))
    return [target for target in found if target.startswith("net:")]
