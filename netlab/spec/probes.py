"""The probe grammar: ``[ping|curl|tcp|udp] SRC[.NIC|@ADDRESS] -> TARGET``.

TARGET: POD[.NIC][:port], NODE[.NIC][:port], HOST[:port], ROUTER[.NIC], an address[:port],
svc/NAME[:port] (its ClusterIP; the bare name where no actor has it), or NODE[.NIC]:SERVICE (its
NodePort on that address).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address

from netlab.errors import UsageError
from netlab.model import Lab, Probe, Service, Source, Target
from netlab.spec.checking import nearest

KINDS = ("ping", "curl", "tcp", "udp")
FORM = "expected [ping|curl|tcp|udp] SRC -> TARGET, such as curl ma1 -> ca2"
DEFAULT_PORT = 80

_PROBE = re.compile(r"(?:(\S+)\s+)?(\S+)\s*->\s*(\S+)")


def parse_probe(text: str, lab: Lab) -> Probe:
    """The probe that *text* means in *lab*.

    Raises:
        UsageError: it is none; the message says what was expected.
    """
    match = _PROBE.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{text!r}: {FORM}")
    kind = match[1] or "curl"
    if kind not in KINDS:
        raise UsageError(f"no probe {kind!r}{nearest(kind, KINDS)}: {FORM}")
    names = dict(lab.named_addresses())
    return Probe(kind, _source(match[2], lab, names), _target(match[3], lab, names))  # type: ignore[arg-type]


def _source(text: str, lab: Lab, names: Mapping[str, IPv4Address]) -> Source:
    actor, at, bound = text.partition("@")
    if at:
        return Source(_actor(actor, lab), address=_address(bound, text))
    actor, _, nic = text.partition(".")
    _actor(actor, lab)
    if nic and text not in names:
        devices = [name.partition(".")[2] for name in names if name.startswith(f"{actor}.")]
        raise UsageError(f"{actor} has no address on {nic!r}{nearest(nic, devices)}")
    return Source(actor, nic=nic or None)


def _actor(name: str, lab: Lab) -> str:
    if name not in lab.actors:
        raise UsageError(f"no node, Pod, host or router {name!r}{nearest(name, lab.actors)}")
    return name


def _address(text: str, whole: str) -> IPv4Address:
    try:
        return IPv4Address(text)
    except ValueError:
        raise UsageError(f"{whole!r}: {text!r} is not an IPv4 address") from None


def _target(text: str, lab: Lab, names: Mapping[str, IPv4Address]) -> Target:
    base, colon, tail = text.partition(":")
    if colon and not tail:
        raise UsageError(f"{text!r}: expected a port or a Service after ':'")
    port = int(tail) if tail.isdigit() else None
    if port is not None and not 1 <= port <= 65535:
        raise UsageError(f"{text!r}: a port is 1..65535")
    if base.startswith("svc/") or (base in _services(lab) and base not in lab.actors):
        if colon and port is None:
            raise UsageError(f"{text!r}: expected a port number after the Service")
        return _cluster_ip(text, _service(base.removeprefix("svc/"), lab), port)
    address, actor = _where(base, lab, names)
    if colon and port is None:
        return _node_port(text, _service(tail, lab), address, actor, lab)
    return Target(text, address, port or DEFAULT_PORT, actor)


def _where(base: str, lab: Lab, names: Mapping[str, IPv4Address]) -> tuple[IPv4Address, str | None]:
    if base in names:
        return names[base], base.partition(".")[0]
    if re.fullmatch(r"[0-9.]+", base):
        address = _address(base, base)
        name = lab.name_of(address)
        return address, None if name == base else name.partition(".")[0]
    known = [*names, *_services(lab)]
    raise UsageError(f"no Pod, node, host, address or Service {base!r}{nearest(base, known)}")


def _services(lab: Lab) -> Mapping[str, Service]:
    return lab.services


def _service(name: str, lab: Lab) -> Service:
    if name not in lab.services:
        raise UsageError(f"no Service {name!r}{nearest(name, lab.services)}")
    return lab.services[name]


def _cluster_ip(text: str, service: Service, port: int | None) -> Target:
    if service.cluster_ip is None:
        raise UsageError(f"{text!r}: Service {service.name} has no ClusterIP")
    number = service.ports[0].port if port is None else port
    name = f"{service.namespace}/{service.name}"
    return Target(text, service.cluster_ip, number, None, name)


def _node_port(
    text: str, service: Service, address: IPv4Address, actor: str | None, lab: Lab
) -> Target:
    number = service.ports[0].node_port
    if number is None:
        raise UsageError(f"{text!r}: Service {service.name} has no NodePort (type NodePort)")
    if actor not in lab.nodes:
        raise UsageError(f"{text!r}: a NodePort is asked on a node, not on {actor or address}")
    return Target(text, address, number, actor, f"{service.namespace}/{service.name}")
