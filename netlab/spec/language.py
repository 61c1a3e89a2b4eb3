"""The lab language as JSON Schema (draft 2020-12), with what each field means.

One description serves three: the validator, editors (``schema`` prints it) and the reference.
``expected`` says in a message what would have been right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any, TypeAlias

from netlab.model import Version

Schema: TypeAlias = dict[str, Any]

LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
"""RFC 1123, as Kubernetes names Pods and nodes."""

SERVICE = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"
"""RFC 1035, as Kubernetes names Services: never mistaken for a port."""

INSTANCE = r"^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$"
DEVICE = r"^[A-Za-z0-9_][-A-Za-z0-9_.]{0,14}$"
ALLOW = ("duplicate-address", "foreign-address", "overlapping-cidr")


def formats() -> Mapping[str, Callable[[str], bool]]:
    """Format name -> whether a text is one."""
    return {
        "address": _accepts(IPv4Address),
        "interface": _accepts(IPv4Interface),
        "cluster-ip": lambda text: text == "None" or _accepts(IPv4Address)(text),
        "network": _accepts(IPv4Network),
        "route": lambda text: text == "default" or _accepts(IPv4Network)(text),
        "version": _accepts(Version.parse),
        "mac-address": lambda text: bool(re.fullmatch(r"([0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}", text)),
    }


def _accepts(parse: Callable[[str], object]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    return check


def _text(description: str, expected: str = "text", **more: object) -> Schema:
    return {"type": "string", "description": description, "expected": expected, **more}


def _address(description: str) -> Schema:
    return _text(description, "an IPv4 address such as 172.16.1.2", format="address")


def _interface(description: str) -> Schema:
    expected = "an IPv4 address such as 172.16.1.2 or 172.16.1.2/16"
    return _text(description, expected, format="interface")


def _network(description: str) -> Schema:
    expected = "an IPv4 network such as 172.16.0.0/16, host bits zero"
    return _text(description, expected, format="network")


def _version(description: str) -> Schema:
    return _text(description, "a version such as v1.28 or v1.28.3", format="version")


def _flag(description: str) -> Schema:
    return {"type": "boolean", "description": description, "expected": "true or false"}


def _integer(description: str, low: int, high: int) -> Schema:
    return {
        "type": "integer",
        "minimum": low,
        "maximum": high,
        "description": description,
        "expected": f"an integer {low}..{high}",
    }


def _choice(description: str, *values: str) -> Schema:
    return {
        "enum": list(values),
        "description": description,
        "expected": "one of: " + ", ".join(values),
    }


def _list(items: Schema, description: str, **more: object) -> Schema:
    return {
        "type": "array",
        "items": items,
        "description": description,
        "expected": "a list",
        **more,
    }


def _object(description: str, required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "description": description,
        "expected": "a mapping",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _named(description: str, value: Schema, pattern: str = LABEL, **more: object) -> Schema:
    """A mapping from names to *value*."""
    what = {
        LABEL: "a name of a-z, 0-9 and '-', at most 63 characters",
        SERVICE: "a name of a-z, 0-9 and '-' that starts with a letter, at most 63 characters",
        DEVICE: "a device name of at most 15 characters",
    }[pattern]
    return {
        "type": "object",
        "description": description,
        "expected": "a mapping from names",
        "propertyNames": {"pattern": pattern, "expected": what},
        "additionalProperties": value,
        **more,
    }


_PORT = _integer("Port number.", 1, 65535)
_MTU = _integer("Largest packet in bytes.", 68, 65535)
_TABLE = {
    "type": ["integer", "string"],
    "description": "Routing table: main or a number.",
    "expected": "main or a table number",
}
_SYSCTLS: Schema = {
    "type": "object",
    "description": "Sysctls of the namespace, dotted; a device's own dots written '/'.",
    "expected": "a mapping from sysctl names to values",
    "propertyNames": {
        "pattern": r"^net(\.[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*){2,}$",
        "expected": "a sysctl of a network namespace, such as net.ipv4.conf.eth0/100.rp_filter",
    },
    "additionalProperties": {
        "type": ["integer", "string"],
        "expected": "a number or text",
    },
}
_COMMAND = _list(
    {"type": "string", "expected": "text"},
    "A program of your own instead of the built-in server: its argv, run without a shell.",
)


def _raw(when: str) -> Schema:
    route = _object(
        "A route as in `ip route`.",
        ("dst",),
        dst=_text("Prefix, or default.", "a network or default", format="route"),
        dev=_text("Device."),
        via=_address("Next hop."),
        src=_address("Preferred source."),
        table=_TABLE,
        type=_choice("Kind.", "unicast", "blackhole", "unreachable", "prohibit"),
        scope=_choice("Scope.", "global", "link", "host"),
        onlink=_flag("Next hop is on the link even if no route says so."),
        metric=_integer("Metric.", 0, 2**32 - 1),
        mtu=_MTU,
        place=_choice("How it joins equal routes.", "add", "append", "prepend"),
    )
    rule = _object(
        "A policy rule as in `ip rule`.",
        ("table",),
        table=_TABLE,
        priority=_integer(
            "Priority; left out: the kernel takes one below the lowest.", 0, 2**32 - 1
        ),
        **{
            "from": _network("Source prefix."),
            "to": _network("Destination prefix."),
            "fwmark": {
                "type": ["integer", "string"],
                "minimum": 0,
                "maximum": 2**32 - 1,
                "pattern": "^0x[0-9A-Fa-f]{1,8}$",
                "description": "Packet mark.",
                "expected": "a mark such as 1 or 0x1",
            },
            "iif": _text("Incoming device."),
        },
    )
    neighbour = _object(
        "A permanent ARP entry.",
        ("address", "dev", "mac"),
        address=_address("Whose."),
        dev=_text("Device."),
        mac=_text("MAC address.", "a MAC address such as 02:00:00:00:00:01", format="mac-address"),
    )
    return _object(
        f"Objects {when} the components' own.",
        sysctls=_SYSCTLS,
        routes=_list(route, "Routes."),
        rules=_list(rule, "Policy rules."),
        neighbours=_list(neighbour, "Permanent neighbours."),
        iptables=_list(
            _text("One rule.", "a rule such as -t filter -A FORWARD -s 10.0.0.1 -j DROP"),
            "Rules as iptables-save prints them, with their table in front; -I inserts.",
        ),
    )


def _extra() -> Schema:
    return _object(
        "Raw objects of your own: reproduce a bug, inject a fault.",
        before=_raw("before"),
        after=_raw("after"),
    )


def _coordinator() -> Schema:
    cidrs = _list(_network("A CIDR."), "CIDRs that are routed to the node.")
    auto: Schema = {
        "type": ["string", "array"],
        "items": _network("A CIDR."),
        "pattern": "^auto$",
        "expected": "auto or a list of CIDRs",
    }
    return _object(
        "Spiderpool's coordinator (SpiderCoordinator, or the plugin's own configuration).",
        behaviour=_choice(
            "Which code: released is v1.1.2 to v1.2.2.", "released", "pr5683-rev1", "none"
        ),
        podDefaultRouteNIC=_text(
            "NIC that keeps the default route. Default '': the one that has it."
        ),
        tunePodRoutes=_flag("Move routes of further NICs into tables of their own. Default true."),
        hostRuleTable=_integer(
            "The node's table of routes to underlay Pods. Default 500.", 1, 2**31 - 1
        ),
        podRPFilter=_integer("rp_filter in the Pod; negative leaves it alone. Default 0.", -1, 2),
        overlayPodCIDR={**auto, "description": "Pod CIDRs; auto: every Calico pool not disabled."},
        serviceCIDR={**auto, "description": "Service CIDRs; auto: the cluster's."},
        hijackCIDR={
            **cidrs,
            "description": "Further CIDRs routed to the node. Default [169.254.0.0/16].",
        },
        markRules=_flag("Answer by veth0 what came in by it (PR 2078). Default true."),
        sourceRules=_flag("Rule and table 100 for eth0's address (PR 3686). Default true."),
        vethLinkAddress=_address("Address on the Pod's veth0, for REDIRECT."),
        vethMTU={**_MTU, "description": "MTU of veth0. Default 1500."},
        podMACPrefix=_text(
            "First two bytes of the NIC's MAC.",
            "two bytes such as 0a:1b, the first even",
            pattern="^[0-9A-Fa-f][02468ACEace]:[0-9A-Fa-f]{2}$",
        ),
        policyRoutes=_list(
            _object("A route of the NIC.", ("dst", "gw"), dst=_network("To."), gw=_address("By.")),
            "Static routes by the NIC.",
        ),
    )


def _calico(*, of_node: bool) -> Schema:
    encapsulations = ("VXLAN", "VXLANCrossSubnet", "IPIP", "IPIPCrossSubnet", "None")
    pool = _object(
        "An IPPool.",
        ("cidr",),
        cidr=_network("The pool."),
        natOutgoing=_flag("Masquerade what leaves all pools. Default: calico.natOutgoing."),
        disabled=_flag("No new addresses from it. Default false."),
        blockSize=_integer("Prefix length of a node's block. Default 26.", 20, 32),
    )
    felix = _object(
        "FelixConfiguration.",
        disableConntrackInvalidCheck=_flag("No INVALID drop in workload chains. Default false."),
        chainInsertMode=_choice("Where Felix hooks in. Default Insert.", "Insert", "Append"),
        defaultEndpointToHostAction=_choice(
            "Pod to its own node. Default Accept.", "Accept", "Drop", "Return"
        ),
        allowVXLANPacketsFromWorkloads=_flag("Default false."),
        allowIPIPPacketsFromWorkloads=_flag("Default false."),
        vxlanVNI=_integer("Default 4096.", 1, 2**24 - 1),
        vxlanPort={**_PORT, "description": "Default 4789."},
    )
    return _object(
        "Calico.",
        version=_version("Default v3.30; v3.27 to v3.32."),
        encapsulation=_choice("Between nodes. Default VXLAN.", *encapsulations),
        natOutgoing=_flag("Of pools that do not say it themselves. Default true."),
        mtu={**_MTU, "description": "Of Pods' veths and the tunnel. Default 1450."},
        felix=felix,
        **({} if of_node else {"ipPools": _named("Pools, instead of podCIDR alone.", pool)}),
    )


def _kube_proxy() -> Schema:
    schema = _object(
        "kube-proxy; false or null: none runs.",
        version=_version("Default v1.33; v1.24 to v1.36."),
        mode=_choice("Default iptables.", "iptables", "nftables", "ipvs"),
        clusterCIDR={
            "type": ["string", "null"],
            "format": "network",
            "description": "Tells Pods' traffic. Default podCIDR, else the first pool; "
            "null: no detector, so that off-cluster clients are not masqueraded.",
            "expected": "an IPv4 network or null",
        },
        masqueradeAll=_flag("Masquerade every ClusterIP client. Default false."),
        conntrack=_object(
            "Conntrack settings.",
            tcpBeLiberal=_flag("Set nf_conntrack_tcp_be_liberal first. Default false."),
        ),
        localhostNodePorts=_flag("NodePorts on 127.0.0.1. Default true."),
        nodePortAddresses=_list(
            _network("A CIDR."), "Addresses that serve NodePorts. Default: all."
        ),
        sysctlAtStart={
            **_SYSCTLS,
            "description": "What kube-proxy read when it started. Default: cluster.sysctl.",
        },
    )
    return {**schema, "type": ["object", "boolean", "null"], "expected": "a mapping, or false"}


def _cluster_settings(*, of_node: bool = False) -> dict[str, Schema]:
    return {
        "iptablesBackend": _choice(
            "iptables-nft or iptables-legacy. Default NFT.", "NFT", "Legacy"
        ),
        "calico": _calico(of_node=of_node),
        "kubeProxy": _kube_proxy(),
        "spiderpool": _object("Spiderpool.", coordinator=_coordinator()),
        "sysctl": {**_SYSCTLS, "description": "Sysctls of every node, after all components."},
    }


def _underlay() -> Schema:
    router = {
        "type": "object",
        "description": "Addresses by network, one NIC each (eth0, eth1, ...), and forwarding.",
        "expected": "a mapping from networks to addresses",
        "properties": {
            "sendRedirects": _flag("Send ICMP redirects. Default false."),
            "extra": _extra(),
        },
        "additionalProperties": _list(
            _interface("Address on the network."), "Addresses.", minItems=1
        ),
    }
    return _object(
        "The world around the cluster.",
        ("networks",),
        networks=_named(
            "L2 segments (switches).",
            _object(
                "One wire.",
                ("subnets",),
                subnets=_list(_network("A subnet."), "Subnets on this wire.", minItems=1),
                mtu=_MTU,
                extra=_extra(),
            ),
        ),
        routers=_named("Routers.", router),
        hosts=_named(
            "Machines outside the cluster.",
            _object(
                "A machine with one NIC, eth0.",
                ("network", "address"),
                network=_text("The network that it is plugged into.", "the name of a network"),
                address=_interface("Its address; the subnet's length unless it has its own."),
                gateway={
                    **_address("Default route. Default: the router in its subnet; null: none."),
                    "type": ["string", "null"],
                },
                ports=_list(_PORT, "Ports that the server listens on, beside 80."),
                command=_COMMAND,
                extra=_extra(),
            ),
        ),
    )


def _nodes() -> Schema:
    nic = _object(
        "A NIC: plugged into a network, or a VLAN of another NIC.",
        network=_text("The network.", "the name of a network"),
        address=_interface("Its address, with the subnet's length unless given. Default: none."),
        link=_text("Parent NIC of a VLAN.", "the name of a NIC"),
        vlan=_integer("VLAN id.", 1, 4094),
        mtu=_MTU,
    )
    return _named(
        "Nodes; any cluster setting may be repeated for one of them.",
        _object(
            "A node.",
            ("nics",),
            nics=_named("NICs in the order of their creation.", nic, DEVICE, minProperties=1),
            gateway={
                **_address("Default route. Default: the router in its subnet; null: none."),
                "type": ["string", "null"],
            },
            extra=_extra(),
            **_cluster_settings(of_node=True),
        ),
    )


def _attachments() -> Schema:
    coordinator = {
        **_coordinator(),
        "type": ["object", "boolean"],
        "expected": "a mapping, or false for none",
    }
    return _named(
        "NetworkAttachmentDefinitions.",
        _object(
            "A main CNI, then the coordinator.",
            ("cni", "master", "subnet"),
            cni=_choice("The main CNI.", "macvlan"),
            master=_text("The node's NIC beneath.", "the name of a node's NIC"),
            mode=_choice("macvlan mode. Default bridge.", "bridge", "private", "vepa", "passthru"),
            subnet=_network("Addresses of its Pods."),
            gateway={
                **_address("Default route. Default: the router in the subnet; null: none."),
                "type": ["string", "null"],
            },
            mtu=_MTU,
            coordinator=coordinator,
        ),
    )


def _pods() -> Schema:
    nic = _object(
        "A NIC.",
        ("attach",),
        attach=_text(
            "calico, or a networkAttachment.", "calico or the name of a networkAttachment"
        ),
        address=_interface(
            "Its address. Default: the next free one of the node's Calico block (the tunnel has "
            "the block's first), or of the attachment's subnet."
        ),
        defaultRoute=_choice(
            "How a further NIC's default joins. Default prepend.", "add", "append", "prepend"
        ),
    )
    return _named(
        "Pods, in the order of their creation.",
        _object(
            "A Pod.",
            ("node", "nics"),
            namespace=_text("Default 'default'.", "a name of a-z, 0-9 and '-'", pattern=LABEL),
            node=_text("Where it runs.", "the name of a node"),
            nics=_named("NICs in order.", nic, DEVICE, minProperties=1),
            coordinator={
                **_coordinator(),
                "description": "What its annotation says of the coordinator: wins over the "
                "cluster and the node, not over the attachment.",
            },
            ports=_list(_PORT, "Ports that the server listens on, beside 80 and targetPorts."),
            command=_COMMAND,
            extra=_extra(),
        ),
    )


def _services() -> Schema:
    port = _object(
        "A port.",
        ("port",),
        name=_text(
            "Name.", "a name of a-z, 0-9 and '-'", pattern="^[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$"
        ),
        protocol=_choice("Default TCP.", "TCP", "UDP", "SCTP"),
        port={**_PORT, "description": "Of the ClusterIP."},
        targetPort={**_PORT, "description": "Of the Pods. Default: port."},
        nodePort={
            **_PORT,
            "description": "Of the nodes. Default: the next free one from 30086, where Kubernetes "
            "begins to choose by itself.",
        },
    )
    endpoint = {
        "type": ["string", "object"],
        "description": "A Pod (its first NIC), or one NIC of it with its conditions.",
        "expected": "the name of a Pod, or a mapping with pod",
        "properties": {
            "pod": _text("The Pod.", "the name of a Pod"),
            "nic": _text("Its NIC. Default: the first.", "the name of a NIC"),
            "ready": _flag("Default true."),
            "serving": _flag("Default: as ready."),
            "terminating": _flag("Default false."),
        },
        "required": ["pod"],
        "additionalProperties": False,
    }
    return _named(
        "Services.",
        pattern=SERVICE,
        value=_object(
            "A Service.",
            ("ports",),
            namespace=_text("Default 'default'.", "a name of a-z, 0-9 and '-'", pattern=LABEL),
            type=_choice("Default ClusterIP.", "ClusterIP", "NodePort", "LoadBalancer"),
            clusterIP=_text(
                "None: headless. Default: the next free one of serviceCIDR, beyond its first 256, "
                "which Kubernetes leaves to addresses that are given.",
                "an IPv4 address such as 10.233.0.100, or None",
                format="cluster-ip",
            ),
            ports=_list(port, "Ports.", minItems=1),
            endpoints=_list(endpoint, "Endpoints. Default: none."),
            externalTrafficPolicy=_choice("Default Cluster.", "Cluster", "Local"),
            internalTrafficPolicy=_choice("Default Cluster.", "Cluster", "Local"),
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
            "in": _text("Where.", "the name of a node, Pod, host, router or network"),
            "route": _text(
                "An address (`ip route get`), or a prefix or default (a table's entry)."
            ),
            "rule": _object(
                "A policy rule: every word given must be as given.",
                **dict.fromkeys(STATE_FIELDS["rule"], scalar),
            ),
            "link": _text("A device."),
            "neighbour": _address("Whose ARP entry."),
            "absent": _flag("It must not be there."),
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
    entry = _object(
        "What must come out.",
        ("id",),
        id=_text(
            "Unique; a variant's entry of the same id replaces the base's.",
            "a word",
            pattern=r"^\S+$",
        ),
        probe=_text("[ping|curl|tcp|udp] SRC -> TARGET", "a probe such as curl ma1 -> ca2"),
        state=state,
        result=_choice("Default delivered.", "delivered", "rejected", "dropped"),
        seenAs=_text("Source that the server saw: a name, name.device, or an address."),
        at=_text("Where it dies.", "the name of a node, Pod, host, router or network"),
        by=_text("What kills it: component/reason.", "component/reason"),
        hops=_integer("Routers that the request passes.", 0, 63),
        count=_integer("Run it that many times in a row. Default 1.", 1, 100),
        control=_text(
            "Expectation whose delivery proves a negative one.", "the id of an expectation"
        ),
        why=_text("Why, in a sentence."),
        tags=_list(_text("A tag."), "Tags for --select."),
    )
    return _list(entry, "Expectations: they make the lab a test.")


@cache
def schema() -> Schema:
    """The whole language."""
    cluster = _object(
        "Settings of the cluster.",
        podCIDR=_network("Pods' addresses: Calico's pool, unless calico.ipPools has others."),
        serviceCIDR=_network("ClusterIPs."),
        **_cluster_settings(),
    )
    variant = _object(
        "A named change.",
        title=_text("One line for people."),
        set={
            "type": "object",
            "description": "Setting path -> value; null removes it.",
            "expected": "a mapping from setting paths to values",
        },
        expect=_expectations(),
    )
    root = _object(
        "A lab: a topology, the settings of its components, and what must come out.",
        ("name", "underlay"),
        name=_text(
            "The lab's name.",
            "a name of a-z, 0-9 and '-', at most 42 characters",
            pattern=INSTANCE,
        ),
        title=_text("One line for people."),
        underlay=_underlay(),
        cluster=cluster,
        nodes=_nodes(),
        networkAttachments=_attachments(),
        pods=_pods(),
        services=_services(),
        expect=_expectations(),
        variants=_named("Variants.", variant),
        allow=_list(_choice("What the lab does wrong on purpose.", *ALLOW), "Checks that are off."),
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "netlab", **root}
