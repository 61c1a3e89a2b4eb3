"""Compare rendered rules with what the real components print.

Reads a folder of pairs ``kube-proxy/VERSION/MODE-CASE.input.yaml`` and ``.expected.rules``: the
input in Kubernetes' words, and the text that the unmodified rule-writing code of that version
printed for it. `compare` gives a Report; ``python -m netlab.fidelity --data DIR`` prints it.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from tabulate import tabulate

from netlab.kube_proxy.iptables import render
from netlab.kube_proxy.rules import Rules
from netlab.kube_proxy.state import (
    Endpoint,
    LoadBalancerIP,
    LocalDetector,
    ProxyState,
    ServicePort,
)
from netlab.model import Version

Status: TypeAlias = Literal["equal", "different", "not printed", "not covered"]

STATUSES: tuple[Status, ...] = ("equal", "different", "not printed", "not covered")
MODES = ("iptables", "nftables")
RENDERED_MODES = frozenset({"iptables"})

_SORTED_CHAINS = frozenset(
    {"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-FIREWALL"}
)
"""Chains whose services come in random order upstream: the data sorts them by service name."""

_LAST = "\uffff"
"""Sorts behind every service name: "this must be the last rule in this chain"."""

_KNOWN: Mapping[str, str] = {
    "": "case mode version expected inputFrom source proxy services endpointSlices",
    "proxy": "ipFamily nodeName nodeIP nodeAddresses localDetector masqueradeAll masqueradeMark "
    "nodePortAddresses localhostNodePorts conntrackTCPLiberal randomFully nfacctCounters",
    "proxy.localDetector": "clusterCIDR interfaceNamePrefix bridgeInterface",
    "services": "namespace name type clusterIP ports externalIPs loadBalancerIPs "
    "loadBalancerSourceRanges healthCheckNodePort sessionAffinity sessionAffinityTimeoutSeconds "
    "externalTrafficPolicy internalTrafficPolicy",
    "services.ports": "name protocol port nodePort",
    "services.loadBalancerIPs": "ip ipMode",
    "endpointSlices": "namespace service slice addressType ports endpoints",
    "endpointSlices.ports": "name protocol port",
    "endpointSlices.endpoints": "addresses nodeName ready serving terminating",
}
"""Keys that `state` reads or may ignore, by path: an input that says more is not covered."""


@dataclass(frozen=True, slots=True)
class Case:
    """One pair and what came of it.

    *status*: ``equal`` or ``different``, line by line; ``not printed``: the real proxier had
    nothing to synchronise yet, so that there is no text; ``not covered``: it was not compared.
    *detail*: the unified diff, or what is not covered.
    """

    version: str
    mode: str
    name: str
    status: Status
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All pairs, in the order of their versions and names."""

    cases: tuple[Case, ...]

    @property
    def different(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.status == "different")

    def counts(self) -> dict[tuple[str, str], Counter[Status]]:
        """(version, mode) -> how many pairs of each status."""
        found: dict[tuple[str, str], Counter[Status]] = {}
        for case in self.cases:
            found.setdefault((case.version, case.mode), Counter())[case.status] += 1
        return found

    def __str__(self) -> str:
        """Every difference, what was not covered, and a table of the counts."""
        told = [f"{case.version} {case.name}\n{case.detail}\n" for case in self.different]
        missing = Counter(c.detail for c in self.cases if c.status == "not covered")
        told += [f"not covered: {what} ({count} pairs)" for what, count in sorted(missing.items())]
        rows = [
            (version, mode, counts.total(), *(counts[status] for status in STATUSES))
            for (version, mode), counts in self.counts().items()
        ]
        headers = ("kube-proxy", "mode", "pairs", *STATUSES)
        return "\n".join([*told, tabulate(rows, headers, tablefmt="plain", disable_numparse=True)])


def compare(folder: Path, versions: Sequence[str] | None = None, mode: str = "iptables") -> Report:
    """Every pair of *mode* in *folder*, of the given *versions* (None or none: of all).

    Raises:
        OSError: a pair without its ``.expected.rules``.
    """
    found: list[Case] = []
    for file in sorted((folder / "kube-proxy").glob(f"*/{mode}-*.input.yaml"), key=_in_order):
        version, name = file.parent.name, file.name.removesuffix(".input.yaml")
        if not versions or version in versions:
            found.append(Case(version, mode, name, *_compared(file, mode)))
    return Report(tuple(found))


def _in_order(file: Path) -> tuple[Version, str]:
    return Version.parse(file.parent.name), file.name


def _compared(file: Path, mode: str) -> tuple[Status, str]:
    if mode not in RENDERED_MODES:
        return "not covered", f"mode {mode}"
    case = yaml.load(file.read_text(), yaml.CSafeLoader)
    expected = file.with_name(file.name.replace(".input.yaml", ".expected.rules")).read_text()
    unknown = sorted(set(_unknown(case)))
    if unknown:
        return "not covered", ", ".join(unknown)
    if not expected.strip() and not case["services"]:
        return "not printed", ""
    rendered = restore_text(render(state(case)))
    delta = difflib.unified_diff(
        expected.splitlines(), rendered.splitlines(), "printed", "rendered", lineterm="", n=0
    )
    text = "\n".join(delta)
    return ("different", text) if text else ("equal", "")


def _unknown(value: object, path: str = "") -> Iterator[str]:
    """Paths of keys that `state` does not know."""
    if isinstance(value, list):
        for entry in value:
            yield from _unknown(entry, path)
    if isinstance(value, dict) and path in _KNOWN:
        for key, entry in value.items():
            below = f"{path}.{key}" if path else key
            if key in _KNOWN[path].split():
                yield from _unknown(entry, below)
            else:
                yield below


def state(case: Mapping[str, Any]) -> ProxyState:
    """A case's input as the renderer's."""
    proxy = case["proxy"]
    version = Version.parse(case["version"])
    family: Literal[4, 6] = 6 if proxy["ipFamily"] == "IPv6" else 4
    detector = proxy["localDetector"]
    return ProxyState(
        version=version,
        node=proxy["nodeName"],
        node_ip=ip_address(proxy["nodeIP"]),
        node_addresses=tuple(ip_interface(text).ip for text in proxy["nodeAddresses"]),
        services=tuple(_services(case)),
        family=family,
        detector=None if detector == "none" else _detector(detector),
        masquerade_all=proxy["masqueradeAll"],
        # Up to v1.30 the cases come from a real proxier, which pads; then from its unit tests.
        mark=proxy["masqueradeMark"] if version >= Version(1, 31, 0) else "0x00004000",
        node_port_addresses=tuple(map(ip_network, proxy["nodePortAddresses"])),
        localhost_node_ports=proxy.get("localhostNodePorts", True),
        random_fully=proxy["randomFully"],
        be_liberal=proxy.get("conntrackTCPLiberal", False),
        nfacct=frozenset(proxy.get("nfacctCounters", ())),
    )


def _detector(value: Mapping[str, str]) -> LocalDetector:
    ((kind, text),) = value.items()
    if kind == "clusterCIDR":
        return LocalDetector("ClusterCIDR", text)
    if kind == "interfaceNamePrefix":
        return LocalDetector("InterfaceNamePrefix", text)
    return LocalDetector("BridgeInterface", text)


def _services(case: Mapping[str, Any]) -> Iterator[ServicePort]:
    services = sorted(case["services"] or (), key=lambda s: (s["namespace"], s["name"]))
    for service in services:
        for port in sorted(service["ports"], key=lambda p: str(p["name"])):
            yield ServicePort(
                namespace=service["namespace"],
                service=service["name"],
                cluster_ip=ip_address(service["clusterIP"]),
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
                    ip_interface(text.strip())
                    for text in service.get("loadBalancerSourceRanges", ())
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
    """The endpoints of one port; a condition that is not said is ready and serving (KEP 1672)."""
    for piece in case["endpointSlices"] or ():
        if (piece["namespace"], piece["service"]) != (service["namespace"], service["name"]):
            continue
        numbers = [p["port"] for p in piece["ports"] if p["name"] == port["name"]]
        for number in numbers:
            for entry in piece["endpoints"] or ():
                yield Endpoint(
                    ip_address(entry["addresses"][0]),
                    number,
                    entry.get("nodeName", ""),
                    ready=entry.get("ready", True),
                    serving=entry.get("serving", True),
                    terminating=entry.get("terminating", False),
                )


def restore_text(rules: Rules) -> str:
    """*rules* in the canonical order of the data: what iptables-restore would be given.

    Tables filter, then nat; chains sorted; within the chains that all Services share, rules
    sorted by service name, without regard to ports.
    """
    text: list[str] = []
    by_chain = rules.by_chain()
    for table in ("filter", "nat"):
        chains = sorted(
            (name, lines) for (where, name), lines in by_chain.items() if where == table
        )
        text.append(f"*{table}")
        text += (f":{name} - [0:0]" for name, _ in chains)
        for name, lines in chains:
            if name in _SORTED_CHAINS:
                lines.sort(key=lambda line: line.service.port_name if line.service else _LAST)
            text += (f"-A {name} {line.text}" for line in lines)
        text.append("COMMIT")
    return "\n".join([*text, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report of every mode; 1 if a pair differs or there is none."""
    parser = argparse.ArgumentParser(prog="fidelity", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--version", action="append", default=[], metavar="X.Y.Z")
    options = parser.parse_args(argv)
    reports = (compare(options.data, options.version, mode) for mode in MODES)
    report = Report(tuple(case for part in reports for case in part.cases))
    if not report.cases:
        sys.stderr.write(f"no pairs in {options.data}/kube-proxy\n")
        return 1
    sys.stdout.write(f"{report}\n")
    return 1 if report.different else 0


if __name__ == "__main__":
    raise SystemExit(main())
