"""A plan as a POSIX shell script that creates the same objects with the usual programs.

Each line stands behind its reason. The script's order is the plan's, but for what `netlab.kernel`
does beside or after the rtnetlink objects: ipsets and iptables rules, then conntrack's sysctls.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from netlab.plan import (
    KERNEL_CHAINS,
    MAIN_TABLE,
    Address,
    Bridge,
    Command,
    FdbEntry,
    IpSet,
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
    Sysctl,
    Veth,
    Vlan,
    Vxlan,
    describe,
)

Line: TypeAlias = tuple[Origin | None, str]

_UNNAMED = "netlab.new"

_HEADER = """\
#!/bin/sh
# {title}, as network namespaces, links, addresses, routes, rules, ipsets and iptables rules.
# Run as root. NETLAB is what the names of the namespaces begin with; to remove them again:
#   ip netns list | grep -o "^$NETLAB[.][^ ]*" | xargs -n 1 ip netns delete
set -eu
: "${{NETLAB:={prefix}}}"
"""


def render(plan: Plan) -> str:
    """The script. Servers are not part of it: a comment says which there would be."""
    prefix = f"netlab.{plan.name}"
    lines = [_HEADER.format(title=plan.name, prefix=prefix).rstrip()]
    said: Origin | None = None
    for origin, text in _lines(plan):
        if origin is not None and origin != said:
            lines.append(f"\n# {describe(origin)}")
        said = origin
        lines.append(text)
    return "\n".join([*lines, ""])


def _lines(plan: Plan) -> Iterator[Line]:
    late: list[Sysctl] = []
    for item in plan.objects:
        if isinstance(item, Sysctl) and _is_late(item):
            late.append(item)
        else:
            yield from ((item.origin, text) for text in _commands(item))
    yield from _ipsets(item for item in plan.objects if isinstance(item, IpSet))
    for ruleset in plan.rulesets():
        yield from _ruleset(ruleset)
    for item in late:
        yield item.origin, _sysctl(item)


def _is_late(item: Sysctl) -> bool:
    """Whether it may exist only after a rule has loaded conntrack."""
    return item.name.startswith(("net.netfilter.", "net.nf_conntrack"))


def _commands(item: Object) -> Iterator[str]:
    match item:
        case Netns():
            yield from _netns(item)
        case Link():
            yield from _link(item)
        case Address() | Route() | PolicyRule() | Neighbour():
            yield _ip(item.netns, _layer3(item))
        case FdbEntry():
            entry = f"{item.mac} dev {_q(item.dev)} dst {item.dst} self permanent"
            yield f"bridge -n {_name(item.netns)} fdb replace {entry}"
        case Sysctl():
            yield _sysctl(item)
        case Listener() | Command():
            yield _program(item)


def _layer3(item: Address | Route | PolicyRule | Neighbour) -> str:
    match item:
        case Address():
            scope = "" if item.scope == "global" else f" scope {item.scope}"
            return f"address add {item.address} dev {_q(item.dev)}{scope}"
        case Route():
            return _route(item)
        case PolicyRule():
            return _rule(item)
        case Neighbour():
            entry = f"{item.address} lladdr {item.mac} dev {_q(item.dev)} nud permanent"
            return f"neighbour replace {entry}"


def _program(item: Listener | Command) -> str:
    if isinstance(item, Listener):
        ports = ", ".join(map(str, item.ports))
        return f"# {item.netns}: the lab's server would listen on {ports} (TCP, UDP and HTTP)"
    return _exec(item.netns, f"{shlex.join(item.argv)} </dev/null >/dev/null 2>&1 &")


def _q(text: str) -> str:
    return shlex.quote(text)


def _name(netns: str) -> str:
    return f'"$NETLAB".{_q(netns)}'


def _ip(netns: str, rest: str) -> str:
    return f"ip -n {_name(netns)} {rest}"


def _exec(netns: str, rest: str) -> str:
    """By nsenter: `ip netns exec` would also want to mount a /sys, which a chroot refuses."""
    return f"nsenter --net=/run/netns/{_name(netns)} {rest}"


def _netns(item: Netns) -> Iterator[str]:
    yield f"ip netns add {_name(item.netns)}"
    if item.sysctls:
        settings = " \\\n    ".join(_q(f"{name}={value}") for name, value in item.sysctls.items())
        # What this kernel does not have cannot differ between hosts: -e.
        yield _exec(item.netns, f"sysctl -q -e -w \\\n    {settings}")
    yield _ip(item.netns, "link set lo up")


def _sysctl(item: Sysctl) -> str:
    setting = _q(f"{item.name}={item.value}")
    if item.optional:
        return _exec(item.netns, f"sysctl -q -e -w {setting} || true")
    return _exec(item.netns, f"sysctl -q -w {setting}")


def _settings(name: str, mac: str | None, mtu: int | None) -> str:
    address = f" address {mac}" if mac else ""
    return _q(name) + address + (f" mtu {mtu}" if mtu is not None else "")


def _link(item: Link) -> Iterator[str]:
    """Born where it belongs, and up.

    A macvlan gets its name there: kernels before 6.2 look for it where the lower device is.
    """
    own = _settings(item.name, item.mac, item.mtu)
    if item.tx_queue_len is not None:
        own += f" txqueuelen {item.tx_queue_len}"
    master = f" master {_q(item.master)}" if item.master else ""
    match item:
        case Veth():
            peer = _settings(item.peer, item.peer_mac, item.peer_mtu)
            far = f"peer name {peer} netns {_name(item.peer_netns)}"
            yield _ip(item.netns, f"link add {own} type veth {far}")
        case Macvlan():
            born = _UNNAMED + own.removeprefix(_q(item.name))
            there = f"link {_q(item.lower)} netns {_name(item.netns)}"
            yield _ip(item.lower_netns, f"link add {born} {there} type macvlan mode {item.mode}")
            yield _ip(item.netns, f"link set {_UNNAMED} name {_q(item.name)}")
        case Bridge():
            yield _ip(item.netns, f"link add {own} type bridge")
            if item.mtu is not None:
                yield _ip(item.netns, f"link set {_q(item.name)} mtu {item.mtu}")
        case Vlan():
            yield _ip(item.netns, f"link add {own} link {_q(item.lower)} type vlan id {item.vlan}")
        case Vxlan():
            tunnel = f"id {item.vni} dstport {item.port} local {item.local} dev {_q(item.lower)}"
            yield _ip(item.netns, f"link add {own} type vxlan {tunnel} nolearning")
        case _:
            raise AssertionError(item)
    yield _ip(item.netns, f"link set {_q(item.name)}{master} up")
    if isinstance(item, Veth):
        peer_master = f" master {_q(item.peer_master)}" if item.peer_master else ""
        yield _ip(item.peer_netns, f"link set {_q(item.peer)}{peer_master} up")


def _route(item: Route) -> str:
    parts = [f"route {item.place}"]
    if item.kind != "unicast":
        parts.append(item.kind)
    parts.append("default" if not item.dst.prefixlen else str(item.dst))
    words = {
        "via": item.via,
        "dev": _q(item.dev) if item.dev else None,
        "src": item.src,
        "table": item.table if item.table != MAIN_TABLE else None,
        "proto": item.protocol,
        "scope": item.scope,
        "metric": item.metric,
        "mtu": item.mtu,
    }
    parts += (f"{name} {value}" for name, value in words.items() if value is not None)
    if item.onlink:
        parts.append("onlink")
    return " ".join(parts)


def _rule(item: PolicyRule) -> str:
    mark = None if item.fwmark is None else hex(item.fwmark)
    if mark and item.fwmask is not None:
        mark += f"/{item.fwmask:#x}"
    words = {
        "from": item.src or "all",
        "to": item.dst,
        "fwmark": mark,
        "iif": _q(item.iif) if item.iif else None,
        "lookup": item.table,
        "priority": item.priority,
    }
    said = (f"{name} {value}" for name, value in words.items() if value is not None)
    return f"rule add {' '.join(said)}"


def _ipsets(sets: Iterable[IpSet]) -> Iterator[Line]:
    for item in sets:
        text = [f"create {item.name} {item.type} {item.options}".rstrip()]
        text += (f"add {item.name} {member}" for member in item.members)
        yield item.origin, _fed(_exec(item.netns, "ipset restore"), "\n".join([*text, ""]))


def _ruleset(ruleset: Ruleset) -> Iterator[Line]:
    """The reasons stand inside, before the rules."""
    tables = [table for table in KERNEL_CHAINS if table in ruleset.rules]
    program = _exec(ruleset.netns, f"iptables-{ruleset.backend}-restore")
    yield None, f"\n# {ruleset.netns}: {', '.join(tables)}"
    yield None, _fed(program, ruleset.restore_input(reasons=True))


def _fed(command: str, text: str) -> str:
    """*command* with *text* as its input, unchanged by the shell."""
    return f"{command} <<'END'\n{text}END"
