"""Names, MAC addresses and address blocks that follow from a lab alone, so that they never vary.

Where a real component derives a value, it is derived in the same way; where the real value is
random (a veth's MAC, a container ID), it is hashed from the owner's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv4Network

from netlab.plan import LINK_NAME_MAX


def cali_interface(namespace: str, pod: str) -> str:
    """Host side of a Calico Pod's veth (Calico CNI plugin, ``VethNameForWorkload``).

    ``cali`` and the first 11 hex digits of sha1("namespace.pod").
    """
    return "cali" + hashlib.sha1(f"{namespace}.{pod}".encode()).hexdigest()[:11]  # noqa: S324 - Calico's choice


def sandbox_interface(namespace: str, pod: str) -> str:
    """Host side of the coordinator's veth: ``veth`` and 11 digits of the sandbox container ID.

    Real IDs are random; here they are the SHA-256 of the Pod's name.
    """
    return "veth" + hashlib.sha256(f"{namespace}/{pod}".encode()).hexdigest()[:11]


def vtep_mac(node: str) -> str:
    """MAC of vxlan.calico: 66 and the first 5 bytes of sha1(node name) (Felix, vxlan_mgr.go)."""
    digest = hashlib.sha1(node.encode()).digest()  # noqa: S324 - Felix' choice
    return ":".join(f"{byte:02x}" for byte in (0x66, *digest[:5]))


def mac(netns: str, device: str) -> str:
    """A locally administered unicast MAC, the same for the same device of every instance."""
    digest = hashlib.sha256(f"{netns}/{device}".encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (0x02, *digest[:5]))


def port_name(netns: str, device: str) -> str:
    """Name of the switch port that *device* of *netns* is plugged into: ``node1.eth0``.

    Over 15 characters, the tail gives way to a hash, so that two long names stay apart.
    """
    name = f"{netns}.{device}"
    if len(name) <= LINK_NAME_MAX:
        return name
    return f"{name[:8]}.{hashlib.sha256(name.encode()).hexdigest()[: LINK_NAME_MAX - 9]}"


def node_blocks(
    pool: IPv4Network,
    block_size: int,
    nodes: Iterable[str],
    given: Iterable[tuple[str, IPv4Address]],
) -> Mapping[str, tuple[IPv4Network, ...]]:
    """Affine Calico blocks of each node, by node, in order of allocation.

    Args:
        pool: the IPPool's CIDR.
        block_size: prefix length of a block.
        nodes: every node; one without a block gets the lowest free one for its tunnel address.
        given: (node, address) of Pods whose address the lab fixes, in file order; the first Pod
            in a block makes the block affine to its node, later Pods of other nodes borrow.
    """
    owner: dict[IPv4Network, str] = {}
    for node, address in given:
        if address in pool:
            owner.setdefault(IPv4Network((address, block_size), strict=False), node)
    free = (block for block in pool.subnets(new_prefix=block_size) if block not in owner)
    for node in nodes:
        if node not in owner.values():
            block = next(free, None)
            if block is not None:
                owner[block] = node
    names = dict.fromkeys(owner.values())
    return {name: tuple(b for b, node in owner.items() if node == name) for name in names}


def free_addresses(network: IPv4Network, taken: Iterable[IPv4Address]) -> Iterator[IPv4Address]:
    """Host addresses of *network* that are not *taken*, lowest first."""
    used = set(taken)
    return (address for address in network.hosts() if address not in used)
