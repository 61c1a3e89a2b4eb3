"""Pods: references, NICs, and the addresses that the file leaves to IPAM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any

from netlab import addressing
from netlab.model import Attachment, Coordinator, IPPool, Node, Pod, PodNIC
from netlab.spec import settings
from netlab.spec.checking import nearest
from netlab.spec.world import RESERVED, Workshop, extra, is_host

CALICO = "calico"
FIRST_NIC = "eth0"


def pods(
    shop: Workshop,
    placed: Mapping[str, Node],
    nets: Mapping[str, Attachment],
    service_cidr: IPv4Network | None,
    ports: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, Pod], dict[str, tuple[IPv4Network, ...]]]:
    """Pods, and each node's Calico blocks. *ports*: target ports by Pod."""
    entries = shop.data.get("pods", {})
    for name, entry in entries.items():
        for device, nic in entry["nics"].items():
            if "address" in nic:
                address = IPv4Interface(nic["address"]).ip
                shop.own(address, f"pods.{name}.nics.{device}.address")
    for net in nets.values():
        if net.gateway is not None:
            shop.owners.setdefault(net.gateway, f"networkAttachments.{net.name}.gateway")
    ipam = _ipam(shop, entries, placed)
    found: dict[str, Pod] = {}
    for name, entry in entries.items():
        path = f"pods.{name}"
        known = shop.known("nodes", entry["node"], f"{path}.node", "node")
        if not known or entry["node"] not in placed:
            continue
        birth = _Birth(shop, path, entry, placed[entry["node"]], nets, ipam, service_cidr)
        nics = tuple(birth.nics())
        if len(nics) != len(entry["nics"]):
            continue
        listening = (80, *ports.get(name, ()), *entry.get("ports", ()))
        found[name] = Pod(
            name,
            entry.get("namespace", "default"),
            birth.node.name,
            nics,
            tuple(dict.fromkeys(listening)),
            tuple(entry.get("command", ())),
            extra(shop, entry, f"{path}.extra"),
        )
    return found, ipam.blocks


@dataclass(slots=True)
class _Ipam:
    """Calico's blocks by node; a node takes another one when its own are full."""

    shop: Workshop
    pools: tuple[IPPool, ...]
    blocks: dict[str, tuple[IPv4Network, ...]]
    free: dict[str | IPv4Network, Iterator[IPv4Address]] = field(default_factory=dict)
    """Where the search goes on, by node and by subnet: what is taken stays taken."""

    def tunnels(self) -> dict[IPv4Address, str]:
        """Each node's tunnel has the first address of its first block."""
        return {own[0].network_address: node for node, own in self.blocks.items()}

    def of_node(self, node: str, path: str) -> IPv4Address | None:
        """The next free Calico address of *node* for *path*; None where all pools are full."""
        if node not in self.free:
            self.free[node] = self._calico(node)
        return self._next(node, path)

    def of_subnet(self, subnet: IPv4Network, path: str) -> IPv4Address | None:
        """The next free address of an attachment's *subnet* for *path*."""
        if subnet not in self.free:
            self.free[subnet] = iter(subnet.hosts())
        return self._next(subnet, path)

    def _next(self, source: str | IPv4Network, path: str) -> IPv4Address | None:
        taken = self.shop.owners
        found = next((address for address in self.free[source] if address not in taken), None)
        if found is not None:
            self.shop.own(found, path)
        return found

    def _calico(self, node: str) -> Iterator[IPv4Address]:
        tunnels = self.tunnels()
        enabled = [pool for pool in self.pools if not pool.disabled]
        for block in self.blocks.get(node, ()):
            if any(block.subnet_of(pool.cidr) for pool in enabled):
                yield from (address for address in block if address not in tunnels)
        for pool in enabled:
            if pool.block_size < pool.cidr.prefixlen:
                continue
            for block in pool.cidr.subnets(new_prefix=pool.block_size):
                if not any(block in own for own in self.blocks.values()):
                    self.blocks[node] = (*self.blocks.get(node, ()), block)
                    yield from block


def _ipam(shop: Workshop, entries: Mapping[str, Any], placed: Mapping[str, Node]) -> _Ipam:
    """Blocks as the addresses of the file make them; a node without Calico Pods has one too."""
    pools = next(iter(placed.values())).calico.ip_pools if placed else ()
    given = [
        (entry["node"], IPv4Interface(nic["address"]).ip)
        for entry in entries.values()
        for nic in entry["nics"].values()
        if nic["attach"] == CALICO and "address" in nic and entry["node"] in placed
    ]
    ipam = _Ipam(shop, pools, {})
    uses = any(nic["attach"] == CALICO for e in entries.values() for nic in e["nics"].values())
    first = next((pool for pool in pools if not pool.disabled), None)
    # The first pool comes first: its block holds the tunnel's address.
    for pool in sorted(pools, key=lambda pool: pool is not first) if uses else ():
        where = shop.pool_path(pool.name)
        if pool.block_size < pool.cidr.prefixlen:
            shop.problem(where, f"{pool.cidr} is smaller than one block, a /{pool.block_size}")
            continue
        wanting = placed if pool is first else ()
        for node, own in addressing.node_blocks(pool.cidr, pool.block_size, wanting, given).items():
            ipam.blocks[node] = (*ipam.blocks.get(node, ()), *own)
        without = [node for node in wanting if node not in ipam.blocks]
        if without:
            message = f"{pool.cidr} has no /{pool.block_size} block left for {', '.join(without)}"
            shop.problem(where, message)
    return ipam


@dataclass(frozen=True, slots=True)
class _Birth:
    """One Pod on its way into being: its entry at *path*, and what it may refer to."""

    shop: Workshop
    path: str
    entry: Mapping[str, Any]
    node: Node
    nets: Mapping[str, Attachment]
    ipam: _Ipam
    service_cidr: IPv4Network | None

    def nics(self) -> Iterator[PodNIC]:
        """The NICs that can be made; a problem for each that cannot."""
        made: list[PodNIC] = []
        for index, (device, nic) in enumerate(self.entry["nics"].items()):
            path = f"{self.path}.nics.{device}"
            if device in RESERVED:
                self.shop.problem(path, f"{device!r} is a name that others use", at_key=True)
            elif index == 0 and device != FIRST_NIC:
                self.shop.problem(path, "the first NIC of a Pod is eth0", at_key=True)
            elif index and nic["attach"] == CALICO:
                message = "Calico is the default network: it makes eth0 and no other NIC"
                self.shop.problem(f"{path}.attach", message)
            elif nic["attach"] == CALICO:
                made += self._calico(path, device, nic)
            else:
                made += self._attached(path, device, nic, made)
        yield from made

    def _calico(self, path: str, device: str, nic: Mapping[str, Any]) -> Iterator[PodNIC]:
        pools = self.node.calico.ip_pools
        if not pools:
            if not self.shop.document.gave("cluster.podCIDR"):
                self.shop.problem(f"{path}.attach", "Calico has no pool: give cluster.podCIDR")
            return
        if "address" not in nic:
            free = self.ipam.of_node(self.node.name, f"{path}.address")
            if free is None:
                message = f"no free address left in {', '.join(str(pool.cidr) for pool in pools)}"
                self.shop.problem(path, message, at_key=True)
            else:
                yield PodNIC(device, IPv4Interface((free, 32)))
            return
        address = IPv4Interface(nic["address"])
        tunnel = self.ipam.tunnels().get(address.ip)
        if address.network.prefixlen != 32:
            self.shop.problem(f"{path}.address", "Calico's addresses are /32")
        elif tunnel is not None:
            message = f"{address.ip} is the address of {tunnel}'s tunnel, the first of its block"
            self.shop.problem(f"{path}.address", message)
        elif (
            not any(address.ip in pool.cidr for pool in pools)
            and "foreign-address" not in self.shop.allow
        ):
            inside = ", ".join(str(pool.cidr) for pool in pools)
            hint = "; on purpose? allow: [foreign-address]"
            message = f"{address.ip} is in no pool of Calico's ({inside}){hint}"
            self.shop.problem(f"{path}.address", message)
        else:
            yield PodNIC(device, address)

    def _attached(
        self, path: str, device: str, nic: Mapping[str, Any], before: list[PodNIC]
    ) -> Iterator[PodNIC]:
        name = nic["attach"]
        known = {CALICO, *self.shop.names["networkAttachments"]}
        if name not in known:
            message = f"no attachment {name!r}{nearest(name, known)}"
            self.shop.problem(f"{path}.attach", message)
        if name not in self.nets:
            return
        attachment = self.nets[name]
        masters = [own.name for own in self.node.nics]
        if attachment.master not in masters:
            where = f"master {attachment.master!r} of {name} is no NIC of {self.node.name}"
            hint = nearest(attachment.master, masters)
            self.shop.problem(f"{path}.attach", f"{where}, which has {', '.join(masters)}{hint}")
            return
        address = self._attached_address(path, nic, attachment)
        if address is None:
            return
        coordinator = self._coordinator(path, device, attachment, before)
        yield PodNIC(device, address, attachment, coordinator, nic.get("defaultRoute", "prepend"))

    def _coordinator(
        self, path: str, device: str, attachment: Attachment, before: list[PodNIC]
    ) -> Coordinator | None:
        """The settings of one ADD; what the real plugin refuses is a problem.

        The attachment's own win over the Pod's annotation, which wins over the cluster's
        (SpiderCoordinator): spiderpool, cmd/coordinator/cmd/cni_types.go.
        """
        if attachment.coordinator is None:
            return None
        data = self.shop.data
        given = settings.merged(
            data.get("cluster", {}).get("spiderpool", {}).get("coordinator"),
            data["nodes"][self.node.name].get("spiderpool", {}).get("coordinator"),
            self.entry.get("coordinator"),
            attachment.coordinator,
        )
        where = None
        if "behaviour" in attachment.coordinator:
            where = f"networkAttachments.{attachment.name}.coordinator"
        elif "behaviour" in self.entry.get("coordinator", {}):
            where = f"{self.path}.coordinator"
        pools = self.node.calico.ip_pools
        made = settings.coordinator(self.shop, given, pools, self.service_cidr, where)
        if made is None or not before:
            return made
        first, wanted = before[0], made.pod_default_route_nic
        if first.attachment is not None and first.coordinator is None:
            message = f"the coordinator of {device} needs that of {first.name}, which is off"
            self.shop.problem(path, message, at_key=True)
        present = [*(own.name for own in before), device]
        if made.tune_pod_routes and wanted and wanted not in present:
            hint = nearest(wanted, present)
            message = f"podDefaultRouteNIC {wanted!r} is not in the Pod when {device} comes{hint}"
            self.shop.problem(path, message, at_key=True)
        return made

    def _attached_address(
        self, path: str, nic: Mapping[str, Any], attachment: Attachment
    ) -> IPv4Interface | None:
        subnet = attachment.subnet
        if "address" not in nic:
            free = self.ipam.of_subnet(subnet, f"{path}.address")
            if free is None:
                self.shop.problem(path, f"no free address left in {subnet}", at_key=True)
                return None
            return IPv4Interface((free, subnet.prefixlen))
        given = IPv4Interface(nic["address"])
        if given.ip not in subnet and "foreign-address" not in self.shop.allow:
            hint = "; on purpose? allow: [foreign-address]"
            message = f"{given.ip} is not in {attachment.name} ({subnet}){hint}"
            self.shop.problem(f"{path}.address", message)
            return None
        made = given if "/" in nic["address"] else IPv4Interface((given.ip, subnet.prefixlen))
        return made if is_host(self.shop, made, f"{path}.address") else None
