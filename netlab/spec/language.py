"""The lab language as JSON Schema (draft 2020-12), with what each field means.

One description serves three: the validator, editors (``schema`` prints it) and the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from netlab.spec.components import cluster_settings, coordinator, extra
from netlab.spec.vocabulary import (
    COMMAND,
    DEVICE,
    INSTANCE,
    LABEL,
    MTU,
    PORT,
    SERVICE,
    Schema,
    address,
    choice,
    flag,
    integer,
    interface,
    list_of,
    named,
    network,
    record,
    text,
)

ALLOW = ("duplicate-address", "foreign-address", "overlapping-cidr")


def _underlay() -> Schema:
    router = {
        "type": "object",
        "description": "Addresses by network, one NIC each (eth0, eth1, ...), and forwarding.",
        "expected": "a mapping from networks to addresses",
        "properties": {
            "sendRedirects": flag("Send ICMP redirects. Default false."),
            "extra": extra(),
        },
        "additionalProperties": list_of(
            interface("Address on the network."), "Addresses.", minItems=1
        ),
    }
    return record(
        "The world around the cluster.",
        ("networks",),
        networks=named(
            "L2 segments (switches).",
            record(
                "One wire.",
                ("subnets",),
                subnets=list_of(network("A subnet."), "Subnets on this wire.", minItems=1),
                mtu=MTU,
                extra=extra(),
            ),
        ),
        routers=named("Routers.", router),
        hosts=named(
            "Machines outside the cluster.",
            record(
                "A machine with one NIC, eth0.",
                ("network", "address"),
                network=text("The network that it is plugged into.", "the name of a network"),
                address=interface("Its address; the subnet's length unless it has its own."),
                gateway={
                    **address("Default route. Default: the router in its subnet; null: none."),
                    "type": ["string", "null"],
                },
                ports=list_of(PORT, "Ports that the server listens on, beside 80."),
                command=COMMAND,
                extra=extra(),
            ),
        ),
    )


def _nodes() -> Schema:
    nic = record(
        "A NIC: plugged into a network, or a VLAN of another NIC.",
        network=text("The network.", "the name of a network"),
        address=interface("Its address, with the subnet's length unless given. Default: none."),
        link=text("Parent NIC of a VLAN.", "the name of a NIC"),
        vlan=integer("VLAN id.", 1, 4094),
        mtu=MTU,
    )
    return named(
        "Nodes; any cluster setting may be repeated for one of them.",
        record(
            "A node.",
            ("nics",),
            nics=named("NICs in the order of their creation.", nic, DEVICE, minProperties=1),
            gateway={
                **address("Default route. Default: the router in its subnet; null: none."),
                "type": ["string", "null"],
            },
            extra=extra(),
            **cluster_settings(of_node=True),
        ),
    )


def _attachments() -> Schema:
    chained = {
        **coordinator(),
        "type": ["object", "boolean"],
        "expected": "a mapping, or false for none",
    }
    return named(
        "NetworkAttachmentDefinitions.",
        record(
            "A main CNI, then the coordinator.",
            ("cni", "master", "subnet"),
            cni=choice("The main CNI.", "macvlan"),
            master=text("The node's NIC beneath.", "the name of a node's NIC"),
            mode=choice("macvlan mode. Default bridge.", "bridge", "private", "vepa", "passthru"),
            subnet=network("Addresses of its Pods."),
            gateway={
                **address("Default route. Default: the router in the subnet; null: none."),
                "type": ["string", "null"],
            },
            mtu=MTU,
            coordinator=chained,
        ),
    )


def _pods() -> Schema:
    nic = record(
        "A NIC.",
        ("attach",),
        attach=text("calico, or a networkAttachment.", "calico or the name of a networkAttachment"),
        address=interface(
            "Its address. Default: the next free one of the node's Calico block (the tunnel has "
            "the block's first), or of the attachment's subnet."
        ),
        defaultRoute=choice(
            "How a further NIC's default joins. Default prepend.", "add", "append", "prepend"
        ),
    )
    return named(
        "Pods, in the order of their creation.",
        record(
            "A Pod.",
            ("node", "nics"),
            namespace=text("Default 'default'.", "a name of a-z, 0-9 and '-'", pattern=LABEL),
            node=text("Where it runs.", "the name of a node"),
            nics=named("NICs in order.", nic, DEVICE, minProperties=1),
            coordinator={
                **coordinator(),
                "description": "What its annotation says of the coordinator: wins over the "
                "cluster and the node, not over the attachment.",
            },
            ports=list_of(PORT, "Ports that the server listens on, beside 80 and targetPorts."),
            command=COMMAND,
            extra=extra(),
        ),
    )


def _services() -> Schema:
    port = record(
        "A port.",
        ("port",),
        name=text(
            "Name.", "a name of a-z, 0-9 and '-'", pattern="^[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$"
        ),
        protocol=choice("Default TCP.", "TCP", "UDP", "SCTP"),
        port={**PORT, "description": "Of the ClusterIP."},
        targetPort={**PORT, "description": "Of the Pods. Default: port."},
        nodePort={
            **PORT,
            "description": "Of the nodes. Default: the next free one from 30086, where Kubernetes "
            "begins to choose by itself.",
        },
    )
    endpoint = {
        "type": ["string", "object"],
        "description": "A Pod (its first NIC), or one NIC of it with its conditions.",
        "expected": "the name of a Pod, or a mapping with pod",
        "properties": {
            "pod": text("The Pod.", "the name of a Pod"),
            "nic": text("Its NIC. Default: the first.", "the name of a NIC"),
            "ready": flag("Default true."),
            "serving": flag("Default: as ready."),
            "terminating": flag("Default false."),
        },
        "required": ["pod"],
        "additionalProperties": False,
    }
    return named(
        "Services.",
        pattern=SERVICE,
        value=record(
            "A Service.",
            ("ports",),
            namespace=text("Default 'default'.", "a name of a-z, 0-9 and '-'", pattern=LABEL),
            type=choice("Default ClusterIP.", "ClusterIP", "NodePort", "LoadBalancer"),
            clusterIP=text(
                "None: headless. Default: the next free one of serviceCIDR, beyond its first 256, "
                "which Kubernetes leaves to addresses that are given.",
                "an IPv4 address such as 10.233.0.100, or None",
                format="cluster-ip",
            ),
            ports=list_of(port, "Ports.", minItems=1),
            endpoints=list_of(endpoint, "Endpoints. Default: none."),
            externalTrafficPolicy=choice("Default Cluster.", "Cluster", "Local"),
            internalTrafficPolicy=choice("Default Cluster.", "Cluster", "Local"),
        ),
    )


STATE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "route": (
        *("dev", "via", "src", "table", "from", "mark"),
        *("kind", "proto", "scope", "metric", "mtu", "onlink"),
    ),
    "rule": ("priority", "from", "to", "fwmark", "iif", "oif", "table", "action"),
    "link": ("mac", "mtu", "kind", "up", "qlen", "master", "operstate", "mode", "vlan", "vni"),
    "neighbour": ("dev", "mac", "state"),
}
"""What a state may ask for, by kind, in iproute2's words. A rule's are inside ``rule``."""


def _expectations() -> Schema:
    scalar = {"type": ["integer", "string", "boolean"], "expected": "a word or a number"}
    state = {
        "type": "object",
        "description": "A fact about one namespace: one of route, rule, link, neighbour.",
        "expected": "a mapping",
        "properties": {
            "in": text("Where.", "the name of a node, Pod, host, router or network"),
            "route": text("An address (`ip route get`), or a prefix or default (a table's entry)."),
            "rule": record(
                "A policy rule: every word given must be as given.",
                **dict.fromkeys(STATE_FIELDS["rule"], scalar),
            ),
            "link": text("A device."),
            "neighbour": address("Whose ARP entry."),
            "absent": flag("It must not be there."),
            **{
                name: scalar
                for kind, names in STATE_FIELDS.items()
                for name in names
                if kind != "rule"
            },
        },
        "required": ["in"],
        "additionalProperties": False,
    }
    entry = record(
        "What must come out.",
        ("id",),
        id=text(
            "Unique; a variant's entry of the same id replaces the base's.",
            "a word",
            pattern=r"^\S+$",
        ),
        probe=text("[ping|curl|tcp|udp] SRC -> TARGET", "a probe such as curl ma1 -> ca2"),
        state=state,
        result=choice("Default delivered.", "delivered", "rejected", "dropped"),
        seenAs=text("Source that the server saw: a name, name.device, or an address."),
        at=text("Where it dies.", "the name of a node, Pod, host, router or network"),
        by=text("What kills it: component/reason.", "component/reason"),
        hops=integer("Routers that the request passes.", 0, 63),
        count=integer("Run it that many times in a row. Default 1.", 1, 100),
        control=text(
            "Expectation whose delivery proves a negative one.", "the id of an expectation"
        ),
        why=text("Why, in a sentence."),
        tags=list_of(text("A tag."), "Tags for --select."),
    )
    return list_of(entry, "Expectations: they make the lab a test.")


@cache
def schema() -> Schema:
    """The whole language."""
    cluster = record(
        "Settings of the cluster.",
        podCIDR=network("Pods' addresses: Calico's pool, unless calico.ipPools has others."),
        serviceCIDR=network("ClusterIPs."),
        **cluster_settings(),
    )
    variant = record(
        "A named change.",
        title=text("One line for people."),
        set={
            "type": "object",
            "description": "Setting path -> value; null removes it.",
            "expected": "a mapping from setting paths to values",
        },
        expect=_expectations(),
    )
    root = record(
        "A lab: a topology, the settings of its components, and what must come out.",
        ("name", "underlay"),
        name=text(
            "The lab's name.",
            "a name of a-z, 0-9 and '-', at most 42 characters",
            pattern=INSTANCE,
        ),
        title=text("One line for people."),
        underlay=_underlay(),
        cluster=cluster,
        nodes=_nodes(),
        networkAttachments=_attachments(),
        pods=_pods(),
        services=_services(),
        expect=_expectations(),
        variants=named("Variants.", variant),
        allow=list_of(
            choice("What the lab does wrong on purpose.", *ALLOW), "Checks that are off."
        ),
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "netlab", **root}
