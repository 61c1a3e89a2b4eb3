"""Compare rendered rules with what the real components print.

Reads a folder of pairs ``kube-proxy/VERSION/MODE-CASE.input.yaml`` and ``.expected.rules``: the
input in Kubernetes' words, and the text that the unmodified rule-writing code of that version
printed for it.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path
from typing import Any, Literal

import yaml
from tabulate import tabulate

from netlab.kube_proxy.iptables import Rules, render
from netlab.kube_proxy.state import (
    Endpoint,
    LoadBalancerIP,
    LocalDetector,
    ProxyState,
    ServicePort,
)
from netlab.model import Version

_SORTED_CHAINS = (
    "KUBE-SERVICES",
    "KUBE-NODEPORTS",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-PROXY-FIREWALL",
)
"""Chains whose services come in random order upstream: the data sorts them by service name."""


@dataclass(frozen=True, slots=True)
class Case:
    """One pair; *difference* is empty where the texts are equal, line by line.

    *printed*: False where the real code had not synchronised yet, so that there is no text.
    """

    version: str
    name: str
    difference: str
    printed: bool


def compare(folder: Path, versions: Sequence[str] = ()) -> Iterator[Case]:
    """Every iptables pair of *folder*, of the given *versions* (all by default)."""
    root = folder / "kube-proxy"
    for file in sorted(root.glob("*/iptables-*.input.yaml")):
        version = file.parent.name
        if versions and version not in versions:
            continue
        case = yaml.load(file.read_text(), yaml.CSafeLoader)
        expected = file.with_name(file.name.replace(".input.yaml", ".expected.rules")).read_text()
        printed = bool(expected.strip())
        rendered = restore_text(render(state(case))) if printed else expected
        delta = difflib.unified_diff(
            expected.splitlines(), rendered.splitlines(), "printed", "rendered", lineterm="", n=0
        )
        yield Case(version, file.name.removesuffix(".input.yaml"), "\n".join(delta), printed)


def state(case: Mapping[str, Any]) -> ProxyState:
    """A case's input as the renderer's."""
    proxy = case["proxy"]
    version = Version.parse(case["version"])
    family: Literal[4, 6] = 6 if proxy["ipFamily"] == "IPv6" else 4
    detector = proxy["localDetector"]
    return ProxyState(
        version=version,
        node=proxy["nodeName"],
        node_addresses=tuple(ip_interface(a).ip for a in proxy["nodeAddresses"]),
        services=tuple(_services(case, family)),
        family=family,
        detector=None if detector == "none" else _detector(detector),
        masquerade_all=proxy["masqueradeAll"],
        mark=proxy["masqueradeMark"] if version >= Version(1, 31, 0) else "0x00004000",
        node_port_addresses=tuple(map(ip_network, proxy["nodePortAddresses"])),
        localhost_node_ports=proxy.get("localhostNodePorts", True),
        random_fully=proxy["randomFully"],
        be_liberal=proxy.get("conntrackTCPLiberal", False),
        nfacct=frozenset(proxy.get("nfacctCounters", ())),
    )


def _detector(value: Mapping[str, str]) -> LocalDetector:
    ((kind, text),) = value.items()
    return LocalDetector(kind[0].upper() + kind[1:], text)  # type: ignore[arg-type]


def _services(case: Mapping[str, Any], family: int) -> Iterator[ServicePort]:
    services = sorted(case["services"] or (), key=lambda s: (s["namespace"], s["name"]))
    for service in services:
        cluster_ip = ip_address(service["clusterIP"])
        if cluster_ip.version != family:
            continue
        for port in sorted(service["ports"], key=lambda p: str(p["name"])):
            yield ServicePort(
                namespace=service["namespace"],
                service=service["name"],
                cluster_ip=cluster_ip,
                port=port["port"],
                name=port["name"],
                protocol=port["protocol"],
                node_port=port.get("nodePort", 0),
                external_ips=tuple(map(ip_address, service.get("externalIPs", ()))),
                load_balancer_ips=tuple(
                    LoadBalancerIP(ip_address(entry["ip"]), entry.get("ipMode", "VIP"))
                    for entry in service.get("loadBalancerIPs", ())
                ),
                source_ranges=tuple(
                    ip_network(text.strip()) for text in service.get("loadBalancerSourceRanges", ())
                ),
                health_check_node_port=service.get("healthCheckNodePort", 0),
                affinity_seconds=service.get("sessionAffinityTimeoutSeconds", 0),
                external_local=service.get("externalTrafficPolicy") == "Local",
                internal_local=service.get("internalTrafficPolicy") == "Local",
                endpoints=tuple(_endpoints(case, service, port)),
            )


def _endpoints(
    case: Mapping[str, Any], service: Mapping[str, Any], port: Mapping[str, Any]
) -> Iterator[Endpoint]:
    for piece in case["endpointSlices"] or ():
        if (piece["namespace"], piece["service"]) != (service["namespace"], service["name"]):
            continue
        numbers = [p["port"] for p in piece["ports"] if p["name"] == port["name"]]
        for number in numbers:
            for entry in piece["endpoints"] or ():
                ready = entry.get("ready", True)
                yield Endpoint(
                    ip_address(entry["addresses"][0]),
                    number,
                    entry.get("nodeName", ""),
                    ready=ready,
                    serving=entry.get("serving", ready),
                    terminating=entry.get("terminating", False),
                )


def restore_text(rules: Rules) -> str:
    """*rules* in the canonical order of the data."""
    text: list[str] = []
    for table in ("filter", "nat"):
        chains = sorted(name for where, name in rules.chains if where == table)
        text.append(f"*{table}")
        text += (f":{name} - [0:0]" for name in chains)
        for chain in chains:
            lines = [line for line in rules.lines if (line.table, line.chain) == (table, chain)]
            if chain in _SORTED_CHAINS:
                lines.sort(key=lambda line: line.service.port_name if line.service else "~")
            text += (f"-A {line.chain} {line.text}" for line in lines)
        text.append("COMMIT")
    return "\n".join([*text, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Print how many pairs are equal, by version, and every difference; 1 if there is one."""
    parser = argparse.ArgumentParser(prog="fidelity", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--version", action="append", default=[], metavar="X.Y.Z")
    options = parser.parse_args(argv)
    cases = list(compare(options.data, options.version))
    rows = [
        (
            version,
            len(found),
            sum(case.printed and not case.difference for case in found),
            sum(not case.printed for case in found),
        )
        for version in dict.fromkeys(case.version for case in cases)
        for found in [[case for case in cases if case.version == version]]
    ]
    different = [case for case in cases if case.difference]
    for case in different:
        sys.stdout.write(f"{case.version} {case.name}\n{case.difference}\n\n")
    sys.stdout.write(
        tabulate(rows, ("kube-proxy", "cases", "equal", "empty"), tablefmt="plain") + "\n"
    )
    return 1 if different or not cases else 0


if __name__ == "__main__":
    raise SystemExit(main())
