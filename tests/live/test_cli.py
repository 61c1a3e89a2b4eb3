"""The command line as its user meets it: whole processes, real labs, texts and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlab import catalogue

pytestmark = pytest.mark.live

LAB = catalogue.find("calico-macvlan")


def netlab(
    *args: str, check: int | None = 0, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run the program and hold it to the exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "netlab", *args],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,  # type: ignore[call-overload]
    )
    if check is not None:
        assert done.returncode == check, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done  # type: ignore[no-any-return]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Path]:
    """A copy of the main lab's file under a name of this test's own, taken down afterwards."""
    file = tmp_path / "cli-test.yaml"
    file.write_text(LAB.read_text().replace("name: calico-macvlan", "name: cli-test"))
    yield file
    netlab("down", "cli-test", check=None)


@pytest.fixture
def running(lab: Path) -> Path:
    netlab("up", str(lab))
    return lab


def test_up_again_is_nothing_and_on_a_changed_file_builds_again(running: Path) -> None:
    before = json.loads(netlab("status", "--format", "json").stdout)
    assert "is up already" in netlab("up", str(running)).stdout
    assert json.loads(netlab("status", "--format", "json").stdout) == before
    running.write_text(running.read_text().replace("natOutgoing: true", "natOutgoing: false"))
    (entry,) = json.loads(netlab("status", "--format", "json").stdout)["labs"]
    assert (entry["name"], entry["stale"], entry["state"]) == ("cli-test", True, "up")
    assert "cali40masq-ipam-pools" in netlab("diff", str(running), check=1).stdout
    built = netlab("up", str(running)).stdout
    assert "built again" in built
    assert "cali40masq-ipam-pools" in built
    netlab("diff", str(running))


def test_down_without_the_file(running: Path) -> None:
    running.unlink()
    shutil.rmtree("/run/netlab/cli-test")
    (entry,) = json.loads(netlab("status", "--format", "json").stdout)["labs"]
    assert (entry["name"], entry["state"]) == ("cli-test", "up")
    assert netlab("down", "cli-test").stdout == "cli-test: removed\n"
    assert json.loads(netlab("status", "--format", "json").stdout) == {"labs": []}


def test_exec_gives_the_commands_own_code_and_output(running: Path) -> None:
    assert running.exists()
    done = netlab("exec", "ma1", "--", "ip", "-br", "-4", "addr", "show", "eth0")
    assert "172.16.100.2/16" in done.stdout
    netlab("exec", "ma1", "--", "sh", "-c", "exit 7", check=7)
    netlab("exec", "ma1", "no-such-program", check=127)
    wrong = netlab("exec", "ma3", "--", "true", check=125)
    assert "did you mean" in wrong.stderr


def test_exec_sees_the_devices_of_its_own_namespace(running: Path) -> None:
    assert running.exists()
    devices = set(netlab("exec", "du1", "--", "ls", "/sys/class/net").stdout.split())
    assert {"eth0", "net1", "lo"} <= devices
    assert "vxlan.calico" not in devices


@pytest.mark.parametrize(
    ("probe", "code", "result", "seen"),
    [
        ("curl ma1 -> ca1", 0, "delivered", "172.16.100.2"),
        ("tcp ma1 -> web-ca2", 0, "delivered", "10.233.100.0"),
        ("udp ma1 -> ma2", 0, "delivered", "172.16.100.2"),
        ("ping ma1 -> ca2", 0, "delivered", None),
        ("curl ma1 -> ca2", 1, "dropped", None),
        ("curl ma1 -> ca1:4444", 1, "rejected", None),
    ],
)
def test_probe(running: Path, probe: str, code: int, result: str, seen: str | None) -> None:
    assert running.exists()
    told = json.loads(netlab("probe", probe, "--format", "json", check=code).stdout)
    assert (told["result"], told["seenAs"]) == (result, seen)


def test_verify_names_what_was_changed_by_hand(running: Path) -> None:
    assert running.exists()
    assert "and nothing else" in netlab("verify").stdout
    netlab("exec", "node1", "--", "iptables", "-D", "KUBE-FORWARD", "1")
    netlab("exec", "ma1", "--", "ip", "route", "del", "10.233.64.0/18")
    drift = json.loads(netlab("verify", "--format", "json", check=1).stdout)["drift"]
    assert [(item["netns"], item["component"], item["reason"]) for item in drift] == [
        ("node1", "kube-proxy", "invalid"),
        ("ma1", "coordinator", "overlayPodCIDR goes through the node"),
    ] or {(item["netns"], item["component"]) for item in drift} == {
        ("node1", "kube-proxy"),
        ("ma1", "coordinator"),
    }


def test_two_instances_of_one_lab_do_not_meet(running: Path) -> None:
    netlab("up", str(running), "--name", "cli-test-2")
    try:
        first = netlab("probe", "--lab", "cli-test", "curl ma1 -> ca1").stdout
        second = netlab("probe", "--lab", "cli-test-2", "curl ma1 -> ca1").stdout
        assert "delivered" in first
        assert "delivered" in second
        netlab("exec", "--lab", "cli-test-2", "ma1", "--", "ip", "link", "del", "veth0")
        netlab("probe", "--lab", "cli-test-2", "curl ma1 -> ca1", check=1)
        netlab("probe", "--lab", "cli-test", "curl ma1 -> ca1")
        several = netlab("probe", "curl ma1 -> ca1", check=3)
        assert "cli-test, cli-test-2" in several.stderr
    finally:
        netlab("down", "cli-test-2")


def test_a_lab_that_another_command_holds_is_busy(running: Path) -> None:
    lock = (
        "import sys; from netlab import kernel\n"
        "with kernel.lock('cli-test'): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        refused = netlab("down", "cli-test", check=2)
        assert str(holder.pid) in refused.stderr
        assert running.exists()
        holder.communicate("")
    netlab("down", "cli-test")


def test_an_interrupted_up_leaves_nothing(lab: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(
            [sys.executable, "-m", "netlab", "up", str(lab)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            while process.poll() is None and not _namespaces("cli-test"):
                os.sched_yield()
            process.send_signal(number)
            assert process.wait() != 0
        assert _namespaces("cli-test") == []


def test_an_interrupted_test_leaves_nothing(lab: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "netlab", "test", str(lab), "--variant", "liberal"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        private = f"cli-test-{process.pid}-*"
        while process.poll() is None and len(_namespaces(private)) < 17:
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert _namespaces(private) == []


def test_test_reports_json_and_leaves_the_running_lab_alone(running: Path) -> None:
    before = json.loads(netlab("status", "--format", "json").stdout)
    told = json.loads(
        netlab(
            "test",
            str(running),
            "--select",
            "S-06",
            "--select",
            "S-07",
            "--select",
            "S-07/ping",
            "--variant",
            "base",
            "--variant",
            "liberal",
            "--format",
            "json",
        ).stdout
    )
    assert (told["lab"], told["failed"], told["errors"]) == ("cli-test", 0, 0)
    results = {
        run["variant"]: {item["id"]: item["observed"]["result"] for item in run["expectations"]}
        for run in told["runs"]
    }
    assert results["base"]["S-07"] == "dropped"
    assert results["liberal"]["S-07"] == "delivered"
    assert json.loads(netlab("status", "--format", "json").stdout) == before


def test_test_fails_where_the_world_is_not_as_expected(running: Path) -> None:
    netlab("exec", "node1", "--", "iptables", "-I", "FORWARD", "-d", "10.233.100.3", "-j", "DROP")
    args = ("test", str(running), "--variant", "base", "--select", "S-06")
    failed = netlab(*args, check=1).stdout
    assert "expected" in failed
    assert "observed" in failed
    netlab("exec", "node1", "--", "iptables", "-D", "FORWARD", "1")
    netlab(*args)


def test_a_negative_without_its_control_is_an_error(running: Path) -> None:
    netlab("exec", "ma1", "--", "ip", "route", "add", "blackhole", "10.233.101.2/32")
    args = ("test", str(running), "--variant", "base", "--select", "S-07", "--select", "S-07/ping")
    told = json.loads(netlab(*args, "--format", "json", check=2).stdout)
    (s07,) = [e for e in told["runs"][0]["expectations"] if e["id"] == "S-07"]
    assert (s07["status"], s07["observed"]["result"]) == ("error", "dropped")


def test_mistakes_are_told_with_their_place_and_code_3(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(LAB.read_text().replace("attach: macvlan-17", "attach: macvlan-71"))
    told = netlab("up", str(broken), check=3).stderr
    assert "did you mean 'macvlan-17'" in told
    assert f"{broken}:" in told
    assert netlab("up", "calico-macvlam", check=3).stderr.count("calico-macvlan") >= 1
    netlab("nonsense", check=3)
    netlab("test", "calico-macvlan", "--variant", "libaral", check=3)


def test_plan_prints_a_script_and_up_of_a_variant_says_so(lab: Path) -> None:
    script = netlab("plan", str(lab), "--variant", "liberal").stdout
    assert script.startswith("#!/bin/sh")
    assert "--ctstate INVALID -j DROP\n" not in script.split("cali-")[0]
    assert "(liberal)" in netlab("up", str(lab), "--variant", "liberal").stdout


def _namespaces(instance: str) -> list[str]:
    folder = Path("/run/netns")
    return sorted(p.name for p in folder.glob(f"netlab.{instance}.*")) if folder.exists() else []


@pytest.mark.usefixtures("no_leaks")
def test_up_test_down_leave_the_host_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "cli-host.yaml"
    file.write_text(LAB.read_text().replace("name: calico-macvlan", "name: cli-host"))
    netlab("up", str(file))
    netlab("test", str(file), "--select", "S-07", "--select", "S-07/ping", "--variant", "base")
    netlab("test", str(file), "--select", "S-07", "--variant", "liberal")
    netlab("down", "cli-host")


def test_without_a_name_the_file_here_is_meant(lab: Path) -> None:
    shutil.copy(lab, lab.with_name("lab.yaml"))
    here = {"cwd": lab.parent}
    netlab("up", **here)
    assert "and nothing else" in netlab("verify", **here).stdout
    assert "what the file says" in netlab("diff", **here).stdout
    assert netlab("down", "./lab.yaml", **here).stdout == "cli-test: removed\n"
    assert netlab("down", **here).stdout == "cli-test: was not up\n"
    nowhere = netlab("up", check=3, cwd=lab.parent.parent)
    assert "say which lab" in nowhere.stderr
