"""How a node enters a network: reach the peers it was given or remembers, say hello, compare network, version, clock.

`hello` is the one method whose name carries no network id, so that two peers which cannot work together can say why.
Holds no state and owns no task beyond its own calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from swarm_protocol import limits
from swarm_protocol.dht_messages import Contact
from swarm_protocol.errors import (
    ConfigError,
    PeerError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    StartError,
    SwarmError,
)
from swarm_protocol.version import PROTOCOL_VERSION, Hello, check_hello, software_version

from swarm.network.libp2p.host import CONTROL_FAILURES, Host, NotServed, dial_failure
from swarm.network.libp2p.unary_connection import UnaryAnswer
from swarm.network.multiaddr import PeerAddr

T = TypeVar("T")

HELLO = "/swarm/hello"

SEED_TIMEOUT_S = 5.0
"""For a seed across the world on a slow link; half of the patience of a person who waits for an error."""

GRACE_S = 0.5
"""For the other peers once one has answered: the dead ones must not delay a node that is already connected."""

HEAD_START_S = 1.0
"""For the given peers, before remembered ones are tried as well. Given peers that all fail sooner end it."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    hello: Hello
    skew_s: float  # the peer's clock minus ours


def method_prefix(network_id: str) -> str:
    """What the names of all methods of a network begin with."""
    return f"/swarm/{PROTOCOL_VERSION}/{network_id}/"


def hello_answer(network_id: str) -> UnaryAnswer:
    async def answer(_peer_id: str, _request: bytes) -> bytes:
        return _hello(network_id, time.time()).to_bytes()

    return answer


async def greet(host: Host, peer_id: str, network_id: str) -> Greeting:
    """Raises PeerUnreachable, PeerRefused (no Swarm node) or PeerViolation."""
    before = time.time()
    try:
        answer = await host.call(peer_id, HELLO, _hello(network_id, before).to_bytes())
    except NotServed:
        raise PeerRefused(
            "it is a libp2p host, but not a Swarm node", remedy="give the address of one", peer_id=peer_id
        ) from None
    after = time.time()
    hello = Hello.from_bytes(answer)
    return Greeting(hello=hello, skew_s=hello.sent_at - (before + after) / 2 if hello.sent_at else 0.0)


async def explain_refusal(host: Host, peer_id: str, network_id: str, method: str) -> PeerError:
    """Why `peer_id` does not know a method of ours."""
    try:
        greeting = await greet(host, peer_id, network_id)
        check_hello(_hello(network_id, 0.0), greeting.hello, peer_id)
    except PeerError as error:
        return error
    return PeerRefused(f"the peer does not serve {method!r}", remedy="ask one that does", peer_id=peer_id)


async def connect(host: Host, peer_id: str, addrs: Sequence[str], network_id: str) -> Greeting:
    """Reach `peer_id` at `addrs` and check that we can work together, clocks aside. Raises PeerError."""
    try:
        async with asyncio.timeout(SEED_TIMEOUT_S):
            await host.control.connect(peer_id, addrs)
            greeting = await greet(host, peer_id, network_id)
    except TimeoutError:
        raise PeerTimeout(f"no answer within {SEED_TIMEOUT_S:.0f} s", peer_id=peer_id) from None
    except CONTROL_FAILURES as error:
        raise PeerUnreachable(dial_failure(str(error)), peer_id=peer_id) from None
    check_hello(_hello(network_id, 0.0), greeting.hello, peer_id)
    return greeting


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """The peer ids through which a node entered its network: of those it was given, and of those it remembered."""

    given: tuple[str, ...] = ()
    remembered: tuple[str, ...] = ()

    @property
    def peer_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.given, *self.remembered)))


async def join(
    host: Host,
    given: Sequence[PeerAddr],
    remembered: Sequence[Contact],
    network_id: str,
    *,
    may_be_first: bool = False,
) -> Entrance:
    """Reach peers of the network; those that are slow may still be on their way. Remembered ones are a second choice.

    Raises ConfigError if a given peer refuses and none of the others accepts, StartError if no peer was reached
    (unless none was given and this node `may_be_first`), or if this machine's clock is off.
    """
    attempts: dict[asyncio.Task[Greeting], PeerAddr | Contact] = {
        asyncio.create_task(connect(host, addr.peer_id, [addr.addr], network_id)): addr for addr in given
    }
    try:
        await first_success(set(attempts), timeout_s=HEAD_START_S if remembered else None)
        if not any(map(succeeded, attempts)) and not _refusals(_failures(attempts)):
            for contact in remembered:
                attempts[asyncio.create_task(connect(host, contact.peer_id, contact.addrs, network_id))] = contact
            await first_success(set(attempts))
        if attempts:
            await asyncio.wait(attempts, timeout=GRACE_S)
        greetings = {attempt: task.result() for task, attempt in attempts.items() if succeeded(task)}
        failures = _failures(attempts)
    finally:
        for task in attempts:
            task.cancel()
        if attempts:
            await asyncio.wait(attempts)
    entrance = Entrance(
        given=tuple(dict.fromkeys(each.peer_id for each in greetings if isinstance(each, PeerAddr))),
        remembered=tuple(each.peer_id for each in greetings if isinstance(each, Contact)),
    )
    if not entrance.given and (refusals := _refusals(failures)):
        raise _refused(failures, refusals)
    if not greetings:
        if given or (remembered and not may_be_first):
            raise _nobody(failures, num_remembered=len(remembered))
        return entrance
    for addr, failure in failures.items():
        logger.warning("%s: %s", addr, failure)
    _check_clock([greeting.skew_s for greeting in greetings.values()])
    return entrance


def _hello(network_id: str, sent_at: float) -> Hello:
    return Hello(network_id=network_id, software_version=software_version(), sent_at=sent_at)


async def first_success(tasks: set[asyncio.Task[T]], *, timeout_s: float | None = None) -> None:
    """Until one has succeeded, all have failed, or `timeout_s` is over."""
    pending = {task for task in tasks if not task.done()}
    if any(map(succeeded, tasks)):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(map(succeeded, done)):
                    return


def succeeded(task: asyncio.Task[T]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _failures(attempts: Mapping[asyncio.Task[Greeting], PeerAddr | Contact]) -> dict[PeerAddr, BaseException | None]:
    """Of given peers. Remembered ones may be gone for good, and nobody has named them."""
    return {
        attempt: task.exception()
        for task, attempt in attempts.items()
        if isinstance(attempt, PeerAddr) and task.done() and not succeeded(task)
    }


def _refusals(failures: Mapping[PeerAddr, BaseException | None]) -> list[PeerRefused]:
    return [failure for failure in failures.values() if isinstance(failure, PeerRefused)]


def _told(failures: Mapping[PeerAddr, BaseException | None]) -> str:
    """Each peer's cause once."""
    return "; ".join(
        f"{addr}: {failure.message if isinstance(failure, SwarmError) else failure}"
        for addr, failure in failures.items()
    )


def _refused(failures: Mapping[PeerAddr, BaseException | None], refusals: Sequence[PeerRefused]) -> ConfigError:
    remedies = dict.fromkeys(refusal.remedy for refusal in refusals)
    told = _told(failures)
    return ConfigError(f"cannot join through the given peers: {told}", remedy="; ".join(filter(None, remedies)))


def _nobody(failures: Mapping[PeerAddr, BaseException | None], *, num_remembered: int) -> StartError:
    if not failures:
        return StartError(
            f"none of the peers that this node remembers ({num_remembered}) could be reached",
            remedy="give --peers the address of a node that runs, as swarm-node seed prints it",
        )
    also = f"; nor any of the {num_remembered} that this node remembers" if num_remembered else ""
    return StartError(
        f"none of the given peers could be reached: {_told(failures)}{also}",
        remedy="check the addresses and that these nodes run, or give another node of the network",
    )


def _check_clock(skews_s: Sequence[float]) -> None:
    skew_s = statistics.median(skews_s)
    if abs(skew_s) <= limits.MAX_CLOCK_SKEW_S:
        return
    raise StartError(
        f"this machine's clock is {abs(skew_s):.0f} s {'behind' if skew_s > 0 else 'ahead of'} that of the "
        f"{len(skews_s)} peers it reached",
        remedy="set the clock, for example by turning on network time",
    )
