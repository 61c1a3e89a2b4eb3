"""Lab -> Plan: asks each component in turn for what it writes, in the order of a real cluster.

First the world and the nodes' NICs, then what was there before any component (``extra.before``),
then Calico with its Pods, the attachments with their coordinator, kube-proxy, and at last what
the user adds or sets. A component may look at everything planned before its turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from netlab import kube_proxy, raw, wiring
from netlab.cni import calico, macvlan, spiderpool
from netlab.model import Lab, Pod
from netlab.plan import (
    Bridge,
    Chain,
    Hook,
    IpSet,
    Macvlan,
    Object,
    Origin,
    Plan,
    Sysctl,
    Veth,
    Vlan,
    Vxlan,
)

_FEATURES: tuple[tuple[type[Object], str], ...] = (
    (Bridge, "bridge"),
    (IpSet, "ipset"),
    (Macvlan, "macvlan"),
    (Veth, "veth"),
    (Vlan, "vlan"),
    (Vxlan, "vxlan"),
)
_MATCH = re.compile(r"(?:^|\s)-m (\w+)")
_TARGET = re.compile(
    r"\s(?:-j|--jump) (MARK|CONNMARK|MASQUERADE|DNAT|SNAT|REJECT|NOTRACK|REDIRECT)\b"
)


def compile_lab(lab: Lab) -> Plan:
    """The plan of *lab* in its variant.

    Raises:
        PlanError: components planned things that cannot stand together.
    """
    planned: list[Object] = [*wiring.objects(lab)]
    planned += (_pod_namespace(pod) for pod in lab.pods.values())
    planned += raw.objects(lab, "before", ("nodes", "hosts", "routers", "networks"))
    planned += calico.objects(lab)
    if any(nic.coordinator for pod in lab.pods.values() for nic in pod.nics):
        for node in lab.nodes.values():
            planned += spiderpool.node_objects(node)
    for pod in lab.pods.values():
        planned = _attach(lab, pod, planned)
    planned += kube_proxy.objects(lab)
    for pod in lab.pods.values():
        planned.append(wiring.server(pod.name, pod.ports, pod.command, f"pods.{pod.name}"))
    planned += _node_sysctls(lab)
    planned += raw.objects(lab, "after", ("nodes", "hosts", "routers", "networks", "pods"))
    objects = _last_value_wins(planned)
    return Plan.of(lab.name, objects, features(objects))


def features(objects: Iterable[Object]) -> Iterator[str]:
    """What the kernel and the machine must have for *objects*, in the words of `doctor`."""
    yield from ("root", "netns")
    for item in objects:
        yield from (name for kind, name in _FEATURES if isinstance(item, kind))
        if isinstance(item, Chain | Hook):
            yield f"iptables-{item.backend}"
            texts = (item.text,) if isinstance(item, Hook) else (rule.text for rule in item.rules)
            for text in texts:
                yield from (f"xt_{name}" for name in _MATCH.findall(text))
                yield from (f"xt_{name}" for name in _TARGET.findall(text))


def _pod_namespace(pod: Pod) -> Object:
    origin = Origin(
        "kubelet", "the Pod's sandbox", f"Pod {pod.namespace}/{pod.name}", f"pods.{pod.name}"
    )
    return wiring.namespace(pod.name, origin)


def _attach(lab: Lab, pod: Pod, planned: list[Object]) -> list[Object]:
    """*planned* with the Pod's attachments, each main CNI followed by its coordinator."""
    before = list(raw.objects(lab, "before", ("pods",), only=pod.name))
    for nic in pod.nics:
        if nic.attachment is None:
            continue
        planned = [*planned, *macvlan.objects(pod, nic, nic.attachment), *before]
        before = []
        if nic.coordinator is not None:
            backend = lab.nodes[pod.node].iptables_backend
            tuning = spiderpool.tune(pod, nic, backend, planned)
            kept = [item for item in planned if item.key not in tuning.removed]
            planned = [*kept, *tuning.added]
    return [*planned, *before]


def _node_sysctls(lab: Lab) -> Iterator[Object]:
    for node in lab.nodes.values():
        for name, value in node.sysctl.items():
            origin = Origin("user", "cluster.sysctl", f"node {node.name}", f"cluster.sysctl.{name}")
            yield Sysctl(netns=node.name, origin=origin, name=name, value=value)


def _last_value_wins(planned: list[Object]) -> list[Object]:
    """A sysctl that several write keeps its first place and its last value."""
    last = {item.key: item for item in planned if isinstance(item, Sysctl)}
    written: set[tuple[str, ...]] = set()
    objects: list[Object] = []
    for item in planned:
        if isinstance(item, Sysctl):
            if item.key not in written:
                objects.append(last[item.key])
            written.add(item.key)
        else:
            objects.append(item)
    return objects
