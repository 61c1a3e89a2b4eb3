"""A lab as Linux sees it: kernel objects, who asked for each, and their order.

Nothing here knows Kubernetes and nothing here does I/O. A `Plan` is a value: it can be compared,
hashed, printed as a shell script (`netlab.script`) and applied (`netlab.kernel`).

Names of network namespaces are the lab's own (``node1``, ``ma1``); the kernel module puts the
instance's prefix before them. A plan never names the host's network namespace.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Literal, TypeAlias

from netlab.errors import PlanError

Key: TypeAlias = tuple[str, ...]
Backend: TypeAlias = Literal["nft", "legacy"]
Table: TypeAlias = Literal["raw", "mangle", "nat", "filter"]

MAIN_TABLE = 254
LINK_NAME_MAX = 15

KERNEL_CHAINS: Mapping[str, tuple[str, ...]] = {
    "raw": ("PREROUTING", "OUTPUT"),
    "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
}
"""The chains that iptables has by itself, by table, in the order of ``iptables-save``."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asked for a kernel object, and why.

    *component*: the real program that writes it (``kube-proxy``, ``felix``, ``calico``,
    ``coordinator``, ``macvlan``, ``kubelet``, ``underlay``, ``kernel``, ``user``). *reason*: one
    phrase; a drop's reason is a word of the closed list that ``schema`` prints. *subject*: the
    Kubernetes object it serves (``Service default/web``). *path*: the lab's setting behind it
    (``cluster.kubeProxy.version``), which the lab's source map turns into file:line.
    """

    component: str
    reason: str
    subject: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """One thing that the kernel holds in the network namespace *netns*."""

    netns: str
    origin: Origin = field(compare=False, repr=False)

    @property
    def key(self) -> Key:
        """What makes it the same object in two plans: a changed object keeps its key."""
        raise AssertionError(type(self))

    @property
    def provides(self) -> tuple[Key, ...]:
        return (self.key,)

    @property
    def requires(self) -> tuple[Key, ...]:
        return (("netns", self.netns),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Netns(Object):
    """A network namespace, with loopback up.

    A new namespace copies the host's IPv4 settings (``net.core.devconf_inherit_init_net``), so
    *sysctls* writes every one that a path can depend on: the same lab on every host.
    """

    sysctls: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> Key:
        return ("netns", self.netns)

    @property
    def requires(self) -> tuple[Key, ...]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Object):
    """A network device, up. *mac* None: the kernel chooses (random). *mtu* None: its default.

    *master* is the bridge that it is a port of, in the same namespace.
    """

    name: str
    mac: str | None = None
    mtu: int | None = None
    master: str | None = None
    tx_queue_len: int | None = None

    @property
    def key(self) -> Key:
        return ("link", self.netns, self.name)

    @property
    def requires(self) -> tuple[Key, ...]:
        master = (("link", self.netns, self.master),) if self.master else ()
        return (("netns", self.netns), *master)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge(Link):
    """A bridge without STP: its ports forward at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Veth(Link):
    """A veth pair, both ends born in their own namespace with their own name."""

    peer_netns: str
    peer: str
    peer_mac: str | None = None
    peer_mtu: int | None = None
    peer_master: str | None = None

    @property
    def provides(self) -> tuple[Key, ...]:
        return (self.key, ("link", self.peer_netns, self.peer))

    @property
    def requires(self) -> tuple[Key, ...]:
        ends = ((self.netns, self.master), (self.peer_netns, self.peer_master))
        masters = (("link", netns, master) for netns, master in ends if master)
        return (("netns", self.netns), ("netns", self.peer_netns), *masters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Macvlan(Link):
    """A macvlan on *lower*, a device of another (or the same) namespace."""

    lower_netns: str
    lower: str
    mode: Literal["bridge", "private", "vepa", "passthru"] = "bridge"

    @property
    def requires(self) -> tuple[Key, ...]:
        return (("netns", self.netns), ("link", self.lower_netns, self.lower))


@dataclass(frozen=True, slots=True, kw_only=True)
class Vlan(Link):
    """An 802.1Q sub-interface *vlan* of *lower*, in the same namespace."""

    lower: str
    vlan: int

    @property
    def requires(self) -> tuple[Key, ...]:
        return (("netns", self.netns), ("link", self.netns, self.lower))


@dataclass(frozen=True, slots=True, kw_only=True)
class Vxlan(Link):
    """A unicast VXLAN device with static forwarding (``nolearning``)."""

    vni: int
    port: int
    local: IPv4Address
    lower: str

    @property
    def requires(self) -> tuple[Key, ...]:
        return (("netns", self.netns), ("link", self.netns, self.lower))


@dataclass(frozen=True, slots=True, kw_only=True)
class Address(Object):
    """An IPv4 address on a device; the order of addresses on one device is their order here."""

    dev: str
    address: IPv4Interface
    scope: Literal["global", "link", "host"] = "global"

    @property
    def key(self) -> Key:
        return ("address", self.netns, self.dev, str(self.address))

    @property
    def requires(self) -> tuple[Key, ...]:
        return (("link", self.netns, self.dev),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Object):
    """A route. *dst* 0.0.0.0/0 is the default route. *kind* other than unicast has no device.

    *place* says how it joins routes of equal prefix, as ``ip route`` does: ``add`` fails on an
    equal one, ``append`` goes behind, ``prepend`` in front (a plain ``NLM_F_CREATE``).
    """

    dst: IPv4Network
    dev: str | None = None
    via: IPv4Address | None = None
    src: IPv4Address | None = None
    table: int = MAIN_TABLE
    scope: Literal["global", "link", "host"] | None = None
    protocol: int = 3
    kind: Literal["unicast", "blackhole", "unreachable", "prohibit"] = "unicast"
    onlink: bool = False
    metric: int | None = None
    mtu: int | None = None
    place: Literal["add", "append", "prepend"] = "add"

    @property
    def key(self) -> Key:
        return (
            "route",
            self.netns,
            str(self.table),
            str(self.dst),
            self.kind,
            self.dev or "",
            str(self.via or ""),
            str(self.metric or ""),
        )

    @property
    def requires(self) -> tuple[Key, ...]:
        return (("link", self.netns, self.dev),) if self.dev else (("netns", self.netns),)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRule(Object):
    """A policy rule (``ip rule``). *priority* None: the kernel takes one below the lowest own."""

    table: int
    priority: int | None = None
    src: IPv4Network | None = None
    dst: IPv4Network | None = None
    fwmark: int | None = None
    fwmask: int | None = None
    iif: str | None = None

    @property
    def key(self) -> Key:
        parts = (self.priority, self.src, self.dst, self.fwmark, self.fwmask, self.iif, self.table)
        return ("rule", self.netns, *(str(part if part is not None else "") for part in parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour(Object):
    """A permanent ARP entry."""

    dev: str
    address: IPv4Address
    mac: str

    @property
    def key(self) -> Key:
        return ("neighbour", self.netns, self.dev, str(self.address))

    @property
    def requires(self) -> tuple[Key, ...]:
        return (("link", self.netns, self.dev),)


@dataclass(frozen=True, slots=True, kw_only=True)
class FdbEntry(Object):
    """A permanent forwarding entry of a VXLAN device (``self``): frames to *mac* go to *dst*."""

    dev: str
    mac: str
    dst: IPv4Address

    @property
    def key(self) -> Key:
        return ("fdb", self.netns, self.dev, self.mac)

    @property
    def requires(self) -> tuple[Key, ...]:
        return (("link", self.netns, self.dev),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sysctl(Object):
    """A sysctl of the namespace, dotted; a device's own dots are written ``/`` as sysctl does.

    *optional*: where the kernel has no such sysctl (its module is not loaded), the behaviour is
    the wanted one already, and nothing is written.
    """

    name: str
    value: str
    optional: bool = False

    @property
    def key(self) -> Key:
        return ("sysctl", self.netns, self.name)

    @property
    def device(self) -> str | None:
        """The device whose settings it belongs to, if any."""
        parts = self.name.split(".")
        if parts[:1] != ["net"] or len(parts) < 5 or parts[2] not in {"conf", "neigh"}:
            return None
        device = parts[3].replace("/", ".")
        return None if device in {"all", "default", "lo"} else device

    @property
    def requires(self) -> tuple[Key, ...]:
        return (("link", self.netns, self.device),) if self.device else (("netns", self.netns),)


@dataclass(frozen=True, slots=True, kw_only=True)
class IpSet(Object):
    """An ipset with its *members*, as ``ipset restore`` reads it."""

    name: str
    type: str = "hash:net"
    options: str = "family inet"
    members: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return ("ipset", self.netns, self.name)


@dataclass(frozen=True, slots=True)
class IptablesRule:
    """Match and target in the spelling of ``iptables-restore``, without ``-A CHAIN``."""

    text: str
    origin: Origin = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(Object):
    """A component's own chain, written whole, or a kernel chain's *policy*."""

    table: Table
    name: str
    rules: tuple[IptablesRule, ...] = ()
    policy: Literal["ACCEPT", "DROP"] | None = None
    backend: Backend = "nft"

    @property
    def key(self) -> Key:
        return ("chain", self.netns, self.backend, self.table, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook(Object):
    """A rule in a chain that several share (a kernel chain).

    *place* ``insert`` puts it in front of what is there at its turn in the plan, ``append``
    behind. Where *order* differs, the lower is placed first, whatever its place in the plan.
    """

    table: Table
    chain: str
    text: str
    place: Literal["insert", "append"] = "append"
    order: int = 0
    backend: Backend = "nft"

    @property
    def key(self) -> Key:
        return ("hook", self.netns, self.backend, self.table, self.chain, self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener(Object):
    """The lab's own server: answers HTTP, TCP and UDP on *ports* and says whom it saw."""

    ports: tuple[int, ...]

    @property
    def key(self) -> Key:
        return ("listener", self.netns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Object):
    """A program of the user's own, run in the namespace: *argv*, no shell."""

    argv: tuple[str, ...]

    @property
    def key(self) -> Key:
        return ("command", self.netns)


@dataclass(frozen=True, slots=True)
class Ruleset:
    """What one ``iptables-restore`` gets: every table of one namespace and backend.

    *tables*: table -> (policies, chains, rules) with the rules as (chain, rule) in final order.
    """

    netns: str
    backend: Backend
    policies: Mapping[Key, str]
    chains: Mapping[str, tuple[str, ...]]
    rules: Mapping[str, tuple[tuple[str, IptablesRule], ...]]

    def restore_input(self, *, reasons: bool = False) -> str:
        """The text for ``iptables-restore``; with *reasons*, each rule's origin as a comment."""
        lines: list[str] = []
        for table in KERNEL_CHAINS:
            if table not in self.chains and table not in self.rules:
                continue
            lines.append(f"*{table}")
            lines += (
                f":{chain} {self.policies.get((table, chain), 'ACCEPT')} [0:0]"
                for chain in KERNEL_CHAINS[table]
            )
            lines += (f":{chain} - [0:0]" for chain in self.chains.get(table, ()))
            said: Origin | None = None
            for chain, rule in self.rules.get(table, ()):
                if reasons and rule.origin != said:
                    lines.append(f"# {describe(rule.origin)}")
                    said = rule.origin
                lines.append(f"-A {chain} {rule.text}")
            lines.append("COMMIT")
        return "\n".join([*lines, ""])


def describe(origin: Origin) -> str:
    """*origin* as one line: ``kube-proxy: reason (subject)``."""
    subject = f" ({origin.subject})" if origin.subject else ""
    return f"{origin.component}: {origin.reason}{subject}"


@dataclass(frozen=True)
class Plan:
    """Everything a lab is made of, in an order in which it can be created.

    *objects* are given in any order that each component finds natural; `Plan.of` sorts them.
    *features*: what the kernel and the machine must have (``vxlan``, ``xt_set``, …).
    """

    name: str
    objects: tuple[Object, ...]
    features: frozenset[str] = frozenset()

    @classmethod
    def of(cls, name: str, objects: Iterable[Object], features: Iterable[str] = ()) -> Plan:
        """A plan in creation order.

        Raises:
            PlanError: two objects with one key, a requirement nobody provides, or a circle.
        """
        return cls(name, _ordered(tuple(objects)), frozenset(features))

    @cached_property
    def hash(self) -> str:
        """16 hex digits that change with any object or their order; origins do not count."""
        text = "\n".join(map(repr, self.objects))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def netns(self) -> tuple[str, ...]:
        """Names of the namespaces, in creation order."""
        return tuple(item.netns for item in self.objects if isinstance(item, Netns))

    def rulesets(self) -> tuple[Ruleset, ...]:
        """One per namespace and backend that has rules, in order of first appearance."""
        found: dict[tuple[str, Backend], list[Chain | Hook]] = {}
        for item in self.objects:
            if isinstance(item, Chain | Hook):
                found.setdefault((item.netns, item.backend), []).append(item)
        return tuple(_ruleset(*where, items) for where, items in found.items())


@dataclass(frozen=True, slots=True)
class Difference:
    """One object that two plans do not share: only *old*, only *new*, or both with one key."""

    old: Object | None
    new: Object | None


def diff(old: Plan, new: Plan) -> tuple[Difference, ...]:
    """What must change to get from *old* to *new*, in creation order, removals last."""
    before = {item.key: item for item in old.objects}
    after = {item.key: item for item in new.objects}
    changed = [
        Difference(before.get(key), item) for key, item in after.items() if before.get(key) != item
    ]
    gone = [Difference(item, None) for key, item in before.items() if key not in after]
    return (*changed, *gone)


def attributes(item: Object) -> Iterator[tuple[str, object]]:
    """The fields that make up *item*, without its origin: for printing and comparing."""
    for entry in fields(item):
        if entry.compare:
            yield entry.name, getattr(item, entry.name)


def _ruleset(netns: str, backend: Backend, items: list[Chain | Hook]) -> Ruleset:
    """Chains as written, then the hooks at their turn: the order that the kernel ends up with."""
    policies: dict[Key, str] = {}
    contents: dict[str, dict[str, list[IptablesRule]]] = {}
    for item in items:
        if isinstance(item, Chain):
            if item.policy:
                policies[item.table, item.name] = item.policy
            contents.setdefault(item.table, {})[item.name] = list(item.rules)
    for hook in sorted((i for i in items if isinstance(i, Hook)), key=lambda hook: hook.order):
        rules = contents.setdefault(hook.table, {}).setdefault(hook.chain, [])
        place = 0 if hook.place == "insert" else len(rules)
        rules.insert(place, IptablesRule(hook.text, hook.origin))
    chains: dict[str, tuple[str, ...]] = {}
    bodies: dict[str, tuple[tuple[str, IptablesRule], ...]] = {}
    for table, by_chain in contents.items():
        kernel = KERNEL_CHAINS[table]
        chains[table] = tuple(name for name in by_chain if name not in kernel)
        names = (*(name for name in kernel if name in by_chain), *chains[table])
        bodies[table] = tuple((name, rule) for name in names for rule in by_chain[name])
    return Ruleset(netns, backend, policies, chains, bodies)


def _ordered(objects: tuple[Object, ...]) -> tuple[Object, ...]:
    """Topological order by requires/provides; among the ready, the one given first goes first."""
    waiting, dependents = _dependencies(objects)
    ready = [index for index, count in enumerate(waiting) if not count]
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for dependent in dependents[index]:
            waiting[dependent] -= 1
            if not waiting[dependent]:
                heapq.heappush(ready, dependent)
    if len(order) != len(objects):
        stuck = min(set(range(len(objects))) - set(order))
        raise PlanError(f"{' '.join(objects[stuck].key)} waits for itself in a circle")
    return tuple(objects[index] for index in order)


def _dependencies(objects: tuple[Object, ...]) -> tuple[list[int], list[list[int]]]:
    """How many objects each waits for, and who waits for each, by index."""
    provider: dict[Key, int] = {}
    for index, item in enumerate(objects):
        for key in item.provides:
            if key in provider:
                raise PlanError(f"planned twice: {' '.join(key)}")
            provider[key] = index
    waiting = [0] * len(objects)
    dependents: list[list[int]] = [[] for _ in objects]
    for index, item in enumerate(objects):
        for key in item.requires:
            if key not in provider:
                raise PlanError(f"{' '.join(item.key)} needs {' '.join(key)}, which is not planned")
            waiting[index] += 1
            dependents[provider[key]].append(index)
    return waiting, dependents
