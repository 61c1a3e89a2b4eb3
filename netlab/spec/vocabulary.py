"""Words that the lab language is described in: kinds of values, each with what is expected.

``expected`` completes the sentence "... is not ..." of a message; editors ignore it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any, TypeAlias

from netlab.model import Version

Schema: TypeAlias = dict[str, Any]

LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
"""RFC 1123, as Kubernetes names Pods and nodes."""

SERVICE = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"
"""RFC 1035, as Kubernetes names Services: never mistaken for a port."""

INSTANCE = r"^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$"
DEVICE = r"^[A-Za-z0-9_][-A-Za-z0-9_.]{0,14}$"


def formats() -> Mapping[str, Callable[[str], bool]]:
    """Format name -> whether a text is one."""
    return {
        "address": _accepts(IPv4Address),
        "interface": _accepts(IPv4Interface),
        "cluster-ip": lambda text: text == "None" or _accepts(IPv4Address)(text),
        "network": _accepts(IPv4Network),
        "route": lambda text: text == "default" or _accepts(IPv4Network)(text),
        "version": _accepts(Version.parse),
        "mac-address": lambda text: bool(re.fullmatch(r"([0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}", text)),
    }


def _accepts(parse: Callable[[str], object]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    return check


def text(description: str, expected: str = "text", **more: object) -> Schema:
    return {"type": "string", "description": description, "expected": expected, **more}


def address(description: str) -> Schema:
    return text(description, "an IPv4 address such as 172.16.1.2", format="address")


def interface(description: str) -> Schema:
    expected = "an IPv4 address such as 172.16.1.2 or 172.16.1.2/16"
    return text(description, expected, format="interface")


def network(description: str) -> Schema:
    expected = "an IPv4 network such as 172.16.0.0/16, host bits zero"
    return text(description, expected, format="network")


def version(description: str) -> Schema:
    return text(description, "a version such as v1.28 or v1.28.3", format="version")


def flag(description: str) -> Schema:
    return {"type": "boolean", "description": description, "expected": "true or false"}


def integer(description: str, low: int, high: int) -> Schema:
    return {
        "type": "integer",
        "minimum": low,
        "maximum": high,
        "description": description,
        "expected": f"an integer {low}..{high}",
    }


def choice(description: str, *values: str) -> Schema:
    return {
        "enum": list(values),
        "description": description,
        "expected": "one of: " + ", ".join(values),
    }


def list_of(items: Schema, description: str, **more: object) -> Schema:
    return {
        "type": "array",
        "items": items,
        "description": description,
        "expected": "a list",
        **more,
    }


def record(description: str, required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "description": description,
        "expected": "a mapping",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def named(description: str, value: Schema, pattern: str = LABEL, **more: object) -> Schema:
    """A mapping from names to *value*."""
    what = {
        LABEL: "a name of a-z, 0-9 and '-', at most 63 characters",
        SERVICE: "a name of a-z, 0-9 and '-' that starts with a letter, at most 63 characters",
        DEVICE: "a device name of at most 15 characters",
    }[pattern]
    return {
        "type": "object",
        "description": description,
        "expected": "a mapping from names",
        "propertyNames": {"pattern": pattern, "expected": what},
        "additionalProperties": value,
        **more,
    }


PORT = integer("Port number.", 1, 65535)
MTU = integer("Largest packet in bytes.", 68, 65535)
TABLE = {
    "type": ["integer", "string"],
    "description": "Routing table: main or a number.",
    "expected": "main or a table number",
}
SYSCTLS: Schema = {
    "type": "object",
    "description": "Sysctls of the namespace, dotted; a device's own dots written '/'.",
    "expected": "a mapping from sysctl names to values",
    "propertyNames": {
        "pattern": r"^net(\.[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*){2,}$",
        "expected": "a sysctl of a network namespace, such as net.ipv4.conf.eth0/100.rp_filter",
    },
    "additionalProperties": {
        "type": ["integer", "string"],
        "expected": "a number or text",
    },
}
COMMAND = list_of(
    {"type": "string", "expected": "text"},
    "A program of your own instead of the built-in server: its argv, run without a shell.",
)
