"""Networks, routers, hosts and nodes' NICs: addresses checked against the wire they are on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any

from netlab.model import (
    Extra,
    Host,
    Network,
    NodeNIC,
    RawNeighbour,
    RawObjects,
    RawRoute,
    RawRule,
    Router,
)
from netlab.raw import parse_iptables
from netlab.spec.checking import nearest
from netlab.spec.document import Document, join

ANY = IPv4Network("0.0.0.0/0")
RESERVED = {"lo", "all", "default", "vxlan.calico", "tunl0", "veth0"}
"""Devices that components or the kernel make, and names that sysctls use for all of them."""

TABLES = {"main": 254, "default": 253, "local": 255}


@dataclass(slots=True)
class Workshop:
    """A document on its way to a Lab: what is known so far, and what is wrong.

    *allow*: checks that the lab turns off. *owners*: address -> the path that has it first.
    *names*: every name that the file gives, of each kind, also of entries that were unusable.
    """

    document: Document
    allow: frozenset[str]
    names: Mapping[str, frozenset[str]]
    owners: dict[IPv4Address, str] = field(default_factory=dict)

    @property
    def data(self) -> dict[str, Any]:
        return self.document.data  # type: ignore[no-any-return]

    def problem(self, path: str, message: str, *, at_key: bool = False) -> None:
        self.document.problem(path, message, at_key=at_key)

    def known(self, kind: str, name: str, path: str, what: str) -> bool:
        """Whether *name* is one of *kind*; a problem at *path* where the file has none such."""
        if name in self.names[kind]:
            return True
        if kind in self.document.lost:
            return False
        hint = nearest(name, self.names[kind]) or self._others(kind)
        self.problem(path, f"no {what} {name!r}{hint}")
        return False

    def _others(self, kind: str) -> str:
        names = sorted(self.names[kind])
        return f"; there are: {', '.join(names[:8])}{', ...' * (len(names) > 8)}" if names else ""

    def pool_path(self, name: str) -> str:
        """The setting that the Calico pool *name* comes from."""
        given = self.data.get("cluster", {}).get("calico", {}).get("ipPools")
        return f"cluster.calico.ipPools.{name}.cidr" if given else "cluster.podCIDR"

    def own(self, address: IPv4Address, path: str) -> None:
        """*path* has *address*; twice is a problem unless the lab means it."""
        first = self.owners.setdefault(address, path)
        if first != path and "duplicate-address" not in self.allow:
            line = self.document.place(first)[0]
            where = f" (line {line})" if self.document.gave(first) else ""
            hint = "; on purpose? allow: [duplicate-address]"
            self.problem(path, f"{address} is already {first}{where}{hint}")


def networks(shop: Workshop) -> dict[str, Network]:
    found: dict[str, Network] = {}
    for name, entry in shop.data["underlay"]["networks"].items():
        path = f"underlay.networks.{name}"
        subnets = tuple(IPv4Network(text) for text in entry["subnets"])
        found[name] = Network(
            name, subnets, entry.get("mtu", 1500), extra(shop, entry, f"{path}.extra")
        )
    return found


def interface(shop: Workshop, network: Network, text: str, path: str) -> IPv4Interface | None:
    """*text* with the length of the subnet of *network* that it is in."""
    given = IPv4Interface(text)
    address = given.ip
    shop.own(address, path)
    for subnet in network.subnets:
        if address in subnet:
            made = given if "/" in text else IPv4Interface((address, subnet.prefixlen))
            return made if is_host(shop, made, path) else None
    if "foreign-address" in shop.allow:
        if "/" not in text:
            shop.problem(path, f"say the prefix length of a foreign address, such as {address}/24")
            return None
        return given
    inside = ", ".join(map(str, network.subnets))
    hint = "; on purpose? allow: [foreign-address]"
    shop.problem(path, f"{address} is not in network {network.name} ({inside}){hint}")
    return None


def is_host(shop: Workshop, given: IPv4Interface, path: str) -> bool:
    """Whether a machine can have *given*: not the network's own address, nor its broadcast."""
    net = given.network
    if net.prefixlen < 31 and given.ip in {net.network_address, net.broadcast_address}:
        shop.problem(path, f"{given.ip} is no host address of {net}")
        return False
    return True


def routers(shop: Workshop, wires: Mapping[str, Network]) -> dict[str, Router]:
    found: dict[str, Router] = {}
    for name, entry in shop.data["underlay"].get("routers", {}).items():
        path = f"underlay.routers.{name}"
        addresses: dict[str, tuple[IPv4Interface, ...]] = {}
        for network, texts in entry.items():
            if network in {"sendRedirects", "extra"}:
                continue
            if not shop.known("networks", network, f"{path}.{network}", "network"):
                continue
            if network in wires:
                own = (
                    interface(shop, wires[network], text, f"{path}.{network}[{index}]")
                    for index, text in enumerate(texts)
                )
                addresses[network] = tuple(address for address in own if address)
        redirects = entry.get("sendRedirects", False)
        found[name] = Router(name, addresses, redirects, extra(shop, entry, f"{path}.extra"))
    return found


def gateway(
    shop: Workshop,
    entry: Mapping[str, Any],
    path: str,
    subnets: Sequence[tuple[str | None, IPv4Network]],
    gateways: Mapping[str, Router],
) -> IPv4Address | None:
    """What the file says (null: none), else the first router address in one of *subnets*.

    *subnets*: (network, subnet) of each NIC; a network of None is any.
    """
    if "gateway" in entry:
        if entry["gateway"] is None:
            return None
        address = IPv4Address(entry["gateway"])
        if any(address in subnet for _, subnet in subnets):
            return address
        inside = ", ".join(str(subnet) for _, subnet in subnets)
        shop.problem(f"{path}.gateway", f"{address} is not in {inside}")
        return None
    for network, subnet in subnets:
        for router in gateways.values():
            for wire, addresses in router.addresses.items():
                for address in addresses if network in {None, wire} else ():
                    if address.ip in subnet:
                        return address.ip
    return None


def hosts(
    shop: Workshop, wires: Mapping[str, Network], gateways: Mapping[str, Router]
) -> dict[str, Host]:
    found: dict[str, Host] = {}
    for name, entry in shop.data["underlay"].get("hosts", {}).items():
        path = f"underlay.hosts.{name}"
        network = entry["network"]
        if not shop.known("networks", network, f"{path}.network", "network"):
            continue
        if network not in wires:
            continue
        address = interface(shop, wires[network], entry["address"], f"{path}.address")
        if address is None:
            continue
        found[name] = Host(
            name,
            network,
            address,
            gateway(shop, entry, path, [(network, address.network)], gateways),
            tuple(dict.fromkeys((80, *entry.get("ports", ())))),
            tuple(entry.get("command", ())),
            extra(shop, entry, f"{path}.extra"),
        )
    return found


def node_nics(
    shop: Workshop, name: str, entry: Mapping[str, Any], wires: Mapping[str, Network]
) -> tuple[NodeNIC, ...]:
    """NICs in the file's order; a VLAN's parent comes before it."""
    found: dict[str, NodeNIC] = {}
    for device, nic in entry["nics"].items():
        path = f"nodes.{name}.nics.{device}"
        if device in RESERVED or device.startswith(("cali", "veth")):
            shop.problem(path, f"{device!r} is a name that others use", at_key=True)
            continue
        made = _node_nic(shop, path, device, nic, found, wires)
        if made is not None:
            found[device] = made
    return tuple(found.values())


def _node_nic(
    shop: Workshop,
    path: str,
    device: str,
    nic: Mapping[str, Any],
    before: Mapping[str, NodeNIC],
    wires: Mapping[str, Network],
) -> NodeNIC | None:
    vlan, link, network = nic.get("vlan"), nic.get("link"), nic.get("network")
    if (vlan is None) != (link is None):
        if not shop.document.gave(f"{path}.{'vlan' if vlan is None else 'link'}"):
            shop.problem(path, "a VLAN has both link and vlan")
        return None
    if link is not None and link not in before:
        shop.problem(f"{path}.link", f"no NIC {link!r} before it{nearest(link, before)}")
        return None
    if (link is None) == (network is None):
        shop.problem(path, "plug it into a network, or give link and vlan")
        return None
    if network is not None and not shop.known("networks", network, f"{path}.network", "network"):
        return None
    wire = wires.get(network or _wire_of(link, before))
    address = None
    if "address" in nic and wire is not None:
        address = _nic_address(shop, f"{path}.address", nic["address"], wire, of_vlan=bool(link))
    return NodeNIC(device, network, address, link, vlan, nic.get("mtu"))


def _nic_address(
    shop: Workshop, path: str, text: str, wire: Network, *, of_vlan: bool
) -> IPv4Interface | None:
    """The subnets of a VLAN are its own, not those of the wire that it is on."""
    given = IPv4Interface(text)
    if not of_vlan or any(given.ip in subnet for subnet in wire.subnets):
        return interface(shop, wire, text, path)
    if "/" not in text:
        shop.problem(path, f"say the prefix length of an address in a VLAN, such as {text}/24")
        return None
    shop.own(given.ip, path)
    return given if is_host(shop, given, path) else None


def _wire_of(link: str | None, before: Mapping[str, NodeNIC]) -> str:
    """The network that the frames of a VLAN end up on."""
    while link is not None:
        network, link = before[link].network, before[link].link
        if network is not None:
            return network
    return ""


# --- extra ---------------------------------------------------------------------------------------


def extra(shop: Workshop, entry: Mapping[str, Any], path: str) -> Extra:
    given = entry.get("extra", {})
    return Extra(
        _raw(shop, given.get("before", {}), join(path, "before")),
        _raw(shop, given.get("after", {}), join(path, "after")),
    )


def _raw(shop: Workshop, given: Mapping[str, Any], path: str) -> RawObjects:
    for index, line in enumerate(given.get("iptables", ())):
        try:
            parse_iptables(line)
        except ValueError as error:
            shop.problem(f"{path}.iptables[{index}]", str(error))
    return RawObjects(
        {name: str(value) for name, value in given.get("sysctls", {}).items()},
        tuple(_routes(shop, given.get("routes", ()), f"{path}.routes")),
        tuple(
            RawRule(
                table_number(shop, rule["table"], f"{path}.rules[{index}].table"),
                rule.get("priority"),
                _network(rule.get("from")),
                _network(rule.get("to")),
                _mark(rule.get("fwmark")),
                rule.get("iif"),
            )
            for index, rule in enumerate(given.get("rules", ()))
        ),
        tuple(
            RawNeighbour(IPv4Address(entry["address"]), entry["dev"], entry["mac"].lower())
            for entry in given.get("neighbours", ())
        ),
        tuple(given.get("iptables", ())),
    )


def _routes(shop: Workshop, given: list[dict[str, Any]], path: str) -> Iterator[RawRoute]:
    for index, route in enumerate(given):
        here = f"{path}[{index}]"
        unicast = route.get("type", "unicast") == "unicast"
        if unicast and "dev" not in route:
            shop.problem(here, "a unicast route needs its dev: nothing is guessed")
        if not unicast and {"dev", "via"} & route.keys():
            shop.problem(here, f"a route of type {route['type']} has neither dev nor via")
        yield RawRoute(
            ANY if route["dst"] == "default" else IPv4Network(route["dst"]),
            route.get("dev"),
            _address(route.get("via")),
            _address(route.get("src")),
            table_number(shop, route.get("table", "main"), f"{here}.table"),
            route.get("type", "unicast"),
            route.get("scope"),
            route.get("onlink", False),
            route.get("metric"),
            route.get("mtu"),
            route.get("place", "add"),
        )


def table_number(shop: Workshop, value: str | int, path: str) -> int:
    if isinstance(value, int) and 0 < value < 2**32:
        return value
    if value in TABLES:
        return TABLES[str(value)]
    shop.problem(path, f"{value!r} is not main or a table number")
    return 254


def _mark(value: int | str | None) -> int | None:
    return int(value, 0) if isinstance(value, str) else value


def _address(text: str | None) -> IPv4Address | None:
    return None if text is None else IPv4Address(text)


def _network(text: str | None) -> IPv4Network | None:
    return None if text is None else IPv4Network(text)
