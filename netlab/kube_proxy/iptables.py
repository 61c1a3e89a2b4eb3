"""kube-proxy's iptables mode: the rules that `syncProxyRules` writes, by version.

Text, names and order are those of the real proxier's input to iptables-restore. Source:
kubernetes pkg/proxy/iptables/proxier.go of v1.24 to v1.36; `netlab.fidelity` compares with what
that code prints. Services come in a random order there and in the order given here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from netlab.kube_proxy.rules import Line, Rules
from netlab.kube_proxy.service import ServiceRules
from netlab.kube_proxy.state import ProxyState
from netlab.model import Version
from netlab.plan import Table

LARGE_CLUSTER_ENDPOINTS = 1000
"""With more, endpoints' rules carry no comments (largeClusterEndpointsThreshold)."""

INVALID_COUNTER = "ct_state_invalid_dropped_pkts"


class Jump(NamedTuple):
    """A jump from a kernel chain, put in front of what is there, in this order."""

    table: Table
    chain: str
    text: str
    since: Version


_NEW = "-m conntrack --ctstate NEW "
_EXTERNAL = (
    f'{_NEW}-m comment --comment "kubernetes externally-visible service portals" '
    "-j KUBE-EXTERNAL-SERVICES"
)
_HEALTH = '-m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS'
_PORTALS = '-m comment --comment "kubernetes service portals" -j KUBE-SERVICES'
_FORWARD = '-m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD'
_FIREWALL = f'{_NEW}-m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL'
_POSTROUTING = '-m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING'
_V124, _V125 = Version(1, 24, 0), Version(1, 25, 0)

JUMPS: tuple[Jump, ...] = (
    Jump("filter", "INPUT", _EXTERNAL, _V124),
    Jump("filter", "FORWARD", _EXTERNAL, _V124),
    Jump("filter", "INPUT", _HEALTH, _V124),
    Jump("filter", "FORWARD", f"{_NEW}{_PORTALS}", _V124),
    Jump("filter", "OUTPUT", f"{_NEW}{_PORTALS}", _V124),
    Jump("filter", "FORWARD", _FORWARD, _V124),
    Jump("filter", "INPUT", _FIREWALL, _V125),
    Jump("filter", "OUTPUT", _FIREWALL, _V125),
    Jump("filter", "FORWARD", _FIREWALL, _V125),
    Jump("nat", "OUTPUT", _PORTALS, _V124),
    Jump("nat", "PREROUTING", _PORTALS, _V124),
    Jump("nat", "POSTROUTING", _POSTROUTING, _V124),
)
"""kube-proxy's jumps in the order of their creation (iptablesJumpChains).

From v1.27 it would also make kubelet's jumps to KUBE-FIREWALL, which are there already.
"""

LOCALNET_RULE = (
    '-m comment --comment "block incoming localnet connections" '
    "-d 127.0.0.0/8 ! -s 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)


def render(state: ProxyState) -> Rules:
    """Every chain and rule that one full synchronisation of *state* writes."""
    rules = Rules()
    rules.declare("filter", ("KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-FORWARD"))
    rules.declare("filter", ("KUBE-NODEPORTS",))
    if state.traits.drops_in_filter:
        rules.declare("filter", ("KUBE-PROXY-FIREWALL",))
    rules.declare("nat", ("KUBE-SERVICES", "KUBE-NODEPORTS"))
    rules.declare("nat", ("KUBE-POSTROUTING", "KUBE-MARK-MASQ"))
    if state.traits.localnet_rule and state.serves_loopback:
        rules.declare("filter", ("KUBE-FIREWALL",))
        setting = "localhostNodePorts"
        rules.lines.append(
            Line("filter", "KUBE-FIREWALL", LOCALNET_RULE, "localnet", setting=setting)
        )
    rules.lines += _masquerade(state)
    ports = state.own_services
    comments = sum(len(port.endpoints) for port in ports) <= LARGE_CLUSTER_ENDPOINTS
    for port in ports:
        ServiceRules(state, port, comments=comments).write(rules)
    rules.lines += _node_ports(state)
    rules.lines += _forwarding(state)
    return rules


def _masquerade(state: ProxyState) -> Iterator[Line]:
    """KUBE-POSTROUTING and KUBE-MARK-MASQ."""
    mark = state.mark
    reason = "masquerades what was marked for it"
    post = "KUBE-POSTROUTING"
    yield Line("nat", post, f"-m mark ! --mark {mark}/{mark} -j RETURN", reason)
    yield Line("nat", post, f"-j MARK --xor-mark {mark}", reason)
    comment = '-m comment --comment "kubernetes service traffic requiring SNAT"'
    fully = " --random-fully" if state.random_fully else ""
    yield Line("nat", post, f"{comment} -j MASQUERADE{fully}", reason)
    marks = "marks for masquerading"
    yield Line("nat", "KUBE-MARK-MASQ", f"-j MARK --or-mark {mark}", marks)


def _node_ports(state: ProxyState) -> Iterator[Line]:
    """The last rules of nat KUBE-SERVICES: which local addresses serve NodePorts."""
    comment = (
        '-m comment --comment "kubernetes service nodeports; '
        'NOTE: this must be the last rule in this chain"'
    )
    for destination in _node_port_destinations(state):
        text = f"{comment} {destination} -j KUBE-NODEPORTS"
        reason = "NodePorts on the node's own addresses"
        yield Line("nat", "KUBE-SERVICES", text, reason, setting="nodePortAddresses")


def _node_port_destinations(state: ProxyState) -> Iterator[str]:
    """The matches that tell a NodePort's destination, without loopback where it is not served."""
    if state.family == 6:
        without, guard = state.traits.localhost_flag, " ! -d ::1/128"
    else:
        without, guard = not state.localhost_allowed, " ! -d 127.0.0.0/8"
    if state.matches_all_node_addresses:
        yield f"-m addrtype --dst-type LOCAL{guard if without else ''}"
        return
    for address in state.matched_node_addresses:
        if not (without and address.is_loopback):
            yield f"-d {address}"


def _forwarding(state: ProxyState) -> Iterator[Line]:
    """KUBE-FORWARD; the INVALID rule is left out where liberal (kubernetes PR 120412)."""
    chain = "KUBE-FORWARD"
    if not (state.traits.liberal_skips_invalid and state.be_liberal):
        counted = state.traits.nfacct_counters and INVALID_COUNTER in state.nfacct
        counter = f" -m nfacct --nfacct-name {INVALID_COUNTER}" if counted else ""
        text = f"-m conntrack --ctstate INVALID{counter} -j DROP"
        yield Line("filter", chain, text, "invalid", setting="version")
    marked = f"-m mark --mark {state.mark}/{state.mark} -j ACCEPT"
    comment = '-m comment --comment "kubernetes forwarding rules"'
    yield Line("filter", chain, f"{comment} {marked}", "accepts what was marked for masquerading")
    comment = '-m comment --comment "kubernetes forwarding conntrack rule"'
    text = f"{comment} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
    yield Line("filter", chain, text, "accepts known connections")
