"""What the kernel holds, in iproute2's words: every value is text, absent ones are left out.

pyroute2's message classes decode what comes back. They are loaded without the rest of pyroute2,
which would cost 0.25 s.
"""

from __future__ import annotations

import errno
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from ipaddress import IPv4Address, IPv4Network
from socket import AF_INET
from typing import Any

from netlab.errors import KernelError
from netlab.kernel import namespaces, words
from netlab.kernel import rtnetlink as rt
from netlab.kernel.objects import AF_BRIDGE
from netlab.kernel.rtnetlink import Refused, Socket
from netlab.kernel.words import Words

_LOOKUP_TABLE = 0x1000
_FIB_MATCH = 0x2000
_RTA_DST, _RTA_SRC, _RTA_IIF, _RTA_MARK = 1, 2, 3, 16
_ONLINK = 4
_INVERTED, _TO_TABLE = 2, 1
_NARROWING = ("FRA_IP_PROTO", "FRA_SPORT_RANGE", "FRA_DPORT_RANGE", "FRA_UID_RANGE", "FRA_TUN_ID")
_STATES = {
    0x01: "incomplete",
    0x02: "reachable",
    0x04: "stale",
    0x08: "delay",
    0x10: "probe",
    0x20: "failed",
    0x40: "noarp",
    0x80: "permanent",
}
_NO_ROUTE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL, errno.EACCES, errno.EAGAIN}

_loading = threading.Lock()


def links(instance: str, netns: str) -> tuple[Words, ...]:
    """Devices in the order of their creation.

    name, kind, mac, mtu, qlen, master, up, operstate, index, lower (the index of what it is joined
    to); by kind also mode, vlan, vni, port, local, learning, stp.
    """
    with open_socket(instance, netns) as socket:
        return tuple(read_links(socket))


def addresses(instance: str, netns: str) -> tuple[Words, ...]:
    """IPv4 addresses: address (with its length), dev, scope."""
    with open_socket(instance, netns) as socket:
        return tuple(read_addresses(socket))


def routes(instance: str, netns: str, table: str | None = None) -> tuple[Words, ...]:
    """IPv4 routes of *table* (``main``, ``500``; None: of all), in the kernel's order.

    dst (``default``; a host without its /32), kind, via, dev, table, proto, scope, src, metric,
    mtu, onlink.
    """
    with open_socket(instance, netns) as socket:
        found = tuple(read_routes(socket))
    return tuple(route for route in found if table is None or route["table"] == table)


def rules(instance: str, netns: str) -> tuple[Words, ...]:
    """Policy rules by priority: priority, from (``all`` or a prefix), to, fwmark, iif, table."""
    with open_socket(instance, netns) as socket:
        return tuple(read_rules(socket))


def neighbours(instance: str, netns: str) -> tuple[Words, ...]:
    """ARP entries: address, dev, mac, state (``permanent``, ``reachable``, ``failed``, …)."""
    with open_socket(instance, netns) as socket:
        return tuple(read_neighbours(socket))


def forwarding(instance: str, netns: str) -> tuple[Words, ...]:
    """Forwarding entries of VXLAN devices: address (the MAC), dev, dst."""
    with open_socket(instance, netns) as socket:
        return tuple(read_forwarding(socket))


def route_get(
    instance: str,
    netns: str,
    dst: IPv4Address,
    *,
    src: IPv4Address | None = None,
    mark: int | None = None,
    iif: str | None = None,
) -> Words:
    """The route that a packet to *dst* takes, as ``ip route get`` says it.

    dst, kind, via, dev, table, src (the source that it gets), and match: the prefix of the entry
    that decided. Where there is no route: dst, kind ``unreachable`` and error.

    Raises:
        KernelError: *iif* does not exist, or *src* is nobody's.
    """
    with open_socket(instance, netns) as socket:
        asked = [rt.ipv4(_RTA_DST, dst)]
        if src is not None:
            asked.append(rt.ipv4(_RTA_SRC, src))
        if mark is not None:
            asked.append(rt.u32(_RTA_MARK, mark))
        try:
            if iif is not None:
                asked.append(rt.u32(_RTA_IIF, socket.index(iif)))
            length = 32 if src is not None else 0
            found = [_get_route(socket, length, flag, asked) for flag in (0, _FIB_MATCH)]
        except Refused as error:
            if error.errno not in _NO_ROUTE:
                raise KernelError(f"{netns}: route to {dst}: {error.strerror}") from None
            return {"dst": str(dst), "kind": "unreachable", "error": str(error.strerror)}
        except OSError as error:
            raise KernelError(f"{netns}: route to {dst}: {iif}: {error.strerror}") from None
    chosen, matched = found
    kept = {name: chosen[name] for name in ("kind", "via", "dev", "table", "src") if name in chosen}
    return {"dst": str(dst), **kept, "match": matched["dst"]}


def _get_route(socket: Socket, src_len: int, flag: int, asked: list[bytes]) -> Words:
    fixed = rt.fields("route", AF_INET, 32, src_len, 0, 0, 0, 0, 0, flag | _LOOKUP_TABLE)
    return _route(socket, _decode("route", socket.get("route", fixed, *asked)))


def read_links(socket: Socket) -> Iterator[Words]:
    fixed = rt.fields("link", 0, 0, 0, 0, 0)
    mask = rt.u32(rt.IFLA_EXT_MASK, rt.SKIP_STATS)
    for message in socket.dump("link", fixed, mask):
        yield dict(_link(socket, _decode("link", message)))


def _link(socket: Socket, message: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - pyroute2's
    yield "name", message.get_attr("IFLA_IFNAME")
    info = message.get_attr("IFLA_LINKINFO")
    kind = info.get_attr("IFLA_INFO_KIND") if info else None
    if kind:
        yield "kind", kind
    if message.get_attr("IFLA_ADDRESS"):
        yield "mac", message.get_attr("IFLA_ADDRESS")
    yield "mtu", str(message.get_attr("IFLA_MTU"))
    yield "qlen", str(message.get_attr("IFLA_TXQLEN"))
    master = message.get_attr("IFLA_MASTER")
    if master:
        yield "master", socket.device(master)
    yield from _link_details(kind, info.get_attr("IFLA_INFO_DATA") if info else None)
    yield "up", _truth(message["flags"] & 1)
    yield "operstate", str(message.get_attr("IFLA_OPERSTATE")).lower()
    yield "index", str(message["index"])
    if message.get_attr("IFLA_LINK"):
        yield "lower", str(message.get_attr("IFLA_LINK"))


def _link_details(kind: str | None, data: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - pyroute2's
    if data is None:
        return
    match kind:
        case "macvlan":
            yield "mode", str(data.get_attr("IFLA_MACVLAN_MODE"))
        case "vlan":
            yield "vlan", str(data.get_attr("IFLA_VLAN_ID"))
        case "vxlan":
            yield "vni", str(data.get_attr("IFLA_VXLAN_ID"))
            yield "port", str(data.get_attr("IFLA_VXLAN_PORT"))
            local = data.get_attr("IFLA_VXLAN_LOCAL")
            if local:
                yield "local", str(local)
            yield "learning", _truth(data.get_attr("IFLA_VXLAN_LEARNING"))
            if data.get_attr("IFLA_VXLAN_LINK"):
                yield "lower", str(data.get_attr("IFLA_VXLAN_LINK"))
        case "bridge":
            yield "stp", _truth(data.get_attr("IFLA_BR_STP_STATE"))


def read_addresses(socket: Socket) -> Iterator[Words]:
    for raw in socket.dump("address", rt.fields("address", AF_INET, 0, 0, 0, 0)):
        message = _decode("address", raw)
        yield {
            "address": f"{message.get_attr('IFA_LOCAL')}/{message['prefixlen']}",
            "dev": socket.device(message["index"]),
            "scope": words.SCOPES.get(message["scope"], str(message["scope"])),
        }


def read_routes(socket: Socket) -> Iterator[Words]:
    for raw in socket.dump("route", rt.fields("route", AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)):
        yield _route(socket, _decode("route", raw))


def _route(socket: Socket, message: Any) -> Words:  # noqa: ANN401 - pyroute2's
    return dict(_route_words(socket, message))


def _route_words(socket: Socket, message: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - likewise
    network = IPv4Network((message.get_attr("RTA_DST") or 0, message["dst_len"]))
    yield "dst", words.prefix(network)
    yield "kind", words.ROUTE_KINDS.get(message["type"], str(message["type"]))
    if message.get_attr("RTA_GATEWAY"):
        yield "via", message.get_attr("RTA_GATEWAY")
    if message.get_attr("RTA_OIF"):
        yield "dev", socket.device(message.get_attr("RTA_OIF"))
    yield "table", words.table(message.get_attr("RTA_TABLE") or message["table"])
    yield "proto", words.PROTOCOLS.get(message["proto"], str(message["proto"]))
    yield "scope", words.SCOPES.get(message["scope"], str(message["scope"]))
    if message.get_attr("RTA_PREFSRC"):
        yield "src", message.get_attr("RTA_PREFSRC")
    if message.get_attr("RTA_PRIORITY"):
        yield "metric", str(message.get_attr("RTA_PRIORITY"))
    metrics = message.get_attr("RTA_METRICS")
    mtu = metrics.get_attr("RTAX_MTU") if metrics else None
    if mtu is not None:
        yield "mtu", str(mtu)
    if message["flags"] & _ONLINK:
        yield "onlink", "true"


def read_rules(socket: Socket) -> Iterator[Words]:
    for raw in socket.dump("rule", rt.fields("rule", AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)):
        yield dict(_rule_words(_decode("rule", raw)))


def _rule_words(message: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - pyroute2's
    yield "priority", str(message.get_attr("FRA_PRIORITY") or 0)
    source, target = message.get_attr("FRA_SRC"), message.get_attr("FRA_DST")
    yield "from", words.prefix(IPv4Network((source, message["src_len"]))) if source else "all"
    if target:
        yield "to", words.prefix(IPv4Network((target, message["dst_len"])))
    mark, mask = message.get_attr("FRA_FWMARK"), message.get_attr("FRA_FWMASK")
    if mark is not None or mask is not None:
        yield "fwmark", words.mark(mark or 0, mask)
    if message.get_attr("FRA_IIFNAME"):
        yield "iif", message.get_attr("FRA_IIFNAME")
    if message.get_attr("FRA_OIFNAME"):
        yield "oif", message.get_attr("FRA_OIFNAME")
    if message["flags"] & _INVERTED:
        yield "not", "true"
    for name in _NARROWING:
        if message.get_attr(name) is not None:
            yield name.removeprefix("FRA_").lower(), str(message.get_attr(name))
    if message["action"] != _TO_TABLE:
        yield "action", words.ROUTE_KINDS.get(message["action"], str(message["action"]))
    yield "table", words.table(message.get_attr("FRA_TABLE") or message["table"])


def read_neighbours(socket: Socket) -> Iterator[Words]:
    for raw in socket.dump("neighbour", rt.fields("neighbour", AF_INET, 0, 0, 0, 0)):
        message = _decode("neighbour", raw)
        with suppress(OSError):
            found: dict[str, str | None] = {
                "address": message.get_attr("NDA_DST"),
                "dev": socket.device(message["ifindex"]),
                "mac": message.get_attr("NDA_LLADDR"),
                "state": _STATES.get(message["state"], "none"),
            }
            yield {name: value for name, value in found.items() if value}


def read_forwarding(socket: Socket) -> Iterator[Words]:
    for raw in socket.dump("neighbour", rt.fields("neighbour", AF_BRIDGE, 0, 0, 0, 0)):
        message = _decode("neighbour", raw)
        target = message.get_attr("NDA_DST")
        if target:
            yield {
                "address": message.get_attr("NDA_LLADDR"),
                "dev": socket.device(message["ifindex"]),
                "dst": target,
            }


def open_socket(instance: str, netns: str) -> Socket:
    """A socket in the lab's namespace, for any thread.

    Raises:
        KernelError: no such namespace.
    """
    with namespaces.enter(instance, netns):
        return Socket()


def _truth(value: object) -> str:
    return "true" if value else "false"


def _decode(kind: rt.Kind, raw: bytes) -> Any:  # noqa: ANN401 - pyroute2's
    with _loading:
        message = _classes()[kind](raw)
    message.decode()
    return message


@cache
def _classes() -> dict[rt.Kind, Any]:
    """The message classes, imported without running ``pyroute2/__init__.py``.

    While they load, an unexecuted module stands for the package. It and what it loaded are
    forgotten afterwards, so that ``import pyroute2`` by anybody else is what it always was.
    """
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_pyroute2(name)}
    found = importlib.util.find_spec("pyroute2")
    if found is not None:
        sys.modules["pyroute2"] = importlib.util.module_from_spec(found)
    try:
        from pyroute2.netlink.rtnl.fibmsg import fibmsg  # noqa: PLC0415 - loaded where needed
        from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg  # noqa: PLC0415 - likewise
        from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg  # noqa: PLC0415 - likewise
        from pyroute2.netlink.rtnl.ndmsg import ndmsg  # noqa: PLC0415 - likewise
        from pyroute2.netlink.rtnl.rtmsg import rtmsg  # noqa: PLC0415 - likewise
    finally:
        for name in list(sys.modules):
            if _is_pyroute2(name):
                del sys.modules[name]
        sys.modules.update(others)
    return {
        "link": ifinfmsg,
        "address": ifaddrmsg,
        "route": rtmsg,
        "neighbour": ndmsg,
        "rule": fibmsg,
    }


def _is_pyroute2(module: str) -> bool:
    return module == "pyroute2" or module.startswith("pyroute2.")
