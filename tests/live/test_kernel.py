"""Plan -> Linux and back, on this machine's own kernel."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

import pytest

from netlab import kernel
from netlab.errors import Busy, KernelError
from netlab.kernel import build, machine, namespaces, ownership
from netlab.plan import (
    Address,
    Bridge,
    Chain,
    Command,
    FdbEntry,
    Hook,
    IpSet,
    IptablesRule,
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
    Vlan,
    Vxlan,
)

pytestmark = pytest.mark.live

Names = Callable[[], str]
USER = Origin("user", "test")


@pytest.fixture
def up(plan: Plan, no_leaks: Names) -> Iterator[str]:
    """The plan with every kind of object, up."""
    instance = no_leaks()
    kernel.apply(plan, instance, files={"lab.yaml": b"name: x\n"})
    try:
        yield instance
    finally:
        kernel.teardown(instance)


def inside(instance: str, netns: str, *argv: str) -> str:
    """What a real program says in the namespace, entered by iproute2."""
    command = ["nsenter", f"--net=/run/netns/netlab.{instance}.{netns}", *argv]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_plan_that_was_applied_has_no_drift(plan: Plan, up: str) -> None:
    assert kernel.verify(plan, up) == ()


def test_an_instance_is_known_from_the_kernel_alone(plan: Plan, up: str) -> None:
    (found,) = [one for one in kernel.instances() if one.name == up]
    assert (found.state, found.plan_hash) == ("up", plan.hash)
    assert found.netns == ("lan", "node1", "node2", "pod")
    assert found.up_since is not None
    assert 0 <= (datetime.now(tz=UTC) - found.up_since).total_seconds() < 60


def test_a_namespace_that_is_gone_makes_an_instance_incomplete(up: str) -> None:
    subprocess.run(["ip", "netns", "delete", f"netlab.{up}.node2"], check=True)
    (found,) = [one for one in kernel.instances() if one.name == up]
    assert found.state == "incomplete"


def test_packets_flow_at_once(up: str) -> None:
    for target in ("172.16.1.2", "172.17.1.2", "10.233.102.0"):
        done = kernel.run(up, "node1", ["ping", "-c", "1", "-W", "1", target], timeout=5)
        assert done.returncode == 0, done


def test_teardown_says_whether_there_was_anything(plan: Plan, no_leaks: Names) -> None:
    instance = no_leaks()
    kernel.apply(plan, instance)
    assert kernel.teardown(instance)
    assert not kernel.teardown(instance)


def test_two_instances_with_equal_addresses_do_not_meet(plan: Plan, no_leaks: Names) -> None:
    one, two = no_leaks(), no_leaks()
    try:
        kernel.apply(plan, one)
        kernel.apply(plan, two)
        inside(two, "node2", "ip", "link", "set", "eth0", "down")
        ping = ["ping", "-c", "1", "-W", "1", "172.16.1.2"]
        assert kernel.run(one, "node1", ping, timeout=5).returncode == 0
        assert kernel.run(two, "node1", ping, timeout=5).returncode == 1
        kernel.teardown(two)
        assert kernel.verify(plan, one) == ()
    finally:
        kernel.teardown(one)
        kernel.teardown(two)


def test_an_instance_is_not_applied_twice_and_survives_the_attempt(plan: Plan, up: str) -> None:
    with pytest.raises(KernelError, match=f"{up} exists"):
        kernel.apply(plan, up)
    assert kernel.verify(plan, up) == ()


def test_an_address_without_its_device_is_named_with_the_kernels_reason(
    plan: Plan, no_leaks: Names
) -> None:
    stray = Address(netns="pod", origin=USER, dev="nope", address=IPv4Interface("192.0.2.1/24"))
    with pytest.raises(KernelError, match=r"pod: address 192\.0\.2\.1/24 dev nope .*ENODEV"):
        kernel.apply(Plan("broken", (*plan.objects, stray)), no_leaks())


def broken(item: Object) -> Object | None:  # noqa: C901, PLR0911 - one case for each kind
    """*item* with a value that the kernel or a program refuses; None: nothing can be wrong."""
    match item:
        case Netns():
            return replace(item, sysctls={"net.ipv4.ip_forward": "x"})
        case Veth() | Macvlan() | Vxlan() | Bridge():
            return replace(item, mtu=1)
        case Address():
            return replace(item, dev="nope")
        case Route():
            return replace(item, dev="nope", kind="unicast")
        case PolicyRule():
            return replace(item, iif="a-name-that-is-too-long")
        case Neighbour() | FdbEntry():
            return replace(item, dev="nope")
        case Sysctl():
            return replace(item, name="net.ipv4.nope", optional=False)
        case IpSet():
            return replace(item, members=("nonsense",))
        case Chain():
            return replace(item, rules=(IptablesRule("-j NOPE", USER),))
        case Hook():
            return replace(item, text="-m nope -j ACCEPT")
        case Command():
            return replace(item, argv=("/no/such/program",))
        case _:
            return None


def test_a_failure_at_any_object_leaves_nothing(plan: Plan, no_leaks: Names) -> None:
    tried = 0
    for index, item in enumerate(plan.objects):
        wrong = broken(item)
        if wrong is None:
            continue
        tried += 1
        objects = (*plan.objects[:index], wrong, *plan.objects[index + 1 :])
        instance = no_leaks()
        with pytest.raises(KernelError) as caught:
            kernel.apply(Plan("broken", objects), instance)
        assert item.netns in str(caught.value), wrong
        assert instance not in {one.name for one in kernel.instances()}, wrong
        assert not (ownership.RUN / instance).exists()
    assert tried >= len(plan.objects) - 2


def test_a_refused_rule_is_named_with_who_asked_for_it(no_leaks: Names) -> None:
    origin = Origin("kube-proxy", "services", "Service default/web")
    rule = IptablesRule("-p tcp -j KUBE-NOPE", origin)
    chain = Chain(netns="a", origin=origin, table="nat", name="KUBE-SERVICES", rules=(rule,))
    plan = Plan.of("x", [Netns(netns="a", origin=USER), chain])
    with pytest.raises(KernelError, match=r"KUBE-NOPE.*kube-proxy: services \(Service default/web"):
        kernel.apply(plan, no_leaks())


def test_a_server_that_does_not_start_fails_the_whole(
    plan: Plan, no_leaks: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("import sys\nsys.exit('port 80 is taken')\n")
    monkeypatch.setattr(build, "AGENT", agent)
    with pytest.raises(KernelError, match=r"did not start.*port 80 is taken"):
        kernel.apply(plan, no_leaks())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing(
    number: signal.Signals, plan: Plan, no_leaks: Names, tmp_path: Path
) -> None:
    """A server that never gets ready holds `apply` where it has made everything else."""
    instance = no_leaks()
    agent = tmp_path / "agent.py"
    agent.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGUSR1)\nsignal.pause()\n")
    program = (
        "import os, pathlib, pickle, signal, sys\n"
        "from netlab import kernel\n"
        "from netlab.kernel import build\n"
        f"build.AGENT = pathlib.Path({str(agent)!r})\n"
        "plan = pickle.loads(sys.stdin.buffer.read())\n"
        f"signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), {int(number)}))\n"
        "try:\n"
        f"    kernel.apply(plan, {instance!r})\n"
        "except BaseException as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(plan),
        capture_output=True,
        timeout=60,
        check=True,
        cwd=Path(kernel.__file__).parent.parent.parent,
    )
    expected = "KeyboardInterrupt" if number == signal.SIGINT else "KernelError"
    assert done.stdout.decode().startswith(expected), done
    assert instance not in {one.name for one in kernel.instances()}


def test_teardown_ends_every_program_that_lives_in_the_lab(up: str) -> None:
    argv = [
        "nsenter",
        f"--net=/run/netns/netlab.{up}.pod",
        "sh",
        "-c",
        "trap '' TERM; sleep 600 & wait",
    ]
    stray = subprocess.Popen(argv, start_new_session=True)
    with namespaces.enter(up, "node1"):
        other = subprocess.Popen(["sleep", "600"])
    kernel.teardown(up)
    assert stray.wait(timeout=10) == -signal.SIGKILL
    assert other.wait(timeout=10) == -signal.SIGKILL


def test_foreign_namespaces_are_not_touched(plan: Plan, no_leaks: Names) -> None:
    """One with the prefix but no stamp, and one with another instance's stamp."""
    instance, other = no_leaks(), no_leaks()
    foreign = [f"netlab.{instance}.foreign", f"netlab.{instance}.other"]
    try:
        kernel.apply(plan, instance)
        for name in foreign:
            subprocess.run(["ip", "netns", "add", name], check=True)
        alias = ["link", "set", "lo", "alias", f"netlab {other} 0123456789abcdef"]
        subprocess.run(["ip", "-n", foreign[1], *alias], check=True)
        assert kernel.teardown(instance)
        left = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
        assert sorted(line.split()[0] for line in left.splitlines() if instance in line) == foreign
    finally:
        for name in foreign:
            subprocess.run(["ip", "netns", "delete", name], check=True)


def test_a_file_that_a_crash_left_unmounted_is_removed(no_leaks: Names) -> None:
    instance = no_leaks()
    file = namespaces.path(instance, "node1")
    namespaces.prepare_directory()
    file.touch()
    (found,) = [one for one in kernel.instances() if one.name == instance]
    assert found.state == "incomplete"
    assert kernel.teardown(instance)
    assert not file.exists()


def test_a_link_in_the_way_is_not_followed(no_leaks: Names, tmp_path: Path) -> None:
    instance = no_leaks()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = namespaces.path(instance, "a")
    namespaces.prepare_directory()
    link.symlink_to(victim)
    try:
        with pytest.raises(KernelError, match="exists"):
            kernel.apply(Plan.of("x", [Netns(netns="a", origin=USER)]), instance)
        assert not kernel.teardown(instance)
        assert victim.read_text() == "precious"
    finally:
        link.unlink()


@pytest.mark.parametrize("name", ["", "-a", "a-", "a.b", "../x", "A", "a" * 43, "a/b", "a b"])
def test_an_instance_name_cannot_lead_elsewhere(name: str, plan: Plan) -> None:
    for use in (kernel.teardown, lambda n: kernel.apply(plan, n), lambda n: kernel.stored(n, "x")):
        with pytest.raises(KernelError):
            use(name)


def test_a_sysctl_outside_net_is_refused(no_leaks: Names) -> None:
    before = Path("/proc/sys/vm/swappiness").read_text()
    for name in ("vm.swappiness", "net.//.vm.swappiness"):
        item = Sysctl(netns="a", origin=USER, name=name, value="1")
        with pytest.raises(KernelError, match="does not belong to a network namespace"):
            kernel.apply(Plan.of("x", [Netns(netns="a", origin=USER), item]), no_leaks())
    assert Path("/proc/sys/vm/swappiness").read_text() == before


# --- drift ---------------------------------------------------------------------------------------

DRIFTS: dict[str, tuple[str, str, str, str, str | None]] = {
    "mtu": (
        "node1",
        "ip link set eth0 mtu 1400",
        "link",
        "changed: link eth0 mtu 1400, planned 1500",
        "underlay",
    ),
    "mac": (
        "lan",
        "ip link set node2.eth0 address 02:00:00:00:09:09",
        "link",
        "changed: link node2.eth0 mac 02:00:00:00:09:09, planned 02:00:00:00:02:02",
        "underlay",
    ),
    "master": (
        "lan",
        "ip link set node2.eth0 nomaster",
        "link",
        "changed: link node2.eth0 master none, planned br0",
        "underlay",
    ),
    "new link": (
        "pod",
        "ip link add x0 type bridge",
        "link",
        "unexpected: link x0 kind bridge",
        None,
    ),
    "address gone": (
        "node2",
        "ip address del 172.17.1.2/16 dev eth0",
        "address",
        "missing: address 172.17.1.2/16 dev eth0",
        "underlay",
    ),
    "address new": (
        "node2",
        "ip address add 192.0.2.1/24 dev eth0",
        "address",
        "unexpected: address 192.0.2.1/24 dev eth0",
        None,
    ),
    "route gone": (
        "node1",
        "ip route del blackhole 10.233.101.0/26",
        "route",
        "missing: route 10.233.101.0/26 kind blackhole",
        "calico",
    ),
    "route changed": (
        "node1",
        "ip route change default via 172.16.0.9 dev eth0 mtu 1400",
        "route",
        "changed: route default kind unicast via 172.16.0.9",
        "underlay",
    ),
    "route new": (
        "node1",
        "ip route add 198.51.100.0/24 via 172.16.0.1",
        "route",
        "unexpected: route 198.51.100.0/24",
        None,
    ),
    "route table": (
        "pod",
        "ip route add 198.51.100.0/24 dev net1 table 77",
        "route",
        "unexpected: route 198.51.100.0/24 kind unicast dev net1 table 77",
        None,
    ),
    "rule gone": (
        "pod",
        "ip rule del from 172.16.100.2 lookup 500",
        "rule",
        "missing: rule priority 32765 from 172.16.100.2 table 500",
        "user",
    ),
    "rule new": (
        "pod",
        "ip rule add from 192.0.2.0/24 lookup 77 priority 5",
        "rule",
        "unexpected: rule priority 5 from 192.0.2.0/24 table 77",
        None,
    ),
    "rule inverted": (
        "pod",
        "ip rule add not from all lookup 500 priority 9 ipproto tcp",
        "rule",
        "unexpected: rule priority 9 from all not true ip_proto 6 table 500",
        None,
    ),
    "kernel's rule": (
        "pod",
        "ip rule del lookup default",
        "rule",
        "missing: rule priority 32767 from all table default",
        None,
    ),
    "neighbour": (
        "node1",
        "ip neighbour del 10.233.102.0 dev vxlan.calico",
        "neighbour",
        "missing: neighbour 10.233.102.0",
        "calico",
    ),
    "fdb": (
        "node1",
        "bridge fdb del 66:00:00:00:00:02 dev vxlan.calico dst 172.16.1.2 self",
        "fdb",
        "missing: fdb 66:00:00:00:00:02",
        "calico",
    ),
    "sysctl": (
        "node1",
        "sysctl -q -w net.ipv6.conf.all.disable_ipv6=0",
        "sysctl",
        "changed: sysctl net.ipv6.conf.all.disable_ipv6=0, planned 1",
        "underlay",
    ),
    "device sysctl": (
        "pod",
        "sysctl -q -w net.ipv4.conf.net1.rp_filter=0",
        "sysctl",
        "changed: sysctl net.ipv4.conf.net1.rp_filter=0, planned 2",
        "user",
    ),
    "conntrack sysctl": (
        "node1",
        "sysctl -q -w net.netfilter.nf_conntrack_tcp_be_liberal=0",
        "sysctl",
        "changed: sysctl net.netfilter.nf_conntrack_tcp_be_liberal=0, planned 1",
        "kube-proxy",
    ),
    "member gone": (
        "node1",
        "ipset del cali40all 10.233.64.0/18",
        "ipset",
        "missing: ipset cali40all member 10.233.64.0/18",
        "felix",
    ),
    "member new": (
        "node1",
        "ipset add cali40all 192.0.2.0/24",
        "ipset",
        "unexpected: ipset cali40all member 192.0.2.0/24",
        None,
    ),
    "set new": ("pod", "ipset create x hash:ip", "ipset", "unexpected: ipset x", None),
    "rule missing": (
        "node1",
        "iptables-nft -t nat -D KUBE-SERVICES 3",
        "iptables",
        "missing: iptables-nft -t nat -A KUBE-SERVICES -d 10.233.0.3/32",
        "kube-proxy",
    ),
    "rule changed": (
        "node1",
        "iptables-nft -t nat -R KUBE-SERVICES 3 -d 10.233.0.33/32 -j RETURN",
        "iptables",
        "changed: iptables-nft -t nat -A KUBE-SERVICES -d 10.233.0.33/32 -j RETURN, planned",
        "kube-proxy",
    ),
    "rule inserted": (
        "node1",
        "iptables-nft -I FORWARD -j ACCEPT",
        "iptables",
        "unexpected: iptables-nft -t filter -A FORWARD -j ACCEPT",
        None,
    ),
    "policy": (
        "node1",
        "iptables-nft -P INPUT DROP",
        "iptables",
        "changed: iptables-nft -t filter -P INPUT DROP, planned -P INPUT ACCEPT",
        None,
    ),
    "chain": (
        "node1",
        "iptables-nft -N NEW",
        "iptables",
        "unexpected: iptables-nft -t filter -N NEW",
        None,
    ),
    "other backend": (
        "node1",
        "iptables-legacy -A INPUT -j DROP",
        "iptables",
        "unexpected: iptables-legacy -t filter -A INPUT -j DROP",
        None,
    ),
    "legacy rule": (
        "pod",
        "iptables-legacy -t mangle -F PREROUTING",
        "iptables",
        "missing: iptables-legacy -t mangle -A PREROUTING -j MARK",
        "user",
    ),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_one_change_is_one_drift_with_its_name(name: str, plan: Plan, up: str) -> None:
    netns, command, kind, text, component = DRIFTS[name]
    inside(up, netns, *command.split())
    drifts = kernel.verify(plan, up)
    assert [(one.netns, one.kind) for one in drifts] == [(netns, kind)], drifts
    assert drifts[0].text.startswith(text)
    assert (drifts[0].origin.component if drifts[0].origin else None) == component


def test_a_link_that_is_down_is_a_drift(plan: Plan, up: str) -> None:
    inside(up, "lan", "ip", "link", "set", "node2.eth0", "down")
    found = [(one.netns, one.text) for one in kernel.verify(plan, up)]
    assert ("lan", "changed: link node2.eth0 up false, planned true") in found


def test_the_order_of_equal_routes_is_part_of_the_plan(plan: Plan, up: str) -> None:
    first = "10.0.0.0/8 via 172.16.0.3 dev net1"
    inside(up, "pod", "ip", "route", "del", *first.split())
    inside(up, "pod", "ip", "route", "append", *first.split())
    (drift,) = kernel.verify(plan, up)
    assert (drift.netns, drift.kind) == ("pod", "route")
    assert "via 172.16.0.1 dev net1" in drift.text
    assert "comes first" in drift.text


def test_missing_and_additional_namespaces_are_drift(plan: Plan, up: str) -> None:
    subprocess.run(["ip", "netns", "delete", f"netlab.{up}.pod"], check=True)
    name = f"netlab.{up}.extra"
    subprocess.run(["ip", "netns", "add", name], check=True)
    alias = ["link", "set", "lo", "up", "alias", f"netlab {up} {plan.hash}"]
    subprocess.run(["ip", "-n", name, *alias], check=True)
    found = {(one.netns, one.text) for one in kernel.verify(plan, up) if one.kind == "netns"}
    assert found == {
        ("pod", "missing: the network namespace"),
        ("extra", "unexpected: the network namespace"),
    }


def test_programs_that_have_ended_are_drift(plan: Plan, up: str) -> None:
    pids = [
        int(pid)
        for netns in ("lan", "node1", "node2", "pod")
        for pid in subprocess.run(
            ["ip", "netns", "pids", f"netlab.{up}.{netns}"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
    ]
    handles = [os.pidfd_open(pid) for pid in pids]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for handle in handles:
        os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT)
        os.close(handle)
    found = {(one.netns, one.kind, one.text) for one in kernel.verify(plan, up)}
    assert found == {
        *(
            (node, "listener", f"missing: nobody answers on {protocol} port {port}")
            for node in ("node1", "node2")
            for protocol in ("TCP", "UDP")
            for port in (80, 8080)
        ),
        ("pod", "command", "missing: sleep infinity has ended"),
    }


# --- reading -------------------------------------------------------------------------------------


def test_route_get_says_what_ip_route_get_says(up: str) -> None:
    found = kernel.route_get(up, "node1", IPv4Address("8.8.8.8"))
    assert found == {
        "dst": "8.8.8.8",
        "kind": "unicast",
        "via": "172.16.0.1",
        "dev": "eth0",
        "table": "main",
        "src": "172.16.1.1",
        "match": "default",
    }
    assert "via 172.16.0.1 dev eth0 src 172.16.1.1" in inside(
        up, "node1", "ip", "route", "get", "8.8.8.8"
    )


def test_route_get_follows_the_policy_rules(up: str) -> None:
    source, mark = IPv4Address("172.16.100.2"), 0x10
    by_source = kernel.route_get(up, "pod", IPv4Address("8.8.8.8"), src=source)
    by_mark = kernel.route_get(up, "pod", IPv4Address("8.8.8.8"), mark=mark)
    assert (by_source["table"], by_mark["table"]) == ("500", "500")
    none = kernel.route_get(up, "pod", IPv4Address("8.8.8.8"))
    assert none == {"dst": "8.8.8.8", "kind": "unreachable", "error": "Network is unreachable"}


def test_tables_rules_links_and_neighbours_in_iproute2s_words(up: str) -> None:
    assert [route["via"] for route in kernel.routes(up, "pod", "main") if "via" in route] == [
        "172.16.0.3",
        "172.16.0.1",
        "172.16.0.2",
    ]
    assert kernel.routes(up, "pod", "500") == (
        {
            "dst": "default",
            "kind": "unicast",
            "dev": "net1",
            "table": "500",
            "proto": "boot",
            "scope": "link",
            "src": "172.16.100.2",
            "metric": "7",
        },
    )
    assert [
        (rule["priority"], rule["from"], rule["table"]) for rule in kernel.rules(up, "pod")
    ] == [
        ("0", "all", "local"),
        ("1000", "all", "501"),
        ("32764", "all", "500"),
        ("32765", "172.16.100.2", "500"),
        ("32766", "all", "main"),
        ("32767", "all", "default"),
    ]
    (net1,) = [link for link in kernel.links(up, "pod") if link["name"] == "net1"]
    assert {
        "kind": "macvlan",
        "mode": "bridge",
        "mac": "02:00:00:00:03:01",
        "mtu": "1500",
    }.items() <= net1.items()
    permanent = [one for one in kernel.neighbours(up, "node1") if one["state"] == "permanent"]
    assert permanent == [
        {
            "address": "10.233.102.0",
            "dev": "vxlan.calico",
            "mac": "66:00:00:00:00:02",
            "state": "permanent",
        }
    ]


def test_what_was_stored_is_read_back_and_only_that(up: str) -> None:
    assert kernel.stored(up, "lab.yaml") == b"name: x\n"
    assert kernel.stored(up, "other") is None
    assert (ownership.RUN / up).stat().st_mode & 0o777 == 0o700
    assert (ownership.RUN / up / "lab.yaml").stat().st_mode & 0o777 == 0o600
    with pytest.raises(KernelError):
        kernel.stored(up, "../secret")


# --- programs ------------------------------------------------------------------------------------


def test_programs_run_in_their_namespace_at_the_same_time(up: str) -> None:
    argv = ["ip", "-o", "-4", "address", "show", "scope", "global"]
    wanted = {"node1": "172.16.1.1/16", "node2": "172.16.1.2/16", "pod": "172.16.100.2/16"}
    with ThreadPoolExecutor(8) as pool:
        jobs = [(n, pool.submit(kernel.run, up, n, argv, timeout=10)) for n in [*wanted] * 8]
        for netns, job in jobs:
            assert wanted[netns] in job.result().stdout


def test_a_program_that_takes_too_long_is_killed_with_its_children(up: str) -> None:
    done = kernel.run(up, "pod", ["sh", "-c", "sleep 600 & echo started; wait"], timeout=0.5)
    assert (done.timed_out, done.stdout) == (True, "started\n")
    assert 0.5 <= done.seconds < 5


def test_a_program_gets_its_input_and_nothing_of_our_environment(
    up: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:3128")
    done = kernel.run(
        up, "pod", ["sh", "-c", "cat; env"], timeout=5, input="hello\n", env={"A": "b"}
    )
    assert done.stdout.startswith("hello\n")
    assert "http_proxy" not in done.stdout
    assert "A=b" in done.stdout.splitlines()


def test_a_program_that_does_not_exist_is_an_error_not_a_result(up: str) -> None:
    with pytest.raises(KernelError, match="cannot run no-such-program"):
        kernel.run(up, "pod", ["no-such-program"], timeout=5)


def test_only_the_thread_that_enters_is_inside(up: str) -> None:
    own = os.stat("/proc/thread-self/ns/net").st_ino  # noqa: PTH116 - of this thread
    seen: list[int] = []
    with kernel.enter(up, "pod"):
        assert os.stat("/proc/thread-self/ns/net").st_ino != own  # noqa: PTH116 - likewise
        leader = Path("/proc/self/task", str(os.getpid()), "ns/net")
        other = threading.Thread(target=lambda: seen.append(leader.stat().st_ino))
        other.start()
        other.join()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("172.16.100.2", 0))
    assert os.stat("/proc/thread-self/ns/net").st_ino == own  # noqa: PTH116 - likewise
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with pytest.raises(OSError, match="assign requested address") as caught:
            probe.bind(("172.16.100.2", 0))
        assert caught.value.errno == errno.EADDRNOTAVAIL


EXECUTE = (
    "import sys; from netlab import kernel; sys.exit(kernel.execute(*sys.argv[1:3], sys.argv[3:]))"
)


def execute(*argv: str) -> subprocess.CompletedProcess[str]:
    root = Path(kernel.__file__).parent.parent.parent
    command = [sys.executable, "-c", EXECUTE, *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
        (["sh", "-c", "kill -KILL $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
    ],
)
def test_exec_returns_the_programs_own_code(argv: list[str], code: int, up: str) -> None:
    assert execute(up, "pod", *argv).returncode == code


def test_exec_shows_the_namespaces_own_sys(up: str) -> None:
    assert execute(up, "pod", "ls", "/sys/class/net").stdout.split() == ["lo", "net1"]


def test_exec_passes_sigterm_on(up: str) -> None:
    root = Path(kernel.__file__).parent.parent.parent
    script = "trap 'echo ended; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    argv = [sys.executable, "-c", EXECUTE, up, "pod", "sh", "-c", script]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "ended\n"
        assert process.wait(timeout=10) == 3


def test_exec_passes_on_a_signal_that_comes_at_once(up: str) -> None:
    """The program signals whoever waits for it as soon as it runs: the wait must not end first."""
    script = "trap 'exit 3' TERM; kill -TERM $PPID; while :; do sleep 0.05; done"
    assert execute(up, "pod", "sh", "-c", script).returncode == 3


# --- locks, features -----------------------------------------------------------------------------


def test_a_second_command_on_the_same_lab_is_told_who_has_it(no_leaks: Names) -> None:
    instance = no_leaks()
    program = (
        "import sys; from netlab import kernel\n"
        f"with kernel.lock({instance!r}):\n    print('locked', flush=True); sys.stdin.read()\n"
    )
    root = Path(kernel.__file__).parent.parent.parent
    argv = [sys.executable, "-c", program, "marker-argument"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=root) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(Busy, match=rf"process {holder.pid} \(.*marker-argument"),
            kernel.lock(instance),
        ):
            pass
        with kernel.lock(no_leaks()):
            pass
        holder.kill()
    with kernel.lock(instance), pytest.raises(Busy), kernel.lock(instance):
        pass


def test_features_of_this_machine_and_what_it_lacks(no_leaks: Names) -> None:
    del no_leaks
    wanted = ["root", "netns", "veth", "bridge", "macvlan", "vxlan", "ipset", "iptables-nft"]
    wanted += ["iptables-legacy", *machine.EXTENSIONS, "no-such-program"]
    found = kernel.features(wanted)
    assert found["no-such-program"] == "the program no-such-program is not installed"
    assert found["veth"] == found["iptables-nft"] == found["xt_conntrack"] == ""


def test_an_extension_that_the_kernel_lacks_is_named_alone(
    no_leaks: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    del no_leaks
    lacking = {**machine.EXTENSIONS, "xt_nope": ("filter", "INPUT", "-m nope -j ACCEPT")}
    monkeypatch.setattr(machine, "EXTENSIONS", lacking)
    found = kernel.features(["iptables-nft", "xt_nope", "xt_comment"])
    assert found["xt_comment"] == found["iptables-nft"] == ""
    assert found["xt_nope"].startswith("not with iptables-nft:")


def test_a_vlan_where_the_kernel_has_them(no_leaks: Names) -> None:
    if problem := kernel.features(["vlan"])["vlan"]:
        pytest.skip(f"vlan: {problem}")
    instance = no_leaks()
    objects = [
        *(Netns(netns=name, origin=USER) for name in "ab"),
        Veth(netns="a", origin=USER, name="eth0", peer_netns="b", peer="eth0"),
        Vlan(netns="a", origin=USER, name="eth0.100", lower="eth0", vlan=100),
        Sysctl(netns="a", origin=USER, name="net.ipv4.conf.eth0/100.rp_filter", value="2"),
    ]
    plan = Plan.of("vlan", objects)
    try:
        kernel.apply(plan, instance)
        assert kernel.verify(plan, instance) == ()
        inside(instance, "a", "ip", "link", "del", "eth0.100")
        assert [one.kind for one in kernel.verify(plan, instance)][:1] == ["link"]
    finally:
        kernel.teardown(instance)
