"""How a node enters a network: reach the peers it was given, say hello, compare network, version and clock.

`hello` is the one method whose name carries no network id, so that two peers which cannot work together can say why.
Holds no state and owns no task beyond its own calls.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from swarm_protocol import limits
from swarm_protocol.errors import (
    ConfigError,
    PeerError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    StartError,
    SwarmError,
)
from swarm_protocol.version import Hello, check_hello, software_version

from swarm.network.libp2p_daemon import DaemonOptions
from swarm.network.libp2p_host import CONTROL_FAILURES, Host, NotServed, dial_failure
from swarm.network.libp2p_unary import UnaryAnswer
from swarm.network.multiaddr import PeerAddr

T = TypeVar("T")

HELLO = "/swarm/hello"

SEED_TIMEOUT_S = 5.0
"""For a seed across the world on a slow link; half of the patience of a person who waits for an error."""

GRACE_S = 0.5
"""For the other seeds once one has answered: the dead ones must not delay a node that is already connected."""

COPY_CHECK_S = 1.5
"""For finding a peer by its id through the seeds; a live one answers in a few round trips."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    hello: Hello
    skew_s: float  # the peer's clock minus ours


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


async def connect(host: Host, addr: PeerAddr, network_id: str) -> Greeting:
    """Reach `addr` and check that we can work together, clocks aside. Raises PeerError."""
    try:
        async with asyncio.timeout(SEED_TIMEOUT_S):
            await host.control.connect(addr.peer_id, [addr.addr])
            greeting = await greet(host, addr.peer_id, network_id)
    except TimeoutError:
        raise PeerTimeout(f"no answer within {SEED_TIMEOUT_S:.0f} s", peer_id=addr.peer_id) from None
    except CONTROL_FAILURES as error:
        raise PeerUnreachable(dial_failure(str(error)), peer_id=addr.peer_id) from None
    check_hello(_hello(network_id, 0.0), greeting.hello, addr.peer_id)
    return greeting


async def join(host: Host, addrs: Sequence[PeerAddr], network_id: str) -> tuple[str, ...]:
    """The peers among `addrs` that were reached; those that are slow may still be on their way.

    Raises ConfigError if all are in another network or version, StartError if none was reached or our clock is off.
    """
    if not addrs:
        return ()
    attempts = {asyncio.create_task(connect(host, addr, network_id)): addr for addr in addrs}
    try:
        await _first_success(set(attempts))
        await asyncio.wait(attempts, timeout=GRACE_S)
        greetings = {addr.peer_id: task.result() for task, addr in attempts.items() if _succeeded(task)}
        failures = {addr: task.exception() for task, addr in attempts.items() if task.done() and not _succeeded(task)}
    finally:
        for task in attempts:
            task.cancel()
        await asyncio.wait(attempts)
    if not greetings:
        raise _nobody(failures)
    for addr, failure in failures.items():
        logger.warning("%s: %s", addr, failure)
    _check_clock([greeting.skew_s for greeting in greetings.values()])
    return tuple(greetings)


async def check_identity_is_free(addrs: Sequence[PeerAddr], peer_id: str) -> None:
    """Raises StartError if a running node has this identity, wherever it is.

    A throwaway anonymous host asks the seeds' network for the peer id and dials it. libp2p lets a connection stand only
    if the other side proves that it holds the key, so whoever answers is a copy. None of the seeds reached, or
    nothing found in time: free, as far as can be told. (A later sign is a record of ours that we did not write.)
    """
    host = await Host.start(DaemonOptions(dht_server=False))
    lane = asyncio.create_task(host.lane.run())
    try:
        async with asyncio.timeout(COPY_CHECK_S):
            dials = [asyncio.create_task(host.control.connect(addr.peer_id, [addr.addr])) for addr in addrs]
            try:
                await _first_success(set(dials))
            finally:
                for dial in dials:
                    dial.cancel()
                await asyncio.wait(dials)
            if not any(_succeeded(dial) for dial in dials) or not await _can_dial(host, peer_id):
                return
    except TimeoutError:
        return
    finally:
        try:
            await host.stop()
        finally:
            await lane
    raise StartError(
        f"the identity {peer_id} is in use by another running node",
        remedy="stop that node, or give this one its own identity (another home folder)",
    )


def _hello(network_id: str, sent_at: float) -> Hello:
    return Hello(network_id=network_id, software_version=software_version(), sent_at=sent_at)


async def _can_dial(host: Host, peer_id: str) -> bool:
    while True:
        try:
            await host.control.connect(peer_id)
        except CONTROL_FAILURES as error:
            if "failed to find any peer in table" not in str(error):
                return False
            await asyncio.sleep(0.02)  # the seed is connected, but the daemon has yet to learn what it can do
        else:
            return True


async def _first_success(tasks: set[asyncio.Task[T]]) -> None:
    """Until one has succeeded or all have failed."""
    pending = tasks
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if any(_succeeded(task) for task in done):
            return


def _succeeded(task: asyncio.Task[T]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _nobody(failures: dict[PeerAddr, BaseException | None]) -> StartError | ConfigError:
    """Each peer's cause once, and each remedy once."""
    told = "; ".join(
        f"{addr}: {failure.message if isinstance(failure, SwarmError) else failure}"
        for addr, failure in failures.items()
    )
    refusals = [failure for failure in failures.values() if isinstance(failure, PeerRefused)]
    if refusals:
        remedies = dict.fromkeys(refusal.remedy for refusal in refusals)
        return ConfigError(f"cannot join through the given peers: {told}", remedy="; ".join(filter(None, remedies)))
    return StartError(
        f"none of the given peers could be reached: {told}",
        remedy="check the addresses and that these nodes run, or give another node of the network",
    )


def _check_clock(skews_s: Sequence[float]) -> None:
    skew_s = statistics.median(skews_s)
    if abs(skew_s) <= limits.MAX_CLOCK_SKEW_S:
        return
    raise StartError(
        f"this machine's clock is {abs(skew_s):.0f} s {'behind' if skew_s > 0 else 'ahead of'} that of the "
        f"{len(skews_s)} peers it was given",
        remedy="set the clock, for example by turning on network time",
    )
