"""``expect:`` -- probes and states resolved against the lab that they are about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from netlab.cni import felix
from netlab.errors import UsageError
from netlab.kube_proxy import KUBELET_REASONS as KUBELET
from netlab.kube_proxy import REASONS as KUBE_PROXY
from netlab.model import Expectation, Lab, Probe, State
from netlab.spec.checking import nearest
from netlab.spec.language import STATE_FIELDS
from netlab.spec.probes import parse_probe
from netlab.spec.world import Workshop

KERNEL = {
    "no-route": "no route to the destination",
    "blackhole": "a route of type blackhole",
    "unreachable": "a route of type unreachable",
    "prohibit": "a route of type prohibit",
    "rp-filter": "strict reverse path filter: the way back is another device",
    "martian-source": "a source address that cannot come from there",
    "accept-local": "a source address of the machine's own, and accept_local is 0",
    "route-localnet": "127.0.0.0/8 from another machine, and route_localnet is 0",
    "forwarding-off": "the packet is for another machine, and forwarding is 0",
    "ttl-exceeded": "TTL reached 0",
    "neighbour-failed": "nobody answered ARP",
    "wrong-mac": "the frame was for another machine's MAC",
    "link-down": "the device is down",
    "macvlan-isolation": "a macvlan child and its own master do not talk",
    "bridge-port": "the switch's port does not forward",
    "no-forwarding-entry": "vxlan knows no peer for the MAC",
    "mtu": "too big for the path, and the ICMP that says so was lost",
    "conntrack-full": "no room for another connection",
    "no-listener": "nothing listens on the port: RST, or ICMP port unreachable for UDP",
    "wrong-tuple": "the answer came from another address than was asked: RST by the client",
}
"""Why the kernel itself drops or rejects."""

_SUBJECT = {"route": "dst", "link": "name", "neighbour": "address"}


def reasons() -> dict[str, str]:
    """Every ``component/reason`` that `by` may say, with what it means; ``user/...`` is free."""
    found = {f"kube-proxy/{name}": text for name, text in KUBE_PROXY.items()}
    found |= {f"kubelet/{name}": text for name, text in KUBELET.items()}
    found |= {f"felix/{name}": text for name, text in felix.REASONS.items()}
    return found | {f"kernel/{name}": text for name, text in KERNEL.items()}


def expectations(
    shop: Workshop, lab: Lab, entries: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[Expectation, ...]:
    """(path, entry) pairs as expectations of *lab*; ids are unique by now."""
    addresses = dict(lab.named_addresses())
    by_id = {entry["id"]: entry for _, entry in entries}
    found = (_one(shop, lab, addresses, by_id, path, entry) for path, entry in entries)
    return tuple(entry for entry in found if entry is not None)


def _one(
    shop: Workshop,
    lab: Lab,
    addresses: Mapping[str, IPv4Address],
    by_id: Mapping[str, Mapping[str, Any]],
    path: str,
    entry: Mapping[str, Any],
) -> Expectation | None:
    if ("probe" in entry) == ("state" in entry):
        if not (shop.document.gave(f"{path}.probe") or shop.document.gave(f"{path}.state")):
            shop.problem(path, "give one of probe and state")
        elif "probe" in entry:
            shop.problem(f"{path}.state", "give one of probe and state, not both", at_key=True)
        return None
    state = _state(shop, lab, entry["state"], f"{path}.state") if "state" in entry else None
    probe = (
        _probe(shop, lab, addresses, entry["probe"], f"{path}.probe") if "probe" in entry else None
    )
    _check_words(shop, lab, path, entry)
    _check_control(shop, by_id, path, entry)
    _check_company(shop, path, entry, probe)
    if state is None and probe is None:
        return None
    return Expectation(
        id=entry["id"],
        why=entry.get("why", ""),
        probe=probe,
        state=state,
        result=entry.get("result", "delivered"),
        seen_as=entry.get("seenAs"),
        seen_as_address=_seen_as(shop, lab, addresses, entry, f"{path}.seenAs"),
        at=entry.get("at"),
        by=entry.get("by"),
        hops=entry.get("hops"),
        count=entry.get("count", 1),
        control=entry.get("control"),
        tags=tuple(entry.get("tags", ())),
        path=shop.document.original(path),
    )


def _check_words(shop: Workshop, lab: Lab, path: str, entry: Mapping[str, Any]) -> None:
    at, by = entry.get("at"), entry.get("by")
    places = [*lab.actors, *lab.networks]
    if at is not None and at not in places and not _about_the_unusable(shop, lab, at):
        shop.problem(
            f"{path}.at", f"no node, Pod, host, router or network {at!r}{nearest(at, places)}"
        )
    known = reasons()
    if by is not None and by not in known and not re.fullmatch(r"user/\S+", by):
        shop.problem(f"{path}.by", f"no reason {by!r}{nearest(by, known)}; `schema` lists them")


def _check_control(
    shop: Workshop, by_id: Mapping[str, Mapping[str, Any]], path: str, entry: Mapping[str, Any]
) -> None:
    """A control is another probe of the same run, and expected to be delivered."""
    if "control" not in entry:
        return
    wanted = entry["control"]
    if wanted not in by_id or wanted == entry["id"]:
        others = [name for name in by_id if name != entry["id"]]
        shop.problem(f"{path}.control", f"no other expectation {wanted!r}{nearest(wanted, others)}")
        return
    other = by_id[wanted]
    if "state" in other or other.get("result", "delivered") != "delivered":
        message = f"{wanted!r} proves nothing: a control is a probe that is delivered"
        shop.problem(f"{path}.control", message)


def _check_company(
    shop: Workshop, path: str, entry: Mapping[str, Any], probe: Probe | None
) -> None:
    """Fields that say nothing of what the entry asks or expects."""
    if "state" in entry:
        for key in ("result", "seenAs", "at", "by", "hops", "count", "control"):
            if key in entry:
                shop.problem(f"{path}.{key}", f"{key} is for probes", at_key=True)
        return
    failing = entry.get("result", "delivered") != "delivered"
    for key in ("seenAs", "hops") if failing else ("at", "by", "control"):
        if key in entry:
            what = "delivered" if failing else "rejected or dropped"
            shop.problem(f"{path}.{key}", f"{key} is for what is {what}", at_key=True)
    if probe is not None and probe.kind == "ping" and not failing:
        for key in ("seenAs", "hops"):
            if key in entry:
                message = f"{key} is not for ping: the kernel answers it, and does not say"
                shop.problem(f"{path}.{key}", message, at_key=True)


def _probe(
    shop: Workshop, lab: Lab, addresses: Mapping[str, IPv4Address], text: str, path: str
) -> Probe | None:
    try:
        return parse_probe(text, lab, addresses)
    except UsageError as error:
        if not _about_the_unusable(shop, lab, text):
            shop.problem(path, str(error))
        return None


def _about_the_unusable(shop: Workshop, lab: Lab, text: str) -> bool:
    """Whether *text* names something of the file that has a problem of its own already."""
    if shop.document.lost:
        return True
    usable = {*lab.actors, *lab.networks, *lab.services}
    written = {name for names in shop.names.values() for name in names}
    parts = text.replace("->", " ").replace(":", " ").replace("/", " ").replace("@", " ").split()
    mentioned = {part.partition(".")[0] for part in parts}
    return bool(mentioned & (written - usable))


def _seen_as(
    shop: Workshop,
    lab: Lab,
    addresses: Mapping[str, IPv4Address],
    entry: Mapping[str, Any],
    path: str,
) -> IPv4Address | None:
    text = entry.get("seenAs")
    if text is None or text in addresses:
        return addresses.get(text or "")
    try:
        return IPv4Address(text)
    except ValueError:
        if not _about_the_unusable(shop, lab, text):
            shop.problem(path, f"no name or address {text!r}{nearest(text, addresses)}")
        return None


def _state(shop: Workshop, lab: Lab, given: Mapping[str, Any], path: str) -> State | None:
    where = given["in"]
    places = [*lab.actors, *lab.networks]
    if where not in places:
        if not _about_the_unusable(shop, lab, where):
            message = f"no node, Pod, host, router or network {where!r}{nearest(where, places)}"
            shop.problem(f"{path}.in", message)
        return None
    kinds = [kind for kind in STATE_FIELDS if kind in given]
    if len(kinds) != 1:
        if not any(shop.document.gave(f"{path}.{kind}") for kind in STATE_FIELDS) or kinds:
            shop.problem(path, f"give one of {', '.join(STATE_FIELDS)}")
        return None
    kind = kinds[0]
    fields = () if kind == "rule" else STATE_FIELDS[kind]
    for key in given:
        if key not in {"in", "absent", kind, *fields}:
            has = f"it has {', '.join(fields)}" if fields else "its words go inside rule: {...}"
            message = f"a {kind} has no {key!r}{nearest(key, fields)}; {has}"
            shop.problem(f"{path}.{key}", message, at_key=True)
    facts = dict(_facts(kind, given))
    if kind == "route":
        _check_route(shop, facts["dst"], path)
    return State(where, kind, facts, given.get("absent", False))  # type: ignore[arg-type]


def _facts(kind: str, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if kind == "rule":
        yield from ((key, _word(value)) for key, value in given["rule"].items())
    else:
        yield _SUBJECT[kind], _word(given[kind])
    for key, value in given.items():
        if key not in {"in", "absent", kind}:
            yield key, _word(value)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_route(shop: Workshop, dst: str, path: str) -> None:
    if dst != "default" and not _is_network(dst):
        shop.problem(f"{path}.route", f"{dst!r} is not an address, a prefix or default")


def _is_network(text: str) -> bool:
    try:
        IPv4Network(text)
    except ValueError:
        return False
    return True
