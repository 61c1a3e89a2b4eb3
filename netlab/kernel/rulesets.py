"""ipsets and iptables rules: written and read by the real programs, as children in a namespace."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from netlab.errors import KernelError
from netlab.kernel.processes import environment
from netlab.plan import Backend, IpSet, Plan, Ruleset, describe

_QUOTED = re.compile(r"'(\S+)'")
_LINE = re.compile(r"line:? (\d+)")
_COUNTERS = re.compile(r" \[\d+:\d+\]$")
_RANDOM = re.compile(r" (?:hashsize|bucketsize|initval) \S+")


class Children:
    """The programs that `apply` has running; all of them can be ended at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(self, argv: Sequence[str], given: str, env: Mapping[str, str]) -> tuple[int, str, str]:
        """Exit code, output and messages of a program in the current thread's namespace.

        Raises:
            OSError: it cannot be started.
        """
        with self._lock:
            if self._stopped:
                raise KernelError("stopped")
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment(), **env},
                text=True,
            )
            self._running.add(process)
        with process:
            out, said = process.communicate(given)
        with self._lock:
            self._running.discard(process)
        return process.returncode, out, said

    def stop(self) -> None:
        """Kill what runs, and start nothing more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.kill()


def sets_of(plan: Plan) -> dict[str, tuple[IpSet, ...]]:
    """The plan's ipsets by namespace."""
    found: dict[str, list[IpSet]] = {}
    for item in plan.objects:
        if isinstance(item, IpSet):
            found.setdefault(item.netns, []).append(item)
    return {netns: tuple(items) for netns, items in found.items()}


def sets_input(sets: Sequence[IpSet]) -> str:
    """What ``ipset restore`` reads."""
    lines = [f"create {item.name} {item.type} {item.options}".rstrip() for item in sets]
    lines += (f"add {item.name} {member}" for item in sets for member in item.members)
    return "\n".join([*lines, ""])


def restore_sets(sets: Sequence[IpSet], children: Children) -> None:
    """Create *sets* in the current thread's namespace.

    Raises:
        KernelError: ``ipset`` refused; the message names the set's line.
    """
    given = sets_input(sets)
    code, _, said = _run(sets[0].netns, ["ipset", "restore"], given, children)
    if code:
        raise KernelError(f"{sets[0].netns}: ipset restore: {_blame(said, given)}")


def restore_rules(ruleset: Ruleset, children: Children, locks: Path | None) -> None:
    """Load *ruleset* into the current thread's namespace.

    *locks*: a directory for the legacy programs' lock, so that namespaces do not wait for each
    other's; None: the host's.

    Raises:
        KernelError: refused; the message names the rule and who asked for it.
    """
    program = f"iptables-{ruleset.backend}-restore"
    given = ruleset.restore_input()
    lock = {"XTABLES_LOCKFILE": str(locks / f"{ruleset.netns}.xtables")} if locks else {}
    code, _, said = _run(ruleset.netns, [program, "-w"], given, children, lock)
    if code:
        problem = f"{_blame(said, given)}{_owner(said, given, ruleset)}"
        raise KernelError(f"{ruleset.netns}: {program}: {problem}")


def saved_sets(netns: str, children: Children) -> dict[str, tuple[str, frozenset[str]]]:
    """``ipset save`` of the current thread's namespace: set -> (type and options, members)."""
    code, out, said = _run(netns, ["ipset", "save"], "", children)
    if code:
        raise KernelError(f"{netns}: ipset save: {said.strip()}")
    created: dict[str, str] = {}
    members: dict[str, set[str]] = {}
    for line in out.splitlines():
        verb, name, rest = line.split(" ", 2)
        if verb == "create":
            created[name] = _RANDOM.sub("", f" {rest}").strip()
        else:
            members.setdefault(name, set()).add(rest)
    return {name: (kind, frozenset(members.get(name, ()))) for name, kind in created.items()}


def saved_rules(netns: str, backend: Backend, children: Children) -> dict[str, list[str]]:
    """``iptables-save`` of the current thread's namespace: ``table chain`` -> rules.

    A chain's policy is its first line (``policy DROP``); kernel chains that accept and are empty
    are left out, since a table that nobody has used is the same.
    """
    code, out, said = _run(netns, [f"iptables-{backend}-save"], "", children)
    if code:
        raise KernelError(f"{netns}: iptables-{backend}-save: {said.strip()}")
    chains: dict[str, list[str]] = {}
    table = ""
    for line in out.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(":"):
            name, policy = _COUNTERS.sub("", line[1:]).split(" ")
            chains[f"{table} {name}"] = [f"policy {policy}"]
        elif line.startswith("-A "):
            _, name, *rest = line.split(" ", 2)
            chains[f"{table} {name}"].append(rest[0] if rest else "")
    return {name: lines for name, lines in chains.items() if lines != ["policy ACCEPT"]}


def _run(
    netns: str,
    argv: Sequence[str],
    given: str,
    children: Children,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str, str]:
    try:
        return children.run(argv, given, env or {})
    except OSError as error:
        raise KernelError(f"{netns}: cannot run {argv[0]}: {error.strerror}") from None


def _blamed(said: str, given: str) -> str:
    """The line of the input that a program means.

    A chain that does not exist is quoted, since only the COMMIT behind it fails.
    """
    lines = given.splitlines()
    for quoted in _QUOTED.findall(said):
        named = [line for line in lines if line.startswith("-A ") and quoted in line.split()]
        if named:
            return named[0]
    match = _LINE.search(said)
    return lines[int(match[1]) - 1] if match and 0 < int(match[1]) <= len(lines) else ""


def _blame(said: str, given: str) -> str:
    """The program's first words, with the line of its input that it means."""
    first = next((line for line in said.splitlines() if line.strip()), "failed")
    line = _blamed(said, given)
    return f"{first.strip()} ({line})" if line else first.strip()


def _owner(said: str, given: str, ruleset: Ruleset) -> str:
    line = _blamed(said, given)
    for rules in ruleset.rules.values():
        for chain, rule in rules:
            if line == f"-A {chain} {rule.text}":
                return f", asked for by {describe(rule.origin)}"
    return ""
