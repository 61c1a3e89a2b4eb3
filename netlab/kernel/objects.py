"""Plan objects as rtnetlink requests and sysctl files, created one after another in plan order."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from socket import AF_INET

from netlab.errors import KernelError
from netlab.kernel import rtnetlink as rt
from netlab.kernel import words
from netlab.kernel.rtnetlink import APPEND, CREATE, EXCL, REPLACE, Socket
from netlab.plan import (
    Address,
    Bridge,
    FdbEntry,
    Link,
    Macvlan,
    Neighbour,
    Object,
    PolicyRule,
    Route,
    Sysctl,
    Veth,
    Vlan,
    Vxlan,
)

AF_BRIDGE = 7

_IFF_UP = 1
UNNAMED = "netlab.new"
"""Name of a macvlan until it is in its own namespace."""

_ADDRESS, _IFNAME, _MTU, _LINK, _MASTER, _TXQLEN, _LINKINFO, _NET_NS_FD = 1, 3, 4, 5, 10, 13, 18, 28
_INFO_KIND, _INFO_DATA = 1, 2
_VETH_PEER, _MACVLAN_MODE, _VLAN_ID = 1, 1, 1
_VXLAN_ID, _VXLAN_LINK, _VXLAN_LOCAL, _VXLAN_LEARNING, _VXLAN_PORT = 1, 3, 4, 7, 15
_PREFIX, _LOCAL = 1, 2
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_PREFSRC, _RTA_METRICS = 1, 4, 5, 6, 7, 8
_RTA_TABLE, _RTAX_MTU = 15, 2
_FRA_DST, _FRA_SRC, _FRA_IIFNAME, _FRA_PRIORITY, _FRA_FWMARK = 1, 2, 3, 6, 10
_FRA_TABLE, _FRA_FWMASK = 15, 16
_NDA_DST, _NDA_LLADDR = 1, 2

_TO_TABLE = 1
_PERMANENT = 0x80
_SELF = 0x02
_ONLINK = 4
_MACVLAN_MODES = {"private": 1, "vepa": 2, "bridge": 4, "passthru": 8}
_PLACE = {"add": CREATE | EXCL, "append": CREATE | APPEND, "prepend": CREATE}
_SCOPES = {name: number for number, name in words.SCOPES.items()}
_ROUTE_KINDS = {name: number for number, name in words.ROUTE_KINDS.items()}


@dataclass(frozen=True, slots=True)
class Space:
    """An open network namespace: its file, a descriptor of it and an rtnetlink socket in it."""

    file: Path
    descriptor: int
    socket: Socket

    def close(self) -> None:
        self.socket.close()
        os.close(self.descriptor)


def create(item: Object, spaces: Mapping[str, Space]) -> None:
    """Create a link, address, route, rule, neighbour or forwarding entry; others are skipped.

    Raises:
        OSError: the kernel refused.
    """
    socket = spaces[item.netns].socket
    match item:
        case Veth():
            _veth(item, spaces)
        case Macvlan():
            _macvlan(item, spaces)
        case Link():
            _link(item, socket)
        case Address():
            _address(item, socket)
        case Route():
            _route(item, socket)
        case PolicyRule():
            _rule(item, socket)
        case Neighbour() | FdbEntry():
            _neighbour(item, socket)


def loopback(socket: Socket, alias: str) -> None:
    """Loopback up, with *alias* for a label."""
    socket.request("link", 0, _fixed_link(1), rt.text(rt.IFLA_IFALIAS, alias))


def sysctl_path(name: str) -> Path:
    """The file of a sysctl: ``.`` and ``/`` change places, as in sysctl(8).

    Raises:
        KernelError: not a sysctl of a network namespace; it would change the host.
    """
    parts = name.split(".")
    if parts[0] != "net" or len(parts) < 3 or any(part.strip("/") == "" for part in parts):
        raise KernelError(f"sysctl {name} does not belong to a network namespace")
    return Path("/proc/sys", *(part.replace("/", ".") for part in parts))


def write_sysctl(name: str, value: str, *, optional: bool) -> None:
    """Write a sysctl of the current thread's namespace.

    *optional*: where the kernel has none of this name, or only one to read, nothing is written.

    Raises:
        OSError
    """
    try:
        descriptor = os.open(sysctl_path(name), os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        if optional and error.errno in {errno.ENOENT, errno.EACCES, errno.EPERM}:
            return
        raise
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def is_late(item: Sysctl) -> bool:
    """Whether it may exist only after a rule has loaded conntrack (Debian's kernels)."""
    return item.name.startswith(("net.netfilter.", "net.nf_conntrack"))


def _settings(
    name: str, mac: str | None, mtu: int | None, tx_queue_len: int | None = None
) -> bytes:
    settings = rt.text(_IFNAME, name)
    if mac:
        settings += rt.mac(_ADDRESS, mac)
    if mtu is not None:
        settings += rt.u32(_MTU, mtu)
    if tx_queue_len is not None:
        settings += rt.u32(_TXQLEN, tx_queue_len)
    return settings


def _own_settings(item: Link) -> bytes:
    return _settings(item.name, item.mac, item.mtu, item.tx_queue_len)


def _master(name: str | None, socket: Socket) -> bytes:
    return rt.u32(_MASTER, socket.index(name)) if name else b""


def _info(kind: str, *data: bytes) -> bytes:
    details = rt.nested(_INFO_DATA, *data) if data else b""
    return rt.nested(_LINKINFO, rt.text(_INFO_KIND, kind), details)


def _fixed_link(index: int = 0) -> bytes:
    """A device that is to be up; *index* 0: a new one."""
    return rt.fields("link", 0, 0, index, _IFF_UP, _IFF_UP)


def _veth(item: Veth, spaces: Mapping[str, Space]) -> None:
    """Both ends are born where they belong, with their names.

    The far end cannot be born up: nothing is joined to it yet (drivers/net/veth.c, veth_open).
    """
    near, far = spaces[item.netns].socket, spaces[item.peer_netns].socket
    peer = (
        rt.fields("link", 0, 0, 0, 0, 0)
        + _settings(item.peer, item.peer_mac, item.peer_mtu)
        + rt.u32(_NET_NS_FD, spaces[item.peer_netns].descriptor)
    )
    near.request(
        "link",
        CREATE | EXCL,
        _fixed_link(),
        _own_settings(item),
        _master(item.master, near),
        _info("veth", rt.nested(_VETH_PEER, peer)),
    )
    far.request("link", 0, _fixed_link(far.index(item.peer)), _master(item.peer_master, far))


def _macvlan(item: Macvlan, spaces: Mapping[str, Space]) -> None:
    """Asked for where the lower device is, born where it belongs, and named there.

    Kernels before 6.2 look for the name in the namespace of the request (net/core/rtnetlink.c,
    ``__rtnl_newlink``): there a Pod's eth0 on a node's eth0 would exist already. They also rename
    only what is down, so the same request that names it brings it up.
    """
    lower, own = spaces[item.lower_netns].socket, spaces[item.netns].socket
    lower.request(
        "link",
        CREATE | EXCL,
        rt.fields("link", 0, 0, 0, 0, 0),
        _settings(UNNAMED, item.mac, item.mtu, item.tx_queue_len),
        rt.u32(_LINK, lower.index(item.lower)),
        rt.u32(_NET_NS_FD, spaces[item.netns].descriptor),
        _info("macvlan", rt.u32(_MACVLAN_MODE, _MACVLAN_MODES[item.mode])),
    )
    named = rt.text(_IFNAME, item.name)
    own.request("link", 0, _fixed_link(own.index(UNNAMED)), named, _master(item.master, own))


def _link(item: Link, socket: Socket) -> None:
    parts = [_own_settings(item), _master(item.master, socket)]
    match item:
        case Bridge():
            parts.append(_info("bridge"))
        case Vlan():
            parts.append(rt.u32(_LINK, socket.index(item.lower)))
            parts.append(_info("vlan", rt.u16(_VLAN_ID, item.vlan)))
        case Vxlan():
            parts.append(_info("vxlan", *_vxlan(item, socket)))
        case _:
            raise KernelError(f"{words.describe(item)}: no way to create a {type(item).__name__}")
    socket.request("link", CREATE | EXCL, _fixed_link(), *parts)
    if isinstance(item, Bridge) and item.mtu is not None:
        # Only an MTU that was set, not one that it was born with, survives a port with another one
        # (net/bridge/br_if.c, br_mtu_auto_adjust).
        index = socket.index(item.name)
        socket.request("link", 0, _fixed_link(index), rt.u32(_MTU, item.mtu))


def _vxlan(item: Vxlan, socket: Socket) -> tuple[bytes, ...]:
    return (
        rt.u32(_VXLAN_ID, item.vni),
        rt.u32(_VXLAN_LINK, socket.index(item.lower)),
        rt.ipv4(_VXLAN_LOCAL, item.local),
        rt.be16(_VXLAN_PORT, item.port),
        rt.u8(_VXLAN_LEARNING, 0),
    )


def _address(item: Address, socket: Socket) -> None:
    length, scope = item.address.network.prefixlen, _SCOPES[item.scope]
    fixed = rt.fields("address", AF_INET, length, 0, scope, socket.index(item.dev))
    own = item.address.ip
    socket.request("address", CREATE | EXCL, fixed, rt.ipv4(_LOCAL, own), rt.ipv4(_PREFIX, own))


def _route(item: Route, socket: Socket) -> None:
    fixed = rt.fields(
        "route",
        AF_INET,
        item.dst.prefixlen,
        0,
        0,
        _short_table(item.table),
        item.protocol,
        _SCOPES[words.route_scope(item)],
        _ROUTE_KINDS[item.kind],
        _ONLINK if item.onlink else 0,
    )
    parts = [rt.u32(_RTA_TABLE, item.table)]
    if item.dst.prefixlen:
        parts.append(rt.ipv4(_RTA_DST, item.dst.network_address))
    if item.dev:
        parts.append(rt.u32(_RTA_OIF, socket.index(item.dev)))
    if item.via:
        parts.append(rt.ipv4(_RTA_GATEWAY, item.via))
    if item.src:
        parts.append(rt.ipv4(_RTA_PREFSRC, item.src))
    if item.metric is not None:
        parts.append(rt.u32(_RTA_PRIORITY, item.metric))
    if item.mtu is not None:
        parts.append(rt.nested(_RTA_METRICS, rt.u32(_RTAX_MTU, item.mtu)))
    socket.request("route", _PLACE[item.place], fixed, *parts)


def _rule(item: PolicyRule, socket: Socket) -> None:
    source = item.src.prefixlen if item.src else 0
    target = item.dst.prefixlen if item.dst else 0
    table = _short_table(item.table)
    fixed = rt.fields("rule", AF_INET, target, source, 0, table, 0, 0, _TO_TABLE, 0)
    parts = [rt.u32(_FRA_TABLE, item.table)]
    if item.priority is not None:
        parts.append(rt.u32(_FRA_PRIORITY, item.priority))
    if item.src:
        parts.append(rt.ipv4(_FRA_SRC, item.src.network_address))
    if item.dst:
        parts.append(rt.ipv4(_FRA_DST, item.dst.network_address))
    if item.fwmark is not None:
        parts.append(rt.u32(_FRA_FWMARK, item.fwmark))
    if item.fwmask is not None:
        parts.append(rt.u32(_FRA_FWMASK, item.fwmask))
    if item.iif:
        parts.append(rt.text(_FRA_IIFNAME, item.iif))
    socket.request("rule", CREATE | EXCL, fixed, *parts)


def _neighbour(item: Neighbour | FdbEntry, socket: Socket) -> None:
    """Replaced, not added: traffic may have made an entry of its own already."""
    if isinstance(item, Neighbour):
        family, flags, address = int(AF_INET), 0, item.address
    else:
        family, flags, address = AF_BRIDGE, _SELF, item.dst
    fixed = rt.fields("neighbour", family, socket.index(item.dev), _PERMANENT, flags, 0)
    parts = (rt.ipv4(_NDA_DST, address), rt.mac(_NDA_LLADDR, item.mac))
    socket.request("neighbour", CREATE | REPLACE, fixed, *parts)


def _short_table(table: int) -> int:
    """For the header's field of one byte: RT_TABLE_COMPAT where the attribute must say it."""
    return table if table < 256 else 252
