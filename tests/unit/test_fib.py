"""The source that the kernel would pick, on plan objects. The live suite asks the kernel itself."""

from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from netlab.fib import device_names, source_address
from netlab.plan import Address, Bridge, Object, Origin, PolicyRule, Route, Veth

ORIGIN = Origin("test", "test")
ANY = IPv4Network("0.0.0.0/0")


def link(name: str) -> Object:
    return Bridge(netns="n", origin=ORIGIN, name=name)


def address(dev: str, text: str, scope: str = "global") -> Object:
    return Address(netns="n", origin=ORIGIN, dev=dev, address=IPv4Interface(text), scope=scope)  # type: ignore[arg-type]


def route(dst: str, **fields: object) -> Object:
    return Route(netns="n", origin=ORIGIN, dst=IPv4Network(dst), **fields)  # type: ignore[arg-type]


def source(objects: list[Object], dst: str) -> str | None:
    found = source_address(objects, "n", IPv4Address(dst))
    return str(found) if found else None


NODE = [
    link("eth0"),
    link("vxlan.calico"),
    link("cali1"),
    address("vxlan.calico", "10.233.100.0/32"),
    address("eth0", "172.16.1.2/16"),
    route("0.0.0.0/0", dev="eth0", via=IPv4Address("172.16.0.1")),
]


def test_connected_subnet_gives_the_address_in_it() -> None:
    assert source(NODE, "172.16.100.2") == "172.16.1.2"


def test_own_address_is_its_own_source() -> None:
    assert source(NODE, "10.233.100.0") == "10.233.100.0"


def test_device_without_address_borrows_the_first_device_that_has_one() -> None:
    objects = [*NODE, route("10.233.100.3/32", dev="cali1", scope="link")]
    assert source(objects, "10.233.100.3") == "172.16.1.2"


def test_borrowing_goes_by_creation_of_devices_not_of_addresses() -> None:
    first_tunnel = [NODE[1], NODE[0], *NODE[2:], route("10.1.0.0/16", dev="cali1", scope="link")]
    assert source(first_tunnel, "10.1.0.1") == "10.233.100.0"


def test_link_scope_address_is_not_borrowed() -> None:
    objects = [
        link("a"),
        link("b"),
        link("c"),
        address("a", "169.254.100.1/32", "link"),
        address("b", "10.0.0.1/24"),
        route("10.9.0.0/16", dev="c", scope="link"),
    ]
    assert source(objects, "10.9.0.1") == "10.0.0.1"


def test_gateway_decides_between_two_addresses_of_a_device() -> None:
    objects = [
        link("eth0"),
        address("eth0", "172.16.0.1/16"),
        address("eth0", "172.17.0.1/16"),
        route("0.0.0.0/0", dev="eth0", via=IPv4Address("172.17.0.9")),
    ]
    assert source(objects, "8.8.8.8") == "172.17.0.1"


def test_route_source_wins() -> None:
    objects = [*NODE, route("10.9.0.0/16", dev="eth0", src=IPv4Address("10.233.100.0"))]
    assert source(objects, "10.9.0.1") == "10.233.100.0"


def test_policy_rule_of_a_lower_priority_is_asked_first() -> None:
    rule = PolicyRule(netns="n", origin=ORIGIN, table=500, priority=1000)
    objects = [*NODE, rule, route("172.16.100.2/32", dev="cali1", table=500, scope="link")]
    assert source(objects, "172.16.100.2") == "172.16.1.2"
    assert source([*objects, address("cali1", "169.254.9.9/32")], "172.16.100.2") == "169.254.9.9"


def test_marked_and_source_rules_do_not_concern_an_unbound_lookup() -> None:
    rules = [
        PolicyRule(netns="n", origin=ORIGIN, table=100, priority=10, fwmark=1),
        PolicyRule(netns="n", origin=ORIGIN, table=100, priority=11, src=IPv4Network("1.1.1.1")),
    ]
    objects = [*NODE, *rules, route("0.0.0.0/0", kind="blackhole", table=100)]
    assert source(objects, "8.8.8.8") == "172.16.1.2"


def test_no_route_no_source() -> None:
    assert source(NODE[:-1], "8.8.8.8") is None


def test_device_names_count_both_ends_of_a_veth() -> None:
    pair = Veth(netns="p", origin=ORIGIN, name="eth0", peer_netns="n", peer="cali2")
    assert device_names([*NODE, pair], "n") == ("eth0", "vxlan.calico", "cali1", "cali2")
    assert device_names([*NODE, pair], "p") == ("eth0",)
