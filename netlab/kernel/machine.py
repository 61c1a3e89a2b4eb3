"""What this machine can do, tried in a network namespace of its own that is gone afterwards."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from pathlib import Path

from netlab.errors import KernelError, MissingFeature
from netlab.kernel import namespaces, objects, ownership, processes, rulesets
from netlab.kernel.objects import Space
from netlab.kernel.rtnetlink import Socket
from netlab.plan import (
    Backend,
    Bridge,
    Hook,
    IpSet,
    Link,
    Macvlan,
    Origin,
    Plan,
    Table,
    Veth,
    Vlan,
    Vxlan,
)

PROGRAMS: Mapping[str, str] = {
    "curl": "curl",
    "ping": "ping",
    "ipset": "ipset",
    "conntrack": "conntrack",
    "iptables-nft": "iptables-nft-restore",
    "iptables-legacy": "iptables-legacy-restore",
}
"""Feature -> the program that it takes."""

EXTENSIONS: Mapping[str, tuple[Table, str, str]] = {
    "xt_addrtype": ("filter", "INPUT", "-m addrtype --dst-type LOCAL -j ACCEPT"),
    "xt_comment": ("filter", "INPUT", "-m comment --comment probe -j ACCEPT"),
    "xt_conntrack": ("filter", "INPUT", "-m conntrack --ctstate INVALID -j ACCEPT"),
    "xt_icmp": ("filter", "INPUT", "-p icmp -m icmp --icmp-type 8 -j ACCEPT"),
    "xt_limit": ("filter", "INPUT", "-m limit --limit 1/sec -j ACCEPT"),
    "xt_mark": ("filter", "INPUT", "-m mark --mark 0x1/0x1 -j ACCEPT"),
    "xt_multiport": ("filter", "INPUT", "-p tcp -m multiport --dports 1,2 -j ACCEPT"),
    "xt_physdev": ("filter", "FORWARD", "-m physdev --physdev-is-bridged -j ACCEPT"),
    "xt_recent": ("filter", "INPUT", "-m recent --name probe --set -j ACCEPT"),
    "xt_rpfilter": ("raw", "PREROUTING", "-m rpfilter --invert -j ACCEPT"),
    "xt_set": ("filter", "INPUT", "-m set --match-set probe src -j ACCEPT"),
    "xt_statistic": ("nat", "OUTPUT", "-m statistic --mode random --probability 0.5 -j ACCEPT"),
    "xt_tcp": ("filter", "INPUT", "-p tcp -m tcp --dport 1 -j ACCEPT"),
    "xt_udp": ("filter", "INPUT", "-p udp -m udp --dport 1 -j ACCEPT"),
    "xt_CONNMARK": ("mangle", "PREROUTING", "-j CONNMARK --save-mark"),
    "xt_DNAT": ("nat", "PREROUTING", "-p tcp -j DNAT --to-destination 192.0.2.1:80"),
    "xt_MARK": ("nat", "PREROUTING", "-j MARK --set-xmark 0x1/0x1"),
    "xt_MASQUERADE": ("nat", "POSTROUTING", "-j MASQUERADE"),
    "xt_NOTRACK": ("raw", "PREROUTING", "-j NOTRACK"),
    "xt_REDIRECT": ("nat", "PREROUTING", "-p tcp -j REDIRECT --to-ports 80"),
    "xt_REJECT": ("filter", "INPUT", "-j REJECT"),
    "xt_SNAT": ("nat", "POSTROUTING", "-j SNAT --to-source 192.0.2.1"),
}
"""Feature -> a rule that needs it."""

_MODULES: Mapping[str, tuple[str, ...]] = {
    "veth": ("veth",),
    "bridge": ("bridge",),
    "macvlan": ("macvlan",),
    "vxlan": ("vxlan",),
    "vlan": ("8021q",),
    "ipset": ("ip_set", "ip_set_hash_net", "ip_set_hash_ip"),
    "iptables-nft": ("nf_tables", "nft_compat", "nft_chain_nat", "nf_conntrack"),
    "iptables-legacy": (
        *("ip_tables", "iptable_raw", "iptable_mangle", "iptable_nat", "iptable_filter"),
        "nf_conntrack",
    ),
    "conntrack": ("nf_conntrack", "nf_conntrack_netlink"),
    "xt_rpfilter": ("ipt_rpfilter",),
    "xt_REJECT": ("ipt_REJECT",),
    "xt_SNAT": ("xt_nat",),
    "xt_DNAT": ("xt_nat",),
    "xt_NOTRACK": ("xt_CT",),
    "xt_tcp": ("xt_tcpudp",),
    "xt_udp": ("xt_tcpudp",),
    "xt_icmp": (),
}
"""Feature -> kernel modules. Not br_netfilter: it would send the host's own bridged packets through
the host's iptables (Documentation/networking/ip-sysctl.rst, bridge-nf-call-iptables).
"""
_READ_ONLY = ("net.netfilter.nf_conntrack_max", "net.netfilter.nf_conntrack_buckets")
_ORIGIN = Origin("kernel", "feature probe")
_NS = "probe"


def prepare(plan: Plan) -> None:
    """Load the modules of the plan's features and see that the machine has them all.

    Raises:
        MissingFeature: naming each that is missing, and why it is known to be.
    """
    if os.geteuid() != 0:
        raise MissingFeature(ownership.NOT_ROOT)
    load_modules(plan.features)
    missing = {name: problem for name, problem in features(plan.features).items() if problem}
    if missing:
        told = "; ".join(f"{name}: {problem}" for name, problem in missing.items())
        raise MissingFeature(f"this machine lacks what {plan.name} needs: {told}")


def features(needed: Iterable[str]) -> Mapping[str, str]:
    """What is the matter with each feature, sorted by name; empty text: it is here.

    ``root``, ``netns``; ``veth``, ``bridge``, ``macvlan``, ``vxlan``, ``vlan``; ``ipset``;
    ``iptables-nft``, ``iptables-legacy`` and ``xt_*``, tried with the backends among *needed*;
    programs (``curl``, ``ping``, ``conntrack``). Another name is taken for a program's.
    """
    names = sorted(set(needed))
    found = dict.fromkeys(names, "")
    if os.geteuid() != 0:
        return dict.fromkeys(names, ownership.NOT_ROOT)
    try:
        namespaces.in_scratch(lambda: None).result()
    except OSError as error:
        return dict.fromkeys(names, f"no network namespaces: {error.strerror}")
    for name in names:
        if name not in _DEVICES and not name.startswith("xt_") and name not in {"root", "netns"}:
            found[name] = _program(PROGRAMS.get(name, name))
    with ThreadPoolExecutor() as pool:
        tried = [pool.submit(_try_devices, [name for name in names if name in _DEVICES])]
        wanted = [name for name in names if name in EXTENSIONS]
        backends = _backends(found)
        tried += [pool.submit(_try_rules, backend, wanted, found) for backend in backends]
    for future in tried:
        for name, problem in future.result().items():
            found[name] = found.get(name) or problem
    return found


def load_modules(names: Iterable[str]) -> None:
    """Load what the features *names* need, where this kernel has modules at all.

    Whether it worked is not asked here: `features` tells.
    """
    release = Path("/lib/modules", platform.release())
    if not release.is_dir():
        return
    wanted: dict[str, None] = {}
    for name in sorted(names):
        default = (name,) if name.startswith("xt_") else ()
        wanted.update(dict.fromkeys(_MODULES.get(name, default)))
    loaded = {line.split(" ", 1)[0] for line in _lines(Path("/proc/modules"))}
    built_in = {Path(line).name.partition(".")[0] for line in _lines(release / "modules.builtin")}
    present = {module.replace("-", "_") for module in loaded | built_in}
    missing = [module for module in wanted if module not in present]
    if missing and not _program("modprobe"):
        argv = ["modprobe", "--quiet", "--all", *missing]
        subprocess.run(argv, env=processes.environment(), capture_output=True, check=False)


def notes() -> tuple[str, ...]:
    """What a lab cannot set on this machine, a sentence each."""
    if os.geteuid() != 0:
        return ()

    def look() -> list[str]:
        told = []
        for name in _READ_ONLY:
            file = objects.sysctl_path(name)
            if file.exists() and not file.stat().st_mode & 0o200:
                told.append(f"{name} is read-only inside a network namespace")
        if not Path("/proc/sys/net/bridge").exists():
            told.append("br_netfilter is not loaded: switches need no setting to bypass iptables")
        return told

    return tuple(namespaces.in_scratch(look).result())


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _program(name: str) -> str:
    found = shutil.which(name, path=processes.environment()["PATH"])
    return "" if found else f"the program {name} is not installed"


def _backends(found: Mapping[str, str]) -> list[Backend]:
    """The backends to try rules with: those wanted and installed, else whichever is."""
    backends: tuple[Backend, ...] = ("nft", "legacy")
    asked = [one for one in backends if f"iptables-{one}" in found]
    if not asked and any(name.startswith("xt_") or name == "ipset" for name in found):
        asked = ["nft"]
    return [one for one in asked if not _program(PROGRAMS[f"iptables-{one}"])]


_VETH = Veth(netns=_NS, origin=_ORIGIN, name="v0", peer_netns=_NS, peer="v1")
_DEVICES: Mapping[str, Link] = {
    "veth": _VETH,
    "bridge": Bridge(netns=_NS, origin=_ORIGIN, name="b0"),
    "macvlan": Macvlan(netns=_NS, origin=_ORIGIN, name="m0", lower_netns=_NS, lower="v0"),
    "vxlan": Vxlan(
        netns=_NS,
        origin=_ORIGIN,
        name="x0",
        vni=1,
        port=4789,
        local=IPv4Address("192.0.2.1"),
        lower="v0",
    ),
    "vlan": Vlan(netns=_NS, origin=_ORIGIN, name="l0", lower="v0", vlan=1),
}


def _try_devices(names: Iterable[str]) -> dict[str, str]:
    """Create a device of each kind; those on top of another take a veth for it."""

    def create() -> dict[str, str]:
        found: dict[str, str] = {}
        descriptor = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        space = Space(Path(), descriptor, Socket())
        try:
            for name in dict.fromkeys(["veth", *names]):
                try:
                    objects.create(_DEVICES[name], {_NS: space})
                except OSError as error:
                    found[name] = f"the kernel cannot create it: {error.strerror}"
        finally:
            space.close()
        return found

    wanted = list(names)
    found = namespaces.in_scratch(create).result() if wanted else {}
    return {name: problem for name, problem in found.items() if name in wanted}


def _try_rules(backend: Backend, names: list[str], needed: Mapping[str, str]) -> dict[str, str]:
    """All at once, since that is one program; one by one only where that fails."""
    with_set = "ipset" in needed or "xt_set" in names
    problem = _refusal(backend, names, with_set=with_set)
    if not problem:
        return {}
    found: dict[str, str] = {}
    if with_set and (refused := _refusal(None, [], with_set=True)):
        found["ipset"] = refused
        found["xt_set"] = refused
    bare = _refusal(backend, [], with_set=False)
    if bare:
        return {**found, f"iptables-{backend}": bare}
    for name in names:
        if refused := _refusal(backend, [name], with_set=name == "xt_set"):
            found.setdefault(name, f"not with iptables-{backend}: {refused}")
    return {name: text for name, text in found.items() if name in {*names, *needed}}


def _refusal(backend: Backend | None, names: Iterable[str], *, with_set: bool) -> str:
    """What the programs say against an ipset and rules with the extensions *names*."""
    rules = [EXTENSIONS[name] for name in names]
    hooks = [
        Hook(
            netns=_NS, origin=_ORIGIN, table=table, chain=chain, text=text, backend=backend or "nft"
        )
        for table, chain, text in rules
    ]

    def load() -> None:
        children = rulesets.Children()
        if with_set:
            rulesets.restore_sets([IpSet(netns=_NS, origin=_ORIGIN, name="probe")], children)
        if backend:
            empty = Hook(
                netns=_NS,
                origin=_ORIGIN,
                table="filter",
                chain="INPUT",
                text="-j ACCEPT",
                backend=backend,
            )
            for ruleset in Plan("probe", (*hooks, empty)).rulesets():
                rulesets.restore_rules(ruleset, children, None)

    try:
        namespaces.in_scratch(load).result()
    except KernelError as error:
        return str(error).partition(": ")[2]
    return ""
