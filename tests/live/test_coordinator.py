"""What the coordinator finds on its node, asked of the kernel itself by `ip route get`, `ip addr`.

`GetAllHostIPRouteForPod`: the sources of the routes to the Pod's addresses, then every other
address of devices that belong to the node itself. The plan's answer comes from a pure model.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import partial

import pytest

from netlab import catalogue, kernel, lifecycle
from netlab.compile import compile_lab
from netlab.model import Lab, Pod
from netlab.plan import Neighbour
from netlab.spec import load

pytestmark = pytest.mark.live

LAB = load(catalogue.find("calico-macvlan"))
PLAN = compile_lab(LAB)
ATTACHED = [pod for pod in LAB.pods.values() if any(nic.coordinator for nic in pod.nics)]
PODS_OWN = re.compile("docker|cbr|dummy|virbr|lxcbr|veth|lo$|cali|flannel|kube-ipvs|cni|cilium")


def before_attaching(lab: Lab, names: set[str]) -> Lab:
    """*lab* as it is when the coordinator is about to run for the Pods *names*."""
    stripped = {
        name: replace(pod, nics=tuple(nic for nic in pod.nics if not nic.coordinator))
        for name, pod in lab.pods.items()
    }
    pods = {
        name: stripped[name] if name in names else pod
        for name, pod in lab.pods.items()
        if name not in names or stripped[name].nics
    }
    return replace(lab, pods=pods, services={}, expect=())


def asked(instance: str, pod: Pod) -> list[str]:
    """The node's addresses for *pod*, in order, as the real programs tell them."""
    run = partial(kernel.run, instance, pod.node, timeout=20)
    found: dict[str, None] = {}
    for nic in pod.nics:
        told = json.loads(run(("ip", "-j", "route", "get", str(nic.address.ip))).stdout)
        found[told[0]["prefsrc"]] = None
    for link in json.loads(run(("ip", "-j", "-4", "addr")).stdout):
        if not PODS_OWN.match(link["ifname"]):
            for address in link["addr_info"]:
                found[address["local"]] = None
    return list(found)


def planned(pod: Pod) -> list[str]:
    """The same, as the plan has it: the neighbours that the coordinator gives the Pod."""
    return [
        str(item.address)
        for item in PLAN.objects
        if isinstance(item, Neighbour) and item.netns == pod.name
    ]


@pytest.mark.parametrize("stripped", ["all", "one"])
def test_node_addresses_are_the_kernels_own(stripped: str) -> None:
    single = [pod for pod in ATTACHED if len(pod.nics) == 1]
    dual = [pod for pod in ATTACHED if len(pod.nics) == 2]
    pods = ATTACHED if stripped == "all" else [single[-1], dual[-1]]
    lab = before_attaching(LAB, {pod.name for pod in pods})
    instance = f"coordinator-{os.getpid()}"
    with lifecycle.private(lab, compile_lab(lab), instance):
        for pod in pods:
            assert planned(pod) == asked(instance, pod), pod.name
    assert len(pods) >= 2


def test_the_first_of_them_is_the_next_hop_of_hijacked_traffic() -> None:
    instance = f"coordinator-{os.getpid()}"
    with lifecycle.private(LAB, PLAN, instance):
        for pod in ATTACHED:
            told = kernel.run(
                instance, pod.name, ("ip", "-j", "route", "get", "10.233.0.100"), timeout=20
            )
            assert json.loads(told.stdout)[0]["gateway"] == planned(pod)[0], pod.name
