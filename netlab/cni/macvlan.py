"""The macvlan main plugin with its IPAM result: link, address and default route in the Pod.

Source: containernetworking/plugins, plugins/main/macvlan (``createMacvlan``) and pkg/ipam
(``ConfigureIface``).
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address

from netlab.addressing import mac
from netlab.model import Attachment, Pod, PodNIC
from netlab.plan import Address, Macvlan, Object, Origin, Route
from netlab.wiring import EVERYWHERE


def prefixed_mac(prefix: str, address: IPv4Address) -> str:
    """The MAC of podMACPrefix: two bytes of prefix, then the address's four (Spiderpool)."""
    return ":".join((prefix.lower(), *(f"{byte:02x}" for byte in address.packed)))


def objects(pod: Pod, nic: PodNIC, attachment: Attachment) -> Iterator[Object]:
    """What ADD leaves in the Pod for *nic*, before any chained plugin."""
    subject = f"Pod {pod.namespace}/{pod.name}"
    path = f"pods.{pod.name}.nics.{nic.name}"
    origin = Origin("macvlan", f"{attachment.mode} mode on {attachment.master}", subject, path)
    prefix = nic.coordinator.pod_mac_prefix if nic.coordinator else ""
    address = nic.address.ip
    yield Macvlan(
        netns=pod.name,
        origin=origin,
        name=nic.name,
        mac=prefixed_mac(prefix, address) if prefix else mac(pod.name, nic.name),
        mtu=attachment.mtu,
        lower_netns=pod.node,
        lower=attachment.master,
        mode=attachment.mode,
    )
    ipam = Origin("macvlan", f"address from {attachment.subnet}", subject, path)
    yield Address(netns=pod.name, origin=ipam, dev=nic.name, address=nic.address)
    if attachment.gateway:
        first = nic is pod.nics[0]
        yield Route(
            netns=pod.name,
            origin=Origin("macvlan", "default route of the attachment", subject, path),
            dst=EVERYWHERE,
            via=attachment.gateway,
            dev=nic.name,
            place="add" if first else nic.default_route,
        )
