"""A small internet on this machine: public hosts, homes behind routers of several kinds, and what can go wrong there.

Nothing leads out of it. All hosts and routers sit on one backbone with public-looking addresses, as libp2p ignores the
ranges for documentation. docs/guides/small-internet.md describes each host. Names of namespaces begin with the process
id of who made them, so that labs do not collide, and `remove_abandoned` recognizes what a killed one left.

The kernel does not have to delay packets (netem): there are no latencies here. `support.wan_proxy` has them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from internet import namespaces

BACKBONE, BACKBONE6 = "44.10.20", "2a44:1020::"
PORT = 4001
"""The port that routers with forwarding forward."""

PUBLIC = {"seed": 10, "open1": 31, "open2": 32, "open3": 33, "open4": 34}
"""Hosts that are behind no router, by the last byte of their address."""
SPARE = range(50, 60)
"""The last bytes of addresses to which a router may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A NAT that drops packets which nobody behind it has asked for. With `is_symmetric`, each destination sees another
    port of it. Otherwise ports are kept where they are free. `forwards` is the host to which it forwards PORT. `outer`
    is its address on the backbone, or on the network of the router that it is `behind`. `lan6` is its inner network of
    IPv6, whose hosts have public addresses behind the same filter, or empty if there is none."""

    outer: str
    lan: str  # the first three bytes of its inner network, in which it is .1
    hosts: Mapping[str, int]  # by the last byte of their address
    outer6: str = ""
    lan6: str = ""  # a /64, in which it is ::1
    is_symmetric: bool = False
    forwards: str = ""
    behind: str = ""


_R1_IP6 = {"outer6": f"{BACKBONE6}21", "lan6": "2a44:1021::"}
_R3_IP6 = {"outer6": f"{BACKBONE6}23", "lan6": "2a44:1023::"}
_R5_IP6 = {"outer6": f"{BACKBONE6}25", "lan6": "2a44:1025::"}
_R5B_IP6 = {"outer6": "2a44:1025::2", "lan6": "2a44:1026::"}
ROUTERS = {
    "r1": Router(outer=f"{BACKBONE}.21", lan="192.168.1", hosts={"home1": 2, "home1b": 3}, **_R1_IP6),
    "r2": Router(outer=f"{BACKBONE}.22", lan="192.168.2", hosts={"home2": 2}),
    "r3": Router(outer=f"{BACKBONE}.23", lan="192.168.3", hosts={"sym1": 2}, is_symmetric=True, **_R3_IP6),
    "r4": Router(outer=f"{BACKBONE}.24", lan="192.168.4", hosts={"sym2": 2}, is_symmetric=True),
    "r5": Router(outer=f"{BACKBONE}.25", lan="100.64.0", hosts={}, **_R5_IP6),
    "r5b": Router(outer="100.64.0.2", lan="10.64.0", hosts={"cgn1": 2}, behind="r5", **_R5B_IP6),
    "r6": Router(outer=f"{BACKBONE}.26", lan="192.168.6", hosts={"fwd1": 2}, forwards="fwd1"),
}
HOME_ROUTER = {host: name for name, router in ROUTERS.items() for host in router.hosts}
HOSTS = (*PUBLIC, *HOME_ROUTER)

EVERYTHING = "-A OUTPUT -o eth0"
"""The rule that counts all bytes that a host sends."""

AT_ONCE6 = {f"ipv6/conf/{which}/accept_dad": 0 for which in ("all", "default")}
"""Skips the second in which other hosts may claim a new address."""

FORWARDING6 = {"ipv6/conf/all/forwarding": 1}
FIREWALL6 = """\
*filter
:INPUT DROP
:FORWARD DROP
-A INPUT -p ipv6-icmp -j ACCEPT
-A FORWARD -m conntrack --ctstate INVALID -j DROP
-A FORWARD -i lan -j ACCEPT
-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
COMMIT
"""
"""Allows ICMPv6, which finds neighbours. Addresses are kept, and unsolicited packets are dropped."""

STRICT_TRACKING = {"netfilter/nf_conntrack_tcp_loose": 0}
"""Has a router drop packets of connections that it has forgotten, as it did not see their beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Bytes of packets that a host has sent, in total and `to` each address or network of the lab."""

    total: int
    to: Mapping[str, int]


class Lab:
    def __init__(self, name: str = f"swarm-lab-{os.getpid()}") -> None:
        self._name = name
        self._outer = {name: router.outer for name, router in ROUTERS.items()}

    # --- building and removing ----------------------------------------------------------------------------------------

    def build(self) -> None:
        """Build all hosts and routers. Raises RuntimeError, after which `remove` must still be called."""
        for each in ("wan", *HOSTS, *ROUTERS):
            namespaces.add(self.namespace(each))
            namespaces.configure(self.namespace(each), ["link set lo up"])
            namespaces.set_kernel(self.namespace(each), AT_ONCE6)
        wan = self.namespace("wan")
        namespaces.configure(wan, ["link add br0 type bridge", f"addr add {BACKBONE6}1/64 dev br0", "link set br0 up"])
        namespaces.set_kernel(wan, FORWARDING6)
        for host, last in PUBLIC.items():
            self._plug_in(host, "wan", "br0", f"{BACKBONE}.{last}", address6=address6(host))
        for name, router in ROUTERS.items():
            self._build_router(name, router)
        for host in HOSTS:
            namespaces.filter_packets(self.namespace(host), _counting(_addresses()))
            addresses6 = filter(None, map(address6, HOSTS))
            namespaces.filter_packets(self.namespace(host), _counting(addresses6), tables="ip6tables")

    def remove(self) -> None:
        """Remove whatever exists of the lab. Processes inside keep their namespace alive, without its name."""
        for name in namespaces.named(rf"{re.escape(self._name)}-\w+"):
            namespaces.remove(name)

    def namespace(self, host: str) -> str:
        return f"{self._name}-{host}"

    def processes(self) -> dict[int, str]:
        """Return the ids of the processes inside, with the hosts on which they run."""
        return {pid: host for host in HOSTS for pid in namespaces.processes(self.namespace(host))}

    def _build_router(self, name: str, router: Router) -> None:
        inner = self.namespace(name)
        bridge = ["link add lan type bridge", f"addr add {router.lan}.1/24 dev lan", "link set lan up"]
        namespaces.configure(inner, bridge)
        namespaces.set_kernel(inner, {"ipv4/ip_forward": 1, **STRICT_TRACKING})
        namespaces.filter_packets(inner, _nat(router))
        upstream, bridge = (router.behind, "lan") if router.behind else ("wan", "br0")
        gateway = f"{ROUTERS[router.behind].lan}.1" if router.behind else ""
        self._plug_in(name, upstream, bridge, router.outer, gateway=gateway, address6=router.outer6)
        if router.lan6:
            namespaces.set_kernel(inner, FORWARDING6)
            namespaces.filter_packets(inner, FIREWALL6, tables="ip6tables")
            namespaces.configure(inner, [f"addr add {router.lan6}1/64 dev lan"])
            namespaces.configure(self.namespace(upstream), [f"route add {router.lan6}/64 via {router.outer6}"])
        if router.lan6 and router.behind:
            via = ROUTERS[router.behind].outer6
            namespaces.configure(self.namespace("wan"), [f"route add {router.lan6}/64 via {via}"])
        for host in router.hosts:
            gateway, address = f"{router.lan}.1", f"{router.lan}.{router.hosts[host]}"
            self._plug_in(host, name, "lan", address, gateway=gateway, address6=address6(host))

    def _plug_in(
        self, host: str, other: str, bridge: str, address: str, *, gateway: str = "", address6: str = ""
    ) -> None:
        """Connect `eth0` of a host with a bridge of another, whose port is named after the host."""
        ours, theirs = self.namespace(host), self.namespace(other)
        namespaces.run(*f"ip link add {host} netns {theirs} type veth peer name eth0 netns {ours}".split())
        namespaces.configure(theirs, [f"link set {host} master {bridge} up"])
        up = ["link set eth0 up", f"addr add {address}/24 dev eth0", _default_route(gateway)]
        if address6:
            up += [f"addr add {address6}/64 dev eth0", _default_route6(address6)]
        namespaces.configure(ours, up)

    # --- what happens on the internet ---------------------------------------------------------------------------------

    def address(self, host: str) -> str:
        """Return the address from which the host's packets arrive on the backbone now."""
        if host in PUBLIC:
            return f"{BACKBONE}.{PUBLIC[host]}"
        router = HOME_ROUTER[host]
        return self._outer[ROUTERS[router].behind or router]

    def change_address(self, host: str) -> None:
        """Give the host's router another address at once, without the mappings of the old one."""
        router = HOME_ROUTER[host]
        old = self._outer[router]
        new = next(f"{BACKBONE}.{last}" for last in SPARE if f"{BACKBONE}.{last}" not in self._outer.values())
        change = [f"addr del {old}/24 dev eth0", f"addr add {new}/24 dev eth0", _default_route("")]
        namespaces.configure(self.namespace(router), change)
        self._outer[router] = new

    def reboot_router(self, host: str, *, down_s: float) -> None:
        """Take the host's router down for so long. It comes back with the same address and without its mappings."""
        name = HOME_ROUTER[host]
        router, links = self.namespace(name), ["eth0", *ROUTERS[name].hosts]
        namespaces.configure(router, [f"link set {link} down" for link in links])
        namespaces.forget_connections(router)
        time.sleep(down_s)
        namespaces.configure(router, [f"link set {link} up" for link in links])
        namespaces.configure(router, _outer_routes(ROUTERS[name]))

    def rewrite_ports(self, host: str) -> None:
        """Let the host's router forget its mappings, so that its NAT uses other ports from the next packets on."""
        namespaces.forget_connections(self.namespace(HOME_ROUTER[host]))

    def forget_after(self, host: str, seconds: int) -> None:
        """Let the host's router forget mappings after `seconds` without a packet, starting with each mapping's next
        packet."""
        settings = {"tcp_timeout_established": seconds, "udp_timeout": seconds, "udp_timeout_stream": seconds}
        tracking = {f"netfilter/nf_conntrack_{name}": value for name, value in settings.items()}
        namespaces.set_kernel(self.namespace(HOME_ROUTER[host]), tracking)

    def limit(self, host: str, mbit: int) -> None:
        """Limit the host's line to `mbit` Mbit/s each way, by a token bucket with a queue of 200 ms before it."""
        other = self.namespace(HOME_ROUTER.get(host, "wan"))
        for namespace, interface in ((self.namespace(host), "eth0"), (other, host)):
            bucket = f"tbf rate {mbit}mbit burst 32kb latency 200ms"
            namespaces.run(*f"tc -n {namespace} qdisc replace dev {interface} root {bucket}".split())

    def sent(self, host: str) -> Sent:
        total, to = 0, {}
        for tables in ("iptables", "ip6tables"):
            for rule, num_bytes in namespaces.filter_counts(self.namespace(host), tables=tables).items():
                if found := re.fullmatch(r"-A OUTPUT -d (\S+?)(?:/32|/128)?", rule):
                    to[found[1]] = num_bytes
                elif rule == EVERYTHING:
                    total += num_bytes
        return Sent(total=total, to=to)


def remove_abandoned() -> None:
    """Remove the labs of processes that have ended."""
    for name in namespaces.named(r"swarm-lab-\d+-\w+"):
        if not Path("/proc", name.split("-")[2]).exists():
            namespaces.remove(name)


def lan_of(host: str) -> str:
    """Return the network behind the router that a host is behind."""
    return f"{ROUTERS[HOME_ROUTER[host]].lan}.0/24"


def address6(host: str) -> str:
    """Return the host's IPv6 address, which no router rewrites, or an empty string if it has none."""
    if host in PUBLIC:
        return f"{BACKBONE6}{PUBLIC[host]}"
    router = ROUTERS[HOME_ROUTER[host]]
    return f"{router.lan6}{router.hosts[host]}" if router.lan6 else ""


def _outer_routes(router: Router) -> list[str]:
    """Return the commands that restore what a router loses when its outer interface is down."""
    routes = [_default_route(f"{ROUTERS[router.behind].lan}.1" if router.behind else "")]
    if router.outer6:
        routes += [f"addr replace {router.outer6}/64 dev eth0", _default_route6(router.outer6)]
    return routes


def _default_route6(address6: str) -> str:
    return f"route replace default via {address6.rpartition(':')[0]}:1"


def _default_route(gateway: str) -> str:
    """Return the command that adds a default route. The backbone has no exit, but a host with a route behaves as if
    there were one, and packets sent there are lost."""
    return f"route replace default {f'via {gateway}' if gateway else 'dev eth0'}"


def _counting(addresses: Iterable[str]) -> str:
    """Return packet filter rules without a target, which only count."""
    rules = [EVERYTHING, *(f"-A OUTPUT -d {each}" for each in addresses)]
    return "\n".join(["*filter", *rules, "COMMIT", ""])


def _addresses() -> list[str]:
    addresses = [f"{BACKBONE}.{last}" for last in (*PUBLIC.values(), *SPARE)]
    networks = [f"{router.lan}.0/24" for router in ROUTERS.values()]
    return [*addresses, *networks, *(router.outer for router in ROUTERS.values() if not router.behind)]


def _nat(router: Router) -> str:
    forwarding = [
        f"-A PREROUTING -i eth0 -p {kind} --dport {PORT} -j DNAT --to-destination "
        f"{router.lan}.{router.hosts[router.forwards]}:{PORT}"
        for kind in ("tcp", "udp")
        if router.forwards
    ]
    return "\n".join(
        [
            "*nat",
            *forwarding,
            f"-A POSTROUTING -o eth0 -j MASQUERADE{' --random-fully' if router.is_symmetric else ''}",
            "COMMIT",
            "*filter",
            ":INPUT DROP",
            ":FORWARD DROP",
            "-A FORWARD -m conntrack --ctstate INVALID -j DROP",
            "-A FORWARD -i lan -j ACCEPT",
            "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED,DNAT -j ACCEPT",
            "COMMIT",
            "",
        ]
    )
