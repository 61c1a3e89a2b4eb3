"""Each thing that can happen to a probe, made with real routes and rules, and what it is called."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlab import kernel, lifecycle, probe
from netlab.compile import compile_lab
from netlab.model import Lab
from netlab.outcome import Outcome
from netlab.probe import ARP_SILENT
from netlab.spec import parse, parse_probe

pytestmark = pytest.mark.live

TEXT = """
name: probes
underlay:
  networks:
    lan: {subnets: [10.0.1.0/24]}
    wan: {subnets: [10.0.2.0/24]}
  routers:
    gw:
      lan: [10.0.1.1]
      wan: [10.0.2.1]
      extra:
        after:
          iptables:
            - -t filter -A FORWARD -p tcp --dport 81 -j DROP
            - -t filter -A FORWARD -p udp --dport 81 -j DROP
            - -t filter -A FORWARD -p tcp --dport 82 -j REJECT --reject-with icmp-port-unreachable
            - -t filter -A FORWARD -p udp --dport 82 -j REJECT --reject-with icmp-port-unreachable
            - -t filter -A FORWARD -p tcp --dport 83 -j REJECT --reject-with icmp-host-prohibited
            - -t filter -A FORWARD -p tcp --dport 84 -j REJECT --reject-with tcp-reset
            - -t filter -A FORWARD -p icmp -d 10.0.2.12 -j REJECT --reject-with icmp-host-prohibited
            - -t filter -A FORWARD -p icmp -d 10.0.2.13 -j DROP
            - -t nat -A POSTROUTING -s 10.0.1.12 -o eth1 -j MASQUERADE
  hosts:
    a: {network: lan, address: 10.0.1.10}
    m: {network: lan, address: 10.0.1.12}
    lost: {network: lan, address: 10.0.1.13, gateway: null}
    c: {network: wan, address: 10.0.2.11}
    filtered: {network: wan, address: 10.0.2.12}
    silent: {network: wan, address: 10.0.2.13}
    own: {network: wan, address: 10.0.2.14, command: [sleep, infinity]}
cluster: {podCIDR: 10.233.64.0/18, serviceCIDR: 10.233.0.0/18, kubeProxy: false}
nodes:
  node1: {nics: {eth0: {network: lan, address: 10.0.1.20}}}
"""
INSTANCE = f"probes-{os.getpid()}"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    file = tmp_path_factory.mktemp("probes") / "probes.yaml"
    file.write_text(TEXT)
    made = parse(TEXT, file)
    with lifecycle.private(made, compile_lab(made), INSTANCE):
        yield made


def run(text: str, lab: Lab) -> Outcome:
    return probe.run(parse_probe(text, lab), INSTANCE)


@pytest.mark.parametrize("kind", ["curl", "tcp", "udp"])
def test_the_server_says_whom_it_saw_and_how_far(lab: Lab, kind: str) -> None:
    near, far = run(f"{kind} a -> node1", lab), run(f"{kind} a -> c", lab)
    assert (near.result, str(near.seen_as), near.server, near.hops) == (
        "delivered",
        "10.0.1.10",
        "node1",
        0,
    )
    assert (far.result, str(far.seen_as), far.server, far.hops) == (
        "delivered",
        "10.0.1.10",
        "c",
        1,
    )


@pytest.mark.parametrize("kind", ["curl", "tcp", "udp"])
def test_masquerading_shows(lab: Lab, kind: str) -> None:
    assert str(run(f"{kind} m -> c", lab).seen_as) == "10.0.2.1"


def test_a_bound_source_is_used(lab: Lab) -> None:
    for kind in ("curl", "tcp", "udp"):
        assert run(f"{kind} gw.eth1 -> c", lab).result == "delivered"
        assert str(run(f"{kind} gw@10.0.1.1 -> c", lab).seen_as) == "10.0.1.1"
    assert run("ping gw@10.0.1.1 -> c", lab).result == "delivered"


@pytest.mark.parametrize(
    ("text", "result", "by"),
    [
        ("ping a -> c", "delivered", None),
        ("ping a -> silent", "dropped", None),
        ("ping a -> filtered", "rejected", "10.0.1.1"),
        ("ping lost -> c", "dropped", None),
        ("curl a -> c:81", "dropped", None),
        ("tcp a -> c:81", "dropped", None),
        ("udp a -> c:81", "dropped", None),
        ("curl a -> c:82", "rejected", "10.0.1.1"),
        ("tcp a -> c:82", "rejected", "10.0.1.1"),
        ("udp a -> c:82", "rejected", "10.0.1.1"),
        ("curl a -> c:83", "rejected", "10.0.1.1"),
        ("tcp a -> c:83", "rejected", "10.0.1.1"),
        ("curl a -> c:84", "rejected", "10.0.2.11"),
        ("curl a -> c:99", "rejected", "10.0.2.11"),
        ("tcp a -> c:99", "rejected", "10.0.2.11"),
        ("udp a -> c:99", "rejected", "10.0.2.11"),
        ("curl lost -> c", "dropped", None),
        ("tcp lost -> c", "dropped", None),
        ("udp lost -> c", "dropped", None),
        ("curl a -> own", "rejected", "10.0.2.14"),
    ],
)
def test_what_it_is_called(lab: Lab, text: str, result: str, by: str | None) -> None:
    outcome = run(text, lab)
    offender = str(outcome.rejected_by) if outcome.rejected_by else None
    assert (outcome.result, offender) == (result, by), outcome


def test_a_neighbour_that_does_not_answer(lab: Lab) -> None:
    outcome = run("udp a -> 10.0.1.99", lab)
    assert outcome.result == "dropped"
    kernel.run(INSTANCE, "a", ("ping", "-c", "1", "-W", "4", "10.0.1.99"), timeout=20)
    again = run("tcp a -> 10.0.1.99", lab)
    assert again.result == "dropped"


def test_no_route_says_so(lab: Lab) -> None:
    for kind in ("ping", "curl", "tcp", "udp"):
        assert "no route" in run(f"{kind} lost -> c", lab).reason


def test_a_machine_that_says_unreachable_for_another(lab: Lab) -> None:
    """The router asks by ARP in vain and answers with ICMP: rejected, by it."""
    outcome = run("tcp a -> 10.0.2.99", lab)
    assert outcome.result in {"dropped", "rejected"}
    done = kernel.run(INSTANCE, "a", ("ping", "-n", "-c", "1", "-W", "5", "10.0.2.99"), timeout=20)
    own = {word["address"].split("/")[0] for word in kernel.addresses(INSTANCE, "a")}
    read = probe.read_ping(done.returncode, done.stdout, done.stderr, own)
    assert (read.result, str(read.rejected_by)) == ("rejected", "10.0.1.1")
    assert read.reason != ARP_SILENT


def test_an_instrument_that_is_missing_is_an_error(lab: Lab) -> None:
    gone = probe.run(parse_probe("curl a -> c", lab), "no-such-instance")
    assert gone.result == "error"


# --- the agent -----------------------------------------------------------------------------------


def agent() -> Path:
    """/proc entry of the instance's agent."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                environment = str((entry / "ns/net").readlink())
            except OSError:
                continue
            if b"netlab/agent.py" in command and environment in _namespaces():
                return entry
    raise AssertionError("no agent")


def _namespaces() -> set[str]:
    folder = Path("/run/netns")
    return {f"net:[{path.stat().st_ino}]" for path in folder.glob(f"netlab.{INSTANCE}.*")}


def test_the_agent_lives_in_the_lab_and_is_light(lab: Lab) -> None:
    assert lab.hosts
    entry = agent()
    assert (entry / "ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    (line,) = [x for x in (entry / "status").read_text().splitlines() if x.startswith("VmHWM")]
    assert int(line.split()[1]) <= 40 * 1024
    assert (entry / "cwd").readlink() == Path("/")
    targets = {str(file.readlink()) for file in (entry / "fd").iterdir()}
    others = {t for t in targets if not t.startswith(("socket:", "anon_inode:"))}
    assert others == {"/dev/null"}


def test_a_slow_client_holds_up_nobody(lab: Lab) -> None:
    with kernel.enter(INSTANCE, "a"):
        slow = [socket.create_connection(("10.0.2.11", 80), 5) for _ in range(50)]
    try:
        for client in slow:
            client.send(b"GET / HTT")
        assert run("curl a -> c", lab).result == "delivered"
        slow[0].send(b"P/1.1\r\nHost: c\r\n\r\n")
        assert b'"seen": "10.0.1.10"' in slow[0].recv(4096)
    finally:
        for client in slow:
            client.close()


def test_a_client_that_talks_rubbish_is_dropped(lab: Lab) -> None:
    with kernel.enter(INSTANCE, "a"):
        client = socket.create_connection(("10.0.2.11", 80), 5)
    with client:
        client.settimeout(5)
        try:
            client.sendall(b"x" * 100_000)
            assert client.recv(4096) == b""
        except ConnectionError:
            pass
    assert run("curl a -> c", lab).result == "delivered"
