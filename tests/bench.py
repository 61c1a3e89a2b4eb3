"""`invoke bench`: whole processes, medians, against the targets of the project.

Runs under an instance name of its own, and leaves nothing up.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tabulate import tabulate

LAB = "calico-macvlan"
INSTANCE = "bench"
SECONDS = {"up": 0.7, "test": 6.0, "down": 0.4, "help": 0.25}
MEGABYTES = {"up": 80.0, "agent": 40.0}


def netlab(*args: str) -> tuple[float, float]:
    """Seconds and peak megabytes of one whole process."""
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "netlab", *args], stdout=subprocess.DEVNULL
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"netlab {' '.join(args)} ended with {process.returncode}")
    return seconds, usage.ru_maxrss / 1024


def agent_megabytes() -> float:
    """Peak resident size of the instance's agent."""
    listed = subprocess.run(
        ["ip", "netns", "pids", f"netlab.{INSTANCE}.node1"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    pids = listed or [p.name for p in Path("/proc").iterdir() if p.name.isdigit()]
    for pid in pids:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if b"netlab/agent.py" in command:
            (line,) = [entry for entry in text.splitlines() if entry.startswith("VmHWM")]
            return int(line.split()[1]) / 1024
    raise SystemExit("the agent is not running")


def measure(runs: int) -> dict[str, list[float]]:
    """Every figure of every run, by name."""
    found: dict[str, list[float]] = {}
    for _ in range(runs):
        seconds, megabytes = netlab("up", LAB, "--name", INSTANCE)
        found.setdefault("up", []).append(seconds)
        found.setdefault("up MB", []).append(megabytes)
        found.setdefault("agent MB", []).append(agent_megabytes())
        seconds, _ = netlab("test", LAB, "--name", INSTANCE, "--variant", "base", "--strict")
        found.setdefault("test", []).append(seconds)
        found.setdefault("down", []).append(netlab("down", INSTANCE)[0])
        found.setdefault("help", []).append(netlab("--help")[0])
    return found


def main() -> int:
    """Print the medians beside the targets; with --strict, 1 where one is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="one run instead of five")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--strict", action="store_true", help="a missed target fails")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    netlab("--help")
    figures = measure(1 if options.short else 5)
    found = {name: statistics.median(values) for name, values in figures.items()}
    targets = SECONDS | {f"{name} MB": value for name, value in MEGABYTES.items()}
    rows = [
        (name, f"{value:.2f}", f"{targets[name]:.2f}", "" if value <= targets[name] else "missed")
        for name, value in found.items()
    ]
    if options.format == "json":
        sys.stdout.write(json.dumps({"measured": found, "targets": targets}, indent=2) + "\n")
    else:
        header = ("figure", "median", "target", "")
        sys.stdout.write(tabulate(rows, header, tablefmt="plain") + "\n")
    return int(options.strict and any(row[3] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
