"""``extra:`` -- the user's own objects, as they stand in the lab file."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from ipaddress import IPv4Network
from typing import Literal

from netlab.model import Extra, Host, Lab, Network, Node, Pod, RawObjects, Router
from netlab.plan import (
    KERNEL_CHAINS,
    Backend,
    Chain,
    Hook,
    Neighbour,
    Object,
    Origin,
    PolicyRule,
    Route,
    Sysctl,
    Table,
)

When = Literal["before", "after"]

_ORDER = {"before": -10, "after": 100}
"""Place of the user's rules in shared chains: before every component's, and after."""


def parse_iptables(line: str) -> tuple[Table, Literal["-A", "-I", "-P", "-N"], str, str]:
    """*line* of ``extra.*.iptables`` as (table, command, chain, rest).

    Raises:
        ValueError: the line is not ``-t TABLE -A|-I CHAIN RULE``, ``-P CHAIN TARGET`` or
            ``-N CHAIN``; the message says what was expected.
    """
    expected = "expected '-t TABLE -A|-I CHAIN RULE', '... -P CHAIN ACCEPT|DROP' or '... -N CHAIN'"
    words = line.split(maxsplit=4)
    if len(words) < 4 or words[0] != "-t":
        raise ValueError(expected)
    table, command, chain = words[1], words[2], words[3]
    rest = words[4] if len(words) > 4 else ""
    if table not in KERNEL_CHAINS:
        raise ValueError(f"no table {table!r}: expected one of {', '.join(KERNEL_CHAINS)}")
    if command not in {"-A", "-I", "-P", "-N"}:
        raise ValueError(expected)
    if command == "-P" and (chain not in KERNEL_CHAINS[table] or rest not in {"ACCEPT", "DROP"}):
        raise ValueError(f"a policy is ACCEPT or DROP, of one of {', '.join(KERNEL_CHAINS[table])}")
    if (command == "-N") == bool(rest):
        raise ValueError(expected)
    try:
        shlex.split(rest)
    except ValueError as error:
        raise ValueError(f"{error} in {rest!r}") from None
    if "\n" in line:
        raise ValueError("one rule is one line")
    return table, command, chain, rest  # type: ignore[return-value]


def objects(
    lab: Lab, when: When, kinds: tuple[str, ...], only: str | None = None
) -> Iterator[Object]:
    """The user's objects of every actor of *kinds* (or of *only* one), in file order."""
    for kind in kinds:
        actors: dict[str, Node | Pod | Host | Router | Network] = {**getattr(lab, kind)}
        for name, actor in actors.items():
            if only is not None and name != only:
                continue
            extra: Extra = actor.extra
            top = kind if kind in {"nodes", "pods"} else f"underlay.{kind}"
            path = f"{top}.{name}.extra.{when}"
            yield from _raw(name, getattr(extra, when), when, path, _backend(lab, actor))


def _backend(lab: Lab, actor: Node | Pod | Host | Router | Network) -> Backend:
    if isinstance(actor, Node):
        return actor.iptables_backend
    return lab.nodes[actor.node].iptables_backend if isinstance(actor, Pod) else "nft"


def _raw(netns: str, raw: RawObjects, when: When, path: str, backend: Backend) -> Iterator[Object]:
    def origin(part: str, index: int | str) -> Origin:
        return Origin("user", f"extra.{when}", netns, f"{path}.{part}[{index}]")

    for name, value in raw.sysctls.items():
        where = Origin("user", f"extra.{when}", netns, f"{path}.sysctls.{name}")
        yield Sysctl(netns=netns, origin=where, name=name, value=value)
    for index, neighbour in enumerate(raw.neighbours):
        yield Neighbour(
            netns=netns,
            origin=origin("neighbours", index),
            dev=neighbour.dev,
            address=neighbour.address,
            mac=neighbour.mac,
        )
    for index, route in enumerate(raw.routes):
        yield Route(
            netns=netns,
            origin=origin("routes", index),
            dst=IPv4Network(route.dst),
            dev=route.dev,
            via=route.via,
            src=route.src,
            table=route.table,
            scope=route.scope,
            kind=route.kind,
            onlink=route.onlink,
            metric=route.metric,
            mtu=route.mtu,
            place=route.place,
        )
    for index, rule in enumerate(raw.rules):
        yield PolicyRule(
            netns=netns,
            origin=origin("rules", index),
            table=rule.table,
            priority=rule.priority,
            src=rule.src,
            dst=rule.dst,
            fwmark=rule.fwmark,
            iif=rule.iif,
        )
    for index, line in enumerate(raw.iptables):
        yield _rule(netns, line, when, origin("iptables", index), backend)


def _rule(netns: str, line: str, when: When, origin: Origin, backend: Backend) -> Object:
    table, command, chain, rest = parse_iptables(line)
    if command == "-P":
        policy: Literal["ACCEPT", "DROP"] = "DROP" if rest == "DROP" else "ACCEPT"
        return Chain(
            netns=netns, origin=origin, table=table, name=chain, policy=policy, backend=backend
        )
    if command == "-N":
        return Chain(netns=netns, origin=origin, table=table, name=chain, backend=backend)
    return Hook(
        netns=netns,
        origin=origin,
        table=table,
        chain=chain,
        text=rest,
        place="insert" if command == "-I" else "append",
        order=_ORDER[when],
        backend=backend,
    )
