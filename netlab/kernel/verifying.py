"""The kernel's state against a plan, namespace by namespace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from netlab.kernel import namespaces, ownership, processes, reading, words
from netlab.kernel.build import AGENT
from netlab.kernel.drift import Drift, differences, order
from netlab.kernel.loaded import loaded_drift
from netlab.kernel.words import Words
from netlab.plan import (
    Address,
    Command,
    FdbEntry,
    Link,
    Listener,
    Macvlan,
    Neighbour,
    Netns,
    Object,
    Origin,
    Plan,
    PolicyRule,
    Route,
    Ruleset,
    Veth,
    Vlan,
    Vxlan,
)

_READERS = 4
_FALLBACK = {
    *("tunl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0"),
    *("sit0", "ip6tnl0", "ip6gre0"),
}
"""Devices that tunnel modules put into every namespace (Documentation/admin-guide/sysctl/net.rst,
fb_tunnels_only_for_init_net)."""

_KERNEL_RULES = ({"priority": "0", "table": "local"}, {"priority": "32766", "table": "main"})
_LAST_RULE = {"priority": "32767", "table": "default"}
_TCP_LISTEN, _UDP_OPEN = "0A", "07"


def verify(plan: Plan, instance: str) -> tuple[Drift, ...]:
    """Every difference between the kernel's state and *plan*, by namespace in plan order.

    Kernel routes (``proto kernel``), IPv6, learnt neighbours and counters are not compared.

    Raises:
        KernelError: a program that reads or loads rules failed.
    """
    present = ownership.inodes(instance)
    found = [*_namespaces(plan, present)]
    names = [name for name in plan.netns if name in present]
    by_netns: dict[str, list[Object]] = {name: [] for name in plan.netns}
    for item in plan.objects:
        by_netns[item.netns].append(item)
    indices = {name: _indices(instance, name) for name in names}
    loads: dict[str, list[Ruleset]] = {}
    for ruleset in plan.rulesets():
        loads.setdefault(ruleset.netns, []).append(ruleset)

    def one(name: str) -> list[Drift]:
        soft = loaded_drift(instance, name, by_netns[name], loads.get(name, []))
        servers = _servers(instance, name, by_netns[name], present[name])
        return [*_hard_drift(plan, instance, name, by_netns[name], indices), *soft, *servers]

    with ThreadPoolExecutor(_READERS) as pool:
        for drifts in pool.map(one, names):
            found += drifts
    return tuple(found)


def _namespaces(plan: Plan, present: Mapping[str, int]) -> Iterator[Drift]:
    for item in plan.objects:
        if isinstance(item, Netns) and item.netns not in present:
            yield Drift(item.netns, "netns", "missing: the network namespace", item.origin)
    for name in sorted(set(present) - set(plan.netns)):
        yield Drift(name, "netns", "unexpected: the network namespace")


def _indices(instance: str, netns: str) -> Mapping[str, str]:
    return {link["name"]: link["index"] for link in reading.links(instance, netns)}


# --- what rtnetlink holds ------------------------------------------------------------------------


def _hard_drift(
    plan: Plan,
    instance: str,
    netns: str,
    items: Sequence[Object],
    indices: Mapping[str, Mapping[str, str]],
) -> Iterator[Drift]:
    yield from _links(plan, netns, reading.links(instance, netns), indices)
    wanted = [(words.address(i), i.origin) for i in items if isinstance(i, Address)]
    actual = [a for a in reading.addresses(instance, netns) if a["address"] != "127.0.0.1/8"]
    yield from differences(netns, "address", wanted, actual, ("address", "dev"))
    yield from order(netns, "address", wanted, actual, ("dev",))
    yield from _routes(netns, items, reading.routes(instance, netns))
    yield from _rules(netns, items, reading.rules(instance, netns))
    wanted = [(words.neighbour(i), i.origin) for i in items if isinstance(i, Neighbour)]
    actual = [n for n in reading.neighbours(instance, netns) if n["state"] == "permanent"]
    yield from differences(netns, "neighbour", wanted, actual, ("address", "dev"))
    wanted = [(words.fdb(i), i.origin) for i in items if isinstance(i, FdbEntry)]
    actual = list(reading.forwarding(instance, netns))
    yield from differences(netns, "fdb", wanted, actual, ("address", "dev"))


def _links(
    plan: Plan, netns: str, actual: Iterable[Words], indices: Mapping[str, Mapping[str, str]]
) -> Iterator[Drift]:
    left = {link["name"]: link for link in actual}
    loopback = left.pop("lo", {})
    if loopback.get("up") != "true":
        yield Drift(netns, "link", "changed: link lo is down")
    for wanted, lower, item in _planned_links(plan, netns):
        found = left.pop(wanted["name"], None)
        if found is None:
            text = f"missing: {words.line('link', wanted)}"
            yield Drift(netns, "link", text, item.origin)
            continue
        compared = {*wanted, "master"}
        expected: dict[str, str] = dict(wanted)
        if lower is not None:
            compared.add("lower")
            expected["lower"] = indices.get(lower[0], {}).get(lower[1], "none")
        for name in sorted(compared):
            if found.get(name) != expected.get(name):
                text = _change(wanted["name"], name, found.get(name), expected.get(name), lower)
                yield Drift(netns, "link", text, item.origin)
    for name in sorted(set(left) - _FALLBACK):
        shown = {
            key: left[name][key] for key in ("name", "kind", "mac", "mtu") if key in left[name]
        }
        yield Drift(netns, "link", f"unexpected: {words.line('link', shown)}")


def _change(
    device: str, word: str, found: str | None, planned: str | None, lower: tuple[str, str] | None
) -> str:
    if word == "lower" and lower:
        return f"changed: link {device} is not joined to {lower[1]} of {lower[0]}"
    return f"changed: link {device} {word} {found or 'none'}, planned {planned or 'none'}"


def _planned_links(
    plan: Plan, netns: str
) -> Iterator[tuple[Words, tuple[str, str] | None, Object]]:
    """Words, (namespace, device) that it is joined to, and the object, of each device here."""
    for item in plan.objects:
        if isinstance(item, Veth):
            if item.netns == netns:
                yield words.link(item), (item.peer_netns, item.peer), item
            if item.peer_netns == netns:
                yield words.peer(item), (item.netns, item.name), item
        elif isinstance(item, Link) and item.netns == netns:
            match item:
                case Macvlan():
                    yield words.link(item), (item.lower_netns, item.lower), item
                case Vlan():
                    yield words.link(item), (netns, item.lower), item
                case Vxlan():
                    yield words.link(item), (netns, item.lower), item
                case _:
                    yield words.link(item), None, item


def _routes(netns: str, items: Sequence[Object], actual: Sequence[Words]) -> Iterator[Drift]:
    planned = [item for item in items if isinstance(item, Route)]
    wanted = [(words.route(item), item.origin) for item in planned]
    known = [entry for entry, _ in wanted]
    compared = [route for route in actual if route["proto"] != "kernel" or route in known]
    identity = ("dst", "table", "metric")
    yield from differences(netns, "route", wanted, compared, identity)
    ordered: list[tuple[Words, Origin]] = []
    for item, entry in zip(planned, wanted, strict=True):
        ordered.insert(0 if item.place == "prepend" else len(ordered), entry)
    yield from order(netns, "route", ordered, compared, identity)


def _rules(netns: str, items: Sequence[Object], actual: Sequence[Words]) -> Iterator[Drift]:
    """The planned ones and the kernel's own three, with the priorities that the kernel chose.

    Without a priority, a new rule goes one below the second rule of the list
    (net/core/fib_rules.c, fib_default_rule_pref).
    """
    wanted: list[tuple[Words, Origin | None]] = [
        ({"priority": one["priority"], "from": "all", "table": one["table"]}, None)
        for one in (*_KERNEL_RULES, _LAST_RULE)
    ]
    taken = [0, 32766, 32767]
    for item in items:
        if isinstance(item, PolicyRule):
            chosen = max(taken[1] - 1, 0) if item.priority is None else item.priority
            taken = sorted([*taken, chosen])
            wanted.append((words.rule(item, chosen), item.origin))
    wanted.sort(key=lambda entry: int(entry[0]["priority"]))
    yield from differences(netns, "rule", wanted, actual, ("priority",))


# --- programs ------------------------------------------------------------------------------------


def _servers(instance: str, netns: str, items: Iterable[Object], inode: int) -> Iterator[Drift]:
    listener = next((item for item in items if isinstance(item, Listener)), None)
    if listener:
        tcp, udp = namespaces.in_thread(lambda: _open_ports(instance, netns)).result()
        for port in listener.ports:
            for protocol, known in (("TCP", tcp), ("UDP", udp)):
                if port not in known:
                    text = f"missing: nobody answers on {protocol} port {port}"
                    yield Drift(netns, "listener", text, listener.origin)
    command = next((item for item in items if isinstance(item, Command)), None)
    if command:
        living = map(processes.arguments, processes.living_in({inode}))
        if all(str(AGENT) in argv for argv in living):
            text = f"missing: {' '.join(command.argv)} has ended"
            yield Drift(netns, "command", text, command.origin)


def _open_ports(instance: str, netns: str) -> tuple[set[int], set[int]]:
    with namespaces.enter(instance, netns):
        return (_ports("tcp", _TCP_LISTEN), _ports("udp", _UDP_OPEN))


def _ports(protocol: str, state: str) -> set[int]:
    """Local ports of the sockets in *state* of the current thread's namespace."""
    found: set[int] = set()
    for name in (protocol, f"{protocol}6"):
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/thread-self/net/{name}").read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == state:
                    found.add(int(parts[1].rpartition(":")[2], 16))
    return found
