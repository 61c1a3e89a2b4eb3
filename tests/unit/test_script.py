"""The plan as a shell script: its text. That it makes the same objects is proven live."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Interface, IPv4Network

import pytest

from netlab import script
from netlab.plan import (
    Address,
    Bridge,
    Command,
    FdbEntry,
    Hook,
    IpSet,
    Listener,
    Macvlan,
    Neighbour,
    Netns,
    Object,
    Origin,
    Plan,
    PolicyRule,
    Route,
    Sysctl,
    Veth,
    Vlan,
    Vxlan,
)

ORIGIN = Origin("coordinator", "routes the Pod", "Pod default/ma1")
OTHER = Origin("underlay", "wire")
LOWER = "link eth0"
A = '"$NETLAB".a'


def body(*objects: Object) -> list[str]:
    """The script's lines behind those that make the namespaces."""
    spaces = [Netns(netns=name, origin=OTHER) for name in ("a", "b")]
    text = script.render(Plan("x", (*spaces, *objects)))
    start = 'ip -n "$NETLAB".b link set lo up\n'
    return [line for line in text.partition(start)[2].splitlines() if line]


@pytest.mark.parametrize(
    ("item", "lines"),
    [
        (
            Bridge(netns="a", origin=ORIGIN, name="br0", mac="02:00:00:00:00:01", mtu=1450),
            [
                f"ip -n {A} link add br0 address 02:00:00:00:00:01 mtu 1450 type bridge",
                f"ip -n {A} link set br0 mtu 1450",
                f"ip -n {A} link set br0 up",
            ],
        ),
        (
            Veth(
                netns="a",
                origin=ORIGIN,
                name="eth0",
                tx_queue_len=5,
                peer_netns="b",
                peer="a.eth0",
                peer_mtu=1500,
                peer_master="br0",
            ),
            [
                (
                    f"ip -n {A} link add eth0 txqueuelen 5 type veth"
                    ' peer name a.eth0 mtu 1500 netns "$NETLAB".b'
                ),
                f"ip -n {A} link set eth0 up",
                'ip -n "$NETLAB".b link set a.eth0 master br0 up',
            ],
        ),
        (
            Macvlan(netns="a", origin=ORIGIN, name="net1", lower_netns="b", lower="eth0"),
            [
                f'ip -n "$NETLAB".b link add netlab.new {LOWER} netns {A} type macvlan mode bridge',
                f"ip -n {A} link set netlab.new name net1",
                f"ip -n {A} link set net1 up",
            ],
        ),
        (
            Vlan(netns="a", origin=ORIGIN, name="eth0.7", lower="eth0", vlan=7),
            [
                f"ip -n {A} link add eth0.7 link eth0 type vlan id 7",
                f"ip -n {A} link set eth0.7 up",
            ],
        ),
        (
            Vxlan(
                netns="a",
                origin=ORIGIN,
                name="vxlan.calico",
                vni=4096,
                port=4789,
                local=IPv4Address("172.16.1.2"),
                lower="eth0",
            ),
            [
                (
                    f"ip -n {A} link add vxlan.calico type vxlan id 4096 dstport 4789"
                    " local 172.16.1.2 dev eth0 nolearning"
                ),
                f"ip -n {A} link set vxlan.calico up",
            ],
        ),
        (
            Address(
                netns="a",
                origin=ORIGIN,
                dev="eth0",
                address=IPv4Interface("169.254.1.1/32"),
                scope="link",
            ),
            [f"ip -n {A} address add 169.254.1.1/32 dev eth0 scope link"],
        ),
        (
            Route(
                netns="a",
                origin=ORIGIN,
                dst=IPv4Network("0.0.0.0/0"),
                via=IPv4Address("10.0.0.1"),
                dev="eth0",
                src=IPv4Address("10.0.0.2"),
                table=500,
                metric=5,
                mtu=1400,
                onlink=True,
                place="append",
            ),
            [
                (
                    f"ip -n {A} route append default via 10.0.0.1 dev eth0 src 10.0.0.2"
                    " table 500 proto 3 metric 5 mtu 1400 onlink"
                )
            ],
        ),
        (
            Route(
                netns="a",
                origin=ORIGIN,
                dst=IPv4Network("10.0.0.0/26"),
                kind="blackhole",
                protocol=80,
            ),
            [f"ip -n {A} route add blackhole 10.0.0.0/26 proto 80"],
        ),
        (
            PolicyRule(
                netns="a",
                origin=ORIGIN,
                table=500,
                priority=1000,
                src=IPv4Network("10.0.0.1/32"),
                fwmark=0x10,
                fwmask=0xF0,
                iif="eth0",
            ),
            [
                (
                    f"ip -n {A} rule add from 10.0.0.1/32 fwmark 0x10/0xf0 iif eth0"
                    " lookup 500 priority 1000"
                )
            ],
        ),
        (
            Neighbour(
                netns="a",
                origin=ORIGIN,
                dev="eth0",
                address=IPv4Address("10.0.0.9"),
                mac="02:00:00:00:00:09",
            ),
            [
                (
                    f"ip -n {A} neighbour replace 10.0.0.9 lladdr 02:00:00:00:00:09"
                    " dev eth0 nud permanent"
                )
            ],
        ),
        (
            FdbEntry(
                netns="a",
                origin=ORIGIN,
                dev="vxlan.calico",
                mac="66:00:00:00:00:02",
                dst=IPv4Address("10.0.0.9"),
            ),
            [
                (
                    f"bridge -n {A} fdb replace 66:00:00:00:00:02 dev vxlan.calico"
                    " dst 10.0.0.9 self permanent"
                )
            ],
        ),
        (
            Sysctl(netns="a", origin=ORIGIN, name="net.ipv4.conf.eth0/7.rp_filter", value="2"),
            [f"nsenter --net=/run/netns/{A} sysctl -q -w net.ipv4.conf.eth0/7.rp_filter=2"],
        ),
        (
            Listener(netns="a", origin=ORIGIN, ports=(80, 8080)),
            ["# a: the lab's server would listen on 80, 8080 (TCP, UDP and HTTP)"],
        ),
        (
            Command(netns="a", origin=ORIGIN, argv=("sh", "-c", "echo 'it is' $HOME; sleep 1")),
            [
                (
                    f"nsenter --net=/run/netns/{A} sh -c 'echo '\"'\"'it is'\"'\"' $HOME; sleep 1'"
                    " </dev/null >/dev/null 2>&1 &"
                )
            ],
        ),
        (
            IpSet(netns="a", origin=ORIGIN, name="s", members=("10.0.0.0/8",)),
            [
                f"nsenter --net=/run/netns/{A} ipset restore <<'END'",
                "create s hash:net family inet",
                "add s 10.0.0.0/8",
                "END",
            ],
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Object) else "",
)
def test_each_object_is_the_usual_programs_command(item: Object, lines: list[str]) -> None:
    assert body(item) == ["# coordinator: routes the Pod (Pod default/ma1)", *lines]


def test_a_reason_is_said_once_for_all_lines_that_follow_it() -> None:
    first = Sysctl(netns="a", origin=ORIGIN, name="net.ipv4.conf.all.rp_filter", value="0")
    second = Sysctl(netns="a", origin=ORIGIN, name="net.ipv4.conf.all.arp_ignore", value="0")
    third = Sysctl(netns="a", origin=OTHER, name="net.ipv4.conf.all.arp_filter", value="0")
    reasons = [line for line in body(first, second, third) if line.startswith("#")]
    assert reasons == ["# coordinator: routes the Pod (Pod default/ma1)", "# underlay: wire"]


def test_rules_come_in_one_call_with_their_reasons_and_conntracks_settings_behind_them() -> None:
    late = Sysctl(netns="a", origin=OTHER, name="net.netfilter.nf_conntrack_max", value="1")
    text = '-m comment --comment "it\'s $HOME" -j ACCEPT'
    rule = Hook(netns="a", origin=ORIGIN, table="filter", chain="INPUT", text=text)
    assert body(late, rule) == [
        "# a: filter",
        f"nsenter --net=/run/netns/{A} iptables-nft-restore <<'END'",
        "*filter",
        ":INPUT ACCEPT [0:0]",
        ":FORWARD ACCEPT [0:0]",
        ":OUTPUT ACCEPT [0:0]",
        "# coordinator: routes the Pod (Pod default/ma1)",
        f"-A INPUT {text}",
        "COMMIT",
        "END",
        "# underlay: wire",
        f"nsenter --net=/run/netns/{A} sysctl -q -w net.netfilter.nf_conntrack_max=1",
    ]


def test_namespaces_have_the_instances_names_unless_told_otherwise() -> None:
    lines = script.render(Plan("two-nodes", (Netns(netns="a", origin=OTHER),))).splitlines()
    assert ': "${NETLAB:=netlab.two-nodes}"' in lines
    assert f"ip netns add {A}" in lines
