"""What Felix' iptables chains hold, by version and setting.

Rules are in Felix' own long spelling (``--jump``, ``--set-mark 0/0x…``): it is what Felix hashes
and what it feeds to iptables-restore. Policies, host endpoints, IPIP, WireGuard, flow logs and
IPv6 are no part of a lab, so the chains are those of a cluster that uses none of them.

Sources: projectcalico/calico felix/rules (static.go, endpoints.go, dispatch.go, nat.go, policy.go),
felix/iptables (match_builder.go, actions.go, renderer.go), felix/dataplane/driver.go (mark bits)
and felix/dataplane/linux/int_dataplane.go (``setUpIptablesNormal``), tags v3.27.0 to v3.32.1.
"""

from __future__ import annotations

import base64
import hashlib
import os.path
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from netlab.cni.calico_versions import Traits
from netlab.model import Calico
from netlab.plan import Table

MAX_CHAIN_NAME = 28
LOWEST_MARK = 0x10000
"""Lowest bit of FelixConfiguration's IptablesMarkMask (0xffff0000)."""

MASQ_POOLS = "cali40masq-ipam-pools"
VXLAN_NODES = "cali40all-vxlan-net"
THIS_HOST = "cali40this-host"
DSCP_SOURCES = "cali40dscp-src-net"

ACCEPT, DROP, RETURN = "--jump ACCEPT", "--jump DROP", "--jump RETURN"
MASQUERADE = "--jump MASQUERADE --random-fully"
FROM_WORKLOADS, TO_WORKLOADS = "--in-interface cali+", "--out-interface cali+"
ESTABLISHED = "-m conntrack --ctstate RELATED,ESTABLISHED"

_NO_HOST_ENDPOINTS = "policy of host endpoints, which a lab has none of"
_CLEARED = "clears Felix' marks: other programs may have left them set"
_ACCEPTED = "policy has accepted it already"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: *match* and *action* as Felix spells them, either may be empty.

    *reason*: a key of `netlab.cni.felix.REASONS` for a rule that drops, else a phrase.
    *setting*: what it depends on, below ``cluster.calico.``. *subject*: whom it serves, where
    that is not the node.
    """

    match: str
    action: str
    comment: str = ""
    reason: str = ""
    setting: str = ""
    subject: str = ""

    def render(self, own_hash: str = "") -> str:
        """The rule without ``-A CHAIN``; *own_hash* becomes the first comment."""
        comments = (f"cali:{own_hash}" if own_hash else "", self.comment)
        parts = [f'-m comment --comment "{text}"' for text in comments if text]
        return " ".join([*parts, *(part for part in (self.match, self.action) if part)])


@dataclass(frozen=True, slots=True)
class Body:
    """One of Felix' own chains; *reason* and *subject* hold for its rules that have none."""

    name: str
    reason: str
    rules: Sequence[Rule] = ()
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Hooked:
    """Rules in the kernel's chain *chain*; unless *appended*, chainInsertMode places them."""

    chain: str
    rules: Sequence[Rule]
    appended: bool = False


@dataclass(frozen=True, slots=True)
class Marks:
    """Mark bits, handed out upwards (felix/dataplane/driver.go)."""

    accept: int
    passed: int
    scratch0: int
    scratch1: int

    @classmethod
    def of(cls, traits: Traits, lowest: int = LOWEST_MARK) -> Marks:
        shift = 1 if traits.drop_mark else 0
        return cls(lowest, lowest << 1, lowest << 2 + shift, lowest << 3 + shift)

    @property
    def every(self) -> int:
        return self.accept | self.passed | self.scratch0 | self.scratch1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A workload endpoint on one node: its host interface, and the Pod behind it."""

    interface: str
    namespace: str
    pod: str

    @property
    def subject(self) -> str:
        return f"Pod {self.namespace}/{self.pod}"

    @property
    def profiles(self) -> tuple[str, ...]:
        """The profiles that Calico makes of the Pod's namespace and service account."""
        return (f"kns.{self.namespace}", f"ksa.{self.namespace}.default")


def chain_name(prefix: str, suffix: str, length: int = MAX_CHAIN_NAME) -> str:
    """*prefix* + *suffix*, or where that is too long, a hash instead of the suffix.

    The hash is marked by ``_``, so a name of exactly *length* whose suffix begins with ``_`` is
    hashed too (felix/hashutils, ``GetLengthLimitedID``).
    """
    name = prefix + suffix
    if len(name) < length or (len(name) == length and not suffix.startswith("_")):
        return name
    digest = base64.urlsafe_b64encode(hashlib.sha256(suffix.encode()).digest()).decode()
    return f"{prefix}_{digest[: length - 1 - len(prefix)]}"


def jump(chain: str) -> str:
    return f"--jump {chain}"


def goto(chain: str) -> str:
    return f"--goto {chain}"


def marked(bits: int) -> str:
    return f"-m mark --mark {bits:#x}/{bits:#x}"


def unmarked(bits: int) -> str:
    return f"-m mark --mark 0/{bits:#x}"


def set_mark(bits: int) -> str:
    return f"--jump MARK --set-mark {bits:#x}/{bits:#x}"


def clear_mark(bits: int) -> str:
    return f"--jump MARK --set-mark 0/{bits:#x}"


class Renderer:
    """Felix' chains on one node.

    *lowest_mark* is the lowest bit of IptablesMarkMask.
    """

    def __init__(
        self, calico: Calico, endpoints: Iterable[Endpoint], lowest_mark: int = LOWEST_MARK
    ) -> None:
        self.traits = Traits.of(calico.version)
        self._pools = calico.ip_pools
        self._felix = calico.felix
        self._endpoints = sorted(endpoints, key=lambda endpoint: endpoint.interface)
        self._marks = Marks.of(self.traits, lowest_mark)
        self._accepted = marked(self._marks.accept)
        self._vxlan = f"-p 17 -m multiport --destination-ports {self._felix.vxlan_port}"

    def chains(self, table: Table) -> Iterator[Body]:
        """Felix' own chains of *table*."""
        contents = {"raw": self._raw, "mangle": self._mangle, "nat": self._nat}
        yield from contents.get(table, self._filter)()

    def hooks(self, table: Table) -> Iterator[Hooked]:
        """What Felix has in the kernel's chains of *table*."""
        names = {
            "raw": ("PREROUTING", "OUTPUT"),
            "mangle": ("PREROUTING", "POSTROUTING"),
            "nat": ("PREROUTING", "POSTROUTING", "OUTPUT"),
            "filter": ("FORWARD", "INPUT", "OUTPUT"),
        }
        for name in names[table]:
            last = (table, name) == ("nat", "POSTROUTING") and self.traits.postrouting_appended
            setting = "version" if last else "felix.chainInsertMode"
            reason = "after kube-proxy, whose masquerading clears its mark" if last else "hook"
            rule = Rule("", jump(f"cali-{name}"), reason=reason, setting=setting)
            yield Hooked(name, (rule,), appended=last)
        if table == "filter":
            yield Hooked("FORWARD", self._forward_end(), appended=True)

    # --- raw and mangle --------------------------------------------------------------------------

    def _clear(self, bits: int) -> Rule:
        return Rule("", clear_mark(bits), reason=_CLEARED)

    def _by_host_endpoint(self, action: str) -> Rule:
        comment = "Host endpoint policy accepted packet."
        return Rule(self._accepted, action, comment, _NO_HOST_ENDPOINTS)

    def _untracked(self) -> tuple[Rule, ...]:
        if not self.traits.vxlan_untracked:
            return ()
        match = f"-p udp --dport {self._felix.vxlan_port}"
        reason = "VXLAN has another source port each way: its flows would stay unreplied"
        return (Rule(match, "--jump NOTRACK", reason=reason, setting="version"),)

    def _raw(self) -> Iterator[Body]:
        workload = self._marks.scratch0
        sources = "a workload may send from its own addresses only"
        prerouting = (
            self._clear(self._marks.every),
            *self._untracked(),
            Rule(FROM_WORKLOADS, set_mark(workload), reason=sources),
            Rule(marked(workload), jump("cali-rpf-skip"), reason=sources),
            Rule(f"{marked(workload)} -m rpfilter --invert --validmark", DROP, reason="rpfilter"),
            Rule(unmarked(workload), jump("cali-from-host-endpoint"), reason=_NO_HOST_ENDPOINTS),
            Rule(self._accepted, ACCEPT, reason=_ACCEPTED),
        )
        output = (
            self._clear(self._marks.every),
            Rule("", jump("cali-to-host-endpoint"), reason=_NO_HOST_ENDPOINTS),
            *self._untracked(),
            Rule(self._accepted, ACCEPT, reason=_ACCEPTED),
        )
        yield Body("cali-PREROUTING", "before conntrack", prerouting)
        yield Body("cali-OUTPUT", "before conntrack", output)
        yield Body("cali-rpf-skip", "workloads that may use other sources: a lab has none")
        yield from self._host_endpoint_chains()

    @staticmethod
    def _host_endpoint_chains() -> Iterator[Body]:
        yield Body("cali-from-host-endpoint", _NO_HOST_ENDPOINTS)
        yield Body("cali-to-host-endpoint", _NO_HOST_ENDPOINTS)

    def _mangle(self) -> Iterator[Body]:
        prerouting = (
            Rule(ESTABLISHED, ACCEPT, reason="no pre-DNAT policy for known connections"),
            Rule(self._accepted, ACCEPT, reason=_ACCEPTED),
            Rule("", jump("cali-from-host-endpoint"), reason=_NO_HOST_ENDPOINTS),
            self._by_host_endpoint(ACCEPT),
        )
        dnat = "-m conntrack --ctstate DNAT"
        postrouting = (
            *self._dscp(),
            Rule(self._accepted, RETURN, reason=_ACCEPTED),
            self._clear(self._marks.every),
            Rule(dnat, jump("cali-to-host-endpoint"), reason=_NO_HOST_ENDPOINTS),
            self._by_host_endpoint(RETURN),
        )
        yield Body("cali-PREROUTING", "before DNAT", prerouting)
        yield Body("cali-POSTROUTING", "after routing", postrouting)
        if self.traits.dscp:
            yield Body("cali-egress-dscp", "workloads whose packets get a DSCP: a lab has none")
        yield from self._host_endpoint_chains()

    def _dscp(self) -> tuple[Rule, ...]:
        if not self.traits.dscp:
            return ()
        inside = (self.traits.all_pools, THIS_HOST)
        outside = " ".join(f"-m set ! --match-set {name} dst" for name in inside)
        match = f"-m set --match-set {DSCP_SOURCES} src {outside}"
        comment = "set dscp for traffic leaving cluster."
        reason = "workloads whose packets get a DSCP"
        return (Rule(match, jump("cali-egress-dscp"), comment, reason, "version"),)

    # --- nat -------------------------------------------------------------------------------------

    def _nat(self) -> Iterator[Body]:
        floating = "floating IPs, which a lab has none of"
        outgoing = "natOutgoing: from a pool that has it to outside all pools"
        foreign = "-m addrtype ! --src-type LOCAL --limit-iface-out -m addrtype --src-type LOCAL"
        tunnel = "an own address that is not the tunnel's leaves by the tunnel with the tunnel's"
        postrouting = (
            Rule("", jump("cali-fip-snat"), reason=floating),
            Rule("", jump("cali-nat-outgoing"), reason=outgoing),
            Rule(f"--out-interface vxlan.calico {foreign}", MASQUERADE, reason=tunnel),
        )
        pools = f"-m set --match-set {MASQ_POOLS} src"
        elsewhere = f"-m set ! --match-set {self.traits.all_pools} dst"
        masquerade = Rule(f"{pools} {elsewhere}", MASQUERADE, setting="natOutgoing")
        to_floating = (Rule("", jump("cali-fip-dnat")),)
        yield Body("cali-PREROUTING", floating, to_floating)
        yield Body("cali-OUTPUT", floating, to_floating)
        yield Body("cali-POSTROUTING", "masquerading", postrouting)
        wanted = any(pool.nat_outgoing for pool in self._pools)
        yield Body("cali-nat-outgoing", outgoing, (masquerade,) if wanted else ())
        yield Body("cali-fip-dnat", floating)
        yield Body("cali-fip-snat", floating)

    # --- filter ----------------------------------------------------------------------------------

    def _filter(self) -> Iterator[Body]:
        yield Body("cali-FORWARD", "policy for forwarded packets", self._forward())
        yield Body("cali-INPUT", "policy for packets to the node", self._input())
        yield Body("cali-OUTPUT", "policy for packets from the node", self._output())
        yield Body("cali-wl-to-host", "from a workload to its node", self._workload_to_host())
        yield from self._dispatch("cali-from-wl-dispatch", "--in-interface", "cali-fw-")
        yield from self._dispatch("cali-to-wl-dispatch", "--out-interface", "cali-tw-")
        for endpoint in self._endpoints:
            name, subject = endpoint.interface, endpoint.subject
            to, out = self.to_workload(endpoint.profiles), self.from_workload(endpoint.profiles)
            yield Body(f"cali-tw-{name}", "to the workload", to, subject)
            yield Body(f"cali-fw-{name}", "from the workload", out, subject)
        yield from self._profiles()
        yield Body("cali-cidr-block", "Service addresses that BGP announces: a lab has none")
        yield Body("cali-from-hep-forward", _NO_HOST_ENDPOINTS)
        yield Body("cali-to-hep-forward", _NO_HOST_ENDPOINTS)
        yield from self._host_endpoint_chains()

    def _forward(self) -> tuple[Rule, ...]:
        accept = self._marks.accept
        return (
            self._clear(self._marks.every & ~accept),
            Rule(unmarked(accept), jump("cali-from-hep-forward"), reason=_NO_HOST_ENDPOINTS),
            Rule(FROM_WORKLOADS, jump("cali-from-wl-dispatch")),
            Rule(TO_WORKLOADS, jump("cali-to-wl-dispatch")),
            Rule("", jump("cali-to-hep-forward"), reason=_NO_HOST_ENDPOINTS),
            Rule("", jump("cali-cidr-block"), reason="no loops for addresses of no Service"),
        )

    def _forward_end(self) -> tuple[Rule, ...]:
        comment = "Policy explicitly accepted packet."
        reason = "policy accepted it, and nothing after Felix objected"
        mark = "spares mangle POSTROUTING the policy of host endpoints"
        return (
            Rule(self._accepted, ACCEPT, comment, reason),
            Rule("", set_mark(self._marks.accept), reason=mark),
        )

    def _input(self) -> tuple[Rule, ...]:
        local = "-m addrtype --dst-type LOCAL"
        known = f"{self._vxlan} -m set --match-set {VXLAN_NODES} src {local}"
        allow = "Allow IPv4 VXLAN packets from allowed hosts"
        forbid = "Drop IPv4 VXLAN packets from non-allowed hosts"
        return (
            Rule(known, ACCEPT, allow, "VXLAN from the cluster's nodes"),
            Rule(f"{self._vxlan} {local}", DROP, forbid, "vxlan-not-allowed"),
            Rule(FROM_WORKLOADS, goto("cali-wl-to-host")),
            Rule(self._accepted, ACCEPT, reason=_ACCEPTED),
            self._clear(self._marks.every),
            Rule("", jump("cali-from-host-endpoint"), reason=_NO_HOST_ENDPOINTS),
            self._by_host_endpoint(ACCEPT),
        )

    def _output(self) -> tuple[Rule, ...]:
        known = f"-m addrtype --src-type LOCAL -m set --match-set {VXLAN_NODES} dst"
        allow = "Allow IPv4 VXLAN packets to other allowed hosts"
        not_dnat = "-m conntrack ! --ctstate DNAT"
        return (
            Rule(self._accepted, ACCEPT, reason=_ACCEPTED),
            Rule(TO_WORKLOADS, RETURN, reason="a node always reaches its own workloads"),
            Rule(f"{self._vxlan} {known}", ACCEPT, allow, "VXLAN to the cluster's nodes"),
            self._clear(self._marks.every),
            Rule(not_dnat, jump("cali-to-host-endpoint"), reason=_NO_HOST_ENDPOINTS),
            self._by_host_endpoint(ACCEPT),
        )

    def _workload_to_host(self) -> tuple[Rule, ...]:
        action = self._felix.default_endpoint_to_host_action
        reason = "endpoint-to-host" if action == "Drop" else "a workload may reach its own node"
        comment = "Configured DefaultEndpointToHostAction"
        setting = "felix.defaultEndpointToHostAction"
        return (
            Rule("", jump("cali-from-wl-dispatch"), reason="egress policy of the workload"),
            Rule("", jump(action.upper()), comment, reason, setting),
        )

    def _dispatch(self, root: str, direction: str, prefix: str) -> Iterator[Body]:
        """A shallow tree by the character after the names' longest common prefix."""
        unknown = Rule("", DROP, "Unknown interface", "unknown-interface")
        reason = "to the workload's own chain"
        names = [endpoint.interface for endpoint in self._endpoints]
        common = len(os.path.commonprefix(names))  # noqa: RUF071 - of names, not of paths
        bins: dict[str, list[Rule]] = {}
        for endpoint in self._endpoints:
            name = endpoint.interface
            rule = Rule(f"{direction} {name}", goto(prefix + name), subject=endpoint.subject)
            bins.setdefault(name[: common + 1], []).append(rule)
        rules: list[Rule] = []
        for beginning, inside in bins.items():
            if len(inside) == 1:
                rules += inside
                continue
            child = f"{root}-{beginning[common:]}"
            rules.append(Rule(f"{direction} {beginning}+", goto(child)))
            yield Body(child, reason, (*inside, unknown))
        yield Body(root, reason, (*rules, unknown))

    # --- endpoints and profiles ------------------------------------------------------------------

    def to_workload(self, profiles: Iterable[str]) -> tuple[Rule, ...]:
        """cali-tw: what goes to a workload with *profiles*."""
        return (*self._known(), *self._judged("cali-pri-", profiles))

    def from_workload(self, profiles: Iterable[str]) -> tuple[Rule, ...]:
        """cali-fw: what comes from a workload with *profiles*."""
        return (*self._known(), *self._encapsulated(), *self._judged("cali-pro-", profiles))

    def _known(self) -> Iterator[Rule]:
        yield Rule(ESTABLISHED, ACCEPT, reason="a connection that policy has accepted before")
        if not self._felix.disable_conntrack_invalid_check:
            setting = "felix.disableConntrackInvalidCheck"
            match = "-m conntrack --ctstate INVALID"
            yield Rule(match, DROP, reason="invalid", setting=setting)
        passed = self._marks.passed if self.traits.clears_pass else 0
        reason = "policy answers by these marks"
        yield Rule("", clear_mark(self._marks.accept | passed), reason=reason)

    def _encapsulated(self) -> Iterator[Rule]:
        reason = "encapsulated-from-workload"
        if not self._felix.allow_vxlan_packets_from_workloads:
            comment = "Drop VXLAN encapped packets originating in workloads"
            setting = "felix.allowVXLANPacketsFromWorkloads"
            yield Rule(self._vxlan, DROP, comment, reason, setting)
        if not self._felix.allow_ipip_packets_from_workloads:
            comment = "Drop IPinIP encapped packets originating in workloads"
            setting = "felix.allowIPIPPacketsFromWorkloads"
            yield Rule("-p 4", DROP, comment, reason, setting)

    def _judged(self, prefix: str, profiles: Iterable[str]) -> Iterator[Rule]:
        for profile in profiles:
            yield Rule("", jump(chain_name(prefix, profile)), reason="no policy: profiles decide")
            yield Rule(self._accepted, RETURN, "Return if profile accepted", "accepted by profile")
        yield Rule("", DROP, "Drop if no profiles matched", "no-profile-matched")

    def _profiles(self) -> Iterator[Body]:
        """A namespace's profile accepts everything, a service account's is empty."""
        owners = {
            name: subject
            for endpoint in self._endpoints
            for name, subject in zip(
                endpoint.profiles,
                (
                    f"Namespace {endpoint.namespace}",
                    f"ServiceAccount {endpoint.namespace}/default",
                ),
                strict=True,
            )
        }
        for prefix, direction in (("cali-pri-", "ingress"), ("cali-pro-", "egress")):
            for name, subject in owners.items():
                rules = tuple(self._profile(name, f"Profile {name} {direction}"))
                yield Body(chain_name(prefix, name), f"profile, {direction}", rules, subject)

    def _profile(self, name: str, comment: str) -> Iterator[Rule]:
        if name.startswith("ksa."):
            yield Rule("", "", comment, "no rules of its own")
            return
        yield Rule("", set_mark(self._marks.accept), comment, "without policy, all is accepted")
        if self.traits.profile_returns:
            yield Rule(self._accepted, RETURN, reason="accepted by profile", setting="version")
