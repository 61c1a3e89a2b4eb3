"""What differs between two states, in words; nothing here asks the kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from netlab.kernel import words
from netlab.kernel.words import Words
from netlab.plan import Origin


@dataclass(frozen=True, slots=True)
class Drift:
    """One thing that is not as planned.

    *kind*: ``netns``, ``link``, ``address``, ``route``, ``rule``, ``neighbour``, ``fdb``,
    ``sysctl``, ``ipset``, ``iptables``, ``listener`` or ``command``. *text* begins with
    ``missing``, ``unexpected`` or ``changed``. *origin*: who asked for it; None where nobody did.
    """

    netns: str
    kind: str
    text: str
    origin: Origin | None = None


def differences(
    netns: str,
    kind: str,
    wanted: Sequence[tuple[Words, Origin | None]],
    actual: Iterable[Words],
    identity: tuple[str, ...],
) -> Iterator[Drift]:
    """Missing and unexpected ones; a pair of both with the same *identity* is one change."""
    surplus = list(actual)
    missing: list[tuple[Words, Origin | None]] = []
    for entry, origin in wanted:
        if entry in surplus:
            surplus.remove(entry)
        else:
            missing.append((entry, origin))
    for entry, origin in missing:
        instead = next((s for s in surplus if _same(s, entry, identity)), None)
        if instead is None:
            yield Drift(netns, kind, f"missing: {words.line(kind, entry)}", origin)
        else:
            surplus.remove(instead)
            text = f"changed: {words.line(kind, instead)}, planned {words.line(kind, entry)}"
            yield Drift(netns, kind, text, origin)
    for entry in surplus:
        yield Drift(netns, kind, f"unexpected: {words.line(kind, entry)}")


def _same(one: Words, other: Words, identity: tuple[str, ...]) -> bool:
    return all(one.get(name) == other.get(name) for name in identity)


def order(
    netns: str,
    kind: str,
    wanted: Sequence[tuple[Words, Origin]],
    actual: Sequence[Words],
    group: tuple[str, ...],
) -> Iterator[Drift]:
    """Where all of a group are there, but one comes before another that was to be in front."""
    groups: dict[tuple[str | None, ...], list[tuple[Words, Origin]]] = {}
    for entry, origin in wanted:
        groups.setdefault(tuple(map(entry.get, group)), []).append((entry, origin))
    for key, entries in groups.items():
        found = [one for one in actual if tuple(map(one.get, group)) == key]
        planned = [entry for entry, _ in entries]
        complete = len(found) == len(planned) and all(one in planned for one in found)
        if complete and found != planned:
            first, instead = words.line(kind, planned[0]), words.line(kind, found[0])
            text = f"changed: {instead} comes first, planned {first}"
            yield Drift(netns, kind, text, entries[0][1])


def edits(before: Sequence[str], now: Sequence[str]) -> Iterator[tuple[str, str, str, int]]:
    """(verb, planned line, actual line, index of the planned line) of each difference."""
    matcher = SequenceMatcher(None, before, now, autojunk=False)
    for tag, start, end, new_start, new_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        old, new = before[start:end], now[new_start:new_end]
        both = min(len(old), len(new))
        for offset in range(both):
            yield "changed", old[offset], new[offset], start + offset
        for offset, line in enumerate(old[both:], both):
            yield "missing", line, "", start + offset
        for line in new[both:]:
            yield "unexpected", "", line, start
