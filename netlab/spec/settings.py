"""Cluster settings as they apply to a node, an attachment and a Pod's NIC, all defaults filled."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from netlab.model import (
    Calico,
    Coordinator,
    Felix,
    IPPool,
    KubeProxy,
    PolicyRoute,
    Version,
)
from netlab.spec.world import Workshop

BE_LIBERAL = "net.netfilter.nf_conntrack_tcp_be_liberal"
CALICO_VERSIONS = (Version(3, 27, 0), Version(3, 32))
KUBE_PROXY_VERSIONS = (Version(1, 24, 0), Version(1, 36))
HIJACK = ("169.254.0.0/16",)


def merged(*layers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Later layers win, mapping by mapping; a value that is no mapping replaces the whole."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in (layer or {}).items():
            old = result.get(key)
            both = isinstance(old, dict) and isinstance(value, dict)
            result[key] = merged(old, value) if both else value
    return result


def pools(given: Mapping[str, Any], pod_cidr: IPv4Network | None) -> tuple[IPPool, ...]:
    """Calico's pools: those of *given* (``calico``), else the one that podCIDR makes."""
    entries = given.get("ipPools") or ({"default-ipv4-ippool": {}} if pod_cidr else {})
    return tuple(
        IPPool(
            name,
            IPv4Network(pool.get("cidr", pod_cidr)),
            pool.get("natOutgoing", given.get("natOutgoing", True)),
            pool.get("disabled", False),
            pool.get("blockSize", 26),
        )
        for name, pool in entries.items()
    )


def calico(
    shop: Workshop, given: Mapping[str, Any], pod_cidr: IPv4Network | None, path: str
) -> Calico:
    version = Version.parse(given.get("version", "v3.30"))
    _supported(shop, version, CALICO_VERSIONS, f"{path}.version", "Calico")
    encapsulation = given.get("encapsulation", "VXLAN")
    if encapsulation != "VXLAN":
        message = f"{encapsulation} is not rendered yet: VXLAN is"
        shop.problem(f"{path}.encapsulation", message)
    felix = given.get("felix", {})
    return Calico(
        version,
        pools(given, pod_cidr),
        given.get("mtu", 1450),
        Felix(
            felix.get("disableConntrackInvalidCheck", False),
            felix.get("chainInsertMode", "Insert"),
            felix.get("defaultEndpointToHostAction", "Accept"),
            felix.get("allowVXLANPacketsFromWorkloads", False),
            felix.get("allowIPIPPacketsFromWorkloads", False),
            felix.get("vxlanVNI", 4096),
            felix.get("vxlanPort", 4789),
        ),
    )


def kube_proxy(
    shop: Workshop,
    given: Mapping[str, Any] | bool | None,  # noqa: FBT001 - false is a value of the language
    pod_cidr: IPv4Network | None,
    sysctl: Mapping[str, str],
    path: str,
) -> KubeProxy | None:
    """None where the lab says that none runs. *pod_cidr*: the default of clusterCIDR."""
    if not isinstance(given, Mapping):
        if given:
            shop.problem(path, "true says nothing: give its settings, or false for none")
        return None
    version = Version.parse(given.get("version", "v1.33"))
    _supported(shop, version, KUBE_PROXY_VERSIONS, f"{path}.version", "kube-proxy")
    mode = given.get("mode", "iptables")
    if mode != "iptables":
        shop.problem(f"{path}.mode", f"mode {mode} is not rendered yet: iptables is")
    cidr = given.get("clusterCIDR", pod_cidr)
    at_start = given.get("sysctlAtStart", sysctl)
    return KubeProxy(
        version,
        "iptables",
        None if cidr is None else IPv4Network(cidr),
        given.get("masqueradeAll", False),
        given.get("conntrack", {}).get("tcpBeLiberal", False),
        str(at_start.get(BE_LIBERAL, "0")) != "0",
        given.get("localhostNodePorts", True),
        tuple(map(IPv4Network, given.get("nodePortAddresses", ()))),
    )


def _supported(
    shop: Workshop, version: Version, span: tuple[Version, Version], path: str, what: str
) -> None:
    low, high = span
    if not low <= version <= high:
        first, last = f"v{low.major}.{low.minor}", f"v{high.major}.{high.minor}"
        shop.problem(path, f"{what} {version} is not known here: {first} to {last} are")


def coordinator(
    shop: Workshop,
    given: Mapping[str, Any],
    used: tuple[IPPool, ...],
    service_cidr: IPv4Network | None,
    path: str | None,
) -> Coordinator | None:
    """None for behaviour ``none``. *path*: where its behaviour stands (None: told already)."""
    behaviour = given.get("behaviour", "released")
    if behaviour == "none":
        return None
    if behaviour != "released" and path is not None:
        shop.problem(f"{path}.behaviour", f"{behaviour} is not rendered yet: released and none are")
    link = given.get("vethLinkAddress")
    return Coordinator(
        behaviour,
        given.get("podDefaultRouteNIC", ""),
        given.get("tunePodRoutes", True),
        given.get("hostRuleTable", 500),
        given.get("podRPFilter", 0),
        _cidrs(given, "overlayPodCIDR", tuple(pool.cidr for pool in used if not pool.disabled)),
        _cidrs(given, "serviceCIDR", (service_cidr,) if service_cidr else ()),
        tuple(map(IPv4Network, given.get("hijackCIDR", HIJACK))),
        given.get("markRules", True),
        given.get("sourceRules", True),
        None if link is None else IPv4Address(link),
        given.get("vethMTU", 1500),
        given.get("podMACPrefix", ""),
        tuple(
            PolicyRoute(IPv4Network(route["dst"]), IPv4Address(route["gw"]))
            for route in given.get("policyRoutes", ())
        ),
    )


def _cidrs(
    given: Mapping[str, Any], key: str, auto: tuple[IPv4Network, ...]
) -> tuple[IPv4Network, ...]:
    value = given.get(key, "auto")
    return auto if value == "auto" else tuple(map(IPv4Network, value))
