"""The settings of the cluster's components, and the user's raw objects, as JSON Schema."""

from __future__ import annotations

from netlab.spec.vocabulary import (
    MTU,
    PORT,
    SYSCTLS,
    TABLE,
    Schema,
    address,
    choice,
    flag,
    integer,
    list_of,
    named,
    network,
    record,
    text,
    version,
)


def _raw(when: str) -> Schema:
    route = record(
        "A route as in `ip route`.",
        ("dst",),
        dst=text("Prefix, or default.", "a network or default", format="route"),
        dev=text("Device."),
        via=address("Next hop."),
        src=address("Preferred source."),
        table=TABLE,
        type=choice("Kind.", "unicast", "blackhole", "unreachable", "prohibit"),
        scope=choice("Scope.", "global", "link", "host"),
        onlink=flag("Next hop is on the link even if no route says so."),
        metric=integer("Metric.", 0, 2**32 - 1),
        mtu=MTU,
        place=choice("How it joins equal routes.", "add", "append", "prepend"),
    )
    rule = record(
        "A policy rule as in `ip rule`.",
        ("table",),
        table=TABLE,
        priority=integer(
            "Priority; left out: the kernel takes one below the lowest.", 0, 2**32 - 1
        ),
        **{
            "from": network("Source prefix."),
            "to": network("Destination prefix."),
            "fwmark": {
                "type": ["integer", "string"],
                "minimum": 0,
                "maximum": 2**32 - 1,
                "pattern": "^0x[0-9A-Fa-f]{1,8}$",
                "description": "Packet mark.",
                "expected": "a mark such as 1 or 0x1",
            },
            "iif": text("Incoming device."),
        },
    )
    neighbour = record(
        "A permanent ARP entry.",
        ("address", "dev", "mac"),
        address=address("Whose."),
        dev=text("Device."),
        mac=text("MAC address.", "a MAC address such as 02:00:00:00:00:01", format="mac-address"),
    )
    return record(
        f"Objects {when} the components' own.",
        sysctls=SYSCTLS,
        routes=list_of(route, "Routes."),
        rules=list_of(rule, "Policy rules."),
        neighbours=list_of(neighbour, "Permanent neighbours."),
        iptables=list_of(
            text("One rule.", "a rule such as -t filter -A FORWARD -s 10.0.0.1 -j DROP"),
            "Rules as iptables-save prints them, with their table in front; -I inserts.",
        ),
    )


def extra() -> Schema:
    return record(
        "Raw objects of your own: reproduce a bug, inject a fault.",
        before=_raw("before"),
        after=_raw("after"),
    )


def coordinator() -> Schema:
    cidrs = list_of(network("A CIDR."), "CIDRs that are routed to the node.")
    auto: Schema = {
        "type": ["string", "array"],
        "items": network("A CIDR."),
        "pattern": "^auto$",
        "expected": "auto or a list of CIDRs",
    }
    return record(
        "Spiderpool's coordinator (SpiderCoordinator, or the plugin's own configuration).",
        behaviour=choice(
            "Which code: released is v1.1.2 to v1.2.2.", "released", "pr5683-rev1", "none"
        ),
        podDefaultRouteNIC=text(
            "NIC that keeps the default route. Default '': the one that has it."
        ),
        tunePodRoutes=flag("Move routes of further NICs into tables of their own. Default true."),
        hostRuleTable=integer(
            "The node's table of routes to underlay Pods. Default 500.", 1, 2**31 - 1
        ),
        podRPFilter=integer("rp_filter in the Pod; negative leaves it alone. Default 0.", -1, 2),
        overlayPodCIDR={**auto, "description": "Pod CIDRs; auto: every Calico pool not disabled."},
        serviceCIDR={**auto, "description": "Service CIDRs; auto: the cluster's."},
        hijackCIDR={
            **cidrs,
            "description": "Further CIDRs routed to the node. Default [169.254.0.0/16].",
        },
        markRules=flag("Answer by veth0 what came in by it (PR 2078). Default true."),
        sourceRules=flag("Rule and table 100 for eth0's address (PR 3686). Default true."),
        vethLinkAddress=address("Address on the Pod's veth0, for REDIRECT."),
        vethMTU={**MTU, "description": "MTU of veth0. Default 1500."},
        podMACPrefix=text(
            "First two bytes of the NIC's MAC.",
            "two bytes such as 0a:1b, the first even",
            pattern="^[0-9A-Fa-f][02468ACEace]:[0-9A-Fa-f]{2}$",
        ),
        policyRoutes=list_of(
            record("A route of the NIC.", ("dst", "gw"), dst=network("To."), gw=address("By.")),
            "Static routes by the NIC.",
        ),
    )


def _calico(*, of_node: bool) -> Schema:
    encapsulations = ("VXLAN", "VXLANCrossSubnet", "IPIP", "IPIPCrossSubnet", "None")
    pool = record(
        "An IPPool.",
        ("cidr",),
        cidr=network("The pool."),
        natOutgoing=flag("Masquerade what leaves all pools. Default: calico.natOutgoing."),
        disabled=flag("No new addresses from it. Default false."),
        blockSize=integer("Prefix length of a node's block. Default 26.", 20, 32),
    )
    felix = record(
        "FelixConfiguration.",
        disableConntrackInvalidCheck=flag("No INVALID drop in workload chains. Default false."),
        chainInsertMode=choice("Where Felix hooks in. Default Insert.", "Insert", "Append"),
        defaultEndpointToHostAction=choice(
            "Pod to its own node. Default Accept.", "Accept", "Drop", "Return"
        ),
        allowVXLANPacketsFromWorkloads=flag("Default false."),
        allowIPIPPacketsFromWorkloads=flag("Default false."),
        vxlanVNI=integer("Default 4096.", 1, 2**24 - 1),
        vxlanPort={**PORT, "description": "Default 4789."},
    )
    return record(
        "Calico.",
        version=version("Default v3.30; v3.27 to v3.32."),
        encapsulation=choice("Between nodes. Default VXLAN.", *encapsulations),
        natOutgoing=flag("Of pools that do not say it themselves. Default true."),
        mtu={**MTU, "description": "Of Pods' veths and the tunnel. Default 1450."},
        felix=felix,
        **({} if of_node else {"ipPools": named("Pools, instead of podCIDR alone.", pool)}),
    )


def _kube_proxy() -> Schema:
    schema = record(
        "kube-proxy; false or null: none runs.",
        version=version("Default v1.33; v1.24 to v1.36."),
        mode=choice("Default iptables.", "iptables", "nftables", "ipvs"),
        clusterCIDR={
            "type": ["string", "null"],
            "format": "network",
            "description": "Tells Pods' traffic. Default podCIDR, else the first pool; "
            "null: no detector, so that off-cluster clients are not masqueraded.",
            "expected": "an IPv4 network or null",
        },
        masqueradeAll=flag("Masquerade every ClusterIP client. Default false."),
        conntrack=record(
            "Conntrack settings.",
            tcpBeLiberal=flag("Set nf_conntrack_tcp_be_liberal first. Default false."),
        ),
        localhostNodePorts=flag("NodePorts on 127.0.0.1. Default true."),
        nodePortAddresses=list_of(
            network("A CIDR."), "Addresses that serve NodePorts. Default: all."
        ),
        sysctlAtStart={
            **SYSCTLS,
            "description": "What kube-proxy read when it started. Default: cluster.sysctl.",
        },
    )
    return {**schema, "type": ["object", "boolean", "null"], "expected": "a mapping, or false"}


def cluster_settings(*, of_node: bool = False) -> dict[str, Schema]:
    return {
        "iptablesBackend": choice("iptables-nft or iptables-legacy. Default NFT.", "NFT", "Legacy"),
        "calico": _calico(of_node=of_node),
        "kubeProxy": _kube_proxy(),
        "spiderpool": record("Spiderpool.", coordinator=coordinator()),
        "sysctl": {**SYSCTLS, "description": "Sysctls of every node, after all components."},
    }
