"""Nodes, attachments, Pods and Services: references, addresses and names checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from itertools import combinations
from typing import Any, Literal

from netlab import addressing
from netlab.model import (
    Attachment,
    Endpoint,
    Network,
    Node,
    Pod,
    PodNIC,
    Router,
    Service,
    ServicePort,
)
from netlab.spec import settings
from netlab.spec.checking import nearest
from netlab.spec.world import Workshop, extra, gateway, node_nics

CALICO = "calico"
FIRST_NODE_PORT = 30000
RESERVED_CLUSTER_IPS = 10
"""The first addresses of serviceCIDR are left to what clusters put there (.1, .10)."""


def cidrs(shop: Workshop, wires: Mapping[str, Network]) -> tuple[IPv4Network, IPv4Network]:
    """The two CIDRs of the cluster; overlaps of any two ranges are problems."""
    cluster = shop.data["cluster"]
    pod, service = IPv4Network(cluster["podCIDR"]), IPv4Network(cluster["serviceCIDR"])
    ranges = {"cluster.podCIDR": pod, "cluster.serviceCIDR": service}
    for wire in wires.values():
        for index, subnet in enumerate(wire.subnets):
            ranges[f"underlay.networks.{wire.name}.subnets[{index}]"] = subnet
    if "overlapping-cidr" not in shop.allow:
        for (one, first), (other, second) in combinations(ranges.items(), 2):
            if first.overlaps(second):
                hint = "; on purpose? allow: [overlapping-cidr]"
                shop.problem(other, f"{second} overlaps {one} ({first}){hint}")
    return pod, service


def nodes(
    shop: Workshop,
    wires: Mapping[str, Network],
    gateways: Mapping[str, Router],
    pod_cidr: IPv4Network,
    service_cidr: IPv4Network,
) -> dict[str, Node]:
    """Nodes with their settings; blocks come later, when Pods' addresses are known."""
    cluster = shop.data["cluster"]
    found: dict[str, Node] = {}
    for name, entry in shop.data["nodes"].items():
        path = f"nodes.{name}"
        nics = node_nics(shop, name, entry, wires)
        first = next((nic for nic in nics if nic.address), None)
        if first is None or first.address is None:
            shop.problem(f"{path}.nics", "a node needs a NIC with an address")
            continue
        given = settings.merged(
            {key: cluster.get(key) for key in _REPEATABLE if key in cluster},
            {key: entry[key] for key in _REPEATABLE if key in entry},
        )
        sysctl = {key: str(value) for key, value in given.get("sysctl", {}).items()}
        calico = settings.calico(
            shop, given.get("calico", {}), pod_cidr, _where(entry, path, "calico")
        )
        coordinator = settings.coordinator(
            shop,
            given.get("spiderpool", {}).get("coordinator", {}),
            calico.ip_pools,
            service_cidr,
            f"{_where(entry, path, 'spiderpool')}.coordinator",
        )
        proxy = settings.kube_proxy(
            shop,
            given.get("kubeProxy", {}),
            pod_cidr,
            sysctl,
            _where(entry, path, "kubeProxy"),
        )
        found[name] = Node(
            name,
            nics,
            gateway(shop, entry, path, first.network, first.address.network, gateways),
            calico,
            proxy,
            coordinator,
            sysctl,
            "legacy" if given.get("iptablesBackend") == "Legacy" else "nft",
            (),
            extra(shop, entry, f"{path}.extra"),
        )
    return found


_REPEATABLE = ("calico", "kubeProxy", "spiderpool", "sysctl", "iptablesBackend")


def _where(entry: Mapping[str, Any], path: str, key: str) -> str:
    """The path that a setting came from: the node's own, else the cluster's."""
    return f"{path}.{key}" if key in entry else f"cluster.{key}"


def attachments(shop: Workshop, gateways: Mapping[str, Router]) -> dict[str, Attachment]:
    found: dict[str, Attachment] = {}
    for name, entry in shop.data.get("networkAttachments", {}).items():
        path = f"networkAttachments.{name}"
        if name == CALICO:
            shop.problem(path, "calico is the default network's name", at_key=True)
            continue
        if entry["cni"] != "macvlan":
            shop.problem(f"{path}.cni", f"{entry['cni']} is not rendered yet: macvlan is")
            continue
        subnet = IPv4Network(entry["subnet"])
        chained = entry.get("coordinator", {})
        if chained is True:
            chained = {}
        found[name] = Attachment(
            name,
            "macvlan",
            entry["master"],
            subnet,
            gateway(shop, entry, path, None, subnet, gateways),
            None if chained is False else chained,
            entry.get("mode", "bridge"),
            entry.get("mtu"),
        )
    return found


# --- Pods ----------------------------------------------------------------------------------------


def pods(
    shop: Workshop,
    placed: Mapping[str, Node],
    nets: Mapping[str, Attachment],
    service_cidr: IPv4Network,
    ports: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, Pod], dict[str, tuple[IPv4Network, ...]]]:
    """Pods, and each node's blocks. *ports*: target ports by Pod."""
    entries = shop.data.get("pods", {})
    for name, entry in entries.items():
        for device, nic in entry["nics"].items():
            if "address" in nic:
                shop.own(IPv4Address(nic["address"]), f"pods.{name}.nics.{device}.address")
    blocks = _blocks(entries, placed)
    found: dict[str, Pod] = {}
    for name, entry in entries.items():
        path = f"pods.{name}"
        if not shop.known("nodes", entry["node"], f"{path}.node", "node"):
            continue
        if entry["node"] not in placed:
            continue
        node = placed[entry["node"]]
        nics = tuple(_nics(shop, path, entry, node, nets, blocks, service_cidr))
        if len(nics) != len(entry["nics"]):
            continue
        listening = (80, *ports.get(name, ()), *entry.get("ports", ()))
        found[name] = Pod(
            name,
            entry.get("namespace", "default"),
            node.name,
            nics,
            tuple(dict.fromkeys(listening)),
            tuple(entry.get("command", ())),
            extra(shop, entry, f"{path}.extra"),
        )
    return found, blocks


def _blocks(
    entries: Mapping[str, Any], placed: Mapping[str, Node]
) -> dict[str, tuple[IPv4Network, ...]]:
    """Affine blocks by node, of every pool in use; a node without Calico Pods has one too."""
    uses = any(nic["attach"] == CALICO for e in entries.values() for nic in e["nics"].values())
    if not uses or not placed:
        return {}
    given = [
        (entry["node"], IPv4Address(nic["address"]))
        for entry in entries.values()
        for nic in entry["nics"].values()
        if nic["attach"] == CALICO and "address" in nic and entry["node"] in placed
    ]
    result: dict[str, tuple[IPv4Network, ...]] = {}
    for index, pool in enumerate(next(iter(placed.values())).calico.ip_pools):
        if pool.block_size < pool.cidr.prefixlen:
            continue
        wanting = placed if index == 0 else ()
        blocks = addressing.node_blocks(pool.cidr, pool.block_size, wanting, given)
        for node, own in blocks.items():
            result[node] = (*result.get(node, ()), *own)
    return result


def _nics(
    shop: Workshop,
    path: str,
    entry: Mapping[str, Any],
    node: Node,
    nets: Mapping[str, Attachment],
    blocks: Mapping[str, tuple[IPv4Network, ...]],
    service_cidr: IPv4Network,
) -> Iterator[PodNIC]:
    for index, (device, nic) in enumerate(entry["nics"].items()):
        here = f"{path}.nics.{device}"
        if device in {"lo", "veth0", "tunl0"}:
            shop.problem(here, f"{device!r} is a name that components use", at_key=True)
            continue
        if nic["attach"] == CALICO:
            if index or device != "eth0":
                shop.problem(
                    here, "Calico is the default network: the first NIC, eth0", at_key=True
                )
                continue
            made = _calico_nic(shop, here, device, nic, node, blocks)
        else:
            made = _attached(shop, here, device, nic, node, nets, entry, service_cidr)
        if made is not None:
            yield made


def _calico_nic(
    shop: Workshop,
    path: str,
    device: str,
    nic: Mapping[str, Any],
    node: Node,
    blocks: Mapping[str, tuple[IPv4Network, ...]],
) -> PodNIC | None:
    pools = node.calico.ip_pools
    own = blocks.get(node.name, ())
    if "address" in nic:
        address = IPv4Address(nic["address"])
        if not any(address in pool.cidr for pool in pools):
            inside = ", ".join(str(pool.cidr) for pool in pools)
            shop.problem(f"{path}.address", f"{address} is in no IP pool ({inside})")
            return None
        if own and address == own[0].network_address:
            message = f"{address} is the address of {node.name}'s tunnel"
            shop.problem(f"{path}.address", message)
            return None
        return PodNIC(device, IPv4Interface((address, 32)))
    for block in own:
        for address in block:
            if address != own[0].network_address and address not in shop.owners:
                shop.own(address, f"{path}.address")
                return PodNIC(device, IPv4Interface((address, 32)))
    shop.problem(path, f"no free address in the blocks of {node.name}")
    return None


def _attached(
    shop: Workshop,
    path: str,
    device: str,
    nic: Mapping[str, Any],
    node: Node,
    nets: Mapping[str, Attachment],
    entry: Mapping[str, Any],
    service_cidr: IPv4Network,
) -> PodNIC | None:
    name = nic["attach"]
    known = {CALICO, *shop.names["networkAttachments"]}
    if name not in known:
        shop.problem(f"{path}.attach", f"no attachment {name!r}{nearest(name, known)}")
        return None
    if name not in nets:
        return None
    attachment = nets[name]
    masters = [own.name for own in node.nics]
    if attachment.master not in masters:
        where = f"master {attachment.master!r} of {name} is no NIC of {node.name}"
        shop.problem(f"{path}.attach", f"{where}; there are: {', '.join(masters)}")
        return None
    address = _attached_address(shop, path, nic, attachment)
    if address is None:
        return None
    coordinator = None
    if attachment.coordinator is not None and node.coordinator is not None:
        given = settings.merged(
            shop.data["cluster"].get("spiderpool", {}).get("coordinator"),
            shop.data["nodes"][node.name].get("spiderpool", {}).get("coordinator"),
            attachment.coordinator,
            entry.get("coordinator"),
        )
        where = f"networkAttachments.{name}.coordinator"
        coordinator = settings.coordinator(shop, given, node.calico.ip_pools, service_cidr, where)
        wanted = given.get("podDefaultRouteNIC", "")
        if wanted and wanted not in entry["nics"]:
            message = f"podDefaultRouteNIC {wanted!r} is no NIC of this Pod"
            shop.problem(path, f"{message}{nearest(wanted, entry['nics'])}")
    return PodNIC(device, address, attachment, coordinator, nic.get("defaultRoute", "prepend"))


def _attached_address(
    shop: Workshop, path: str, nic: Mapping[str, Any], attachment: Attachment
) -> IPv4Interface | None:
    subnet = attachment.subnet
    if "address" not in nic:
        free = addressing.free_addresses(subnet, shop.owners)
        address = next(free, None)
        if address is None:
            shop.problem(path, f"no free address in {subnet}")
            return None
        shop.own(address, f"{path}.address")
        return IPv4Interface((address, subnet.prefixlen))
    address = IPv4Address(nic["address"])
    if address not in subnet and "foreign-address" not in shop.allow:
        hint = "; on purpose? allow: [foreign-address]"
        shop.problem(f"{path}.address", f"{address} is not in {attachment.name} ({subnet}){hint}")
        return None
    if subnet.prefixlen < 31 and address in {subnet[0], subnet[-1]}:
        shop.problem(f"{path}.address", f"{address} is no host address of {subnet}")
        return None
    return IPv4Interface((address, subnet.prefixlen))


def names_that_clash(shop: Workshop, found: Mapping[str, Pod]) -> None:
    """Derived device names are hashes cut short: two Pods could meet in one."""
    seen: dict[str, str] = {}
    for pod in found.values():
        for derive in (addressing.cali_interface, addressing.sandbox_interface):
            name = derive(pod.namespace, pod.name)
            other = seen.setdefault(name, pod.name)
            if other != pod.name:
                path = f"pods.{pod.name}"
                shop.problem(path, f"its device {name} on the node is {other}'s too", at_key=True)


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
    shop: Workshop, found_pods: Mapping[str, Pod], service_cidr: IPv4Network
) -> dict[str, Service]:
    entries = shop.data.get("services", {})
    taken = _NodePorts(shop)
    for name, entry in entries.items():
        if "clusterIP" in entry:
            shop.own(IPv4Address(entry["clusterIP"]), f"services.{name}.clusterIP")
        for index, port in enumerate(entry["ports"]):
            if "nodePort" in port:
                taken.take(port["nodePort"], f"services.{name}.ports[{index}].nodePort")
    return {
        name: Service(
            name,
            entry.get("namespace", "default"),
            entry.get("type", "ClusterIP"),
            _cluster_ip(shop, name, entry, service_cidr),
            tuple(_ports(shop, name, entry, taken)),
            tuple(_endpoints(shop, name, entry, found_pods)),
            _external_policy(shop, name, entry),
            entry.get("internalTrafficPolicy", "Cluster"),
        )
        for name, entry in entries.items()
    }


class _NodePorts:
    """NodePorts that are taken; `free` gives the lowest that is not."""

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop
        self.owners: dict[int, str] = {}

    def take(self, number: int, path: str) -> None:
        first = self.owners.setdefault(number, path)
        if first != path:
            self.shop.problem(path, f"nodePort {number} is already {first}")

    def free(self, path: str) -> int:
        number = next(n for n in range(FIRST_NODE_PORT, 65536) if n not in self.owners)
        self.owners[number] = path
        return number


def _cluster_ip(
    shop: Workshop, name: str, entry: Mapping[str, Any], service_cidr: IPv4Network
) -> IPv4Address:
    path = f"services.{name}.clusterIP"
    if "clusterIP" in entry:
        address = IPv4Address(entry["clusterIP"])
        if address not in service_cidr:
            shop.problem(path, f"{address} is not in serviceCIDR ({service_cidr})")
        return address
    free = addressing.free_addresses(service_cidr, shop.owners)
    low = service_cidr.network_address + RESERVED_CLUSTER_IPS
    address = next((a for a in free if a > low), service_cidr.network_address)
    shop.own(address, path)
    return address


def _external_policy(
    shop: Workshop, name: str, entry: Mapping[str, Any]
) -> Literal["Cluster", "Local"]:
    policy: Literal["Cluster", "Local"] = entry.get("externalTrafficPolicy", "Cluster")
    if policy == "Local" and entry.get("type", "ClusterIP") == "ClusterIP":
        path = f"services.{name}.externalTrafficPolicy"
        shop.problem(path, "Local is for type NodePort: a ClusterIP has no external traffic")
    return policy


def _ports(
    shop: Workshop, name: str, entry: Mapping[str, Any], taken: _NodePorts
) -> Iterator[ServicePort]:
    names: set[str] = set()
    external = entry.get("type", "ClusterIP") != "ClusterIP"
    for index, port in enumerate(entry["ports"]):
        path = f"services.{name}.ports[{index}]"
        own = port.get("name", "")
        if own in names or (not own and len(entry["ports"]) > 1):
            shop.problem(path, "several ports need a name of its own each")
        names.add(own)
        if "nodePort" in port and not external:
            shop.problem(f"{path}.nodePort", "type ClusterIP has no nodePort: say type: NodePort")
        number = port.get("nodePort")
        if external and number is None:
            number = taken.free(path)
        yield ServicePort(
            port["port"],
            port.get("targetPort", port["port"]),
            own,
            port.get("protocol", "TCP"),
            number,
        )


def _endpoints(
    shop: Workshop, name: str, entry: Mapping[str, Any], found_pods: Mapping[str, Pod]
) -> Iterator[Endpoint]:
    for index, given in enumerate(entry.get("endpoints", ())):
        path = f"services.{name}.endpoints[{index}]"
        endpoint: dict[str, Any] = {"pod": given} if isinstance(given, str) else given
        if not shop.known("pods", endpoint["pod"], path, "Pod"):
            continue
        if endpoint["pod"] not in found_pods:
            continue
        pod = found_pods[endpoint["pod"]]
        devices = {nic.name: nic for nic in pod.nics}
        device = endpoint.get("nic", pod.nics[0].name)
        if device not in devices:
            shop.problem(
                f"{path}.nic", f"no NIC {device!r} of {pod.name}{nearest(device, devices)}"
            )
            continue
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
