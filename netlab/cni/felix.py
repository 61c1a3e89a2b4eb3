"""Calico Felix' iptables dataplane: chains, hooks and sets, with the hashes of its rules.

Rules are in Felix' own long spelling (``--jump``, ``--set-mark 0/0x…``), which is what it hashes
and what it feeds to iptables-restore. Sources: projectcalico/calico felix/rules (static.go,
endpoints.go, dispatch.go, nat.go, policy.go), felix/iptables (match_builder.go, actions.go,
table.go), felix/hashutils, tags v3.24 to v3.32.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from netlab.addressing import cali_interface
from netlab.model import Calico, Lab, Node, Pod, Version
from netlab.plan import KERNEL_CHAINS, Chain, Hook, IpSet, IptablesRule, Object, Origin, Table

REASONS = {
    "invalid": "conntrack knows no connection that the packet fits: the endpoint's chain drops it",
    "rpfilter": "a workload sent it from an address that is not routed to it",
    "unknown-interface": "a cali interface without a workload endpoint",
    "no-profile-matched": "neither policy nor profile accepted it",
    "vxlan-not-allowed": "VXLAN from an address that is no node of this cluster",
    "encapsulated-from-workload": "a workload may not send VXLAN or IPIP of its own",
    "endpoint-to-host": "defaultEndpointToHostAction Drop: a workload's packet to its own node",
}
"""Why Felix' rules drop: the reasons that its Origins carry."""

MAX_CHAIN_NAME = 28
ALL_POOLS, MASQ_POOLS, VXLAN_NODES = (
    "cali40all-ipam-pools",
    "cali40masq-ipam-pools",
    "cali40all-vxlan-net",
)
HOOK_ORDER = 10
"""After kube-proxy's: an insert ends up above its jumps, an append below."""

_FELIX = "cluster.calico.felix"


class Rule(NamedTuple):
    """One Felix rule: comments (Felix' own first), match and action, joined by `render`."""

    match: str
    action: str
    comment: str = ""
    reason: str = "dispatch"
    setting: str = ""

    def render(self, comments: Sequence[str] = ()) -> str:
        every = [*comments, *([self.comment] if self.comment else [])]
        parts = [f'-m comment --comment "{text}"' for text in every]
        return " ".join([*parts, *(part for part in (self.match, self.action) if part)])


@dataclass(frozen=True, slots=True)
class Marks:
    """Mark bits, taken upwards from the lowest of IptablesMarkMask (0xffff0000)."""

    accept: int
    passed: int
    scratch0: int
    scratch1: int

    @classmethod
    def of(cls, version: Version) -> Marks:
        """A drop bit lies between pass and scratch0 from v3.30 on."""
        shift = 1 if version >= Version(3, 30, 0) else 0
        return cls(0x10000, 0x20000, 0x40000 << shift, 0x80000 << shift)

    @property
    def every(self) -> int:
        return self.accept | self.passed | self.scratch0 | self.scratch1


@dataclass(frozen=True, slots=True)
class Traits:
    """What differs between versions, by behaviour."""

    profile_returns: bool
    clears_pass: bool
    vxlan_notrack: bool
    postrouting_appended: bool

    @classmethod
    def of(cls, version: Version) -> Traits:
        return cls(
            profile_returns=version < Version(3, 28, 0),
            clears_pass=version >= Version(3, 28, 0),
            vxlan_notrack=version >= Version(3, 29, 0),
            postrouting_appended=version >= Version(3, 28, 2),
        )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A workload endpoint on one node: its host interface and the profiles of its Pod."""

    interface: str
    namespace: str
    pod: str

    @property
    def profiles(self) -> tuple[str, ...]:
        return (f"kns.{self.namespace}", f"ksa.{self.namespace}.default")


def limited(prefix: str, suffix: str, length: int = MAX_CHAIN_NAME) -> str:
    """*prefix* + *suffix*, the suffix hashed where that is too long (hashutils.GetLengthLimitedID).

    A suffix that begins with ``_`` is hashed too, so that no two can meet.
    """
    name = prefix + suffix
    if len(name) <= length and not suffix.startswith("_"):
        return name
    digest = base64.urlsafe_b64encode(hashlib.sha256(suffix.encode()).digest()).decode()
    return f"{prefix}_{digest[: length - 1 - len(prefix)]}"


def hashes(chain: str, rules: Sequence[str]) -> list[str]:
    """The hash of each of *rules*, rendered without its own hash comment (``Chain.RuleHashes``).

    Each covers all before it: h0 = sha224(chain), h(i) = sha224(h(i-1) + line); 16 characters of
    base64url. For rules appended to a kernel chain, *chain* ends in ``*appends*``.
    """
    state = hashlib.sha224(chain.encode()).digest()
    found = []
    for rule in rules:
        state = hashlib.sha224(state + f"-A {chain} HASH {rule}".encode()).digest()
        found.append(base64.urlsafe_b64encode(state).decode()[:16])
    return found


def objects(lab: Lab, node: Node) -> Iterator[Object]:
    """Sets, chains and hooks of Felix on *node*."""
    endpoints = tuple(
        Endpoint(cali_interface(pod.namespace, pod.name), pod.namespace, pod.name)
        for pod in lab.pods.values()
        if pod.node == node.name and _has_calico(pod)
    )
    yield from _sets(lab, node)
    tables = Tables(node.calico, endpoints)
    for table in KERNEL_CHAINS:
        for name, rules in tables.chains(table):  # type: ignore[arg-type]
            yield _chain(node, table, name, rules)  # type: ignore[arg-type]
    yield from _hooks(node, tables)


def _has_calico(pod: Pod) -> bool:
    return any(nic.attachment is None for nic in pod.nics)


def _sets(lab: Lab, node: Node) -> Iterator[Object]:
    pools = node.calico.ip_pools
    others = (other for other in lab.nodes.values() if other.name != node.name)
    content = {
        ALL_POOLS: [str(pool.cidr) for pool in pools],
        MASQ_POOLS: [str(pool.cidr) for pool in pools if pool.nat_outgoing],
        VXLAN_NODES: [str(other.address) for other in others],
    }
    for name, members in content.items():
        setting = "cluster.calico.natOutgoing" if name == MASQ_POOLS else "cluster.calico"
        yield IpSet(
            netns=node.name,
            origin=Origin("felix", "set of addresses", f"node {node.name}", setting),
            name=name,
            options="family inet maxelem 1048576",
            members=tuple(members),
        )


class Tables:
    """The content of Felix' chains on one node."""

    def __init__(self, calico: Calico, endpoints: Sequence[Endpoint]) -> None:
        self.calico = calico
        self.endpoints = sorted(endpoints, key=lambda endpoint: endpoint.interface)
        self.marks = Marks.of(calico.version)
        self.traits = Traits.of(calico.version)

    def chains(self, table: Table) -> Iterator[tuple[str, list[Rule]]]:
        """(name, rules) of every chain of *table*."""
        if table == "raw":
            yield "cali-PREROUTING", self._raw_prerouting()
            yield "cali-OUTPUT", self._raw_output()
            yield from self._empty("from-host-endpoint", "to-host-endpoint", "rpf-skip")
        elif table == "mangle":
            yield "cali-PREROUTING", self._mangle_prerouting()
            yield "cali-POSTROUTING", self._mangle_postrouting()
            yield from self._empty("from-host-endpoint", "to-host-endpoint")
        elif table == "nat":
            yield "cali-PREROUTING", [Rule("", "--jump cali-fip-dnat")]
            yield "cali-OUTPUT", [Rule("", "--jump cali-fip-dnat")]
            yield "cali-POSTROUTING", self._nat_postrouting()
            yield "cali-nat-outgoing", self._nat_outgoing()
            yield from self._empty("fip-dnat", "fip-snat")
        else:
            yield from self._filter()

    def _filter(self) -> Iterator[tuple[str, list[Rule]]]:
        yield "cali-FORWARD", self._forward()
        yield "cali-INPUT", self._input()
        yield "cali-OUTPUT", self._output()
        yield "cali-wl-to-host", self._workload_to_host()
        yield from self._dispatch("cali-from-wl-dispatch", "--in-interface", "cali-fw-")
        yield from self._dispatch("cali-to-wl-dispatch", "--out-interface", "cali-tw-")
        for endpoint in self.endpoints:
            yield f"cali-tw-{endpoint.interface}", self.to_workload(endpoint.profiles)
            yield f"cali-fw-{endpoint.interface}", self.from_workload(endpoint.profiles)
        yield from self._profiles()
        yield from self._empty("cidr-block", "from-hep-forward", "to-hep-forward")
        yield from self._empty("from-host-endpoint", "to-host-endpoint")

    @staticmethod
    def _empty(*names: str) -> Iterator[tuple[str, list[Rule]]]:
        yield from ((f"cali-{name}", []) for name in names)

    # --- raw and mangle --------------------------------------------------------------------------

    def _accepted(self) -> str:
        return f"-m mark --mark {self.marks.accept:#x}/{self.marks.accept:#x}"

    def _clear(self, bits: int) -> Rule:
        return Rule("", f"--jump MARK --set-mark 0/{bits:#x}", reason="clears Felix' mark bits")

    def _host_endpoint(self, action: str) -> Rule:
        return Rule(self._accepted(), action, "Host endpoint policy accepted packet.")

    def _notrack(self) -> list[Rule]:
        if not self.traits.vxlan_notrack:
            return []
        match = f"-p udp --dport {self.calico.felix.vxlan_port}"
        return [Rule(match, "--jump NOTRACK", reason="VXLAN is not tracked", setting="version")]

    def _raw_prerouting(self) -> list[Rule]:
        scratch = f"{self.marks.scratch0:#x}/{self.marks.scratch0:#x}"
        mark = f"-m mark --mark {scratch}"
        return [
            self._clear(self.marks.every),
            *self._notrack(),
            Rule("--in-interface cali+", f"--jump MARK --set-mark {scratch}"),
            Rule(mark, "--jump cali-rpf-skip"),
            Rule(f"{mark} -m rpfilter --invert --validmark", "--jump DROP", reason="rpfilter"),
            Rule(f"-m mark --mark 0/{self.marks.scratch0:#x}", "--jump cali-from-host-endpoint"),
            Rule(self._accepted(), "--jump ACCEPT"),
        ]

    def _raw_output(self) -> list[Rule]:
        return [
            self._clear(self.marks.every),
            Rule("", "--jump cali-to-host-endpoint"),
            *self._notrack(),
            Rule(self._accepted(), "--jump ACCEPT"),
        ]

    def _mangle_prerouting(self) -> list[Rule]:
        return [
            Rule("-m conntrack --ctstate RELATED,ESTABLISHED", "--jump ACCEPT"),
            Rule(self._accepted(), "--jump ACCEPT"),
            Rule("", "--jump cali-from-host-endpoint"),
            self._host_endpoint("--jump ACCEPT"),
        ]

    def _mangle_postrouting(self) -> list[Rule]:
        return [
            Rule(self._accepted(), "--jump RETURN"),
            self._clear(self.marks.every),
            Rule("-m conntrack --ctstate DNAT", "--jump cali-to-host-endpoint"),
            self._host_endpoint("--jump RETURN"),
        ]

    # --- nat -------------------------------------------------------------------------------------

    def _nat_postrouting(self) -> list[Rule]:
        wrong = "-m addrtype ! --src-type LOCAL --limit-iface-out -m addrtype --src-type LOCAL"
        reason = "into the tunnel with the tunnel's address"
        masquerade = "--jump MASQUERADE --random-fully"
        return [
            Rule("", "--jump cali-fip-snat"),
            Rule("", "--jump cali-nat-outgoing"),
            Rule(f"--out-interface vxlan.calico {wrong}", masquerade, reason=reason),
        ]

    def _nat_outgoing(self) -> list[Rule]:
        if not any(pool.nat_outgoing for pool in self.calico.ip_pools):
            return []
        source = f"-m set --match-set {MASQ_POOLS} src"
        outside = f"-m set ! --match-set {ALL_POOLS} dst"
        return [
            Rule(
                f"{source} {outside}",
                "--jump MASQUERADE --random-fully",
                reason="natOutgoing: from a pool to outside all pools",
                setting="natOutgoing",
            )
        ]

    # --- filter ----------------------------------------------------------------------------------

    def _forward(self) -> list[Rule]:
        accept = self.marks.accept
        return [
            self._clear(self.marks.every & ~accept),
            Rule(f"-m mark --mark 0/{accept:#x}", "--jump cali-from-hep-forward"),
            Rule("--in-interface cali+", "--jump cali-from-wl-dispatch"),
            Rule("--out-interface cali+", "--jump cali-to-wl-dispatch"),
            Rule("", "--jump cali-to-hep-forward"),
            Rule("", "--jump cali-cidr-block"),
        ]

    def forward_appends(self) -> list[Rule]:
        """The two rules at the end of FORWARD."""
        accept = self.marks.accept
        return [
            Rule(self._accepted(), "--jump ACCEPT", "Policy explicitly accepted packet."),
            Rule("", f"--jump MARK --set-mark {accept:#x}/{accept:#x}"),
        ]

    def _vxlan(self) -> str:
        return f"-p 17 -m multiport --destination-ports {self.calico.felix.vxlan_port}"

    def _input(self) -> list[Rule]:
        local = "-m addrtype --dst-type LOCAL"
        return [
            Rule(
                f"{self._vxlan()} -m set --match-set {VXLAN_NODES} src {local}",
                "--jump ACCEPT",
                "Allow IPv4 VXLAN packets from allowed hosts",
            ),
            Rule(
                f"{self._vxlan()} {local}",
                "--jump DROP",
                "Drop IPv4 VXLAN packets from non-allowed hosts",
                "vxlan-not-allowed",
            ),
            Rule("--in-interface cali+", "--goto cali-wl-to-host"),
            Rule(self._accepted(), "--jump ACCEPT"),
            self._clear(self.marks.every),
            Rule("", "--jump cali-from-host-endpoint"),
            self._host_endpoint("--jump ACCEPT"),
        ]

    def _output(self) -> list[Rule]:
        local = "-m addrtype --src-type LOCAL"
        return [
            Rule(self._accepted(), "--jump ACCEPT"),
            Rule("--out-interface cali+", "--jump RETURN"),
            Rule(
                f"{self._vxlan()} {local} -m set --match-set {VXLAN_NODES} dst",
                "--jump ACCEPT",
                "Allow IPv4 VXLAN packets to other allowed hosts",
            ),
            self._clear(self.marks.every),
            Rule("-m conntrack ! --ctstate DNAT", "--jump cali-to-host-endpoint"),
            self._host_endpoint("--jump ACCEPT"),
        ]

    def _workload_to_host(self) -> list[Rule]:
        action = self.calico.felix.default_endpoint_to_host_action.upper()
        reason = "endpoint-to-host" if action == "DROP" else "what a workload may reach on its node"
        return [
            Rule("", "--jump cali-from-wl-dispatch"),
            Rule(
                "",
                f"--jump {action}",
                "Configured DefaultEndpointToHostAction",
                reason,
                "felix.defaultEndpointToHostAction",
            ),
        ]

    def _dispatch(self, root: str, direction: str, prefix: str) -> Iterator[tuple[str, list[Rule]]]:
        """A shallow tree by the character after the longest common prefix of all names."""
        unknown = Rule("", "--jump DROP", "Unknown interface", "unknown-interface")
        names = [endpoint.interface for endpoint in self.endpoints]
        bins: dict[str, list[str]] = {}
        common = _common_prefix(names)
        for name in names:
            bins.setdefault(name[: len(common) + 1], []).append(name)
        rules: list[Rule] = []
        for beginning, inside in bins.items():
            if len(inside) == 1:
                rules.append(Rule(f"{direction} {inside[0]}", f"--goto {prefix}{inside[0]}"))
                continue
            child = f"{root}-{beginning[len(common) :]}"
            rules.append(Rule(f"{direction} {beginning}+", f"--goto {child}"))
            own = [Rule(f"{direction} {name}", f"--goto {prefix}{name}") for name in inside]
            yield child, [*own, unknown]
        yield root, [*rules, unknown]

    def to_workload(self, profiles: Sequence[str]) -> list[Rule]:
        """cali-tw: what goes to a workload."""
        return [*self._known(), *self._by_profile("cali-pri-", profiles)]

    def from_workload(self, profiles: Sequence[str]) -> list[Rule]:
        """cali-fw: what comes from a workload."""
        felix = self.calico.felix
        reason = "encapsulated-from-workload"
        encapsulated = []
        if not felix.allow_vxlan_packets_from_workloads:
            comment = "Drop VXLAN encapped packets originating in workloads"
            setting = "felix.allowVXLANPacketsFromWorkloads"
            encapsulated.append(Rule(self._vxlan(), "--jump DROP", comment, reason, setting))
        if not felix.allow_ipip_packets_from_workloads:
            comment = "Drop IPinIP encapped packets originating in workloads"
            setting = "felix.allowIPIPPacketsFromWorkloads"
            encapsulated.append(Rule("-p 4", "--jump DROP", comment, reason, setting))
        return [*self._known(), *encapsulated, *self._by_profile("cali-pro-", profiles)]

    def _known(self) -> list[Rule]:
        rules = [Rule("-m conntrack --ctstate RELATED,ESTABLISHED", "--jump ACCEPT")]
        if not self.calico.felix.disable_conntrack_invalid_check:
            setting = "felix.disableConntrackInvalidCheck"
            match = "-m conntrack --ctstate INVALID"
            rules.append(Rule(match, "--jump DROP", reason="invalid", setting=setting))
        passed = self.marks.passed if self.traits.clears_pass else 0
        return [*rules, self._clear(self.marks.accept | passed)]

    def _by_profile(self, prefix: str, profiles: Sequence[str]) -> list[Rule]:
        rules: list[Rule] = []
        for profile in profiles:
            rules.append(Rule("", f"--jump {limited(prefix, profile)}"))
            rules.append(Rule(self._accepted(), "--jump RETURN", "Return if profile accepted"))
        last = "Drop if no profiles matched"
        return [*rules, Rule("", "--jump DROP", last, "no-profile-matched")]

    def _profiles(self) -> Iterator[tuple[str, list[Rule]]]:
        """A namespace's profile accepts everything, a service account's is empty."""
        accept = f"{self.marks.accept:#x}/{self.marks.accept:#x}"
        names = dict.fromkeys(name for e in self.endpoints for name in e.profiles)
        for prefix, direction in (("cali-pri-", "ingress"), ("cali-pro-", "egress")):
            for name in names:
                comment = f"Profile {name} {direction}"
                if name.startswith("ksa."):
                    rules = [Rule("", "", comment)]
                else:
                    rules = [Rule("", f"--jump MARK --set-mark {accept}", comment)]
                    if self.traits.profile_returns:
                        rules.append(Rule(self._accepted(), "--jump RETURN"))
                yield limited(prefix, name), rules


def _common_prefix(names: Sequence[str]) -> str:
    if not names:
        return ""
    first, last = min(names), max(names)
    length = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    return first[:length]


def _origin(node: Node, rule: Rule) -> Origin:
    path = f"cluster.calico.{rule.setting}" if rule.setting else "cluster.calico"
    return Origin("felix", rule.reason, f"node {node.name}", path)


def _texts(hashed_as: str, rules: Sequence[Rule]) -> list[str]:
    """*rules* with their hash as the first comment, as Felix writes them."""
    ids = hashes(hashed_as, [rule.render() for rule in rules])
    return [rule.render((f"cali:{own}",)) for own, rule in zip(ids, rules, strict=True)]


def _chain(node: Node, table: Table, name: str, rules: Sequence[Rule]) -> Chain:
    lines = zip(_texts(name, rules), rules, strict=True)
    return Chain(
        netns=node.name,
        origin=Origin("felix", "chain", f"node {node.name}", "cluster.calico"),
        table=table,
        name=name,
        rules=tuple(IptablesRule(text, _origin(node, rule)) for text, rule in lines),
        backend=node.iptables_backend,
    )


def _hooks(node: Node, tables: Tables) -> Iterator[Object]:
    """Jumps from the kernel's chains (chainInsertMode), and what is always appended."""
    insert = node.calico.felix.chain_insert_mode == "Insert"
    hooked: tuple[tuple[Table, tuple[str, ...]], ...] = (
        ("raw", ("PREROUTING", "OUTPUT")),
        ("mangle", ("PREROUTING", "POSTROUTING")),
        ("nat", ("PREROUTING", "OUTPUT", "POSTROUTING")),
        ("filter", ("INPUT", "FORWARD", "OUTPUT")),
    )
    for table, names in hooked:
        for name in names:
            jump = [Rule("", f"--jump cali-{name}", reason="jump", setting="felix.chainInsertMode")]
            appended = not insert
            if (table, name) == ("nat", "POSTROUTING") and tables.traits.postrouting_appended:
                appended = True
            extra = tables.forward_appends() if (table, name) == ("filter", "FORWARD") else []
            if not appended:
                yield from _placed(node, table, name, jump, insert=True)
                jump = []
            yield from _placed(node, table, name, [*jump, *extra], insert=False)


def _placed(
    node: Node, table: Table, chain: str, rules: Sequence[Rule], *, insert: bool
) -> Iterator[Object]:
    hashed_as = chain if insert else f"{chain}*appends*"
    for text, rule in zip(_texts(hashed_as, rules), rules, strict=True):
        yield Hook(
            netns=node.name,
            origin=_origin(node, rule),
            table=table,
            chain=chain,
            text=text,
            place="insert" if insert else "append",
            order=HOOK_ORDER,
            backend=node.iptables_backend,
        )
