"""The cluster's ranges, nodes, attachments and Services: references and addresses checked."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from itertools import combinations, product
from typing import Any, Literal

from netlab.model import (
    Attachment,
    Endpoint,
    Network,
    Node,
    Pod,
    Router,
    Service,
    ServicePort,
)
from netlab.spec import settings
from netlab.spec.checking import nearest
from netlab.spec.world import Workshop, extra, gateway, node_nics

HEADLESS = "None"
FIRST_NODE_PORT = 30086
"""Kubernetes leaves the ports below to those that are given (KEP 3668)."""


def cidrs(
    shop: Workshop, wires: Mapping[str, Network]
) -> tuple[IPv4Network | None, IPv4Network | None]:
    """The podCIDR (or the first pool's) and serviceCIDR; overlapping ranges are problems."""
    cluster = shop.data.get("cluster", {})
    pod, service = (
        IPv4Network(cluster[key]) if key in cluster else None for key in ("podCIDR", "serviceCIDR")
    )
    pools = settings.pools(cluster.get("calico", {}), pod)
    own = {shop.pool_path(pool.name): pool.cidr for pool in pools}
    first = next(iter(own.values()), None)
    if service is not None:
        own["cluster.serviceCIDR"] = service
    world = {
        f"underlay.networks.{wire.name}.subnets[{index}]": subnet
        for wire in wires.values()
        for index, subnet in enumerate(wire.subnets)
    }
    attached = {
        f"networkAttachments.{name}.subnet": IPv4Network(entry["subnet"])
        for name, entry in shop.data.get("networkAttachments", {}).items()
    }
    _no_overlap(shop, combinations((world | own).items(), 2))
    _no_overlap(shop, product(own.items(), attached.items()))
    return pod or first, service


def _no_overlap(
    shop: Workshop,
    pairs: Iterable[tuple[tuple[str, IPv4Network], tuple[str, IPv4Network]]],
) -> None:
    if "overlapping-cidr" in shop.allow:
        return
    for (one, first), (other, second) in pairs:
        if first.overlaps(second):
            hint = "; on purpose? allow: [overlapping-cidr]"
            shop.problem(other, f"{second} overlaps {one} ({first}){hint}")


def nodes(
    shop: Workshop,
    wires: Mapping[str, Network],
    gateways: Mapping[str, Router],
    pod_cidr: IPv4Network | None,
    service_cidr: IPv4Network | None,
) -> dict[str, Node]:
    """Nodes with their settings; blocks come later, when Pods' addresses are known."""
    found: dict[str, Node] = {}
    for name, entry in shop.data.get("nodes", {}).items():
        path = f"nodes.{name}"
        nics = node_nics(shop, name, entry, wires)
        subnets = [(nic.network, nic.address.network) for nic in nics if nic.address]
        if not subnets:
            if not any(shop.document.gave(f"{path}.nics.{nic}.address") for nic in entry["nics"]):
                shop.problem(f"{path}.nics", "a node needs a NIC with an address", at_key=True)
            continue
        outward = gateway(shop, entry, path, subnets, gateways)
        bare = _node(shop, name, entry, pod_cidr, service_cidr)
        found[name] = replace(bare, nics=nics, gateway=outward)
    return found


def _node(
    shop: Workshop,
    name: str,
    entry: Mapping[str, Any],
    pod_cidr: IPv4Network | None,
    service_cidr: IPv4Network | None,
) -> Node:
    """A node without its NICs: the cluster's settings as they apply to it."""
    path = f"nodes.{name}"
    cluster = shop.data.get("cluster", {})
    given = settings.merged(
        {key: cluster[key] for key in _REPEATABLE if key in cluster},
        {key: entry[key] for key in _REPEATABLE if key in entry},
    )
    where = {key: f"{path}.{key}" if key in entry else f"cluster.{key}" for key in _REPEATABLE}
    sysctl = {key: str(value) for key, value in given.get("sysctl", {}).items()}
    calico = settings.calico(shop, given.get("calico", {}), pod_cidr, where["calico"])
    chained = given.get("spiderpool", {}).get("coordinator", {})
    behaviour = f"{where['spiderpool']}.coordinator"
    return Node(
        name,
        (),
        None,
        calico,
        settings.kube_proxy(shop, given.get("kubeProxy", {}), pod_cidr, sysctl, where["kubeProxy"]),
        settings.coordinator(shop, chained, calico.ip_pools, service_cidr, behaviour),
        sysctl,
        "legacy" if given.get("iptablesBackend") == "Legacy" else "nft",
        extra=extra(shop, entry, f"{path}.extra"),
    )


_REPEATABLE = ("calico", "kubeProxy", "spiderpool", "sysctl", "iptablesBackend")


def attachments(shop: Workshop, gateways: Mapping[str, Router]) -> dict[str, Attachment]:
    found: dict[str, Attachment] = {}
    for name, entry in shop.data.get("networkAttachments", {}).items():
        path = f"networkAttachments.{name}"
        if name == "calico":
            shop.problem(path, "calico is the default network's name", at_key=True)
            continue
        subnet = IPv4Network(entry["subnet"])
        chained = entry.get("coordinator", {})
        if chained is True:
            chained = {}
        if chained and chained.get("behaviour") == "none":
            chained = False
        found[name] = Attachment(
            name,
            "macvlan",
            entry["master"],
            subnet,
            gateway(shop, entry, path, [(None, subnet)], gateways),
            None if chained is False else chained,
            entry.get("mode", "bridge"),
            entry.get("mtu"),
        )
    return found


# --- Services ------------------------------------------------------------------------------------


def target_ports(shop: Workshop) -> dict[str, tuple[int, ...]]:
    """Ports that Services send to, by Pod."""
    found: dict[str, tuple[int, ...]] = {}
    for entry in shop.data.get("services", {}).values():
        numbers = tuple(port.get("targetPort", port["port"]) for port in entry["ports"])
        for endpoint in entry.get("endpoints", ()):
            pod = endpoint if isinstance(endpoint, str) else endpoint["pod"]
            found[pod] = (*found.get(pod, ()), *numbers)
    return found


def services(
    shop: Workshop, found_pods: Mapping[str, Pod], service_cidr: IPv4Network | None
) -> dict[str, Service]:
    entries = shop.data.get("services", {})
    taken = _NodePorts(shop)
    for name, entry in entries.items():
        if entry.get("clusterIP", HEADLESS) != HEADLESS:
            shop.own(IPv4Address(entry["clusterIP"]), f"services.{name}.clusterIP")
        for index, port in enumerate(entry["ports"]):
            if "nodePort" in port:
                path = f"services.{name}.ports[{index}].nodePort"
                taken.take(port["nodePort"], port.get("protocol", "TCP"), path)
    found: dict[str, Service] = {}
    for name, entry in entries.items():
        usable, address = _cluster_ip(shop, name, entry, service_cidr)
        service = Service(
            name,
            entry.get("namespace", "default"),
            entry.get("type", "ClusterIP"),
            address,
            tuple(_ports(shop, name, entry, taken)),
            tuple(_endpoints(shop, name, entry, found_pods)),
            _external_policy(shop, name, entry),
            entry.get("internalTrafficPolicy", "Cluster"),
        )
        if usable:
            found[name] = service
    return found


class _NodePorts:
    """NodePorts that are taken, by protocol; `free` gives the lowest that is not."""

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop
        self.owners: dict[tuple[int, str], str] = {}

    def take(self, number: int, protocol: str, path: str) -> None:
        first = self.owners.setdefault((number, protocol), path)
        if first != path:
            line = self.shop.document.place(first)[0]
            self.shop.problem(path, f"nodePort {number} is already {first} (line {line})")

    def free(self, protocol: str, path: str) -> int:
        numbers = range(FIRST_NODE_PORT, 65536)
        number = next(n for n in numbers if (n, protocol) not in self.owners)
        self.owners[number, protocol] = path
        return number


def _cluster_ip(
    shop: Workshop, name: str, entry: Mapping[str, Any], service_cidr: IPv4Network | None
) -> tuple[bool, IPv4Address | None]:
    """Whether the Service has a usable ClusterIP or wants none, and which."""
    path = f"services.{name}.clusterIP"
    if entry.get("clusterIP") == HEADLESS:
        if entry.get("type", "ClusterIP") != "ClusterIP":
            shop.problem(path, f"a headless Service is of type ClusterIP, not {entry['type']}")
        return True, None
    if service_cidr is None:
        if not shop.document.gave("cluster.serviceCIDR"):
            shop.problem(f"services.{name}", "a Service needs cluster.serviceCIDR", at_key=True)
        return False, None
    if "clusterIP" in entry:
        address = IPv4Address(entry["clusterIP"])
        if address not in service_cidr and "foreign-address" not in shop.allow:
            hint = "; on purpose? allow: [foreign-address]"
            shop.problem(path, f"{address} is not in serviceCIDR ({service_cidr}){hint}")
        elif address in {service_cidr.network_address, service_cidr.broadcast_address}:
            shop.problem(path, f"{address} is the first or last of {service_cidr}")
        return True, address
    free = _free_cluster_ip(service_cidr, shop.owners)
    if free is None:
        shop.problem(path, f"no free address left in {service_cidr}", at_key=True)
        return False, None
    shop.own(free, path)
    return True, free


def _free_cluster_ip(cidr: IPv4Network, taken: Container[IPv4Address]) -> IPv4Address | None:
    """The lowest free address of the upper band, then of the lower.

    Kubernetes leaves min(max(16, size / 16), 256) addresses to those that are given (KEP 3070);
    beyond, it chooses by chance, here the lowest.
    """
    size = cidr.num_addresses
    band = min(max(16, size // 16), 256)
    for offset in (*range(band, min(size - 1, band + 65536)), *range(1, min(band, size - 1))):
        address: IPv4Address = cidr.network_address + offset
        if address not in taken:
            return address
    return None


def _type(shop: Workshop, name: str, entry: Mapping[str, Any]) -> str | None:
    """The Service's type; None where the file gives one that is unusable."""
    told = shop.document.gave(f"services.{name}.type")
    given: str | None = entry.get("type", None if told else "ClusterIP")
    return given


def _external_policy(
    shop: Workshop, name: str, entry: Mapping[str, Any]
) -> Literal["Cluster", "Local"]:
    policy: Literal["Cluster", "Local"] = entry.get("externalTrafficPolicy", "Cluster")
    if policy == "Local" and _type(shop, name, entry) == "ClusterIP":
        path = f"services.{name}.externalTrafficPolicy"
        shop.problem(
            path, "Local is for type NodePort or LoadBalancer: a ClusterIP has no external traffic"
        )
    return policy


def _ports(
    shop: Workshop, name: str, entry: Mapping[str, Any], taken: _NodePorts
) -> Iterator[ServicePort]:
    names: set[str] = set()
    external = _type(shop, name, entry) != "ClusterIP"
    numbers: set[tuple[int, str]] = set()
    for index, port in enumerate(entry["ports"]):
        path = f"services.{name}.ports[{index}]"
        own = port.get("name", "")
        if own in names or (not own and len(entry["ports"]) > 1):
            shop.problem(path, "of several ports each needs a name of its own")
        names.add(own)
        number = (port["port"], port.get("protocol", "TCP"))
        if number in numbers:
            shop.problem(f"{path}.port", f"port {number[0]} is there already")
        numbers.add(number)
        if "nodePort" in port and not external:
            shop.problem(f"{path}.nodePort", "type ClusterIP has no nodePort: say type: NodePort")
        node_port = port.get("nodePort")
        if external and node_port is None:
            node_port = taken.free(port.get("protocol", "TCP"), path)
        yield ServicePort(
            port["port"],
            port.get("targetPort", port["port"]),
            own,
            port.get("protocol", "TCP"),
            node_port,
        )


def _endpoints(
    shop: Workshop, name: str, entry: Mapping[str, Any], found_pods: Mapping[str, Pod]
) -> Iterator[Endpoint]:
    seen: set[tuple[str, str]] = set()
    for index, given in enumerate(entry.get("endpoints", ())):
        path = f"services.{name}.endpoints[{index}]"
        endpoint: dict[str, Any] = {"pod": given} if isinstance(given, str) else given
        where = path if isinstance(given, str) else f"{path}.pod"
        if not shop.known("pods", endpoint["pod"], where, "Pod"):
            continue
        if endpoint["pod"] not in found_pods:
            continue
        pod = found_pods[endpoint["pod"]]
        devices = {nic.name: nic for nic in pod.nics}
        device = endpoint.get("nic", pod.nics[0].name)
        if device not in devices:
            shop.problem(
                f"{path}.nic",
                f"no NIC {device!r} of {pod.name}, which has {', '.join(devices)}"
                f"{nearest(device, devices)}",
            )
            continue
        if (pod.name, device) in seen:
            shop.problem(path, f"{pod.name}'s {device} is an endpoint already")
            continue
        seen.add((pod.name, device))
        ready = endpoint.get("ready", True)
        yield Endpoint(
            pod.name,
            device,
            devices[device].address.ip,
            pod.node,
            ready,
            endpoint.get("serving", ready),
            endpoint.get("terminating", False),
        )
