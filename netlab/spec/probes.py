"""The probe grammar: ``[ping|curl|tcp|udp] SRC[.NIC|@ADDRESS] -> TARGET``.

TARGET: POD[.NIC][:port], NODE[.NIC][:port], HOST[:port], ROUTER[.NIC], an address[:port],
svc/NAME[:port] (its ClusterIP; the bare name where no actor has it), or NODE[.NIC]:SERVICE[:port]
(its NodePort on that address). A Service's port is a number or its name; left out, it is the
first of the probe's protocol.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address

from netlab.errors import UsageError
from netlab.model import Lab, Probe, ProbeKind, Service, ServicePort, Source, Target
from netlab.spec.checking import nearest

KINDS: tuple[ProbeKind, ...] = ("ping", "curl", "tcp", "udp")
FORM = "expected [ping|curl|tcp|udp] SRC -> TARGET, such as curl ma1 -> ca2"
DEFAULT_PORT = 80

_PROBE = re.compile(r"(?:(\S+)\s+)?(\S+)\s*->\s*(\S+)")
_ADDRESS = re.compile(r"[0-9]+(\.[0-9]+){3}")


def parse_probe(text: str, lab: Lab, names: Mapping[str, IPv4Address] | None = None) -> Probe:
    """The probe that *text* means in *lab*; without a kind it is curl.

    Args:
        text: the probe.
        lab: whose names it uses.
        names: `Lab.named_addresses`, by those who have many probes to parse.

    Raises:
        UsageError: it is none; the message says what was expected.
    """
    match = _PROBE.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{text!r}: {FORM}")
    word, source, target = match.groups()
    kind = next((known for known in KINDS if known == (word or "curl")), None)
    if kind is None:
        raise UsageError(f"no probe {word!r}{nearest(word, KINDS)}: {FORM}")
    if names is None:
        names = dict(lab.named_addresses())
    return Probe(kind, _source(source, lab, names), _Goal(target, kind, lab, names).target())


def _source(text: str, lab: Lab, names: Mapping[str, IPv4Address]) -> Source:
    actor, at, bound = text.partition("@")
    if at:
        own = {address for name, address in names.items() if _actor_of(name) == actor}
        address = _address(bound, text)
        if address not in own and actor in lab.actors:
            raise UsageError(f"{actor} has no address {address}: {_listed(own)}")
        return Source(_actor(actor, lab), address=address)
    actor, _, nic = text.partition(".")
    _actor(actor, lab)
    if nic and text not in names:
        raise UsageError(_no_device(actor, nic, names))
    return Source(actor, nic=nic or None)


def _actor(name: str, lab: Lab) -> str:
    if name not in lab.actors:
        raise UsageError(f"no node, Pod, host or router {name!r}{nearest(name, lab.actors)}")
    return name


def _actor_of(name: str) -> str:
    return name.partition(".")[0]


def _no_device(actor: str, nic: str, names: Mapping[str, IPv4Address]) -> str:
    devices = [name.partition(".")[2] for name in names if name.startswith(f"{actor}.")]
    hint = nearest(nic, devices) or f": {_listed(devices)}"
    return f"{actor} has no address on {nic!r}{hint}"


def _listed(values: object) -> str:
    return f"it has {', '.join(map(str, values))}" if values else "it has none"  # type: ignore[call-overload]


def _address(text: str, whole: str) -> IPv4Address:
    try:
        return IPv4Address(text)
    except ValueError:
        raise UsageError(f"{whole!r}: {text!r} is not an IPv4 address") from None


class _Goal:
    """The part of a probe behind the arrow."""

    def __init__(
        self, text: str, kind: ProbeKind, lab: Lab, names: Mapping[str, IPv4Address]
    ) -> None:
        self.text = text
        self.kind = kind
        self.lab = lab
        self.names = names

    def target(self) -> Target:
        base, *rest = self.text.split(":")
        if len(rest) > 2 or not all((base, *rest)):
            raise UsageError(f"{self.text!r}: expected TARGET[:port], such as ma1:80")
        if self.kind == "ping" and rest:
            raise UsageError(f"{self.text!r}: a ping has no port")
        bare = base in self.lab.services and base not in self.lab.actors
        if base.startswith("svc/") or bare:
            if len(rest) > 1:
                raise UsageError(f"{self.text!r}: expected svc/NAME[:port]")
            return self._cluster_ip(base.removeprefix("svc/"), *rest)
        address, actor = self._where(base)
        if rest and not rest[0].isdecimal():
            return self._node_port(address, actor, *rest)
        if len(rest) > 1:
            raise UsageError(f"{self.text!r}: expected one port")
        return Target(self.text, address, self._number(*rest) if rest else DEFAULT_PORT, actor)

    def _where(self, base: str) -> tuple[IPv4Address, str | None]:
        """The address that *base* names, and whose it is."""
        if base in self.names:
            return self.names[base], _actor_of(base)
        if _ADDRESS.fullmatch(base):
            address = _address(base, base)
            name = self.lab.name_of(address)
            return address, None if name == str(address) else _actor_of(name)
        actor, _, nic = base.partition(".")
        if nic and actor in self.lab.actors:
            raise UsageError(_no_device(actor, nic, self.names))
        near = nearest(base, [*self.names, *self.lab.services])
        raise UsageError(f"no Pod, node, host, router, address or Service {base!r}{near}")

    def _service(self, name: str) -> Service:
        if name not in self.lab.services:
            raise UsageError(f"no Service {name!r}{nearest(name, self.lab.services)}")
        return self.lab.services[name]

    def _cluster_ip(self, name: str, port: str = "") -> Target:
        service = self._service(name)
        if service.cluster_ip is None:
            raise UsageError(f"{self.text!r}: Service {name} is headless, it has no ClusterIP")
        number = self._number(port) if port.isdecimal() else self._port(service, port).port
        return Target(
            self.text, service.cluster_ip, number, None, f"{service.namespace}/{service.name}"
        )

    def _node_port(
        self, address: IPv4Address, actor: str | None, name: str, port: str = ""
    ) -> Target:
        service = self._service(name)
        if actor not in self.lab.nodes:
            whose = actor or address
            raise UsageError(f"{self.text!r}: a NodePort is on a node, and {whose} is none")
        number = self._port(service, port).node_port
        if number is None:
            raise UsageError(f"{self.text!r}: Service {name} is not of type NodePort")
        return Target(self.text, address, number, actor, f"{service.namespace}/{service.name}")

    def _port(self, service: Service, wanted: str) -> ServicePort:
        """The port of *service* that has the name or number *wanted*, or the first."""
        protocol = "UDP" if self.kind == "udp" else "TCP"
        ports = [port for port in service.ports if port.protocol == protocol]
        for port in ports:
            if wanted in {"", port.name, str(port.port)}:
                return port
        if not ports and self.kind == "ping":
            return service.ports[0]
        has = ", ".join(f"{p.name or p.port}/{p.protocol}" for p in service.ports)
        what = f"{wanted or 'any'}/{protocol}"
        raise UsageError(f"{self.text!r}: Service {service.name} has no port {what}, it has {has}")

    def _number(self, text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text[:6]) <= 65535 or len(text) > 5:
            raise UsageError(f"{self.text!r}: a port is 1..65535")
        return int(text)
