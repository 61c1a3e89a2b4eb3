"""Networks, routers, hosts and nodes' NICs: addresses checked against the wire they are on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any

from netlab.errors import Problem
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
        places = self.document.keys if at_key else self.document.values
        place = places.get(path) or self.document.place(path)
        self.document.problems.append(Problem(*place, path, message))

    def known(self, kind: str, name: str, path: str, what: str) -> bool:
        """Whether *name* is one of *kind*; a problem at *path* where the file has none such."""
        if name in self.names[kind]:
            return True
        self.problem(path, f"no {what} {name!r}{nearest(name, self.names[kind])}")
        return False

    def own(self, address: IPv4Address, path: str) -> None:
        """*path* has *address*; twice is a problem unless the lab means it."""
        first = self.owners.setdefault(address, path)
        if first != path and "duplicate-address" not in self.allow:
            where = self.document.place(first)[0]
            hint = "; on purpose? allow: [duplicate-address]"
            self.problem(path, f"{address} is already {first} (line {where}){hint}")


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
    address = IPv4Address(text)
    shop.own(address, path)
    for subnet in network.subnets:
        if address in subnet:
            if subnet.prefixlen < 31 and address in {subnet[0], subnet[-1]}:
                shop.problem(path, f"{address} is no host address of {subnet}")
                return None
            return IPv4Interface((address, subnet.prefixlen))
    if "foreign-address" in shop.allow:
        return IPv4Interface((address, 32))
    inside = ", ".join(map(str, network.subnets))
    hint = "; on purpose? allow: [foreign-address]"
    shop.problem(path, f"{address} is not in network {network.name} ({inside}){hint}")
    return None


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
    network: str | None,
    own: IPv4Network,
    gateways: Mapping[str, Router],
) -> IPv4Address | None:
    """What the file says (null: none), else the first router address in the subnet."""
    if "gateway" in entry:
        text = entry["gateway"]
        if text is None:
            return None
        address = IPv4Address(text)
        if address not in own and "foreign-address" not in shop.allow:
            shop.problem(f"{path}.gateway", f"{address} is not in {own}")
            return None
        return address
    for router in gateways.values():
        wires = (
            router.addresses.values() if network is None else [router.addresses.get(network, ())]
        )
        for wire in wires:
            for address in wire:
                if address.ip in own:
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
            gateway(shop, entry, path, network, address.network, gateways),
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
        if device in {"lo", "vxlan.calico", "tunl0"} or device.startswith(("cali", "veth")):
            shop.problem(path, f"{device!r} is a name that components use", at_key=True)
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
        shop.problem(path, "a VLAN has both link and vlan")
        return None
    if link is not None and link not in before:
        shop.problem(f"{path}.link", f"no NIC {link!r} before it{nearest(link, before)}")
        return None
    if link is None and network is None:
        shop.problem(path, "plug it into a network, or give link and vlan")
        return None
    if network is not None and not shop.known("networks", network, f"{path}.network", "network"):
        return None
    address = None
    if "address" in nic:
        if network is None:
            shop.problem(f"{path}.address", "an address needs the network that it is in")
            return None
        if network in wires:
            address = interface(shop, wires[network], nic["address"], f"{path}.address")
    return NodeNIC(device, network, address, link, vlan, nic.get("mtu"))


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
                rule.get("fwmark"),
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
        if route.get("type", "unicast") == "unicast" and not ({"dev", "via"} & route.keys()):
            shop.problem(here, "a unicast route needs dev or via")
        if "via" in route and "dev" not in route:
            shop.problem(here, "say the dev of the next hop too: nothing is guessed")
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


def _address(text: str | None) -> IPv4Address | None:
    return None if text is None else IPv4Address(text)


def _network(text: str | None) -> IPv4Network | None:
    return None if text is None else IPv4Network(text)
