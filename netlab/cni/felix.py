"""Felix' iptables dataplane on one node: ipsets, chains with the hashes of their rules, hooks.

What the chains hold is in `netlab.cni.felix_chains`. Sources: projectcalico/calico
felix/iptables/table.go (hooks), felix/generictables/rules.go (``RuleHashes``) and
felix/dataplane/linux (masq_mgr.go, vxlan_mgr.go, hostip_mgr.go, dscp_mgr.go: the sets), tags
v3.27.0 to v3.32.1.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from netlab.addressing import cali_interface
from netlab.cni.felix_chains import (
    DSCP_SOURCES,
    MASQ_POOLS,
    THIS_HOST,
    VXLAN_NODES,
    Body,
    Endpoint,
    Hooked,
    Renderer,
    Rule,
)
from netlab.model import Lab, Node
from netlab.plan import Chain, Hook, IpSet, IptablesRule, Object, Origin, Table

REASONS: Mapping[str, str] = {
    "invalid": "conntrack knows no connection that the packet fits: the endpoint's chain drops it",
    "rpfilter": "a workload sent it from an address that is not routed to it",
    "unknown-interface": "a cali interface without a workload endpoint",
    "no-profile-matched": "neither policy nor profile accepted it",
    "vxlan-not-allowed": "VXLAN from an address that is no node of this cluster",
    "encapsulated-from-workload": "a workload may not send VXLAN or IPIP of its own",
    "endpoint-to-host": "defaultEndpointToHostAction Drop: a workload's packet to its own node",
}
"""Why Felix' rules drop: reason -> meaning, for the Origins of rules that drop."""

HOOK_ORDER = 10
"""After kube-proxy's: an insert ends up above its jumps, an append below."""

HASH_LENGTH = 16
TABLES: tuple[Table, ...] = ("raw", "mangle", "nat", "filter")
APPENDS = "*appends*"
"""Follows the chain's name in the hashes of rules that Felix always appends (table.go)."""

_CALICO = "cluster.calico"


def rule_hashes(chain: str, rules: Sequence[Rule]) -> list[str]:
    """The hash of each of *rules*, which is the ``cali:…`` comment of the rule.

    Each covers all before it: h(0) = SHA-224(chain), h(i) = SHA-224(h(i-1) + line i), shown as 16
    characters of base64url; the line holds the word HASH in place of the comment. For rules that
    Felix always appends to a kernel chain, *chain* ends in ``*appends*``.
    """
    state = hashlib.sha224(chain.encode()).digest()
    found = []
    for rule in rules:
        state = hashlib.sha224(state + f"-A {chain} HASH {rule.render()}".encode()).digest()
        found.append(base64.urlsafe_b64encode(state).decode()[:HASH_LENGTH])
    return found


def objects(lab: Lab, node: Node) -> Iterator[Object]:
    """Sets, chains and hooks of Felix on *node*."""
    endpoints = (
        Endpoint(cali_interface(pod.namespace, pod.name), pod.namespace, pod.name)
        for pod in lab.pods.values()
        if pod.node == node.name and any(nic.attachment is None for nic in pod.nics)
    )
    renderer = Renderer(node.calico, endpoints)
    yield from _sets(lab, node, renderer)
    for table in TABLES:
        for body in renderer.chains(table):
            yield _chain(node, table, body)
        for hooked in renderer.hooks(table):
            yield from _hooks(node, table, hooked)


def _sets(lab: Lab, node: Node, renderer: Renderer) -> Iterator[Object]:
    """Felix keeps this-host in all versions, though only the DSCP rule refers to it."""
    pools = node.calico.ip_pools
    others = (other for other in lab.nodes.values() if other.name != node.name)
    masquerading = [str(pool.cidr) for pool in pools if pool.nat_outgoing]
    tunnel_ends = [str(other.address) for other in others if other.pod_cidrs]
    sets: list[tuple[str, str, str, Iterable[str]]] = [
        (renderer.traits.all_pools, "hash:net", "all IP pools", (str(p.cidr) for p in pools)),
        (MASQ_POOLS, "hash:net", "IP pools with natOutgoing", masquerading),
        (VXLAN_NODES, "hash:net", "the other nodes, which may send VXLAN", tunnel_ends),
        (THIS_HOST, "hash:ip", "the node's own addresses", _own_addresses(node)),
    ]
    if renderer.traits.dscp:
        sets.append((DSCP_SOURCES, "hash:net", "workloads with a DSCP: a lab has none", ()))
    for name, kind, reason, members in sets:
        path = f"{_CALICO}.natOutgoing" if name == MASQ_POOLS else _CALICO
        yield IpSet(
            netns=node.name,
            origin=Origin("felix", reason, _subject(node), path),
            name=name,
            type=kind,
            options="family inet maxelem 1048576",
            members=tuple(dict.fromkeys(members)),
        )


def _own_addresses(node: Node) -> Iterator[str]:
    """Addresses of the node's own devices; those that attachments bring come later.

    Felix lists the routes of type local (felix/ifacemonitor), so 127.0.0.0/8 counts as 127.0.0.0.
    """
    yield from ("127.0.0.0", "127.0.0.1")
    yield from (str(nic.address.ip) for nic in node.nics if nic.address)
    yield from (str(block.network_address) for block in node.pod_cidrs[:1])


def _subject(node: Node) -> str:
    return f"node {node.name}"


def _origin(node: Node, rule: Rule, reason: str, subject: str = "") -> Origin:
    path = f"{_CALICO}.{rule.setting}" if rule.setting else _CALICO
    return Origin("felix", rule.reason or reason, rule.subject or subject or _subject(node), path)


def _texts(hashed_as: str, rules: Sequence[Rule]) -> list[str]:
    """*rules* with their hash as the first comment, as Felix writes them."""
    found = zip(rule_hashes(hashed_as, rules), rules, strict=True)
    return [rule.render(own_hash) for own_hash, rule in found]


def _chain(node: Node, table: Table, body: Body) -> Chain:
    lines = zip(_texts(body.name, body.rules), body.rules, strict=True)
    return Chain(
        netns=node.name,
        origin=Origin("felix", body.reason, body.subject or _subject(node), _CALICO),
        table=table,
        name=body.name,
        rules=tuple(
            IptablesRule(text, _origin(node, rule, body.reason, body.subject))
            for text, rule in lines
        ),
        backend=node.iptables_backend,
    )


def _hooks(node: Node, table: Table, hooked: Hooked) -> Iterator[Object]:
    """In Append mode too, only what Felix always appends is hashed as appended (table.go)."""
    inserted = node.calico.felix.chain_insert_mode == "Insert" and not hooked.appended
    hashed_as = hooked.chain + (APPENDS if hooked.appended else "")
    for text, rule in zip(_texts(hashed_as, hooked.rules), hooked.rules, strict=True):
        yield Hook(
            netns=node.name,
            origin=_origin(node, rule, "hook"),
            table=table,
            chain=hooked.chain,
            text=text,
            place="insert" if inserted else "append",
            order=HOOK_ORDER,
            backend=node.iptables_backend,
        )
