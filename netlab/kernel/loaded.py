"""Sysctls, ipsets and iptables rules of one namespace against the plan.

They are compared with what the kernel makes of the plan's own: those are loaded into a namespace
without a name and read back in the same way as the lab's, so that both went through the same
programs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from netlab.kernel import namespaces, objects, processes, rulesets
from netlab.kernel.drift import Drift, edits
from netlab.plan import Backend, IpSet, Netns, Object, Origin, Ruleset, Sysctl

_Sets: TypeAlias = Mapping[str, tuple[str, frozenset[str]]]

BACKENDS: tuple[Backend, ...] = ("nft", "legacy")


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What programs and files tell of one namespace."""

    sysctls: Mapping[str, str | None]
    sets: _Sets
    rules: Mapping[Backend, Mapping[str, list[str]]]


def loaded_drift(
    instance: str, netns: str, items: Sequence[Object], loads: Sequence[Ruleset]
) -> Iterator[Drift]:
    """Differences of the namespace *netns*, of which *items* and *loads* are the plan.

    Raises:
        KernelError: a program failed.
    """
    origins: dict[str, Origin] = {}
    for item in items:
        if isinstance(item, Netns):
            origins |= dict.fromkeys(item.sysctls, item.origin)
        elif isinstance(item, Sysctl):
            origins[item.name] = item.origin
    names = [*origins]
    wanted = namespaces.in_scratch(lambda: _planned(netns, items, loads, names)).result()
    actual = namespaces.in_thread(lambda: _actual(instance, netns, names)).result()
    yield from _sysctl_drift(netns, items, origins, wanted.sysctls, actual.sysctls)
    yield from _set_drift(netns, items, wanted.sets, actual.sets)
    for backend in BACKENDS:
        load = next((one for one in loads if one.backend == backend), None)
        pair = (wanted.rules.get(backend, {}), actual.rules.get(backend, {}))
        yield from _rule_drift(netns, backend, load, *pair)


def _planned(
    netns: str, items: Sequence[Object], loads: Sequence[Ruleset], names: Sequence[str]
) -> _Loaded:
    """What the kernel makes of the plan, in a new namespace that the current thread is in."""
    children = rulesets.Children()
    written = [item for item in items if isinstance(item, Sysctl) and not item.device]
    late = [item for item in written if objects.is_late(item)]
    sets = [item for item in items if isinstance(item, IpSet)]
    for item in items:
        if isinstance(item, Netns):
            for name, value in item.sysctls.items():
                objects.write_sysctl(name, value, optional=True)
        elif item in written and item not in late:
            _write(item)
    if sets:
        rulesets.restore_sets(sets, children)
    for load in loads:
        rulesets.restore_rules(load, children, None)
    for item in late:
        _write(item)
    return _read(netns, names, [load.backend for load in loads], children, with_sets=bool(sets))


def _write(item: Sysctl) -> None:
    """Also where the lab's own cannot be written: then both read the same."""
    with suppress(OSError):
        objects.write_sysctl(item.name, item.value, optional=item.optional)


def _actual(instance: str, netns: str, names: Sequence[str]) -> _Loaded:
    backends = [one for one in BACKENDS if shutil.which(f"iptables-{one}-save", path=_path())]
    with_sets = shutil.which("ipset", path=_path()) is not None
    with namespaces.enter(instance, netns):
        return _read(netns, names, backends, rulesets.Children(), with_sets=with_sets)


def _path() -> str:
    return processes.environment()["PATH"]


def _read(
    netns: str,
    names: Iterable[str],
    backends: Iterable[Backend],
    children: rulesets.Children,
    *,
    with_sets: bool,
) -> _Loaded:
    return _Loaded(
        {name: _read_sysctl(name) for name in names},
        rulesets.saved_sets(netns, children) if with_sets else {},
        {backend: rulesets.saved_rules(netns, backend, children) for backend in backends},
    )


def _read_sysctl(name: str) -> str | None:
    with suppress(OSError):
        return _plain(objects.sysctl_path(name).read_text())
    return None


def _plain(value: str) -> str:
    return " ".join(value.split())


def _sysctl_drift(
    netns: str,
    items: Iterable[Object],
    origins: Mapping[str, Origin],
    wanted: Mapping[str, str | None],
    actual: Mapping[str, str | None],
) -> Iterator[Drift]:
    """A device's are compared with the plan itself: the device is not in the other namespace."""
    on_devices = {i.name: _plain(i.value) for i in items if isinstance(i, Sysctl) and i.device}
    for name, origin in origins.items():
        planned, found = on_devices.get(name, wanted[name]), actual[name]
        if found != planned:
            text = f"changed: sysctl {name}={found}, planned {planned}"
            yield Drift(netns, "sysctl", text, origin)


def _set_drift(
    netns: str, items: Iterable[Object], wanted: _Sets, actual: _Sets
) -> Iterator[Drift]:
    origins = {item.name: item.origin for item in items if isinstance(item, IpSet)}
    for name, (kind, members) in wanted.items():
        if name not in actual:
            yield Drift(netns, "ipset", f"missing: ipset {name}", origins.get(name))
            continue
        found_kind, found = actual[name]
        if found_kind != kind:
            text = f"changed: ipset {name} {found_kind}, planned {kind}"
            yield Drift(netns, "ipset", text, origins.get(name))
        for member in sorted(members - found):
            text = f"missing: ipset {name} member {member}"
            yield Drift(netns, "ipset", text, origins.get(name))
        for member in sorted(found - members):
            yield Drift(netns, "ipset", f"unexpected: ipset {name} member {member}")
    for name in sorted(set(actual) - set(wanted)):
        yield Drift(netns, "ipset", f"unexpected: ipset {name}")


def _rule_drift(
    netns: str,
    backend: Backend,
    load: Ruleset | None,
    wanted: Mapping[str, list[str]],
    actual: Mapping[str, list[str]],
) -> Iterator[Drift]:
    for key in [*wanted, *(key for key in actual if key not in wanted)]:
        table, chain = key.split(" ")
        default = "policy ACCEPT" if load is None or chain not in load.chains.get(table, ()) else ""
        before, now = wanted.get(key, [default]), actual.get(key, [default])
        origins = _origins(load, table, chain)
        where = f"iptables-{backend} -t {table}"
        if key not in wanted and now[0] == "policy -":
            yield Drift(netns, "iptables", f"unexpected: {where} -N {chain}")
            before = now[:1]
        elif key not in actual and before[0] == "policy -":
            yield Drift(netns, "iptables", f"missing: {where} -N {chain}", _first(origins))
            continue
        for verb, old, new, index in edits(before, now):
            origin = origins[index] if verb != "unexpected" and index < len(origins) else None
            planned = f", planned {_spoken(chain, old)}" if verb == "changed" else ""
            said = _spoken(chain, old if verb == "missing" else new)
            yield Drift(netns, "iptables", f"{verb}: {where} {said}{planned}", origin)


def _origins(load: Ruleset | None, table: str, chain: str) -> list[Origin | None]:
    """Who asked for each line of the chain, the policy first."""
    if load is None:
        return []
    rules = [rule.origin for name, rule in load.rules.get(table, ()) if name == chain]
    return [rules[0] if rules else None, *rules]


def _first(origins: Sequence[Origin | None]) -> Origin | None:
    return origins[0] if origins else None


def _spoken(chain: str, line: str) -> str:
    return f"-P {chain} {line[7:]}" if line.startswith("policy ") else f"-A {chain} {line}".rstrip()
