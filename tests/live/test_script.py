"""The printed script and `apply` make the same kernel objects.

What is in the kernel is read by the real programs, not by netlab.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from netlab import kernel, script
from netlab.plan import Netns, Plan, Sysctl

pytestmark = pytest.mark.live

RANDOM = re.compile(r" (?:initval|bucketsize|hashsize) \S+|\[\d+:\d+\]")
UNSTABLE = {
    *("ifindex", "link_index", "link_netnsid", "ifalias", "link_netns", "operstate", "flags"),
    *("gc_timer", "hello_timer", "hold_timer", "message_age_timer", "forward_delay_timer"),
    *("carrier_changes", "valid_life_time", "preferred_life_time", "link-netnsid"),
}


def read(prefix: str, netns: str) -> dict[str, Any]:
    """Everything that programs tell of the namespace, without numbers that differ by chance."""
    within = ["nsenter", f"--net=/run/netns/{prefix}.{netns}"]
    told: dict[str, Any] = {}
    for what in (
        "-d link",
        "address",
        "route show table all",
        "rule",
        "neighbour show nud permanent",
    ):
        argv = ["ip", "-n", f"{prefix}.{netns}", "-j", *what.split()]
        told[what] = [stable(one) for one in json.loads(output(*argv) or "[]")]
    told["flags"] = [
        sorted(set(link["flags"]) & {"UP", "LOWER_UP"})
        for link in json.loads(output("ip", "-n", f"{prefix}.{netns}", "-j", "link"))
    ]
    fdb = json.loads(output("bridge", "-n", f"{prefix}.{netns}", "-j", "fdb"))
    told["fdb"] = [entry for entry in fdb if "dst" in entry]
    for program in ("iptables-nft-save", "iptables-legacy-save", "ipset save"):
        lines = output(*within, *program.split()).splitlines()
        told[program] = [RANDOM.sub("", line) for line in lines if not line.startswith("#")]
    # Some settings can only be written, which sysctl takes for a failure.
    argv = [*within, "sysctl", "net.ipv4", "net.ipv6.conf.all"]
    told["sysctls"] = subprocess.run(argv, check=False, capture_output=True, text=True).stdout
    assert "net.ipv4.ip_forward" in told["sysctls"]
    return told


def stable(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {k: stable(v) for k, v in value.items() if k not in UNSTABLE}
    return [stable(one) for one in value] if isinstance(value, list) else value


def output(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def run_script(text: str, prefix: str, file: Path) -> None:
    file.write_text(text)
    subprocess.run(["sh", str(file)], check=True, env={"PATH": PATH, "NETLAB": prefix})


PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def remove(prefix: str, plan: Plan) -> None:
    for netns in plan.netns:
        name = f"{prefix}.{netns}"
        found = subprocess.run(
            ["ip", "netns", "pids", name], check=False, capture_output=True, text=True
        )
        for pid in found.stdout.split():
            subprocess.run(["kill", "-KILL", pid], check=False)
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_the_script_makes_what_apply_makes(
    plan: Plan, no_leaks: Callable[[], str], tmp_path: Path
) -> None:
    instance, prefix = no_leaks(), f"script.{no_leaks()}"
    try:
        kernel.apply(plan, instance)
        run_script(script.render(plan), prefix, tmp_path / "lab.sh")
        for netns in plan.netns:
            applied, scripted = read(f"netlab.{instance}", netns), read(prefix, netns)
            for what, value in applied.items():
                assert scripted[what] == value, (netns, what)
    finally:
        kernel.teardown(instance)
        remove(prefix, plan)


def test_the_comparison_sees_a_difference(
    plan: Plan, no_leaks: Callable[[], str], tmp_path: Path
) -> None:
    """The control of the test above: one line less is one difference in the kernel."""
    instance, prefix = no_leaks(), f"script.{no_leaks()}"
    line = "route add blackhole 10.233.101.0/26"
    text = script.render(plan)
    assert text.count(line) == 1
    kept = "\n".join(one for one in text.splitlines() if line not in one)
    try:
        kernel.apply(plan, instance)
        run_script(kept, prefix, tmp_path / "lab.sh")
        applied, scripted = read(f"netlab.{instance}", "node1"), read(prefix, "node1")
        assert [what for what in applied if applied[what] != scripted[what]] == [
            "route show table all"
        ]
    finally:
        kernel.teardown(instance)
        remove(prefix, plan)


def test_the_script_stops_at_the_first_failure(
    no_leaks: Callable[[], str], tmp_path: Path, plan: Plan
) -> None:
    origin = plan.objects[0].origin
    wrong = Sysctl(netns="a", origin=origin, name="net.ipv4.no_such_setting", value="1")
    objects = [*(Netns(netns=name, origin=origin) for name in "ab"), wrong]
    broken = Plan.of("x", objects)
    assert [item.netns for item in broken.objects] == ["a", "b", "a"]
    prefix = f"script.{no_leaks()}"
    try:
        with pytest.raises(subprocess.CalledProcessError):
            run_script(script.render(broken) + "\necho reached", prefix, tmp_path / "x.sh")
    finally:
        remove(prefix, broken)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "lab.sh"
    file.write_text(script.render(plan))
    done = subprocess.run(["shellcheck", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
