"""One rtnetlink socket: requests with their answer, and dumps (rtnetlink(7)).

Requests are packed here: a lab is some hundred of them, pyroute2 needs 0.45 ms for each, and only
``import pyroute2`` takes 0.25 s. What comes back is raw; `netlab.kernel.reading` has pyroute2
decode it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address
from typing import Literal, Self, TypeAlias

Kind: TypeAlias = Literal["link", "address", "route", "neighbour", "rule"]

REPLACE, EXCL, CREATE, APPEND = 0x100, 0x200, 0x400, 0x800
IFLA_IFALIAS, IFLA_EXT_MASK, SKIP_STATS = 20, 29, 1 << 3

_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_ACK_TLVS = 0x200
_DUMP_INTERRUPTED = 0x10
_NEW: Mapping[Kind, int] = {"link": 16, "address": 20, "route": 24, "neighbour": 28, "rule": 32}
_GET = 2
_ERROR, _DONE = 2, 3
_MESSAGE = struct.Struct("=LHHLL")
_FIELDS: Mapping[Kind, struct.Struct] = {
    "link": struct.Struct("=BxHiII"),
    "address": struct.Struct("=BBBBI"),
    "route": struct.Struct("=8BI"),
    "neighbour": struct.Struct("=B3xiHBB"),
    "rule": struct.Struct("=8BI"),
}
_SOL_NETLINK = 270
_CAP_ACK, _EXT_ACK, _STRICT_CHECK = 10, 11, 12
_SIOCGIFNAME, _SIOCGIFINDEX = 0x8910, 0x8933
_NESTED = 0x8000
_BUFFER = 1 << 18


class Refused(OSError):
    """The kernel said no; ``strerror`` has its own words where it gave any."""


def attribute(number: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), number) + value + b"\0" * (-len(value) % 4)


def u8(number: int, value: int) -> bytes:
    return attribute(number, bytes((value,)))


def u16(number: int, value: int) -> bytes:
    return attribute(number, struct.pack("=H", value))


def be16(number: int, value: int) -> bytes:
    return attribute(number, struct.pack("!H", value))


def u32(number: int, value: int) -> bytes:
    return attribute(number, struct.pack("=I", value))


def text(number: int, value: str) -> bytes:
    return attribute(number, value.encode() + b"\0")


def ipv4(number: int, value: IPv4Address) -> bytes:
    return attribute(number, value.packed)


def mac(number: int, value: str) -> bytes:
    return attribute(number, bytes.fromhex(value.replace(":", "")))


def nested(number: int, *values: bytes) -> bytes:
    return attribute(number | _NESTED, b"".join(values))


def fields(kind: Kind, *values: int) -> bytes:
    """The fixed part of a message, its fields in the order of the C structure.

    link: family, type, index, flags, change. address: family, prefixlen, flags, scope, index.
    route: family, dst_len, src_len, tos, table, protocol, scope, type, flags. neighbour: family,
    ifindex, state, flags, type. rule: family, dst_len, src_len, tos, table, 0, 0, action, flags.
    """
    return _FIELDS[kind].pack(*values)


def attributes(kind: Kind, message: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, value) of each attribute of a message as `Socket.get` returns it."""
    return _attributes(message, _MESSAGE.size + _FIELDS[kind].size)


class Socket:
    """An rtnetlink socket of the namespace in which the current thread is; it stays there.

    Not to be shared between threads.
    """

    def __init__(self) -> None:
        flags = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_NETLINK, flags, socket.NETLINK_ROUTE)
        for option in (_CAP_ACK, _EXT_ACK, _STRICT_CHECK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        self._socket.bind((0, 0))
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def index(self, device: str) -> int:
        """The device's index.

        Raises:
            OSError: ENODEV.
        """
        answer = fcntl.ioctl(self._socket, _SIOCGIFINDEX, struct.pack("16s24x", device.encode()))
        return int(struct.unpack_from("=i", answer, 16)[0])

    def device(self, index: int) -> str:
        """The name of the device with *index*.

        Raises:
            OSError: ENODEV.
        """
        answer = fcntl.ioctl(self._socket, _SIOCGIFNAME, struct.pack("=16xi20x", index))
        return answer[:16].partition(b"\0")[0].decode()

    def request(self, kind: Kind, flags: int, fixed: bytes, *values: bytes) -> None:
        """RTM_NEW* with *flags* (`CREATE`, …), until the kernel has done it.

        Raises:
            Refused: with the kernel's own words.
        """
        self._send(_NEW[kind], flags | _ACK, fixed, values)
        for _ in self._answers():
            pass

    def get(self, kind: Kind, fixed: bytes, *values: bytes) -> bytes:
        """The message of the one object that RTM_GET* names.

        Raises:
            Refused
        """
        self._send(_NEW[kind] + _GET, 0, fixed, values)
        return next(self._answers())

    def dump(self, kind: Kind, fixed: bytes, *values: bytes) -> list[bytes]:
        """The messages of all objects that match; again where one changed meanwhile."""
        while True:
            self._send(_NEW[kind] + _GET, _DUMP, fixed, values)
            try:
                return list(self._answers())
            except InterruptedError:
                continue

    def _send(self, code: int, flags: int, fixed: bytes, values: tuple[bytes, ...]) -> None:
        self._sequence += 1
        body = fixed + b"".join(values)
        length = _MESSAGE.size + len(body)
        head = _MESSAGE.pack(length, code, flags | _REQUEST, self._sequence, 0)
        self._socket.send(head + body)

    def _answers(self) -> Iterator[bytes]:
        interrupted = False
        while True:
            data = self._socket.recv(_BUFFER)
            offset = 0
            while offset < len(data):
                length, code, flags, sequence, _ = _MESSAGE.unpack_from(data, offset)
                message = data[offset : offset + length]
                offset += (length + 3) & ~3
                if sequence != self._sequence:
                    continue
                interrupted = interrupted or bool(flags & _DUMP_INTERRUPTED)
                if code in {_ERROR, _DONE}:
                    _check(message, code, flags)
                    if interrupted:
                        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
                    return
                yield message


def _check(message: bytes, code: int, flags: int) -> None:
    """Raise for an NLMSG_ERROR or NLMSG_DONE that carries an error."""
    (number,) = struct.unpack_from("=i", message, _MESSAGE.size)
    if not number:
        return
    said = os.strerror(-number)
    if flags & _ACK_TLVS:
        # An error repeats the header of the request before its attributes.
        start = _MESSAGE.size + 4 + (_MESSAGE.size if code == _ERROR else 0)
        words = next((value for kind, value in _attributes(message, start) if kind == 1), b"")
        said = words.rstrip(b"\0").decode(errors="replace") or said
    raise Refused(-number, said)


def _attributes(message: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    while offset + 4 <= len(message):
        length, number = struct.unpack_from("=HH", message, offset)
        yield number & ~_NESTED, message[offset + 4 : offset + length]
        offset += max(4, (length + 3) & ~3)
