"""Probes: real `ping` and `curl`, and a cheap tcp and udp of our own, each into an Outcome.

What was seen, and what it is called:

    an answer from the target                                        delivered
    RST, or an ICMP error from another machine                       rejected, by whom
    nothing in time                                                  dropped
    nobody answered ARP for the next hop, or no route, at the source dropped, the reason says so
    the program or the namespace is missing, or it said what we
    cannot read                                                      error

"Host unreachable" has two meanings: the source gave up on ARP, or a router or firewall answered
with ICMP. `ping` says which; for `curl` a connect of our own reads the socket's error queue
(IP_RECVERR, ip(7)), where the kernel keeps the origin of the error and who sent it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from ipaddress import IPv4Address
from typing import TypeVar

from netlab import kernel
from netlab.errors import KernelError
from netlab.model import Probe, ProbeKind
from netlab.outcome import Outcome

PATIENCE = max(1, int(os.environ.get("NETLAB_PATIENCE", "1")))
"""Times all limits: an emulated machine, some twenty times slower, needs more than one."""
CONNECT_SECONDS = 2 * PATIENCE
"""For the first answer: a lab's paths take microseconds, and SYN is sent again after 1 s."""
TOTAL_SECONDS = 3 * PATIENCE
"""For a whole curl: the kernel sends data again after 0.2, 0.6 and 1.4 s; a path that lost all
four has dropped them."""
PROGRAM_SECONDS = 60
"""For a program to come to its own end: ping and curl keep the times above by themselves."""
PER_CORE = 6
"""Programs at once and core: more would only take each other's time, and a probe's clock runs."""
MAX_WAITING = 64
DEFAULT_TTL = 64

T = TypeVar("T")

ARP_SILENT = "nobody answered ARP for the next hop"

_IP_RECVERR, _MSG_ERRQUEUE, _SO_EE_ORIGIN_ICMP = 11, 0x2000, 2
_EXTENDED_ERROR = struct.Struct("=IB")
"""Errno and origin of struct sock_extended_err; the offender's sockaddr_in follows at byte 16."""


def run(probe: Probe, instance: str) -> Outcome:
    """Run *probe* once in *instance*. Never raises for what the network does."""
    started = time.perf_counter()
    try:
        outcome = PROBES[probe.kind](probe, instance)
    except (KernelError, OSError) as error:
        outcome = Outcome("error", str(error))
    return replace(outcome, seconds=time.perf_counter() - started)


def run_all(jobs: Sequence[Callable[[], T]], waiting: int, done: Callable[[], None]) -> list[T]:
    """All *jobs*, a bounded number at a time; what they return, in their order.

    Args:
        jobs: each runs one probe or several in a row.
        waiting: how many of them, first in order, will only wait for a time-out: they take a
            place of their own each, so that they do not keep the others waiting.
        done: called after each job, from any thread.
    """

    def work(job: Callable[[], T]) -> T:
        outcome = job()
        done()
        return outcome

    pool = ThreadPoolExecutor(PER_CORE * (os.cpu_count() or 1) + min(waiting, MAX_WAITING))
    try:
        return list(pool.map(work, jobs))
    finally:
        pool.shutdown(cancel_futures=True)


# --- ping ----------------------------------------------------------------------------------------


def _ping(probe: Probe, instance: str) -> Outcome:
    bound = probe.source.address or probe.source.nic
    source = ("-I", str(bound)) if bound else ()
    argv = ("ping", "-n", "-c", "1", "-W", str(CONNECT_SECONDS), *source)
    done = kernel.run(
        instance, probe.source.actor, (*argv, str(probe.target.address)), timeout=PROGRAM_SECONDS
    )
    own = kernel.addresses(instance, probe.source.actor) if done.returncode else ()
    return read_ping(
        done.returncode, done.stdout, done.stderr, {word["address"].split("/")[0] for word in own}
    )


def read_ping(returncode: int, stdout: str, stderr: str, own: Collection[str]) -> Outcome:
    """The outcome that iputils' ping printed; *own*: addresses of the pinging machine."""
    if returncode == 0:
        return Outcome("delivered", "echo reply")
    unreachable = re.search(r"^From ([\d.]+):? icmp_seq=1 (.+)$", stdout, re.MULTILINE)
    if unreachable:
        if unreachable[1] in own:
            return Outcome("dropped", ARP_SILENT)
        return Outcome("rejected", unreachable[2], rejected_by=IPv4Address(unreachable[1]))
    said = stderr.strip().removeprefix("ping: ")
    if "nreachable" in said:
        return Outcome("dropped", f"no route at the source ({said})")
    if "100% packet loss" in stdout and returncode == 1:
        return Outcome("dropped", said or "no echo reply")
    return Outcome("error", said or f"ping ended with {returncode}")


# --- curl ----------------------------------------------------------------------------------------

_COULD_NOT_CONNECT, _TIMED_OUT, _NOTHING_SENT, _SEND_ERROR, _RECV_ERROR = 7, 28, 52, 55, 56


def _curl(probe: Probe, instance: str) -> Outcome:
    bound = probe.source.address or probe.source.nic
    source = ("--interface", str(bound)) if bound else ()
    url = f"http://{probe.target.address}:{probe.target.port}/"
    argv = (
        *("curl", "--disable", "--silent", "--show-error", "--noproxy", "*"),
        *("--connect-timeout", str(CONNECT_SECONDS), "--max-time", str(TOTAL_SECONDS)),
        *source,
        url,
    )
    done = kernel.run(instance, probe.source.actor, argv, timeout=PROGRAM_SECONDS)
    if done.returncode == _COULD_NOT_CONNECT:
        return _why_not(probe, instance, done.stderr)
    return read_curl(done.returncode, done.stdout, done.stderr)


def read_curl(returncode: int, stdout: str, stderr: str) -> Outcome:
    """The outcome of a curl that got past connect(), or got no answer to it."""
    said = re.sub(r"^curl: \(\d+\) ", "", stderr.strip())
    if returncode == 0:
        return _delivered(stdout)
    if returncode == _TIMED_OUT:
        return Outcome("dropped", said or "timed out")
    if returncode in {_NOTHING_SENT, _SEND_ERROR, _RECV_ERROR}:
        return Outcome("rejected", said or "connection reset")
    return Outcome("error", said or f"curl ended with {returncode}")


def _why_not(probe: Probe, instance: str, stderr: str) -> Outcome:
    """Why connect() failed, from the error queue of a connect of our own."""
    again = _tcp(probe, instance)
    if again.result in {"rejected", "dropped"}:
        return again
    return Outcome("error", f"curl could not connect, a second connection could: {stderr.strip()}")


def _delivered(text: str) -> Outcome:
    """What the lab's server says of the client; another server's answer is delivered as well."""
    try:
        said = json.loads(text)
        hops = None if said["ttl"] is None else DEFAULT_TTL - said["ttl"]
        return Outcome(
            "delivered", "answered", IPv4Address(said["seen"]), str(said["server"]), hops
        )
    except (ValueError, LookupError, TypeError):
        return Outcome("delivered", "answered by a program of the lab's own")


# --- built in ------------------------------------------------------------------------------------


def _tcp(probe: Probe, instance: str) -> Outcome:
    with _socket(probe, instance, socket.SOCK_STREAM) as sock:
        failed = _connect(sock, probe.target.address, probe.target.port)
        if failed:
            return failed
        deadline = time.monotonic() + TOTAL_SECONDS
        try:
            sock.send(b"netlab\n")
            received = b""
            while chunk := _receive(sock, deadline):
                received += chunk
        except OSError as error:
            return _failure(sock, error, probe.target.address)
        if not received and time.monotonic() >= deadline:
            return Outcome("dropped", "connected, then no answer")
        return _delivered(received.decode(errors="replace"))


def _udp(probe: Probe, instance: str) -> Outcome:
    """One datagram and its answer; a lost one is not sent again."""
    with _socket(probe, instance, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((str(probe.target.address), probe.target.port))
            sock.send(b"netlab\n")
            received = _receive(sock, time.monotonic() + CONNECT_SECONDS)
        except OSError as error:
            return _failure(sock, error, probe.target.address)
        if not received:
            return Outcome("dropped", "no answer")
        return _delivered(received.decode(errors="replace"))


def _socket(probe: Probe, instance: str, kind: socket.SocketKind) -> socket.socket:
    """A non-blocking socket of the source's namespace, bound as the probe says."""
    with kernel.enter(instance, probe.source.actor):
        sock = socket.socket(socket.AF_INET, kind)
        try:
            sock.settimeout(0)
            sock.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
            if probe.source.nic:
                device = probe.source.nic.encode()
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device)
            if probe.source.address:
                sock.bind((str(probe.source.address), 0))
        except BaseException:
            sock.close()
            raise
    return sock


def _connect(sock: socket.socket, address: IPv4Address, port: int) -> Outcome | None:
    """None when connected, else the outcome."""
    code = sock.connect_ex((str(address), port))
    if code == errno.EINPROGRESS:
        _, ready, _ = select.select((), (sock,), (), CONNECT_SECONDS)
        if not ready:
            return Outcome("dropped", f"no answer to SYN within {CONNECT_SECONDS} s")
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return _failure(sock, OSError(code, os.strerror(code)), address) if code else None


def _receive(sock: socket.socket, deadline: float) -> bytes:
    """What comes next; nothing at the end, or when the time is over."""
    ready, _, _ = select.select((sock,), (), (), max(0.0, deadline - time.monotonic()))
    return sock.recv(4096) if ready else b""


def _failure(sock: socket.socket, error: OSError, target: IPv4Address) -> Outcome:
    """A socket error as an outcome, by the origin that the error queue tells."""
    said = error.strerror or str(error)
    offender = _offender(sock)
    if offender:
        return Outcome("rejected", f"{said} (ICMP)", rejected_by=offender)
    if error.errno in {errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE}:
        return Outcome("rejected", said, rejected_by=target)
    if error.errno == errno.EHOSTUNREACH:
        return Outcome("dropped", ARP_SILENT)
    if error.errno in {errno.ENETUNREACH, errno.EACCES, errno.EINVAL}:
        return Outcome("dropped", f"no route at the source ({said})")
    if error.errno in {errno.ETIMEDOUT, errno.EPERM}:
        return Outcome("dropped", said)
    return Outcome("error", said)


def _offender(sock: socket.socket) -> IPv4Address | None:
    """Who sent the ICMP error that is queued, if one is."""
    try:
        _, ancillary, _, _ = sock.recvmsg(512, 512, _MSG_ERRQUEUE)
    except OSError:
        return None
    for level, kind, value in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _IP_RECVERR) and len(value) >= 24:
            origin = _EXTENDED_ERROR.unpack_from(value)[1]
            if origin == _SO_EE_ORIGIN_ICMP:
                return IPv4Address(value[20:24])
    return None


PROBES: Mapping[ProbeKind, Callable[[Probe, str], Outcome]] = {
    "ping": _ping,
    "curl": _curl,
    "tcp": _tcp,
    "udp": _udp,
}
