"""Entering a network: reach given or remembered peers, compare network, version and clock, and rejoin after a
partition.

`hello` is the one method whose name carries no network id, so that two peers that cannot work together can say why.
`start_host` refuses an identity that another running node has. `PartitionWatch.run` is a task: it notices that this
node is cut off, or that its seeds are, and dials them. Two groups that lost their common seed thus meet there again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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

from swarm.network.dht.record_dht import RecordDht
from swarm.network.dht.record_storage import RecordValidator
from swarm.network.interface import NotServed
from swarm.network.libp2p.host import CONTROL_FAILURES, Host, Libp2pOptions, dial_failure
from swarm.network.libp2p.p2pd_process import DaemonOptions
from swarm.network.libp2p.unary_connection import UnaryAnswer
from swarm.network.multiaddr import PeerAddr

T = TypeVar("T")

HELLO = "/swarm/hello"

SEED_TIMEOUT_S = 5.0
"""Time-out of one seed: across the world on a slow link, and half of a user's patience."""

GRACE_S = 0.5
"""Time for the other peers once one has answered. Dead ones must not delay a node that is connected."""

HEAD_START_S = 1.0
"""Time for the given peers before remembered ones are tried, too. It ends early if all given peers fail."""


logger = logging.getLogger(__name__)

CHECK_S = 3.0
"""While all is well. A look at the daemon's connections takes a millisecond."""
MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
"""Pause between attempts to reach missing peers; it grows. A partition heals this long after its cause is gone."""
REFRESH_S = 60.0
MAX_KNOWN_PEERS = 64
NUM_DIALS = 8
COPY_CHECK_S = 1.5
"""Time for finding a peer by its id through others. A live one answers in a few round trips."""
NUM_COPY_DIALS = 8
"""Remembered peers that are asked for a copy of this node, besides the given ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    hello: Hello
    skew_s: float  # the peer's clock minus ours


def method_prefix(network_id: str) -> str:
    """Return the prefix of all method names of a network."""
    return f"/swarm/{PROTOCOL_VERSION}/{network_id}/"


def hello_answer(network_id: str) -> UnaryAnswer:
    async def answer(_peer_id: str, _request: bytes) -> bytes:
        return _hello(network_id, time.time()).to_bytes()

    return answer


async def greet(host: Host, peer_id: str, network_id: str, *, addrs: Sequence[str] | None = None) -> Greeting:
    """Raises PeerUnreachable, PeerRefused (no Swarm node) or PeerViolation. `addrs` as in `Host.call`."""
    before = time.time()
    try:
        answer = await host.call(peer_id, HELLO, _hello(network_id, before).to_bytes(), addrs=addrs)
    except NotServed:
        raise PeerRefused(
            "it is a libp2p host, but not a Swarm node", remedy="give the address of one", peer_id=peer_id
        ) from None
    after = time.time()
    hello = Hello.from_bytes(answer)
    return Greeting(hello=hello, skew_s=hello.sent_at - (before + after) / 2 if hello.sent_at else 0.0)


async def check_member(host: Host, peer_id: str, network_id: str) -> None:
    """Greet a peer that has connected itself. Raises PeerError if it is not of this network, or does not say so."""
    greeting = await greet(host, peer_id, network_id, addrs=())
    check_hello(_hello(network_id, 0.0), greeting.hello, peer_id)


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
class NetworkEntry:
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
) -> NetworkEntry:
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
    entry = NetworkEntry(
        given=tuple(dict.fromkeys(each.peer_id for each in greetings if isinstance(each, PeerAddr))),
        remembered=tuple(each.peer_id for each in greetings if isinstance(each, Contact)),
    )
    if not entry.given and (refusals := _refusals(failures)):
        raise _refused(failures, refusals)
    if not greetings:
        if given or (remembered and not may_be_first):
            raise _nobody(failures, num_remembered=len(remembered))
        return entry
    for addr, failure in failures.items():
        logger.warning("%s: %s", addr, failure)
    _check_clock([greeting.skew_s for greeting in greetings.values()])
    return entry


def _hello(network_id: str, sent_at: float) -> Hello:
    return Hello(network_id=network_id, software_version=software_version(), sent_at=sent_at)


async def first_success(tasks: set[asyncio.Task[T]], *, timeout_s: float | None = None) -> None:
    """Wait until one task has succeeded, all have failed, or `timeout_s` is over."""
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
    """Return the failures of given peers. Remembered ones are left out: they may be gone for good."""
    return {
        attempt: task.exception()
        for task, attempt in attempts.items()
        if isinstance(attempt, PeerAddr) and task.done() and not succeeded(task)
    }


def _refusals(failures: Mapping[PeerAddr, BaseException | None]) -> list[PeerRefused]:
    return [failure for failure in failures.values() if isinstance(failure, PeerRefused)]


def _reasons(failures: Mapping[PeerAddr, BaseException | None]) -> str:
    """Return the reason of each failure, by address."""
    return "; ".join(
        f"{addr}: {failure.message if isinstance(failure, SwarmError) else failure}"
        for addr, failure in failures.items()
    )


def _refused(failures: Mapping[PeerAddr, BaseException | None], refusals: Sequence[PeerRefused]) -> ConfigError:
    remedies = dict.fromkeys(refusal.remedy for refusal in refusals)
    reasons = _reasons(failures)
    return ConfigError(f"cannot join through the given peers: {reasons}", remedy="; ".join(filter(None, remedies)))


def _nobody(failures: Mapping[PeerAddr, BaseException | None], *, num_remembered: int) -> StartError:
    if not failures:
        return StartError(
            f"none of the peers that this node remembers ({num_remembered}) could be reached",
            remedy="give --peers the address of a node that runs, as swarm-node seed prints it",
        )
    also = f"; nor any of the {num_remembered} that this node remembers" if num_remembered else ""
    return StartError(
        f"none of the given peers could be reached: {_reasons(failures)}{also}",
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


class PartitionWatch:
    def __init__(
        self,
        host: Host,
        dht: RecordDht,
        seeds: Sequence[PeerAddr],
        network_id: str,
        on_healed: Callable[[], Awaitable[None]],
    ) -> None:
        self._host = host
        self._dht = dht
        self._seeds = tuple(seeds)
        self._met: set[str] = set()  # seeds that have answered and were connected at each look since
        self._network_id = network_id
        self._on_healed = on_healed
        self._known: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def begin(self, met: Iterable[str], known: Iterable[Contact]) -> None:
        """Take in the seeds that have answered, by peer id, and peers of earlier days."""
        self._met.update(met)
        self._known.update((contact.peer_id, contact.addrs) for contact in known)

    async def run(self) -> None:
        pause_s = back_off_s = MIN_PAUSE_S
        loop = asyncio.get_running_loop()
        refresh_at = loop.time() + REFRESH_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                cut_off = await self._heal()
                if loop.time() >= refresh_at:
                    refresh_at = loop.time() + REFRESH_S
                    await asyncio.gather(*(self._dht.ping(peer_id) for peer_id in self._met))
                    await self._dht.tend()
            except PeerUnreachable:
                return  # the daemon has ended; the unary connection tells
            back_off_s = min(back_off_s * 2, MAX_PAUSE_S) if cut_off else MIN_PAUSE_S
            pause_s = back_off_s if cut_off else CHECK_S

    async def _heal(self) -> bool:
        """True while somebody is missing whom we keep trying to reach."""
        connected = await self._host.connected_peers()
        self._host.traffic.note(connected)
        for contact in self._dht.contacts():
            self._known[contact.peer_id] = contact.addrs
            self._known.move_to_end(contact.peer_id)
        while len(self._known) > MAX_KNOWN_PEERS:
            self._known.popitem(last=False)
        self._met.intersection_update(connected)
        missing = [seed for seed in self._seeds if seed.peer_id not in self._met]
        alone = not self._dht.peers()
        if not missing and not alone:
            return False
        found = await asyncio.gather(*(self._reach_seed(seed) for seed in missing))
        if alone:
            others = [peer_id for peer_id in reversed(self._known) if peer_id not in connected][:NUM_DIALS]
            asked = {*others, *connected}
            found += await asyncio.gather(*(self._dht.ping(peer_id, self._known.get(peer_id, ())) for peer_id in asked))
        if any(found):
            logger.info("found %d lost peers again", sum(found))
            await self._dht.refresh()
            await self._on_healed()
        return not all(found) or not self._dht.peers()

    async def _reach_seed(self, seed: PeerAddr) -> bool:
        try:
            await connect(self._host, seed.peer_id, [seed.addr], self._network_id)
        except PeerError as error:
            logger.debug("seed %s: %s", seed, error)
            return False
        if not await self._dht.ping(seed.peer_id):
            return False
        self._met.add(seed.peer_id)
        return True


async def start_host(options: Libp2pOptions, peer_id: str) -> Host:
    """Our host, if nobody else has our identity; the check runs beside the start, before we connect to anyone."""
    daemon_options = options.for_daemon(peer_id)
    asked: tuple[PeerAddr | Contact, ...] = (*options.seeds(peer_id), *options.remembered[:NUM_COPY_DIALS])
    if not asked:
        return await Host.start(daemon_options)
    check = asyncio.create_task(check_identity_is_free(asked, peer_id, options.network_id))
    host: Host | None = None
    try:
        host = await Host.start(daemon_options)
        await check
    except BaseException:
        check.cancel()
        await asyncio.wait((check,))
        if host is not None:
            await host.stop()
        raise
    return host


async def check_identity_is_free(addrs: Sequence[PeerAddr | Contact], peer_id: str, network_id: str) -> None:
    """Raises StartError if a running node has this identity, wherever it is.

    A throwaway anonymous host asks the network behind `addrs` for the peer id, dials it and says hello. libp2p lets a
    connection stand only if the other side proves that it holds the key, so a peer that answers is a copy: this node
    itself, which starts meanwhile, does not answer yet. None of `addrs` reached, or nothing found in time: free, as
    far as can be told. (A later sign is a record of ours that we did not write.)
    """
    host = await Host.start(DaemonOptions())
    unary = asyncio.create_task(host.unary.run())
    try:
        async with asyncio.timeout(COPY_CHECK_S):
            await host.serve(HELLO, hello_answer(network_id))  # relays carry nobody who does not answer
            reached = await _reach_any(host, addrs)
            if not reached or not await _is_there(host, reached, peer_id, network_id):
                return
    except TimeoutError:
        return
    finally:
        try:
            await host.stop()
        finally:
            await unary
    raise StartError(
        f"the identity {peer_id} is in use by another running node",
        remedy="stop that node, or give this one its own identity (another home folder)",
    )


async def _reach_any(host: Host, addrs: Sequence[PeerAddr | Contact]) -> list[str]:
    dials = {
        asyncio.create_task(
            host.control.connect(each.peer_id, [each.addr] if isinstance(each, PeerAddr) else each.addrs)
        ): each.peer_id
        for each in addrs
    }
    try:
        await first_success(set(dials))
        return [peer_id for dial, peer_id in dials.items() if succeeded(dial)]
    finally:
        for dial in dials:
            dial.cancel()
        await asyncio.wait(dials)


async def _is_there(host: Host, reached: Sequence[str], peer_id: str, network_id: str) -> bool:
    asking = RecordDht(host, method_prefix(network_id) + "dht/", RecordValidator(network_id, time.time))
    await asyncio.gather(*(asking.ping(each) for each in reached))
    async for addrs in asking.find_addrs(peer_id):
        try:
            await host.control.connect(peer_id, addrs)
            await greet(host, peer_id, network_id)
        except (*CONTROL_FAILURES, PeerError):
            continue
        return True
    return False
