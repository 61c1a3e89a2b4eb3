"""Plan objects and kernel objects in the words of iproute2: what messages and `verify` compare.

Every object is a mapping of text to text. The first word of a link, address, route or neighbour
is its name, address or prefix; a word that the kernel does not hold is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ipaddress import IPv4Network
from typing import Any, TypeAlias

from netlab.plan import (
    Address,
    Bridge,
    Command,
    FdbEntry,
    Hook,
    Link,
    Listener,
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

Words: TypeAlias = Mapping[str, str]

TABLES: Mapping[int, str] = {253: "default", 254: "main", 255: "local"}
SCOPES: Mapping[int, str] = {0: "global", 200: "site", 253: "link", 254: "host", 255: "nowhere"}
ROUTE_KINDS: Mapping[int, str] = {
    1: "unicast",
    2: "local",
    3: "broadcast",
    4: "anycast",
    5: "multicast",
    6: "blackhole",
    7: "unreachable",
    8: "prohibit",
    9: "throw",
}
PROTOCOLS: Mapping[int, str] = {1: "redirect", 2: "kernel", 3: "boot", 4: "static", 16: "dhcp"}
EVERYWHERE = IPv4Network("0.0.0.0/0")

_SILENT = {"name", "address", "dst"}


def prefix(network: IPv4Network) -> str:
    """``default``, a bare address for /32, else address/length."""
    if network == EVERYWHERE:
        return "default"
    return (
        str(network.network_address) if network.prefixlen == network.max_prefixlen else str(network)
    )


def table(number: int) -> str:
    return TABLES.get(number, str(number))


def route_scope(item: Route) -> str:
    """The scope as ``ip route add`` fills it (ip/iproute.c, iproute_modify)."""
    if item.scope:
        return item.scope
    return "link" if item.kind == "unicast" and item.via is None else "global"


def line(kind: str, words: Words) -> str:
    """One line for people: ``route 10.0.0.0/8 via 172.16.0.1 dev eth0 table main``."""
    parts = [kind]
    for index, (name, value) in enumerate(words.items()):
        parts += [value] if index == 0 and name in _SILENT else [name, value]
    return " ".join(parts)


def describe(item: Object) -> str:
    """*item* for people, with its namespace in front: ``node1: address 10.0.0.1/24 dev eth0``."""
    return f"{item.netns}: {_line(item)}"


def _line(item: Object) -> str:
    """One line for people, without the namespace."""
    said = _SPOKEN.get(type(item))
    if said:
        kind, as_words = said
        return line(kind, as_words(item))
    match item:
        case Sysctl():
            return f"sysctl {item.name}={item.value}"
        case Hook():
            return f"iptables -t {item.table} -A {item.chain} {item.text}"
        case Listener():
            return f"server on {', '.join(map(str, item.ports))}"
        case Command():
            return f"command {' '.join(item.argv)}"
    kind, _, *rest = item.key
    return line("link", link(item)) if isinstance(item, Link) else " ".join([kind, *rest])


def link(item: Link) -> Words:
    """The end of *item* in its own namespace."""
    return dict(_link(item))


def _link(item: Link) -> Iterator[tuple[str, str]]:
    yield "name", item.name
    yield "kind", type(item).__name__.lower()
    if item.mac:
        yield "mac", item.mac.lower()
    if item.mtu is not None:
        yield "mtu", str(item.mtu)
    if item.tx_queue_len is not None:
        yield "qlen", str(item.tx_queue_len)
    if item.master:
        yield "master", item.master
    match item:
        case Macvlan():
            yield "mode", item.mode
        case Vlan():
            yield "vlan", str(item.vlan)
        case Vxlan():
            yield from (("vni", str(item.vni)), ("port", str(item.port)))
            yield from (("local", str(item.local)), ("learning", "false"))
        case Bridge():
            yield "stp", "false"
    yield "up", "true"


def peer(item: Veth) -> Words:
    """The far end of a veth pair."""
    words = {"name": item.peer, "kind": "veth"}
    if item.peer_mac:
        words["mac"] = item.peer_mac.lower()
    if item.peer_mtu is not None:
        words["mtu"] = str(item.peer_mtu)
    if item.peer_master:
        words["master"] = item.peer_master
    return {**words, "up": "true"}


def address(item: Address) -> Words:
    return {"address": str(item.address), "dev": item.dev, "scope": item.scope}


def route(item: Route) -> Words:
    return dict(_route(item))


def _route(item: Route) -> Iterator[tuple[str, str]]:
    yield "dst", prefix(item.dst)
    yield "kind", item.kind
    if item.via:
        yield "via", str(item.via)
    if item.dev:
        yield "dev", item.dev
    yield "table", table(item.table)
    yield "proto", PROTOCOLS.get(item.protocol, str(item.protocol))
    yield "scope", route_scope(item)
    if item.src:
        yield "src", str(item.src)
    if item.metric:
        yield "metric", str(item.metric)
    if item.mtu is not None:
        yield "mtu", str(item.mtu)
    if item.onlink:
        yield "onlink", "true"


def rule(item: PolicyRule, priority: int | None = None) -> Words:
    """*priority*: what the kernel chose where the plan leaves it open."""
    chosen = priority if item.priority is None else item.priority
    words = {} if chosen is None else {"priority": str(chosen)}
    words["from"] = prefix(item.src) if item.src else "all"
    if item.dst:
        words["to"] = prefix(item.dst)
    if item.fwmark is not None:
        words["fwmark"] = mark(item.fwmark, item.fwmask)
    if item.iif:
        words["iif"] = item.iif
    return {**words, "table": table(item.table)}


def mark(value: int, mask: int | None) -> str:
    """``0x10`` or ``0x10/0xf0``; a mask of all bits is not said."""
    return hex(value) if mask is None or mask == 0xFFFFFFFF else f"{value:#x}/{mask:#x}"


def neighbour(item: Neighbour) -> Words:
    return {
        "address": str(item.address),
        "dev": item.dev,
        "mac": item.mac.lower(),
        "state": "permanent",
    }


def fdb(item: FdbEntry) -> Words:
    return {"address": item.mac.lower(), "dev": item.dev, "dst": str(item.dst)}


_SPOKEN: Mapping[type[Object], tuple[str, Callable[[Any], Words]]] = {
    Address: ("address", address),
    Route: ("route", route),
    PolicyRule: ("rule", rule),
    Neighbour: ("neighbour", neighbour),
    FdbEntry: ("fdb", fdb),
}
