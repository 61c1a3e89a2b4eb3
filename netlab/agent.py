"""The servers of a lab: one process that listens in every namespace and says whom it saw.

`netlab.kernel` starts it as a plain file (``python -I -S agent.py``), so it uses the standard
library alone and starts in a few milliseconds. It reads one JSON line::

    {"instance": "lab", "netns": {"ma1": {"path": "/run/netns/netlab.lab.ma1", "ports": [80]}}}

prints ``ready`` when every socket listens, lets go of its standard streams and serves until it is
killed. It ends up inside a namespace of the lab, never in the host's.

A client gets one JSON object: ``server`` (the lab's name of the namespace), ``seen`` and ``port``
(the client as it arrived here), ``local`` (the address that it asked), ``ttl`` (of the SYN or the
datagram: 64 minus it is the number of routers passed) and ``proto``. TCP: as the body of an HTTP
answer, or as a line to a client whose first line is ``netlab``. UDP: to any datagram.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from typing import Any

CLONE_NEWNET = 0x40000000
TCP_SAVE_SYN, TCP_SAVED_SYN = 27, 28
IP_PKTINFO, IP_RECVTTL, IP_TTL = 8, 12, 2
TTL_IN_IP_HEADER = 8

MAX_CONNECTIONS = 1024
MAX_REQUEST = 8192
IDLE_SECONDS = 10.0
BACKLOG = 256

_PKTINFO = struct.Struct("=i4s4s")
_libc = ctypes.CDLL(None, use_errno=True)


class Listener:
    """A listening TCP socket or a bound UDP socket of one namespace."""

    __slots__ = ("name", "socket")

    def __init__(self, name: str, sock: socket.socket) -> None:
        self.name = name
        self.socket = sock


class Connection:
    """An accepted TCP connection whose request is not complete yet."""

    __slots__ = ("name", "peer", "received", "since", "socket", "ttl")

    def __init__(self, name: str, sock: socket.socket, peer: tuple[str, int]) -> None:
        self.name = name
        self.socket = sock
        self.peer = peer
        self.received = b""
        self.since = time.monotonic()
        syn = sock.getsockopt(socket.IPPROTO_TCP, TCP_SAVED_SYN, 128)
        self.ttl = syn[TTL_IN_IP_HEADER] if len(syn) > TTL_IN_IP_HEADER else None


def describe(name: str, peer: tuple[str, int], local: str, ttl: int | None, proto: str) -> bytes:
    """The answer: whom the server called *name* saw."""
    seen = {"server": name, "seen": peer[0], "port": peer[1]}
    return json.dumps({**seen, "local": local, "ttl": ttl, "proto": proto}).encode() + b"\n"


def answer(connection: Connection) -> bytes | None:
    """The whole answer to what was received; None where the request is not complete yet."""
    received = connection.received
    local = connection.socket.getsockname()[0]
    body = describe(connection.name, connection.peer, local, connection.ttl, "tcp")
    if received.startswith(b"netlab\n"):
        return body
    if b"\r\n\r\n" not in received and b"\n\n" not in received:
        return None
    head = (
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    return head if received.startswith(b"HEAD ") else head + body


class Server:
    """All sockets of a lab in one loop; no client can hold up another."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.connections: dict[int, Connection] = {}

    def listen(self, name: str, port: int) -> None:
        """Open TCP and UDP *port* in the current namespace."""
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.setsockopt(socket.IPPROTO_TCP, TCP_SAVE_SYN, 1)
        tcp.bind(("0.0.0.0", port))  # noqa: S104 - every address of the lab's own namespace
        tcp.listen(BACKLOG)
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
        udp.setsockopt(socket.IPPROTO_IP, IP_RECVTTL, 1)
        udp.bind(("0.0.0.0", port))  # noqa: S104 - likewise
        for sock, handler in ((tcp, self.accept), (udp, self.datagram)):
            sock.settimeout(0)
            self.selector.register(sock, selectors.EVENT_READ, (handler, Listener(name, sock)))

    def serve(self) -> None:
        """Answer until the process is killed."""
        while True:
            for key, _ in self.selector.select(IDLE_SECONDS / 2):
                handler, subject = key.data
                try:
                    handler(subject)
                except OSError:
                    if isinstance(subject, Connection):
                        self.close(subject)
            self.close_idle()

    def accept(self, listener: Listener) -> None:
        sock, peer = listener.socket.accept()
        if len(self.connections) >= MAX_CONNECTIONS:
            sock.close()
            return
        sock.settimeout(0)
        connection = Connection(listener.name, sock, peer)
        self.connections[sock.fileno()] = connection
        self.selector.register(sock, selectors.EVENT_READ, (self.receive, connection))

    def receive(self, connection: Connection) -> None:
        """Collect the request; answer and close when it is complete.

        The answer is far smaller than a fresh socket's send buffer: one call takes it whole.
        """
        chunk = connection.socket.recv(4096)
        connection.received += chunk
        reply = answer(connection)
        if reply is not None:
            connection.socket.send(reply)
        if reply is not None or not chunk or len(connection.received) > MAX_REQUEST:
            self.close(connection)

    def datagram(self, listener: Listener) -> None:
        """Answer from the address that was asked, which the route back need not choose."""
        _, ancillary, _, peer = listener.socket.recvmsg(2048, 256)
        ttl, local = None, b"\0\0\0\0"
        for _, kind, value in ancillary:
            if kind == IP_TTL:
                (ttl,) = struct.unpack("=i", value)
            elif kind == IP_PKTINFO:
                local = _PKTINFO.unpack(value)[1]
        reply = describe(listener.name, peer, socket.inet_ntoa(local), ttl, "udp")
        source = _PKTINFO.pack(0, local, b"\0\0\0\0")
        listener.socket.sendmsg([reply], [(socket.IPPROTO_IP, IP_PKTINFO, source)], 0, peer)

    def close(self, connection: Connection) -> None:
        if self.connections.pop(connection.socket.fileno(), None) is not None:
            self.selector.unregister(connection.socket)
            connection.socket.close()

    def close_idle(self) -> None:
        oldest = time.monotonic() - IDLE_SECONDS
        for connection in [c for c in self.connections.values() if c.since < oldest]:
            self.close(connection)


def enter(path: str) -> None:
    """Put this process into the network namespace that is mounted on *path*."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(descriptor, CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    finally:
        os.close(descriptor)


def open_all(server: Server, wanted: dict[str, dict[str, Any]]) -> None:
    """Listen in every namespace and stay in the last; without one there is nowhere to live."""
    if not wanted:
        raise ValueError("no namespace to listen in")
    for name, entry in wanted.items():
        enter(entry["path"])
        for port in entry["ports"]:
            server.listen(name, port)


def main() -> int:
    """Open everything, say so, serve; 1 with a line ``error: …`` where that fails."""
    server = Server()
    try:
        open_all(server, json.loads(sys.stdin.readline())["netns"])
    except (OSError, ValueError, LookupError) as error:
        sys.stdout.write(f"error: {error}\n")
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.chdir("/")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.close(null)
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
