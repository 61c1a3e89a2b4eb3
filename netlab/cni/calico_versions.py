"""What Calico's versions differ in, as far as a lab shows it.

Source: the differences between the tags v3.27.0 to v3.32.1 of projectcalico/calico, in felix/rules,
felix/iptables and felix/dataplane.
"""

from __future__ import annotations

from dataclasses import dataclass

from netlab.model import Version


@dataclass(frozen=True, slots=True)
class Traits:
    """What the versions differ in.

    Attributes:
        profile_returns: an allow rule of a profile is followed by a RETURN, to v3.27; later a
            RETURN at the end of a chain is left out.
        clears_pass: endpoint chains begin by clearing the pass mark too, from v3.28.
        postrouting_appended: Felix goes behind kube-proxy in nat POSTROUTING, from v3.28.2.
        vxlan_untracked: VXLAN is exempt from conntrack, from v3.29.
        drop_mark: a mark bit is reserved for drops, from v3.30.
        conntrack_accounting: Felix switches nf_conntrack_acct on, from v3.30.
        dscp: mangle looks for workloads whose packets get a DSCP, from v3.31.
        route_mtu: routes into the tunnel carry its MTU, from v3.31.
        all_pools: the ipset of all pools, renamed in v3.31.6 and v3.32.1.
    """

    profile_returns: bool
    clears_pass: bool
    postrouting_appended: bool
    vxlan_untracked: bool
    drop_mark: bool
    conntrack_accounting: bool
    dscp: bool
    route_mtu: bool
    all_pools: str

    @classmethod
    def of(cls, version: Version) -> Traits:
        in_v331 = Version(3, 31, 6) <= version < Version(3, 32, 0)
        renamed = in_v331 or version >= Version(3, 32, 1)
        return cls(
            profile_returns=version < Version(3, 28, 0),
            clears_pass=version >= Version(3, 28, 0),
            postrouting_appended=version >= Version(3, 28, 2),
            vxlan_untracked=version >= Version(3, 29, 0),
            drop_mark=version >= Version(3, 30, 0),
            conntrack_accounting=version >= Version(3, 30, 0),
            dscp=version >= Version(3, 31, 0),
            route_mtu=version >= Version(3, 31, 0),
            all_pools="cali40network-ip-pools" if renamed else "cali40all-ipam-pools",
        )
