"""YAML -> Lab: every mistake at once, each with its place and what was expected.

document    text -> plain data, with places
language    the lab language as JSON Schema; its components and vocabulary
checking    schema problems in words
paths       setting paths, and documents changed by them
settings    cluster settings with their defaults
world       networks, routers, hosts, NICs, extra
cluster     ranges, nodes, attachments, Services
pods        Pods and IPAM
consistency what shows only in the whole lab
probes      the probe grammar
expecting   expectations
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from netlab.errors import LabError, Problem, UsageError
from netlab.model import Lab
from netlab.spec import (
    checking,
    cluster,
    consistency,
    document,
    expecting,
    language,
    paths,
    pods,
    world,
)
from netlab.spec.document import Document
from netlab.spec.probes import parse_probe

__all__ = ["load", "load_all", "parse", "parse_probe", "reasons", "schema"]

_WORLD = ("networks", "routers", "hosts")
_CLUSTER = ("nodes", "pods", "services", "networkAttachments")

reasons = expecting.reasons
BASE = "base"


def load(file: Path, *, variant: str = BASE, sets: Mapping[str, str] | None = None) -> Lab:
    """The lab of *file* in *variant*.

    Args:
        file: the lab's file.
        variant: one of its variants.
        sets: changes on top: setting path -> value in YAML; ``null`` removes.

    Raises:
        LabError: with every problem of the file in that variant.
        UsageError: it has no such variant.
    """
    return parse(document.read(file), file, variant=variant, sets=sets)


def load_all(file: Path) -> dict[str, Lab]:
    """The lab in its base and in every variant, by name, base first.

    Raises:
        LabError: with the problems of all of them.
    """
    text = document.read(file)
    checked = _checked(text, file)
    labs: dict[str, Lab] = {}
    problems: dict[Problem, None] = {}
    for name in (BASE, *checked.data.get("variants", {})):
        try:
            labs[name] = _lab(checked, file, name)
        except LabError as error:
            known = {*problems, *checked.problems}
            mark = "" if name == BASE else f" [variant {name}]"
            problems |= {
                problem if problem in known else _marked(problem, name, mark): None
                for problem in error.problems
            }
    if problems:
        raise LabError(str(file), tuple(problems))
    return labs


def _marked(problem: Problem, variant: str, mark: str) -> Problem:
    """*problem* with the variant that has it, where its path does not say so."""
    if problem.path.startswith(f"variants.{variant}."):
        return problem
    return replace(problem, message=problem.message + mark)


def parse(
    text: str, file: Path, *, variant: str = BASE, sets: Mapping[str, str] | None = None
) -> Lab:
    """As `load`, from *text* that was read from *file*."""
    values = {path: document.parse(value, path).data for path, value in (sets or {}).items()}
    return _lab(_checked(text, file), file, variant, values)


def schema() -> dict[str, Any]:
    """The language as JSON Schema; ``by`` lists every component/reason with its meaning."""
    full = copy.deepcopy(language.schema())
    variant = full["properties"]["variants"]["additionalProperties"]
    for entries in (full["properties"]["expect"], variant["properties"]["expect"]):
        by = entries["items"]["properties"]["by"]
        entries["items"]["properties"]["by"] = {"$ref": "#/$defs/by", **by}
    listed = [
        *({"const": name, "description": text} for name, text in reasons().items()),
        {"pattern": "^user/", "description": "a rule or route of the lab's own"},
    ]
    return {**full, "$defs": {"by": {"oneOf": listed}}}


def _checked(text: str, file: Path) -> Document:
    """The document of *text* without what the schema refuses; its problems go with it.

    Raises:
        LabError: too little is left to look any further.
    """
    read = document.parse(text, str(file))
    if not isinstance(read.data, dict):
        message = "a lab is a mapping: name, underlay, cluster, nodes, ..."
        raise LabError(str(file), (*read.problems, Problem(*read.place(""), "", message)))
    read.names = _names(read.data)
    if not checking.check(read):
        raise LabError(str(file), tuple(read.problems))
    underlay = read.data["underlay"]
    read.lost = frozenset(
        [kind for kind in _WORLD if kind not in underlay and read.gave(f"underlay.{kind}")]
        + [kind for kind in _CLUSTER if kind not in read.data and read.gave(kind)]
    )
    if BASE in read.data.get("variants", {}):
        message = "base is the lab as it is written: name the variant after what it changes"
        read.problem(f"variants.{BASE}", message, at_key=True)
        del read.data["variants"][BASE]
    return read


def _names(data: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Every name of each kind that the file gives, usable or not."""
    underlay = data.get("underlay") if isinstance(data.get("underlay"), dict) else {}
    given = {kind: underlay.get(kind) if underlay else None for kind in _WORLD}
    given |= {kind: data.get(kind) for kind in _CLUSTER}
    return {
        kind: frozenset(entries if isinstance(entries, dict) else ())
        for kind, entries in given.items()
    }


def _names_after(checked: Document, made: Document) -> dict[str, frozenset[str]]:
    """The names of a variant: those that it leaves, and those that were unusable before."""
    before, after = _names(checked.data), _names(made.data)
    return {kind: after[kind] | (checked.names[kind] - before[kind]) for kind in after}


def _lab(checked: Document, file: Path, variant: str, sets: Mapping[str, Any] | None = None) -> Lab:
    variants = checked.data.get("variants", {})
    if variant != BASE and variant not in variants:
        hint = checking.nearest(variant, [BASE, *variants])
        raise UsageError(
            f"{file}: no variant {variant!r}{hint}; there are: {', '.join([BASE, *variants])}"
        )
    changes = {} if variant == BASE else variants[variant].get("set", {})
    made = paths.changed(checked, changes, f"variants.{variant}.set")
    if sets:
        made = paths.changed(made, sets, None)
        changes = {**changes, **sets}
    made.names, made.lost = _names_after(checked, made), checked.lost
    made.problems += checked.problems
    if not checking.check(made):
        raise LabError(str(file), tuple(made.problems))
    lab = _build(made, file, variant, changes)
    if made.problems:
        raise LabError(str(file), tuple(dict.fromkeys(made.problems)))
    return lab


def _build(made: Document, file: Path, variant: str, changes: Mapping[str, Any]) -> Lab:
    data = made.data
    shop = world.Workshop(made, frozenset(data.get("allow", ())), made.names)
    _one_name_space(shop)
    wires = world.networks(shop)
    gateways = world.routers(shop, wires)
    outside = world.hosts(shop, wires, gateways)
    pod_cidr, service_cidr = cluster.cidrs(shop, wires)
    nodes = cluster.nodes(shop, wires, gateways, pod_cidr, service_cidr)
    nets = cluster.attachments(shop, gateways)
    ports = cluster.target_ports(shop)
    workloads, blocks = pods.pods(shop, nodes, nets, service_cidr, ports)
    first = next(iter(nodes.values()), None)
    lab = Lab(
        name=data["name"],
        title=data.get("title", ""),
        file=str(file),
        networks=wires,
        routers=gateways,
        hosts=outside,
        nodes={n: replace(node, pod_cidrs=blocks.get(n, ())) for n, node in nodes.items()},
        pods=workloads,
        services=cluster.services(shop, workloads, service_cidr),
        pod_cidrs=tuple(pool.cidr for pool in first.calico.ip_pools) if first else (),
        service_cidrs=(service_cidr,) if service_cidr else (),
        variant=variant,
        variants=tuple(data.get("variants", {})),
        changes={path: _shown(value) for path, value in changes.items()},
        allow=shop.allow,
        sources={**made.keys, **{p: at for p, at in made.values.items() if p not in made.keys}},
    )
    consistency.check(shop, lab)
    entries = _entries(shop, variant)
    return replace(lab, expect=expecting.expectations(shop, lab, entries))


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_shown(inner)}" for key, inner in value.items())
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _one_name_space(shop: world.Workshop) -> None:
    """Networks, routers, hosts, nodes and Pods are all network namespaces: names are unique."""
    seen: dict[str, str] = {}
    underlay = shop.data["underlay"]
    kinds = [(f"underlay.{k}", underlay.get(k, {})) for k in ("networks", "routers", "hosts")]
    kinds += [(k, shop.data.get(k, {})) for k in ("nodes", "pods")]
    for kind, entries in kinds:
        for name in entries:
            first = seen.setdefault(name, f"{kind}.{name}")
            if first != f"{kind}.{name}":
                shop.problem(f"{kind}.{name}", f"the name is already {first}", at_key=True)


def _entries(shop: world.Workshop, variant: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The base's expectations, each replaced by the variant's of the same id, then its new ones."""
    lists = [("expect", shop.data.get("expect", []))]
    if variant != BASE:
        own = shop.data.get("variants", {}).get(variant, {}).get("expect", [])
        lists.append((f"variants.{variant}.expect", own))
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for where, entries in lists:
        own_ids: dict[str, str] = {}
        for index, entry in enumerate(entries):
            path = f"{where}[{index}]"
            first = own_ids.setdefault(entry["id"], path)
            if first != path:
                line = shop.document.place(first)[0]
                shop.problem(f"{path}.id", f"{entry['id']!r} is already in line {line}")
                continue
            asked = found.get(entry["id"], ("", {}))[1]
            found[entry["id"]] = (path, _completed(entry, asked))
    return list(found.values())


def _completed(entry: Mapping[str, Any], base: Mapping[str, Any]) -> Mapping[str, Any]:
    """A variant's *entry* with what is asked, where it leaves that to the *base*'s of its id."""
    if "probe" in entry or "state" in entry:
        return entry
    asked = ("probe", "state", "count", "tags")
    return {**{key: base[key] for key in asked if key in base}, **entry}
