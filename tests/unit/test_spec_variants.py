"""Named changes of a lab, setting paths, places, and the schema that all of it follows."""

# Tables of cases read better with one case a line.
# ruff: noqa: E501

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from netlab import spec
from netlab.errors import LabError
from netlab.model import Lab, Version

LIBERAL = "net.netfilter.nf_conntrack_tcp_be_liberal"

FILE = Path("small.yaml")
SMALL = Path(__file__).with_name("small.yaml").read_text()


def parse(text: str = "", variant: str = "base") -> Lab:
    return spec.parse(SMALL + text, FILE, variant=variant)


# --- variants ------------------------------------------------------------------------------------


def variant(sets: str, expect: str = "[]", base: str = "[]") -> Lab:
    return parse(f"expect: {base}\nvariants: {{v: {{set: {{{sets}}}, expect: {expect}}}}}\n", "v")


@pytest.mark.parametrize(
    ("path", "value", "read"),
    [
        ("cluster.kubeProxy.version", "v1.28", lambda lab: lab.nodes["node1"].kube_proxy.version),
        ("cluster.kubeProxy", "false", lambda lab: lab.nodes["node1"].kube_proxy),
        (f"cluster.sysctl.{LIBERAL}", "1", lambda lab: lab.nodes["node1"].sysctl[LIBERAL]),
        ("nodes.node1.calico.mtu", "1300", lambda lab: lab.nodes["node1"].calico.mtu),
        ("nodes.node2.nics.eth0.100.mtu", "1300", lambda lab: lab.nodes["node2"].nics[1].mtu),
        ("'nodes.node2.nics[eth0.100].mtu'", "1300", lambda lab: lab.nodes["node2"].nics[1].mtu),
        ("'services.dns.ports[tcp].port'", "54", lambda lab: lab.services["dns"].ports[1].port),
        ("'services.dns.ports[0].port'", "54", lambda lab: lab.services["dns"].ports[0].port),
        ("'services.web.endpoints[ma1]'", "ca1", lambda lab: lab.services["web"].endpoints[0].pod),
        ("'services.web.endpoints[du2].ready'", "false", lambda lab: lab.services["web"].endpoints[1].ready),
    ],
)  # fmt: skip
def test_set(path: str, value: str, read: Any) -> None:  # noqa: ANN401 - reads any setting
    expected: dict[str, object] = {"v1.28": Version(1, 28), "false": None, "1": "1"}
    before = None if LIBERAL in path else read(parse())
    after = read(variant(f"{path}: {value}"))
    assert str(after) != str(before)
    if path.endswith("ready'"):
        assert after is False
    else:
        assert str(after) == str(expected.get(value, value))


def test_null_removes() -> None:
    lab = variant("pods.ca2: null, 'services.web.endpoints[du2]': null, 'underlay.hosts': null")
    assert "ca2" not in lab.pods
    assert [endpoint.pod for endpoint in lab.services["web"].endpoints] == ["ma1"]
    assert lab.hosts == {}


def test_a_variant_can_add_what_the_base_lacks() -> None:
    lab = variant("pods.new: {node: node1, nics: {eth0: {attach: calico}}}")
    assert lab.pods["new"].node == "node1"


def test_changes_do_not_leak_into_other_variants() -> None:
    text = "variants: {a: {set: {cluster.calico.mtu: 1300}}, b: {set: {cluster.podCIDR: 10.64.0.0/12}}}"
    first = parse(f"{text}\n", "a")
    with pytest.raises(LabError, match="in no pool"):
        parse(f"{text}\n", "b")
    assert first.nodes["node1"].calico.mtu == 1300
    assert parse(f"{text}\n").nodes["node1"].calico.mtu == 1450


def test_a_variants_entry_replaces_the_bases_in_its_place() -> None:
    base = (
        "[{id: a, probe: curl ma1 -> ca1, seenAs: ma1, tags: [t], count: 2, why: w},"
        " {id: b, probe: ping ma1 -> ca1}]"
    )
    lab = variant(
        "", base=base, expect="[{id: c, probe: ping ca1 -> ma1}, {id: a, result: dropped}]"
    )
    assert [entry.id for entry in lab.expect] == ["a", "b", "c"]
    replaced = lab.expect[0]
    # What is asked stays, what was expected of it does not.
    assert str(replaced.probe) == "curl ma1 -> ca1"
    assert (replaced.count, replaced.tags) == (2, ("t",))
    assert (replaced.result, replaced.seen_as, replaced.why) == ("dropped", None, "")
    assert replaced.path == "variants.v.expect[1]"


def test_what_a_variant_sets_is_kept_for_the_headline() -> None:
    lab = variant(
        "cluster.kubeProxy: {version: v1.28, masqueradeAll: true}, cluster.calico.mtu: 1400"
    )
    assert lab.changes == {
        "cluster.kubeProxy": "version=v1.28, masqueradeAll=true",
        "cluster.calico.mtu": "1400",
    }
    assert (lab.variant, lab.variants) == ("v", ("v",))


def test_a_bad_value_is_pointed_at_in_the_variant() -> None:
    with pytest.raises(LabError) as caught:
        variant("cluster.calico.mtu: 20")
    (problem,) = caught.value.problems
    last = len(SMALL.splitlines()) + 2
    assert (problem.line, problem.path) == (last, "cluster.calico.mtu")


# --- changes from outside the file ------------------------------------------------------------------


def test_sets_come_on_top_of_the_variant() -> None:
    text = (
        SMALL
        + "variants: {v: {set: {cluster.calico.mtu: 1300, cluster.calico.natOutgoing: false}}}\n"
    )
    sets = {"cluster.calico.mtu": "1200", "nodes.node1.kubeProxy": "{version: v1.28}"}
    lab = spec.parse(text, FILE, variant="v", sets=sets)
    assert lab.nodes["node1"].calico.mtu == 1200
    assert not lab.nodes["node1"].calico.ip_pools[0].nat_outgoing
    assert str(lab.nodes["node1"].kube_proxy and lab.nodes["node1"].kube_proxy.version) == "v1.28"
    assert lab.changes == {
        "cluster.calico.mtu": "1200",
        "cluster.calico.natOutgoing": "false",
        "nodes.node1.kubeProxy": "version=v1.28",
    }


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("cluster.kubeProxy.versoin", "v1.33", "small.yaml  cluster.kubeProxy.versoin: no setting 'versoin'"),
        ("cluster.kubeProxy.version", "newest", "small.yaml  cluster.kubeProxy.version: 'newest' is not a version"),
        ("cluster.podCIDR", "[", "cluster.podCIDR:2:1  did not find"),
        ("pods.ca1.nics.eth0.address", "1.2.3.4", "small.yaml  pods.ca1.nics.eth0.address: 1.2.3.4 is in no pool"),
    ],
)  # fmt: skip
def test_a_wrong_set_has_no_line(path: str, value: str, said: str) -> None:
    with pytest.raises(LabError) as caught:
        spec.parse(SMALL, FILE, sets={path: value})
    assert str(caught.value).startswith(said)
    assert len(caught.value.problems) == 1


# --- places and the schema -----------------------------------------------------------------------


def test_every_setting_has_its_place() -> None:
    lab = parse()
    lines = SMALL.splitlines()
    keys = [path for path in lab.sources if path and not path.endswith("]")]
    assert len(keys) > 80
    for path in keys:
        line, column = lab.sources[path]
        key = path.rpartition(".")[2]
        assert lines[line - 1][column - 1 :].startswith((key, "eth0.100"))
    (number,) = (n for n, line in enumerate(lines) if line.startswith("  web:"))
    place = (number + 1, lines[number].index("{pod: du2") + 1)
    assert lab.sources["services.web.endpoints[1]"] == place


def test_the_schema_is_a_schema_and_describes_everything() -> None:
    schema = spec.schema()
    jsonschema_rs.meta.validate(schema)
    assert list(_undescribed(schema, "")) == []


def _undescribed(part: Any, path: str) -> Any:  # noqa: ANN401 - a schema
    for name, below in part.get("properties", {}).items():
        if "description" not in below and path.rpartition(".")[2] not in {"state", "rule"}:
            yield f"{path}.{name}"
        yield from _undescribed(below, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(part.get(key), dict):
            yield from _undescribed(part[key], f"{path}.*")


def test_the_schema_lists_every_reason() -> None:
    schema = spec.schema()
    listed = {entry.get("const") for entry in schema["$defs"]["by"]["oneOf"]}
    assert set(spec.reasons()) <= listed
    validator = jsonschema_rs.Draft202012Validator(schema)
    entry = {"id": "a", "probe": "x", "by": "kube-proxy/invalid"}
    lab = {"name": "a", "underlay": {"networks": {}}, "expect": [entry]}
    assert validator.is_valid(lab)
    assert validator.is_valid({**lab, "expect": [{**entry, "by": "user/my-own"}]})
    assert not validator.is_valid({**lab, "expect": [{**entry, "by": "kube-proxy/nothing"}]})
