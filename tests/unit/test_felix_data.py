"""All vectors of Felix that $NETLAB_FIDELITY_DATA holds: names, hashes, chains, spelling.

The folder's felix/*.json name their sources: dumps of real clusters, and Felix' own tests.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from netlab.cni import felix
from netlab.cni.felix_chains import Endpoint, Renderer, Rule, chain_name
from netlab.model import Calico, IPPool, Version

POOL = IPPool("default", IPv4Network("10.233.64.0/18"))
DATA = os.environ.get("NETLAB_FIDELITY_DATA", "")
pytestmark = pytest.mark.skipif(not DATA, reason="needs NETLAB_FIDELITY_DATA")


def vectors(name: str, key: str = "vectors") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((Path(DATA) / "felix" / name).read_text())[key]
    assert found
    return found


def test_every_hash_of_the_dumps() -> None:
    chains: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for vector in vectors("rule-hash-vectors.json"):
        where = (vector["dump"], vector["table"], vector["hashChainName"])
        chains.setdefault(where, []).append(vector)
    for (_, _, chain), rules in chains.items():
        rules.sort(key=lambda vector: vector["index"])
        texts = [Rule(vector["hashed"].split(" HASH ", 1)[1], "") for vector in rules]
        assert felix.rule_hashes(chain, texts) == [vector["hash"] for vector in rules]


def test_every_hash_of_the_table_test() -> None:
    for vector in vectors("table-test-hashes.json"):
        rules = [Rule("", text) for text in (*vector["rulesBefore"], vector["rule"])]
        assert felix.rule_hashes(vector["chain"], rules)[-1] == vector["hash"]


def test_every_length_limited_name() -> None:
    for vector in vectors("length-limited-ids.json"):
        assert chain_name(vector["prefix"], vector["suffix"], vector["maxLength"]) == vector["id"]


def without_policies(rules: list[Rule]) -> Iterator[Rule]:
    """A lab has no policies: the rules between the marks' clearing and the profiles."""
    for rule in rules:
        by_policy = re.search(r"--jump cali-p[io]-", rule.action)
        if not by_policy and not re.search(r"^Start of|polic(y|ies)", rule.comment):
            yield rule


def test_every_endpoint_chain() -> None:
    for vector in vectors("endpoint-chains.json", "chains"):
        printed = [Rule(r["match"], r["action"], r["comment"] or "") for r in vector["rules"]]
        derived = [rule["derivedHash"] for rule in vector["rules"]]
        assert felix.rule_hashes(vector["chain"], printed) == derived
        if vector["case"] == "disabled":
            continue
        settings = Calico(Version.parse(vector["version"]), ())
        made = Renderer(settings, (), lowest_mark=int(vector["marks"]["accept"], 16))
        side = made.to_workload if "-tw-" in vector["chain"] else made.from_workload
        own = side((vector["policies"] or {}).get("profiles", ()))
        assert [rule.render() for rule in own] == [
            rule.render() for rule in without_policies(printed)
        ]


def shape(text: str) -> str:
    """*text* with a word for every name and number that may vary."""
    text = re.sub(r"0x[0-9a-f]+|(?<=[ ,])\d+(?=[ ,]|$)", "N", text)
    text = re.sub(r"(?<=-interface )\S+|(?<=--match-set )\S+|(?<=-p )(?!N\b)\S+", "X", text)
    text = re.sub(r"(?<=--ctstate )\S+", "S", text)
    return re.sub(r"(?<=--jump |--goto )cali-\S+", "C", text).replace("N,N", "N")


UNLISTED = {
    "-m rpfilter --invert --validmark",
    "--dport N",
    "--jump NOTRACK",
    "-m conntrack ! --ctstate S",
    "-m addrtype --dst-type LOCAL",
}
"""What match_builder.go and actions.go render, but their tests do not."""


def test_every_match_and_action_is_spelt_as_felix_does() -> None:
    printed = [*vectors("rendering.json", "matches"), *vectors("rendering.json", "actions")]
    known = {shape(vector["rendered"]) for vector in printed} | UNLISTED
    endpoints = [Endpoint(f"cali{name}", "default", name) for name in ("6a1", "6b2", "1aa")]
    for version in ("v3.27", "v3.28", "v3.29", "v3.30", "v3.31", "v3.32"):
        made = Renderer(Calico(Version.parse(version), (POOL,)), endpoints)
        for table in felix.TABLES:
            for body in made.chains(table):
                for rule in body.rules:
                    parts = re.split(r" (?=-m |--in-|--out-|-p |--dport)", rule.match)
                    for part in [*parts, rule.action]:
                        assert not part or shape(part) in known, (body.name, part)
