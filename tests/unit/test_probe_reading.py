"""What ping and curl print, read; the texts are iputils 20221126's and curl 7.88's own."""

from __future__ import annotations

import json

import pytest

from netlab.probe import ARP_SILENT, read_curl, read_ping

HEAD = "PING 10.0.0.2 (10.0.0.2) 56(84) bytes of data.\n"
LOSS = (
    "\n--- 10.0.0.2 ping statistics ---\n"
    "1 packets transmitted, 0 received, 100% packet loss, time 0ms\n"
)


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "result", "reason", "by"),
    [
        (
            0,
            f"{HEAD}64 bytes from 10.0.0.2: icmp_seq=1 ttl=63 time=0.1 ms\n",
            "",
            "delivered",
            "echo reply",
            None,
        ),
        (1, HEAD + LOSS, "", "dropped", "no echo reply", None),
        (
            1,
            f"{HEAD}From 10.0.0.1 icmp_seq=1 Destination Host Unreachable\n{LOSS}",
            "",
            "dropped",
            ARP_SILENT,
            None,
        ),
        (
            1,
            f"{HEAD}From 10.0.0.254 icmp_seq=1 Destination Host Unreachable\n{LOSS}",
            "",
            "rejected",
            "Destination Host Unreachable",
            "10.0.0.254",
        ),
        (
            1,
            f"{HEAD}From 10.0.0.254 icmp_seq=1 Packet filtered\n{LOSS}",
            "",
            "rejected",
            "Packet filtered",
            "10.0.0.254",
        ),
        (
            1,
            f"{HEAD}From 10.0.0.254 icmp_seq=1 Time to live exceeded\n{LOSS}",
            "",
            "rejected",
            "Time to live exceeded",
            "10.0.0.254",
        ),
        (
            2,
            "",
            "ping: connect: Network is unreachable\n",
            "dropped",
            "no route at the source (connect: Network is unreachable)",
            None,
        ),
        (
            2,
            "",
            "ping: socket: Operation not permitted\n",
            "error",
            "socket: Operation not permitted",
            None,
        ),
        (2, "", "ping: unknown iface eth7\n", "error", "unknown iface eth7", None),
        (-9, "", "", "error", "ping ended with -9", None),
    ],
)
def test_ping(
    code: int, stdout: str, stderr: str, result: str, reason: str, by: str | None
) -> None:
    outcome = read_ping(code, stdout, stderr, {"10.0.0.1", "127.0.0.1"})
    offender = str(outcome.rejected_by) if outcome.rejected_by else None
    assert (outcome.result, outcome.reason, offender) == (result, reason, by)


def test_curl_reads_what_the_server_saw() -> None:
    body = json.dumps(
        {"server": "ma1", "seen": "10.0.0.1", "port": 1, "local": "x", "ttl": 62, "proto": "tcp"}
    )
    outcome = read_curl(0, body, "")
    assert (outcome.result, str(outcome.seen_as), outcome.server, outcome.hops) == (
        "delivered",
        "10.0.0.1",
        "ma1",
        2,
    )


@pytest.mark.parametrize("body", ["hello", "", "[]", '{"seen": "x"}', "{"])
def test_another_servers_answer_is_delivered_too(body: str) -> None:
    outcome = read_curl(0, body, "")
    assert (outcome.result, outcome.seen_as, outcome.hops) == ("delivered", None, None)


@pytest.mark.parametrize(
    ("code", "result"),
    [
        (28, "dropped"),
        (56, "rejected"),
        (52, "rejected"),
        (55, "rejected"),
        (45, "error"),
        (2, "error"),
    ],
)
def test_curl_codes(code: int, result: str) -> None:
    outcome = read_curl(code, "", f"curl: ({code}) said so\n")
    assert (outcome.result, outcome.reason) == (result, "said so")
