"""What one synchronisation of kube-proxy writes, and how its chains are named."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from netlab.kube_proxy.state import Endpoint, ServicePort
from netlab.plan import Table

REASONS: Mapping[str, str] = {
    "invalid": "conntrack knows no connection that the packet fits: KUBE-FORWARD drops it",
    "no-endpoints": "the Service has no usable endpoint: rejected",
    "no-local-endpoints": "policy Local, and no usable endpoint on this node: dropped",
    "load-balancer-source-ranges": "the client is outside loadBalancerSourceRanges: dropped",
    "localnet": "a martian to 127.0.0.0/8 from another machine: dropped",
}
"""Why kube-proxy's rules drop or reject: the reasons that its Origins carry."""


class Line(NamedTuple):
    """One rule of one of kube-proxy's own chains.

    *reason*: a key of `REASONS` for a rule that drops or rejects, else a phrase; *setting*: the
    field of the Service or of the proxy behind it (``externalTrafficPolicy``, ``version``).
    """

    table: Table
    chain: str
    text: str
    reason: str
    service: ServicePort | None = None
    setting: str = ""


@dataclass(slots=True)
class Rules:
    """Chains (in order of declaration) and lines of one synchronisation."""

    chains: dict[tuple[Table, str], None] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def declare(self, table: Table, names: Iterable[str]) -> None:
        for name in names:
            self.chains.setdefault((table, name))

    def by_chain(self) -> dict[tuple[Table, str], list[Line]]:
        """Every declared chain with its lines, both in order."""
        found: dict[tuple[Table, str], list[Line]] = {chain: [] for chain in self.chains}
        for line in self.lines:
            found[line.table, line.chain].append(line)
        return found


def hash16(text: str) -> str:
    """First 16 characters of base32(sha256(text)) (``portProtoHash``)."""
    return base64.b32encode(hashlib.sha256(text.encode()).digest()).decode()[:16]


def service_chain(prefix: Literal["SVC", "SVL", "EXT", "FW"], port: ServicePort) -> str:
    """``KUBE-SVC-…``: one hash for all of a Service port's chains."""
    return f"KUBE-{prefix}-{hash16(port.port_name + port.protocol.lower())}"


def endpoint_chain(port: ServicePort, endpoint: Endpoint) -> str:
    """``KUBE-SEP-…`` of one endpoint."""
    return f"KUBE-SEP-{hash16(port.port_name + port.protocol.lower() + str(endpoint))}"
