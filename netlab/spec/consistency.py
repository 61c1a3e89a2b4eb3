"""What shows only in the whole lab: derived names that clash, devices that nobody makes."""

from __future__ import annotations

from collections.abc import Iterator

from netlab import addressing
from netlab.model import Lab, Pod
from netlab.spec.checking import nearest
from netlab.spec.world import Workshop

SWITCH = "br0"
VETH = "veth0"
TUNNEL = "vxlan.calico"


def check(shop: Workshop, lab: Lab) -> None:
    """Add what is wrong with *lab* as a whole to the problems."""
    _one_name_each(shop, _ports(lab))
    _one_name_each(shop, _pod_devices(lab))
    for path, netns, devices in _devices(lab):
        _extra_devices(shop, path, netns, devices)


def _one_name_each(shop: Workshop, derived: Iterator[tuple[str, str, str, str]]) -> None:
    """*derived*: (namespace, device, owner, its path); long names are hashes cut short."""
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    for netns, device, owner, path in derived:
        other, where = seen.setdefault((netns, device), (owner, path))
        if other != owner:
            message = f"its device {device} in {netns} would be that of {where}: rename one"
            shop.problem(path, message, at_key=True)


def _plugged(lab: Lab) -> Iterator[tuple[str, str, str, str]]:
    """(network, actor, device, path) of every NIC on a switch."""
    for router in lab.routers.values():
        for index, network in enumerate(router.addresses):
            yield network, router.name, f"eth{index}", f"underlay.routers.{router.name}"
    for host in lab.hosts.values():
        yield host.network, host.name, "eth0", f"underlay.hosts.{host.name}"
    for node in lab.nodes.values():
        for nic in node.nics:
            if nic.network is not None:
                yield nic.network, node.name, nic.name, f"nodes.{node.name}.nics.{nic.name}"


def _ports(lab: Lab) -> Iterator[tuple[str, str, str, str]]:
    for network, actor, device, path in _plugged(lab):
        yield network, addressing.port_name(actor, device), f"{actor}.{device}", path


def _pod_devices(lab: Lab) -> Iterator[tuple[str, str, str, str]]:
    for pod in lab.pods.values():
        for device in _host_sides(pod):
            yield pod.node, device, pod.name, f"pods.{pod.name}"


def _host_sides(pod: Pod) -> Iterator[str]:
    """Devices of *pod* on its node."""
    if pod.nics[0].attachment is None:
        yield addressing.cali_interface(pod.namespace, pod.name)
    elif pod.nics[0].coordinator is not None:
        yield addressing.sandbox_interface(pod.namespace, pod.name)


def _devices(lab: Lab) -> Iterator[tuple[str, str, set[str]]]:
    """(path, name, devices) of everything that ``extra`` can be given to."""
    for network in lab.networks.values():
        ports = {addressing.port_name(a, d) for n, a, d, _ in _plugged(lab) if n == network.name}
        yield f"underlay.networks.{network.name}", network.name, {SWITCH, *ports}
    for router in lab.routers.values():
        own = {f"eth{index}" for index in range(len(router.addresses))}
        yield f"underlay.routers.{router.name}", router.name, own
    for host in lab.hosts.values():
        yield f"underlay.hosts.{host.name}", host.name, {"eth0"}
    for node in lab.nodes.values():
        sides = (_host_sides(pod) for pod in lab.pods.values() if pod.node == node.name)
        own = {*(nic.name for nic in node.nics), *(name for names in sides for name in names)}
        tunnel = {TUNNEL} if node.pod_cidrs else set()
        yield f"nodes.{node.name}", node.name, own | tunnel
    for pod in lab.pods.values():
        own = {nic.name for nic in pod.nics}
        veth = {VETH} if pod.nics[0].attachment and pod.nics[0].coordinator else set()
        yield f"pods.{pod.name}", pod.name, own | veth


def _extra_devices(shop: Workshop, path: str, netns: str, devices: set[str]) -> None:
    entry = shop.data
    for step in path.split("."):
        entry = entry[step]
    for when, raw in entry.get("extra", {}).items():
        for kind in ("routes", "neighbours"):
            for index, item in enumerate(raw.get(kind, ())):
                device = item.get("dev")
                if device is not None and device not in devices:
                    where = f"{path}.extra.{when}.{kind}[{index}].dev"
                    has = f"{netns} has {', '.join(sorted(devices))}"
                    hint = nearest(device, devices)
                    shop.problem(where, f"no device {device!r}{hint}; {has}")
