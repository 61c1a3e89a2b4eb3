"""What differs between kube-proxy's minor versions, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from netlab.model import Version


@dataclass(frozen=True, slots=True)
class Traits:
    """How one version behaves; every trait is false in v1.24."""

    drops_in_filter: bool
    """Refuses in filter (KUBE-PROXY-FIREWALL, KUBE-EXTERNAL-SERVICES), not by KUBE-MARK-DROP."""
    localhost_flag: bool
    """Knows ``--iptables-localhost-nodeports``, and never serves NodePorts on ::1."""
    terminating_endpoints: bool
    """Falls back to serving, terminating endpoints where none is ready (KEP 1669, on)."""
    localnet_rule: bool
    """Writes KUBE-FIREWALL, kubelet's guard of 127.0.0.0/8, itself (KEP 3178, on)."""
    firewall_comment: bool
    """Ends KUBE-FW with a rule that only says where the rest is dropped."""
    unmatched_node_ports: bool
    """Writes NodePort rules even if no address of the node is in nodePortAddresses."""
    liberal_skips_invalid: bool
    """Leaves the INVALID rule out where nf_conntrack_tcp_be_liberal is set (PR 120412)."""
    conntrack_be_liberal: bool
    """Knows ``conntrack.tcpBeLiberal``, which sets that sysctl before the rules are made."""
    mode_proxy_skipped: bool
    """Writes nothing for load balancer IPs of ipMode Proxy (KEP 1860, on)."""
    canonical_ranges: bool
    """Prints loadBalancerSourceRanges without their host bits."""
    nfacct_counters: bool
    """Counts by nfacct objects what it drops and what it accepts on loopback (PR 122812)."""
    open_ranges: bool
    """Takes a loadBalancerSourceRanges entry of /0 as no restriction at all."""


_SINCE: Mapping[str, int] = {
    "drops_in_filter": 25,
    "localhost_flag": 26,
    "terminating_endpoints": 26,
    "localnet_rule": 27,
    "firewall_comment": 27,
    "unmatched_node_ports": 27,
    "liberal_skips_invalid": 29,
    "conntrack_be_liberal": 29,
    "mode_proxy_skipped": 30,
    "canonical_ranges": 30,
    "nfacct_counters": 31,
    "open_ranges": 34,
}
"""Trait -> the first minor of v1 that has it (pkg/proxy/iptables/proxier.go and serviceport.go)."""


def traits(version: Version) -> Traits:
    """The behaviour of *version*, v1.24 or later."""
    minor = (version.major, version.minor)
    return Traits(**{name: minor >= (1, first) for name, first in _SINCE.items()})
