"""Plan -> Linux and back; the only part of netlab that touches the kernel.

A lab is its network namespaces and nothing else: `apply` makes them and what is in them, and
`teardown` ends the programs that live in them and removes them. No object of the host's own
namespace is ever made, changed or deleted.

    namespaces   made, named, entered, removed
    rtnetlink    a socket: requests and dumps
    objects      plan objects as requests
    rulesets     ipset and iptables programs
    processes    programs inside: run, follow, start, end
    ownership    whose a namespace is; locks; files under /run
    build        a whole plan, or nothing
    reading      links, routes, rules and neighbours in iproute2's words
    verifying    the kernel's state against a plan: what rtnetlink holds, programs
    loaded       the same for sysctls, ipsets and iptables rules
    drift        what two states differ in
    machine      features, modules
"""

from netlab.kernel.build import apply
from netlab.kernel.drift import Drift
from netlab.kernel.machine import features, load_modules, notes, prepare
from netlab.kernel.namespaces import enter
from netlab.kernel.ownership import Instance, instances, lock, stored, teardown
from netlab.kernel.processes import Completed, execute, run
from netlab.kernel.reading import (
    addresses,
    forwarding,
    links,
    neighbours,
    route_get,
    routes,
    rules,
)
from netlab.kernel.verifying import verify

__all__ = [
    "Completed",
    "Drift",
    "Instance",
    "addresses",
    "apply",
    "enter",
    "execute",
    "features",
    "forwarding",
    "instances",
    "links",
    "load_modules",
    "lock",
    "neighbours",
    "notes",
    "prepare",
    "route_get",
    "routes",
    "rules",
    "run",
    "stored",
    "teardown",
    "verify",
]
