"""The members of a run whom evidence convicts of a lie, as far as this member knows.

Evidence is checked before it counts, is passed on once to everybody who trains, is kept on the disk, and is shown to
members that form a group with the liar, to members that join, and to observers. A convicted peer is in no group of this
member and votes in none, for as long as the run's `ban_steps` say. Nothing follows from one peer's word: a peer whose
evidence proves nothing is not listened to again.

`RunMember` owns it; checks and the disk are in the executor.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from swarm_protocol.errors import IntegrityError, PeerRefused, PeerViolation, SwarmError
from swarm_protocol.proof_messages import WRONG_INTERVAL, Evidence, EvidenceRequest, WrongInterval

from swarm.network.interface import Stream
from swarm.training.run.methods import short
from swarm.training.state.ban_collector import MAX_ASKED, collect
from swarm.training.state.bans import Ban, Bans
from swarm.training.state.evidence import accused, check
from swarm.training.state.evidence_folder import EvidenceStore
from swarm.training.state.state_sync import RunContext
from swarm.training.state.wrong_interval import IntervalCase, read_case

logger = logging.getLogger(__name__)

T = TypeVar("T")

SEND_TIMEOUT_S = 10.0
"""For a megabyte of evidence over a slow line; others that get it pass it on."""
SHOW_TIMEOUT_S = 60.0
MAX_ACCUSATIONS = 16
"""Accusations of intervals whose findings are gathered: each step draws few."""
MAX_SHOWING = 4
"""Peers that are shown all evidence at one time: anyone may ask."""


class Convictions:
    """The convictions of one member of `context`. `on_new` is called with each new ban, and `on_accusation` with each
    accusation of an interval that does not convict yet; `store` outlives the process."""

    def __init__(
        self,
        context: RunContext,
        on_new: Callable[[Ban], None],
        store: EvidenceStore | None = None,
        on_accusation: Callable[[IntervalCase], None] | None = None,
    ) -> None:
        self._context = context
        self._on_new = on_new
        self._store = store
        self._on_accusation = on_accusation
        self._accusations = OrderedDict[tuple[str, int], WrongInterval]()
        self._bans = Bans(context.replica.config)
        self._ignored: set[str] = set()
        self._checking = asyncio.Lock()
        self._sending: set[asyncio.Task[None]] = set()
        self._num_showing = 0

    @property
    def bans(self) -> tuple[Ban, ...]:
        """The bans that hold in the next round, newest last."""
        return self._bans.at(self._step)

    @property
    def peers(self) -> frozenset[str]:
        """Who is banned in the next round."""
        return self._bans.peers(self._step)

    async def recall(self) -> None:
        """Take what was kept before this process started."""
        if self._store is None:
            return
        for data in await self._off_loop(self._store.read):
            try:
                await self._take(data, passes_on=False)
            except (PeerViolation, IntegrityError) as error:
                logger.warning("evidence that was kept proves nothing: %s", error)

    async def ask(self, peers: Iterable[str]) -> None:
        """Take the evidence that some of `peers`, members of the run, hold: what happened while this member was
        away."""
        asked = 0
        for peer in peers:
            if asked == MAX_ASKED or peer == self._context.network.peer_id:
                continue
            asked += 1
            try:
                async with aclosing(collect(self._context, peer, self.peers)) as shown:
                    async for data in shown:
                        await self.take(data, peer, passes_on=False)
            except SwarmError as error:
                logger.info("%s does not say who is banned: %s", short(peer), error)

    async def take(self, data: bytes, sender: str, *, passes_on: bool = True) -> None:
        """Take evidence from `sender`, a peer or this member. Raises PeerViolation or IntegrityError if it proves
        nothing."""
        if sender in self._ignored:
            raise PeerViolation("its evidence has proved nothing before", peer_id=sender)
        try:
            await self._take(data, passes_on=passes_on, sender=sender)
        except (PeerViolation, IntegrityError):
            if sender != self._context.network.peer_id:
                self._ignored.add(sender)
            raise

    async def lapse(self) -> frozenset[str]:
        """Forget the bans that are over, and return whose they were."""
        lapsed = self._bans.lapse(self._step)
        if self._store is not None:
            for peer in lapsed:
                await self._off_loop(self._store.forget, peer)
        return lapsed

    def show(self, peers: Iterable[str]) -> None:
        """Send all evidence to `peers`."""
        for ban in self.bans:
            self._send(ban.data, peers)

    async def answer(self, stream: Stream) -> None:
        """Show the peer that asks the evidence that it does not know. Raises PeerRefused if many ask at once."""
        request = EvidenceRequest.from_bytes(await stream.receive())
        if request.run != self._context.run:
            raise PeerViolation("this is about another run")
        if self._num_showing >= MAX_SHOWING:
            raise PeerRefused("it shows its evidence to others now")
        self._num_showing += 1
        try:
            async with asyncio.timeout(SHOW_TIMEOUT_S):
                for ban in self._bans.unknown_to(request.known, self._step):
                    await stream.send(ban.data)
        finally:
            self._num_showing -= 1

    def close(self) -> None:
        for task in self._sending:
            task.cancel()

    @property
    def _step(self) -> int:
        return self._context.replica.outer_step + 1

    async def _take(self, data: bytes, *, passes_on: bool, sender: str = "") -> None:
        context = self._context
        async with self._checking:  # one at a time, of all senders
            evidence = Evidence.from_bytes(data)
            peer, step = accused(evidence, context.signatures)
            is_news = self._bans.is_news(peer, step)
            if evidence.kind == WRONG_INTERVAL:
                case = await self._case(evidence, is_news=is_news)
                evidence = case.evidence.evidence()
                data = evidence.to_bytes()
                if is_news and not case.is_enough(context.network.peer_id):
                    self._accuse(case, data, sender)
                    return
            if not is_news:
                return
            verdict = await self._off_loop(check, evidence, context.signatures, context.replica.config)
            ban = self._bans.add(verdict, data)
            if not ban.holds_at(self._step):
                self._bans.lapse(self._step)
                return
            if self._store is not None:
                await self._off_loop(self._store.keep, verdict.peer_id, data)
        logger.warning("%s is convicted: %s", short(verdict.peer_id), verdict.reason)
        if passes_on:
            self._send(data, {*context.replica.roster} - {sender, verdict.peer_id})
        self._on_new(ban)

    def _accuse(self, case: IntervalCase, data: bytes, sender: str) -> None:
        """Pass an accusation on that is not enough yet: this member's own to all others, another's to this one."""
        if sender == self._context.network.peer_id:
            self._send(data, {*self._context.replica.roster} - {case.member.peer_id})
        elif self._on_accusation is not None:
            self._on_accusation(case)

    async def _case(self, evidence: Evidence, *, is_news: bool) -> IntervalCase:
        """Return the accusation with all findings that came so far, which others are shown from now on. Raises
        PeerViolation or IntegrityError."""
        context = self._context
        case = await self._off_loop(read_case, evidence.body, context.signatures, context.replica.config)
        key = (case.member.peer_id, case.step)
        known = self._accusations.get(key)
        if known is not None:
            merged = replace(known, findings=tuple(dict.fromkeys((*known.findings, *case.evidence.findings))))
            try:
                body = merged.to_bytes()
                case = await self._off_loop(read_case, body, context.signatures, context.replica.config)
            except (PeerViolation, IntegrityError):
                return case  # somebody has signed two findings
        self._accusations[key] = case.evidence
        self._accusations.move_to_end(key)
        while len(self._accusations) > MAX_ACCUSATIONS:
            self._accusations.popitem(last=False)
        if not is_news and known is not None and len(case.evidence.findings) > len(known.findings):
            await self._show_instead(key, case.evidence.evidence().to_bytes())
        return case

    async def _show_instead(self, key: tuple[str, int], data: bytes) -> None:
        """Show others this evidence, which has more findings, in place of the earlier one."""
        peer, step = key
        ban = next((each for each in self.bans if each.verdict.peer_id == peer), None)
        if ban is not None and (ban.verdict.step, ban.verdict.kind) == (step, WRONG_INTERVAL):
            self._bans.add(ban.verdict, data)
            if self._store is not None:
                await self._off_loop(self._store.keep, peer, data)

    async def _off_loop(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._context.executor, function, *arguments)

    def _send(self, data: bytes, peers: Iterable[str]) -> None:
        banned = self.peers
        for peer in peers:
            if peer != self._context.network.peer_id and peer not in banned:
                task = asyncio.get_running_loop().create_task(self._send_to(peer, data))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def _send_to(self, peer: str, data: bytes) -> None:
        network, methods = self._context.network, self._context.methods
        try:
            await network.call(peer, methods.evidence, data, timeout_s=SEND_TIMEOUT_S)
        except SwarmError as error:
            logger.info("%s did not take evidence: %s", short(peer), error)
