"""``expect:`` -- probes and states resolved against the lab that they are about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from netlab.cni import felix
from netlab.errors import UsageError
from netlab.kube_proxy import REASONS as KUBE_PROXY
from netlab.model import Expectation, Lab, Probe, State
from netlab.spec.checking import nearest
from netlab.spec.probes import parse_probe
from netlab.spec.world import Workshop

KERNEL = {
    "no-route": "no route to the destination, or an unreachable one",
    "blackhole": "a blackhole route",
    "rp-filter": "strict reverse path filter",
    "martian": "a source address that cannot be there",
    "forwarding-off": "ip_forward is 0",
    "ttl": "TTL reached 0",
    "neighbour-failed": "nobody answered ARP",
    "wrong-mac": "the frame was for another machine",
    "no-listener": "nothing listens on the port",
    "link-down": "the device is down",
    "macvlan-isolation": "a macvlan child and its own master do not talk",
    "mtu": "too big for the path, and the ICMP that says so was lost",
    "conntrack-full": "no room for another connection",
    "tuple-mismatch": "the answer came from another address than was asked",
}

STATE_KINDS = ("route", "rule", "link", "neighbour")
_SUBJECT = {"route": "dst", "link": "name", "neighbour": "address"}


def reasons() -> dict[str, str]:
    """Every ``component/reason`` that `by` may say, with what it means; ``user/...`` is free."""
    found = {f"kube-proxy/{name}": text for name, text in KUBE_PROXY.items()}
    found |= {f"felix/{name}": text for name, text in felix.REASONS.items()}
    return found | {f"kernel/{name}": text for name, text in KERNEL.items()}


def expectations(
    shop: Workshop, lab: Lab, entries: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[Expectation, ...]:
    """(path, entry) pairs as expectations of *lab*; ids are unique by now."""
    addresses = dict(lab.named_addresses())
    ids = [entry["id"] for _, entry in entries]
    found = (_one(shop, lab, addresses, ids, path, entry) for path, entry in entries)
    return tuple(entry for entry in found if entry is not None)


def _one(
    shop: Workshop,
    lab: Lab,
    addresses: Mapping[str, IPv4Address],
    ids: Sequence[str],
    path: str,
    entry: Mapping[str, Any],
) -> Expectation | None:
    if ("probe" in entry) == ("state" in entry):
        shop.problem(path, "give one of probe and state")
        return None
    _check_words(shop, lab, ids, path, entry)
    state = _state(shop, lab, entry["state"], f"{path}.state") if "state" in entry else None
    probe = _probe(shop, lab, entry["probe"], f"{path}.probe") if "probe" in entry else None
    if state is None and probe is None:
        return None
    seen_as = entry.get("seenAs")
    return Expectation(
        id=entry["id"],
        why=entry.get("why", ""),
        probe=probe,
        state=state,
        result=entry.get("result", "delivered"),
        seen_as=seen_as,
        seen_as_address=_seen_as(shop, addresses, entry, probe, f"{path}.seenAs"),
        at=entry.get("at"),
        by=entry.get("by"),
        hops=entry.get("hops"),
        count=entry.get("count", 1),
        control=entry.get("control"),
        tags=tuple(entry.get("tags", ())),
        path=path,
    )


def _check_words(
    shop: Workshop, lab: Lab, ids: Sequence[str], path: str, entry: Mapping[str, Any]
) -> None:
    """Fields that name something: at, by, control; and fields that go together."""
    at, by, control = entry.get("at"), entry.get("by"), entry.get("control")
    places = [*lab.actors, *lab.networks]
    if at is not None and at not in places:
        shop.problem(
            f"{path}.at", f"no node, Pod, host, router or network {at!r}{nearest(at, places)}"
        )
    known = reasons()
    if by is not None and by not in known and not by.startswith("user/"):
        shop.problem(f"{path}.by", f"no reason {by!r}{nearest(by, known)}; `schema` lists them")
    if control is not None and (control not in ids or control == entry["id"]):
        others = [name for name in ids if name != entry["id"]]
        shop.problem(
            f"{path}.control", f"no other expectation {control!r}{nearest(control, others)}"
        )
    _check_company(shop, path, entry)


def _check_company(shop: Workshop, path: str, entry: Mapping[str, Any]) -> None:
    """Fields that say nothing of what the entry expects."""
    failing = entry.get("result", "delivered") != "delivered"
    for key in ("seenAs", "hops") if failing else ("at", "by", "control"):
        if key in entry:
            what = "delivered" if failing else "rejected or dropped"
            shop.problem(f"{path}.{key}", f"{key} is for what is {what}")
    if "state" in entry:
        for key in ("result", "seenAs", "hops", "count", "control"):
            if key in entry:
                shop.problem(f"{path}.{key}", f"{key} is for probes")


def _probe(shop: Workshop, lab: Lab, text: str, path: str) -> Probe | None:
    try:
        return parse_probe(text, lab)
    except UsageError as error:
        if not _about_the_unusable(shop, lab, text):
            shop.problem(path, str(error))
        return None


def _about_the_unusable(shop: Workshop, lab: Lab, text: str) -> bool:
    """Whether *text* names something of the file that has a problem of its own already."""
    usable = {*lab.actors, *lab.networks, *lab.services}
    written = {name for names in shop.names.values() for name in names}
    parts = text.replace("->", " ").replace(":", " ").replace("/", " ").replace("@", " ").split()
    mentioned = {part.partition(".")[0] for part in parts}
    return bool(mentioned & (written - usable))


def _seen_as(
    shop: Workshop,
    addresses: Mapping[str, IPv4Address],
    entry: Mapping[str, Any],
    probe: Probe | None,
    path: str,
) -> IPv4Address | None:
    text = entry.get("seenAs")
    if text is None:
        return None
    if probe is not None and probe.kind == "ping":
        shop.problem(path, "a ping is answered by the kernel, which does not say whom it saw")
        return None
    if text in addresses:
        return addresses[text]
    try:
        return IPv4Address(text)
    except ValueError:
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
    kinds = [kind for kind in STATE_KINDS if kind in given]
    if len(kinds) != 1:
        shop.problem(path, f"give one of {', '.join(STATE_KINDS)}")
        return None
    kind = kinds[0]
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
