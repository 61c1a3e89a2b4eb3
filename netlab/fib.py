"""Which source address the kernel would pick, from the objects of a plan alone.

A pure model of ``ip route get ADDRESS`` (without source, mark or input device) for as much as
components ask of it. Sources: Linux net/ipv4/fib_rules.c, fib_semantics.c
(``fib_info_update_nhc_saddr``) and devinet.c (``inet_select_addr``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network

from netlab.plan import MAIN_TABLE, Address, Link, Object, PolicyRule, Route, Veth


def device_names(objects: Iterable[Object], netns: str) -> tuple[str, ...]:
    """Devices of *netns* in the order of their creation, without loopback."""
    names: list[str] = []
    for item in objects:
        if isinstance(item, Veth) and item.peer_netns == netns:
            names.append(item.peer)
        if isinstance(item, Link) and item.netns == netns:
            names.append(item.name)
    return tuple(names)


def addresses(objects: Iterable[Object], netns: str) -> tuple[Address, ...]:
    """Addresses of *netns*, by device in the order of creation."""
    items = tuple(objects)
    order = {name: index for index, name in enumerate(device_names(items, netns))}
    own = [item for item in items if isinstance(item, Address) and item.netns == netns]
    return tuple(sorted(own, key=lambda item: order[item.dev]))


def source_address(objects: Iterable[Object], netns: str, dst: IPv4Address) -> IPv4Address | None:
    """The source that ``ip route get DST`` prints in *netns*; None where it has no route."""
    items = tuple(item for item in objects if _concerns(item, netns))
    own = addresses(items, netns)
    if any(item.address.ip == dst for item in own):
        return dst
    for table in _tables(items, netns):
        route = _longest(items, own, netns, table, dst)
        if route is not None:
            return _source_of(route, own)
    return None


def _concerns(item: Object, netns: str) -> bool:
    return item.netns == netns or (isinstance(item, Veth) and item.peer_netns == netns)


def _tables(items: tuple[Object, ...], netns: str) -> Iterator[int]:
    """Tables in the order in which an unmarked, locally made packet consults them."""
    rules = [
        (rule.priority, rule.table)
        for rule in items
        if isinstance(rule, PolicyRule)
        and rule.netns == netns
        and rule.priority is not None
        and not (rule.src or rule.dst or rule.fwmark or rule.iif)
    ]
    yield from (table for _, table in sorted(rules))
    yield MAIN_TABLE


def _longest(
    items: tuple[Object, ...],
    own: tuple[Address, ...],
    netns: str,
    table: int,
    dst: IPv4Address,
) -> Route | None:
    routes = [r for r in items if isinstance(r, Route) and r.netns == netns and r.table == table]
    if table == MAIN_TABLE:
        routes += (connected(address) for address in own if address.address.network.prefixlen < 32)
    matching = [route for route in routes if dst in route.dst]
    return max(matching, key=lambda route: route.dst.prefixlen, default=None)


def connected(address: Address) -> Route:
    """The route that the kernel adds with *address* (``proto kernel scope link``)."""
    return Route(
        netns=address.netns,
        origin=address.origin,
        dst=IPv4Network(address.address.network),
        dev=address.dev,
        src=address.address.ip,
        scope="link",
        protocol=2,
    )


def _source_of(route: Route, own: tuple[Address, ...]) -> IPv4Address | None:
    """*route*'s own source, else its device's address, else the first device's that has one."""
    if route.src or route.kind != "unicast":
        return route.src
    on_device = [item.address for item in own if item.dev == route.dev and item.scope != "host"]
    if route.via:
        near = [address.ip for address in on_device if route.via in address.network]
        if near:
            return near[0]
    if on_device:
        return on_device[0].ip
    return next((item.address.ip for item in own if item.scope == "global"), None)
