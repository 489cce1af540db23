"""Enters a network: reaches given, remembered or local peers, and compares network, version and clock.

`identity_check` looks for another node with this one's identity. `partition_watch` rejoins after a partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from swarm_protocol import limits
from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import (
    ConfigError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    StartError,
    SwarmError,
)
from swarm_protocol.version import check_hello

from swarm.ended_tasks import end_tasks
from swarm.network.discovery.peer_names import GivenPeers
from swarm.network.libp2p.daemon_control import ControlError
from swarm.network.libp2p.daemon_errors import CONTROL_FAILURES, dial_failure
from swarm.network.libp2p.greeting import MIN_CLOCKS, Greeting, greet, hello_of, off_by
from swarm.network.libp2p.host import Host
from swarm.network.libp2p.reconnection import accepts_connections
from swarm.network.multiaddr import PeerAddr, is_relayed
from swarm.network.paths.dialler import DIRECT_S, ip4_first

T = TypeVar("T")

SEED_TIMEOUT_S = 5.0
"""Time-out of connecting to one seed, enough for a slow link across the world."""

STARTING_S = 2.0
"""Time for a peer to answer that is connected but refuses a greeting: one that is being started first looks for a copy
of itself, for up to `identity_check.COPY_CHECK_S`. With a dial, it fits into SEED_TIMEOUT_S."""

GREET_AGAIN_S = 0.25

MIN_LOOK_S, MAX_LOOK_S = 0.5, 5.0
"""Bounds of the time between two looks whether a peer that is waited for is there. It is random, so that nodes that
wait for one seed do not come at once."""

LATE_ANSWERS_S = 0.5
"""Time for the other peers to answer once one has. Dead peers must not delay a node that is connected."""

MAX_NEARBY_DIALS = 16
"""Maximum nodes of the local network that are dialled at once, since anyone there can announce any number."""

HEAD_START_S = 1.0
"""Time for the given peers to answer before remembered ones are tried, too. It ends early if all given peers fail."""

IP4_HEAD_START_S = 0.5
"""Time for a given peer's IPv4 address before its IPv6 address is tried, too (see `dialler.ip4_first`)."""

logger = logging.getLogger(__name__)


class NobodyReached(StartError):
    """No peer was joined. Some may answer later."""


class ClockError(StartError):
    """This machine's clock differs too much from those of the peers that it reached."""


async def connect(host: Host, peer_id: str, addrs: Sequence[str], network_id: str) -> Greeting:
    """Reach `peer_id` at `addrs`, and check that its network and protocol version are this node's. Raises PeerError."""
    try:
        async with asyncio.timeout(SEED_TIMEOUT_S):
            await _dial(host, peer_id, addrs)
            greeting = await _greet_once_started(host, peer_id, network_id)
    except TimeoutError:
        raise PeerTimeout(f"no answer within {SEED_TIMEOUT_S:.0f} s", peer_id=peer_id) from None
    except CONTROL_FAILURES as error:
        raise PeerUnreachable(dial_failure(str(error)), peer_id=peer_id) from None
    check_hello(hello_of(network_id), greeting.hello, peer_id)
    return greeting


async def _greet_once_started(host: Host, peer_id: str, network_id: str) -> Greeting:
    """Greet a peer, again for STARTING_S if it refuses: a node that is being started does not answer yet."""
    now_s = asyncio.get_running_loop().time
    until_s = now_s() + STARTING_S
    while True:
        try:
            return await greet(host, peer_id, network_id)
        except PeerRefused:
            if now_s() > until_s:
                raise
        await asyncio.sleep(GREET_AGAIN_S)


async def _dial(host: Host, peer_id: str, addrs: Sequence[str]) -> None:
    """Connect to a peer, by IPv4 first if it has public addresses of both IP versions. Raises what `Control` raises."""
    *first, last = ip4_first(addrs)
    for way in first:
        with contextlib.suppress(ControlError, TimeoutError):
            async with asyncio.timeout(DIRECT_S):
                return await host.control.connect(peer_id, way)
    return await host.control.connect(peer_id, last)


Dials = dict[asyncio.Task[Greeting], PeerAddr | Contact]
Outcomes = Mapping[PeerAddr | Contact, Greeting | BaseException]
"""The result of each dial. A given peer is a `PeerAddr`, and a remembered or local one a `Contact`."""
Failures = Mapping[str, BaseException]
"""The failures to reach given peers, by address, or by name where the name led to no address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEntry:
    """The peer ids through which a node entered its network: given ones, remembered ones, and those found in the local
    network. A node that starts alone, as none of its given peers answered, has the reason in `unreached`. One whose
    clock is wrong by those of too few peers to be sure has that in `clock_error`."""

    given: tuple[str, ...] = ()
    remembered: tuple[str, ...] = ()
    nearby: tuple[str, ...] = ()
    unreached: NobodyReached | None = None
    clock_error: ClockError | None = None

    @property
    def peer_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.given, *self.remembered, *self.nearby)))


FindNearby = Callable[[], Awaitable[Sequence[Contact]]]
"""Looks for nodes in the local network for a few seconds."""


async def join(
    host: Host,
    given: GivenPeers,
    remembered: Sequence[Contact],
    network_id: str,
    *,
    find_nearby: FindNearby | None = None,
    may_be_first: bool = False,
    patience_s: float = 0.0,
) -> NetworkEntry:
    """Reach peers of the network, and return through which ones. Given peers are tried first, then remembered peers,
    then peers of the local network.

    Without given and remembered peers and without `find_nearby`, this node starts alone. With `may_be_first` it also
    starts alone if nobody answers, and does not search for local peers. Raises ConfigError if a given peer refuses and
    no other given peer accepts, NobodyReached, and ClockError.

    Before it dials, it waits for up to `patience_s` until a given peer has connected to it, or the machine of one
    accepts connections.
    """
    if may_be_first:
        find_nearby = None
    if patience_s and (given.addrs or given.are_missing):
        await _wait_until_one_is_there(host, given.addrs, patience_s)
    outcomes = await _dial_until_one_answers(host, given.addrs, remembered, network_id, find_nearby)
    entry = _entry_through(outcomes, remembered)
    failures: Failures = {**given.failures, **_failures(outcomes)}
    if not entry.given and (refusals := _refusals(failures)):
        remedies = filter(None, dict.fromkeys(refusal.remedy for refusal in refusals))
        raise ConfigError(f"cannot join through the given peers: {_reasons(failures)}", remedy="; ".join(remedies))
    if entry.peer_ids:
        for addr, failure in failures.items():
            logger.warning("%s: %s", addr, failure)
        return replace(entry, clock_error=_check_clock(outcomes))
    if not failures and (may_be_first or not (remembered or find_nearby)):
        return entry
    error = _unreachable_error(
        failures, outcomes, num_remembered=len(remembered), was_sought_nearby=find_nearby is not None
    )
    if may_be_first:
        return NetworkEntry(unreached=error)
    raise error


def _entry_through(outcomes: Outcomes, remembered: Sequence[Contact]) -> NetworkEntry:
    """Return the entry through the peers that answered."""
    answered = [target for target, each in outcomes.items() if isinstance(each, Greeting)]
    contacts = [each for each in answered if isinstance(each, Contact)]
    return NetworkEntry(
        given=tuple(dict.fromkeys(each.peer_id for each in answered if isinstance(each, PeerAddr))),
        remembered=tuple(each.peer_id for each in contacts if each in remembered),
        nearby=tuple(each.peer_id for each in contacts if each not in remembered),
    )


async def _is_there(host: Host, addr: PeerAddr) -> bool:
    """Return whether a peer has connected to this node, or its machine accepts connections. That of a relay says
    nothing about a peer behind it. Raises PeerUnreachable if the daemon cannot be asked."""
    return addr.peer_id in await host.connected_peers() or (
        not is_relayed(addr.addr) and await accepts_connections(addr.addr)
    )


async def _wait_until_one_is_there(host: Host, addrs: Sequence[PeerAddr], within_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not any(await asyncio.gather(*(_is_there(host, addr) for addr in addrs))):  # noqa: ASYNC110
                await asyncio.sleep(random.uniform(MIN_LOOK_S, MAX_LOOK_S))


async def _connect_given(host: Host, addr: PeerAddr, network_id: str, *, has_ip4: bool) -> Greeting:
    if has_ip4 and addr.addr.startswith("/ip6/"):
        await asyncio.sleep(IP4_HEAD_START_S)
    return await connect(host, addr.peer_id, [addr.addr], network_id)


async def _dial_until_one_answers(
    host: Host,
    given: Sequence[PeerAddr],
    remembered: Sequence[Contact],
    network_id: str,
    find_nearby: FindNearby | None,
) -> Outcomes:
    """Dial the given peers, then others until one has answered. Return the outcomes; dials that still run are
    cancelled."""
    by_ip4 = {addr.peer_id for addr in given if addr.addr.startswith("/ip4/")}
    dials: Dials = {
        asyncio.create_task(_connect_given(host, addr, network_id, has_ip4=addr.peer_id in by_ip4)): addr
        for addr in given
    }

    def is_over() -> bool:
        return any(map(succeeded, dials)) or bool(_refusals(_failures(_outcomes(dials))))

    async def dial(contacts: Sequence[Contact]) -> None:
        for contact in contacts:
            dials[asyncio.create_task(connect(host, contact.peer_id, contact.addrs, network_id))] = contact
        await first_success(set(dials))

    try:
        await first_success(set(dials), timeout_s=HEAD_START_S if remembered else None)
        if not is_over():
            await dial(remembered)
        if find_nearby is not None and not is_over():
            await dial((await find_nearby())[:MAX_NEARBY_DIALS])
        if dials:
            await asyncio.wait(dials, timeout=LATE_ANSWERS_S)
        return _outcomes(dials)
    finally:
        await end_tasks(*dials)


async def first_success(tasks: set[asyncio.Task[T]], *, timeout_s: float | None = None) -> None:
    """Wait until one task has succeeded, all have failed, or `timeout_s` has passed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not any(map(succeeded, tasks)) and (pending := [task for task in tasks if not task.done()]):
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


def succeeded(task: asyncio.Task[T]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _outcomes(dials: Dials) -> Outcomes:
    """Return how the dials ended that have ended by themselves."""
    ended = [(task, target) for task, target in dials.items() if task.done() and not task.cancelled()]
    return {target: task.exception() or task.result() for task, target in ended}


def _failures(outcomes: Outcomes) -> Failures:
    """Return the failures to reach given peers. Remembered and local peers are left out, since they may be gone for
    good."""
    return {
        str(target): outcome
        for target, outcome in outcomes.items()
        if isinstance(target, PeerAddr) and isinstance(outcome, BaseException)
    }


def _refusals(failures: Failures) -> list[PeerRefused]:
    return [failure for failure in failures.values() if isinstance(failure, PeerRefused)]


def _reasons(failures: Failures) -> str:
    """Return each failure as `ADDRESS: REASON`, in one line."""
    return "; ".join(
        f"{addr}: {failure.message if isinstance(failure, SwarmError) else failure}"
        for addr, failure in failures.items()
    )


def _unreachable_error(
    failures: Failures, outcomes: Outcomes, *, num_remembered: int, was_sought_nearby: bool
) -> NobodyReached:
    reasons = []
    if failures:
        reasons.append(f"none of the given peers could be reached: {_reasons(failures)}")
        remedy = "check the addresses and that these nodes run, or give another node of the network"
    else:
        remedy = "give --peers the address of a running node, as swarm-node seed prints it"
    if num_remembered and failures:
        reasons.append(f"nor any of the {num_remembered} peers that this node remembers")
    elif num_remembered:
        reasons.append(f"none of the peers that this node remembers ({num_remembered}) could be reached")
    # a remembered or local peer may have refused this node: after an update all of them may, and one of them may lie
    if refusal := next((each for each in outcomes.values() if isinstance(each, PeerRefused)), None):
        reasons.append(f"one that answered cannot be joined: {refusal.message}")
        remedy = refusal.remedy
    elif was_sought_nearby:
        reasons.append("no node of this network answered in the local network")
    return NobodyReached("; ".join(reasons), remedy=remedy)


def _check_clock(outcomes: Outcomes) -> ClockError | None:
    """Raises ClockError if this machine's clock is wrong by those of the given peers, or of enough others. Return the
    error if it is wrong by those of fewer others, since one of them may lie."""
    skew_of = {target: each.skew_s for target, each in outcomes.items() if isinstance(each, Greeting)}
    given_s = [skew_s for target, skew_s in skew_of.items() if isinstance(target, PeerAddr)]
    skews_s = given_s or list(skew_of.values())
    skew_s = statistics.median(skews_s)
    if abs(skew_s) <= limits.MAX_CLOCK_SKEW_S:
        return None
    peers = "peer that" if len(skews_s) == 1 else f"{len(skews_s)} peers that"
    error = ClockError(
        f"this machine's clock is {off_by(skew_s)} that of the {peers} it reached",
        remedy="set the clock, for example by turning on network time",
    )
    if given_s or len(skews_s) >= MIN_CLOCKS:
        raise error
    return error
