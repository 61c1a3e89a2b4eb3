"""What one probe came to."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address

from netlab.model import Result


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one probe came to.

    *seen_as*: the source address that the server saw (None: it did not say, or ping). *server*:
    who answered, by the lab's name. *hops*: routers that the request passed. *rejected_by*: who
    sent the RST or ICMP error. *reason*: one phrase for a person.
    """

    result: Result
    reason: str = ""
    seen_as: IPv4Address | None = None
    server: str | None = None
    hops: int | None = None
    rejected_by: IPv4Address | None = None
    seconds: float = 0.0
    tries: int = 1
