"""Resolves peers that are given by a name: /dnsaddr/NAME, /dns4|dns6|dns/NAME/tcp/PORT/p2p/ID, or a host name alone.

A host name alone means /dnsaddr/NAME. Each TXT record at _dnsaddr.NAME holds one address, `dnsaddr=/ip4/…/p2p/…`, which
may contain another name (source: libp2p's specification of dnsaddr). After /dnsaddr/NAME/p2p/ID only the records of
that peer count; otherwise the author of the records decides which peers are met first. Callers get plain IP addresses,
which are checked once, so that no later answer can lead elsewhere.

The addresses behind a name are bounded in number, depth and time, and in kind by `own_networks.kinds_to_dial`.
`GivenPeers` belongs to its network's task.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, PeerUnreachable, SwarmError
from swarm_protocol.identity import check_peer_id

from swarm.network.discovery.dns_lookup import DnsLookup, LookupFailed, is_localhost
from swarm.network.discovery.own_networks import kinds_to_dial, own_subnets
from swarm.network.ip_kinds import IpKind, kind_of
from swarm.network.multiaddr import PeerAddr, ip_of, parse_peer_addr

TIMEOUT_S = 5.0
"""Time-out of the lookups of all names, which run at once. One seed gets as long to answer."""

HURRIED_TIMEOUT_S = 2.0
"""The same time-out if there are other peers to start with."""

AGAIN_S = 60.0
"""Minimum time between two lookups of the names of missing peers."""

MAX_LOOKUPS = 16
"""Maximum lookups for one given name."""

MAX_DEPTH = 4
"""Maximum length of a chain of names that lead to names. libp2p's own bootstrap list needs two."""

MAX_RECORDS = 32
"""Maximum TXT records of one name, and maximum addresses of one host, that are read."""

MAX_ADDRS = 16
"""Maximum addresses of peers from one given name, enough to join through."""

_DNSADDR = "/dnsaddr/"
_DNSADDR_FORM = re.compile(r"/dnsaddr/([^/]*)(?:/p2p/([^/]+))?")
_RECORD = "dnsaddr="
_MAX_NAME_CHARS = 253
_EXAMPLE = "write it like /dnsaddr/swarm.example.org or /dns4/seed.example.org/tcp/4001/p2p/PEER_ID"
_LIST = 'give a list of texts, such as peers=["swarm.example.org"] or ["/ip4/203.0.113.7/tcp/4001/p2p/PEER_ID"]'
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", re.ASCII)
_VERSIONS: Mapping[str, tuple[Literal[4, 6], ...]] = {"dns": (4, 6), "dns4": (4,), "dns6": (6,)}

logger = logging.getLogger(__name__)


def check_peers(peers: object) -> tuple[str, ...]:
    """Return the addresses that a caller gave, in their full form. Raises ConfigError if one is malformed, or if
    `peers` is no list."""
    if isinstance(peers, str):
        raise ConfigError("peers is one address and not a list of addresses", remedy=f"give peers=[{peers!r:.200}]")
    if not isinstance(peers, Sequence) or isinstance(peers, bytes):
        raise ConfigError(f"peers is {peers!r:.80} and not a list of addresses", remedy=_LIST)
    for each in peers:
        if not isinstance(each, str):
            raise ConfigError(f"peers has {each!r:.80}, which is no address", remedy=_LIST)
    return tuple(map(check_peer, peers))


def check_peer(text: str) -> str:
    """Return a peer's address in its full form: /dnsaddr/NAME for a host name alone. Raises ConfigError."""
    if not text.startswith("/"):
        if "." in text and _is_host_name(text):
            return f"{_DNSADDR}{text}"
        raise ConfigError(
            f"address {text[:120]!r} is malformed: it does not start with /",
            remedy="write it like /ip4/203.0.113.7/tcp/4001/p2p/PEER_ID, or give a name such as swarm.example.org",
        )
    if not text.startswith(_DNSADDR):
        addr = parse_peer_addr(text)
        if (name := _host_of(addr)) and not _is_host_name(name):
            raise _no_name(text, name)
        return str(addr)
    name, peer_id = _dnsaddr_parts(text)
    if not _is_host_name(name):
        raise _no_name(text, name)
    if peer_id:
        try:
            check_peer_id(peer_id)
        except ValueError as error:
            raise ConfigError(f"address {text[:120]!r} is malformed: /p2p: {error}", remedy=_EXAMPLE) from None
    return text


def _no_name(text: str, name: str) -> ConfigError:
    return ConfigError(f"address {text[:120]!r} is malformed: {name[:80]!r} is not a host name", remedy=_EXAMPLE)


def is_named(text: str) -> bool:
    """Return whether an address contains a name to look up. `check_peer` has returned the address."""
    return not text.startswith(("/ip4/", "/ip6/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The addresses that the given peers have now, and by given text why some have none."""

    addrs: tuple[PeerAddr, ...] = ()
    failures: Mapping[str, SwarmError] = field(default_factory=dict)


async def resolve(texts: Sequence[str], lookup: DnsLookup, kinds: frozenset[IpKind], *, timeout_s: float) -> Resolved:
    """Return the addresses of the given peers, after looking up their names. Raises ConfigError for a malformed
    text."""
    checked = dict.fromkeys(map(check_peer, texts))
    found: dict[str, Sequence[PeerAddr]] = {
        text: () if is_named(text) else (parse_peer_addr(text),) for text in checked
    }
    failures: dict[str, SwarmError] = {}

    async def look_up(text: str) -> None:
        search = _Search(lookup, kinds)
        try:
            async with asyncio.timeout(timeout_s):
                await search.follow(text)
        except TimeoutError:
            search.reasons.append(f"no name server answered within {timeout_s:g} s")
        found[text] = tuple(search.found)
        reason = "; ".join(dict.fromkeys(search.reasons))[: limits.MAX_FAILURE_TEXT_CHARS]
        if not search.found:
            failures[text] = PeerUnreachable(reason or "the name leads to no address of a peer")
        elif reason:
            logger.warning("%s: %s", text, reason)

    await asyncio.gather(*(look_up(text) for text in checked if is_named(text)))
    return Resolved(addrs=tuple(dict.fromkeys(addr for addrs in found.values() for addr in addrs)), failures=failures)


class _Search:
    """The search for the addresses behind one given name, within the bounds."""

    def __init__(self, lookup: DnsLookup, kinds: frozenset[IpKind]) -> None:
        self._lookup = lookup
        self._kinds = kinds
        self._asked: set[str] = set()
        self.found: dict[PeerAddr, None] = {}
        self.reasons: list[str] = []

    async def follow(self, text: str, *, source: str = "", only: str = "", depth: int = 0) -> None:
        """Add the addresses behind `text`, a checked address. `source` is the name whose records hold `text`, empty if
        the user gave it. If `only` is not empty, only addresses of that peer count."""
        if text.startswith(_DNSADDR):
            name, peer_id = _dnsaddr_parts(text)
            if not (only and peer_id and peer_id != only):
                await self._follow_records(name, peer_id or only, depth)
            return
        addr = parse_peer_addr(text)
        if only and addr.peer_id != only:
            return
        if name := _host_of(addr):
            await self._follow_host(name, addr, is_own_word=not source and is_localhost(name))
        else:
            self._take(addr, source)

    async def _follow_records(self, name: str, only: str, depth: int) -> None:
        if depth >= MAX_DEPTH:
            self.reasons.append(f"the chain of names is longer than {MAX_DEPTH}")
            return
        place = f"_dnsaddr.{name}"
        if not self._may_ask(place):
            return
        try:
            records = await self._lookup.texts(place)
        except LookupFailed as failure:
            self.reasons.append(f"{place}: {failure}")
            return
        named = [text.removeprefix(_RECORD) for text in records if text.startswith(_RECORD)][:MAX_RECORDS]
        if not named:
            self.reasons.append(f"{place} has no TXT record of the form dnsaddr=/ip4/…/tcp/…/p2p/…")
        texts = []
        for text in named:
            try:
                # not the short form
                texts.append(check_peer(text) if text.startswith("/") else str(parse_peer_addr(text)))
            except ConfigError as error:
                self.reasons.append(f"{place}: {error.message}")
        await asyncio.gather(*(self.follow(text, source=place, only=only, depth=depth + 1) for text in texts))

    async def _follow_host(self, name: str, addr: PeerAddr, *, is_own_word: bool) -> None:
        _, form, _, rest = addr.addr.split("/", 3)
        answers = await asyncio.gather(*(self._addresses(name, version) for version in _VERSIONS[form]))
        failures = [str(answer) for answer in answers if isinstance(answer, LookupFailed)]
        if len(failures) == len(answers):
            self.reasons.append(f"{name}: {failures[0]}")
        for version, answer in zip(_VERSIONS[form], answers, strict=True):
            for ip in answer[:MAX_RECORDS] if not isinstance(answer, LookupFailed) else ():
                self._take(
                    PeerAddr(peer_id=addr.peer_id, addr=f"/ip{version}/{ip}/{rest}"), name, is_own_word=is_own_word
                )

    async def _addresses(self, name: str, version: Literal[4, 6]) -> Sequence[str] | LookupFailed:
        if not self._may_ask(f"{name} {version}"):
            return ()
        try:
            return await self._lookup.addresses(name, version)
        except LookupFailed as failure:
            return failure

    def _may_ask(self, what: str) -> bool:
        """Return whether to make a lookup, and count it. A lookup is not repeated, since it would give nothing new."""
        if what in self._asked:
            return False
        if len(self._asked) >= MAX_LOOKUPS:
            self.reasons.append(f"the name takes more than {MAX_LOOKUPS} lookups")
            return False
        self._asked.add(what)
        return True

    def _take(self, addr: PeerAddr, name: str, *, is_own_word: bool = False) -> None:
        """Add one address. With `is_own_word` the user wrote localhost, so a loopback address is meant."""
        ip = ip_of(addr.addr)
        kind = kind_of(ip) if ip is not None else "unusable"
        if kind == "link-local" and ip is not None and ip.version == 6:
            kind = "unusable"  # since a multiaddr has no zone
        if kind not in self._kinds and not (kind == "loopback" and is_own_word):
            self.reasons.append(f"{name} leads to {ip or addr.addr}, {_WHY_NOT[kind]}")
        elif len(self.found) < MAX_ADDRS:
            self.found[addr] = None


_WHY_NOT: Mapping[IpKind, str] = {
    "loopback": "which is this machine itself, while this node listens beyond it",
    "link-local": "a link-local address, while this machine has none",
    "private": "an address of a private network, while this machine is in none",
    "unusable": "which cannot be dialled",
    "public": "",
}


class GivenPeers:
    """The peers that a node was given, with their addresses as of the last lookup.

    The peer `own_peer_id` is left out, since a seed may be in the list that all nodes share.
    """

    def __init__(
        self, texts: Sequence[str], *, own_peer_id: str, listen: Sequence[str], lookup: DnsLookup | None = None
    ) -> None:
        self._texts = tuple(text for text in map(check_peer, texts) if not text.endswith(f"/p2p/{own_peer_id}"))
        self.own_peer_id = own_peer_id
        self._listen = tuple(listen)
        self._lookup = lookup or DnsLookup(timeout_s=TIMEOUT_S)
        self._has_names = any(map(is_named, self._texts))
        self._next_at = 0.0
        self.addrs: tuple[PeerAddr, ...] = ()
        self.failures: Mapping[str, SwarmError] = {}

    @property
    def are_missing(self) -> bool:
        """Return whether the last lookup failed for some given name."""
        return bool(self.failures)

    async def look_up(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Look the names up and set `addrs` and `failures`. If a lookup failed, earlier addresses are kept."""
        own = [subnet.address for subnet in own_subnets()] if self._has_names else []
        self._next_at = asyncio.get_running_loop().time() + AGAIN_S
        resolved = await resolve(self._texts, self._lookup, kinds_to_dial(self._listen, own), timeout_s=timeout_s)
        found = tuple(addr for addr in resolved.addrs if addr.peer_id != self.own_peer_id)
        self.failures = resolved.failures
        kept = self.addrs if resolved.failures else ()
        self.addrs = tuple(dict.fromkeys((*found, *kept)))[: len(self._texts) * MAX_ADDRS]

    async def look_up_again(self) -> None:
        """Look the names up if the last lookup was at least AGAIN_S ago: a seed may have moved to another address."""
        if self._has_names and asyncio.get_running_loop().time() >= self._next_at:
            await self.look_up()


def _dnsaddr_parts(text: str) -> tuple[str, str]:
    """Return the name and the peer id of a /dnsaddr address; an empty peer id if it has none. If `text` has another
    form, return it as the name, which is then no host name."""
    match = _DNSADDR_FORM.fullmatch(text)
    return (match[1], match[2] or "") if match and len(text) <= limits.MAX_ADDR_BYTES else (text, "")


def _host_of(addr: PeerAddr) -> str:
    """Return the host name in an address, or an empty text."""
    _, form, host, *_ = addr.addr.split("/")
    return host if form in _VERSIONS else ""


def _is_host_name(name: str) -> bool:
    """Return whether `name` can be looked up. Letters beyond ASCII have to be written as xn--…."""
    labels = name.removesuffix(".").split(".")
    if not all(_LABEL.fullmatch(label) for label in labels) or len(name) > _MAX_NAME_CHARS:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return True
    return False
