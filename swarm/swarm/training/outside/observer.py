"""Follows a run from outside: the steps that its members commit, with proofs, what members report, and why the run
waits for more of them.

An observer does not train and is not a member. It accepts what a joiner would accept: first, of the certificates that
follow from the author's newest endorsement, the one that most of its voters show; later, certificates that follow from
that one. One task owns it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from swarm_protocol.commit_messages import Certificate, Endorsement
from swarm_protocol.errors import IntegrityError, PeerTimeout, PeerViolation, SwarmError, first_few
from swarm_protocol.member_messages import StandingRequest
from swarm_protocol.proof_messages import Evidence
from swarm_protocol.records import TrainerRecord

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.newest_items import NewestItems
from swarm.training.evidence.bans import MAX_IGNORED, Ban, Bans, UnprovenToOutsiders, Verdict
from swarm.training.round.quorum import Succession, presence
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.ancestry import (
    Anchor,
    ask_until,
    best_of,
    seek_endorsement,
    those_endorsed,
    whom_a_newcomer_asks,
)
from swarm.training.state.certificate_history import MAX_HISTORY_LINKS, CertificateHistory, Proof, whom_to_ask
from swarm.training.state.proof_reader import CALL_TIMEOUT_S, HISTORY_TIMEOUT_S, ProofReader
from swarm.training.trainer_events import OtherHistory

logger = logging.getLogger(__name__)

MAX_BANS_ASKED = 2
"""Members that are asked for evidence at each look, drawn at random."""
MAX_ASKED_AT_A_LOOK = 8
"""Peers asked at each look after the first. Strangers that claim later steps displace no members of the last state."""
MAX_NAMED = 8
"""Missing members that the text of a shortage names; it counts the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """An outer step that the run has taken. `num_trainers` counts the `group` and its followers; `loss` is their mean
    training loss, weighted by tokens. `on_probation` are the group's members on probation; `num_on_probation` counts
    followers too."""

    outer_step: int
    loss: float
    digest: str
    group: tuple[str, ...]
    num_trainers: int
    num_tokens: int
    on_probation: tuple[str, ...] = ()
    num_on_probation: int = 0


class Observer:
    """Observes one `run`. `look` returns what is new."""

    def __init__(self, network: Network, membership: Membership, run: SignedRun) -> None:
        self._membership = membership
        self._reader = ProofReader.of_outsider(network, run)
        self.run = run
        self._succession = Succession.of(run.config)
        self._bans = Bans(run.config)
        self._ignored = NewestItems[str, None](MAX_IGNORED)
        self._chance = random.Random(network.peer_id)
        self._last: Proof | None = None
        self._confirmed: Endorsement | None = None
        self._rosters: list[tuple[str, ...]] = []
        self._history = CertificateHistory(self._succession)

    @property
    def outer_step(self) -> int:
        """The last outer step that was seen; 0 before the first."""
        return self._last.outer_step if self._last else 0

    @property
    def endorsement(self) -> Endorsement | None:
        """The newest endorsement of the run's author that was seen."""
        return self._reader.endorsements.newest

    @property
    def roster(self) -> tuple[str, ...]:
        """The members that decide the next step; empty before the first."""
        return tuple(self._last.roster) if self._last else ()

    @property
    def digests(self) -> frozenset[str]:
        """The digests of the states that were seen of the last outer step. A round that only admits members makes
        another one."""
        return frozenset(link.outcome.state_digest.hex() for link in self._history.since(self.outer_step))

    async def members(self) -> Mapping[str, TrainerRecord]:
        """Return the records of the peers that train the run now, by peer id. Raises PeerTimeout."""
        records, admits = await self._membership.trainers(self._reader.run), self._reader.signatures.admits
        return {peer: each for peer, each in records.items() if each.state != "leaving" and admits(peer)}

    async def look(self, members: Mapping[str, TrainerRecord]) -> list[CommittedStep]:
        """Return the steps since the last look that `members` still have proofs of, in order.

        The first look returns only the newest step. Raises SwarmError if no peer gives a valid answer.
        """
        admits = self._reader.signatures.admits
        claims = {peer: each.outer_step for peer, each in members.items() if each.digest and admits(peer)}
        await seek_endorsement(self._reader, members)
        if self._last is not None and not await self._is_endorsed(self._last, claims):
            self._last = None
        if self._last is None or (self._last.outer_step == 0 and self._last.order is None):
            me = self._reader.network.peer_id
            return await self._first_look(whom_a_newcomer_asks(claims, self.endorsement, me, self._chance))
        return await self._next_look(whom_to_ask(claims, self._last.roster, self._chance)[:MAX_ASKED_AT_A_LOOK])

    async def _next_look(self, peers: Sequence[str]) -> list[CommittedStep]:
        """Return the steps that the first of `peers` with new ones shows. Raises SwarmError if all `peers` fail.

        A peer that shows nothing new does not hide what others show, however late they are. Strangers are not waited
        for once the last step's members have all ended, and as many as a next step needs have answered.
        """
        assert self._last is not None
        roster, steps = self._last.roster, list[CommittedStep]()
        members, answered, failures = {peer for peer in peers if peer in roster}, set[str](), list[SwarmError]()

        async def ask(peer: str) -> bool:
            try:
                links = await self._links(peer)
            except SwarmError as error:
                failures.append(error)
            else:
                answered.add(peer)
                if not steps:  # another peer may have ended at the same moment
                    steps.extend(self._take(links))
            members.discard(peer)
            return bool(steps) or (not members and self._succession.is_enough(roster, answered))

        await ask_until(peers, ask)
        if failures and not answered:
            raise failures[-1]
        return steps

    def _take(self, links: Sequence[Proof]) -> list[CommittedStep]:
        """Remember those of `links` that come after the last seen state, and return their steps."""
        assert self._last is not None
        last = self._last
        links = [link for link in links if link.rank > last.rank]
        before = last.outer_step
        if links and links[0].sequence > last.sequence:
            before = links[0].outer_step - 1  # the run goes on from an earlier state by its author's order
        self._remember(links)
        return [_step(link) for link in links if link.outer_step > before and link.origin.num_tokens]

    async def _first_look(self, peers: Sequence[str]) -> list[CommittedStep]:
        """Return the newest step (see `best_of`). Raises SwarmError if all `peers` fail."""
        shown, failures = await self._reader.newest_of(peers, self._request())
        newest = best_of(await those_endorsed(self._reader, shown), self.endorsement)
        if newest is None:
            if failures and len(failures) == len(peers):
                raise failures[-1]
            return []
        self._history = CertificateHistory(self._succession)
        self._remember([newest])
        return [_step(newest)] if newest.origin.num_tokens else []

    async def _is_endorsed(self, seen: Proof, claims: Mapping[str, int]) -> bool:
        """Return whether the state `seen` may belong to the history that the run's author endorses: it comes before the
        newest endorsement, or one of these peers shows how it follows. Each endorsement is checked until one does."""
        endorsement = self.endorsement
        if endorsement is None or endorsement == self._confirmed or seen.rank[:3] < Anchor.at(endorsement).rank[:3]:
            return True
        asked = whom_to_ask(claims, seen.roster, self._chance)[:MAX_ASKED_AT_A_LOOK]
        if not await those_endorsed(self._reader, dict.fromkeys(asked, seen)):
            return False
        self._confirmed = endorsement
        return True

    def _remember(self, links: list[Proof]) -> None:
        self._history.add(links)
        for link in links:
            self._last = link
            # as in `Replica.anchors`: with a min_group of 1, members of a run can diverge
            kept = self._rosters if self._succession.min_group == 1 else []
            self._rosters = [*kept, link.roster][-MAX_HISTORY_LINKS:]

    async def _links(self, peer: str) -> list[Proof]:
        """Return the links from the last seen state to the state of `peer`. Raises SwarmError."""
        assert self._last is not None
        start, request = self._last, self._request()
        newest = await self._reader.newest(peer, request)
        if newest is None or newest.rank <= start.rank:
            return []
        if newest.order is not None and newest.sequence > start.sequence:
            start = await self._reader.check(Certificate(order=newest.origin.order).to_bytes())
            request = replace(request, step=start.outer_step + 1)
        try:
            async with asyncio.timeout(HISTORY_TIMEOUT_S), aclosing(self._reader.history(peer, request)) as history:
                links = [link async for link in history]
        except TimeoutError:
            raise PeerTimeout("its history does not come", peer_id=peer) from None
        return self._following(start, [*links, newest], peer)

    async def look_for_other_history(self, members: Mapping[str, TrainerRecord]) -> OtherHistory | None:
        """Ask one of `members` with a state that was not seen here, and return those that were found to show another
        history of the run than the one seen here; None if there are none."""
        if (last := self._last) is None:
            return None
        reader, seen = self._reader, {link.outcome.state_digest for link in self._history.since(0)}
        other = sorted(peer for peer, each in members.items() if each.digest and each.digest not in seen)
        for peer in reader.apart.keys() - set(other):
            del reader.apart[peer]
        for peer in self._chance.sample(other, min(1, len(other))):
            try:
                async with asyncio.timeout(2 * CALL_TIMEOUT_S):
                    newest = await reader.newest(peer, self._request())
                    if newest is not None and newest.rank > last.rank:
                        async with aclosing(reader.history(peer, self._request())) as history:
                            newest = await anext(history, newest)
            except (SwarmError, TimeoutError) as error:
                logger.info("%s does not show which history it follows: %s", peer, error)
            else:
                if newest is not None:
                    reader.note_apart(peer, newest)
        return reader.other_history(self._history)

    async def look_for_bans(self, members: Mapping[str, TrainerRecord]) -> tuple[Ban, ...]:
        """Ask some of `members` for new evidence, and return the run's bans. The observer checks all evidence itself. A
        peer that shows invalid evidence is not asked again."""
        step = self.outer_step + 1
        self._bans.lapse(step)
        roster, admits = self.roster, self._reader.signatures.admits
        # strangers can make evidence against any number of their own keys
        asked = whom_to_ask(
            (peer for peer in members if admits(peer) and (not roster or peer in roster)), roster, self._chance
        )
        for peer in [each for each in asked if each not in self._ignored][:MAX_BANS_ASKED]:
            try:
                async with aclosing(self._reader.evidence(peer, self._bans.peers(step))) as shown:
                    async for data in shown:
                        await self._take_evidence(data)
            except (PeerViolation, IntegrityError) as error:
                logger.warning("evidence from %s is invalid: %s", peer, error)
                self._ignored[peer] = None
            except SwarmError as error:
                logger.info("%s does not say who is banned: %s", peer, error)
        return self._bans.at(step)

    async def _take_evidence(self, data: bytes) -> None:
        verdict = await asyncio.to_thread(self._verdict, data)
        if verdict is not None:
            self._bans.add(verdict, data)

    def _verdict(self, data: bytes) -> Verdict | None:
        """Return what the evidence in `data` proves; None if it changes no ban, is about a step or peer that was not
        seen in this run, or convicts only for members that were there. Blocks, the first time for seconds."""
        from swarm.training.evidence.evidence import KINDS, accused, check  # noqa: PLC0415 - torch, which takes seconds

        signatures, evidence = self._reader.signatures, Evidence.from_bytes(data)
        if evidence.kind not in KINDS:  # of a newer version: it may be right
            return None
        peer, step = accused(evidence, signatures)
        known = (*self.roster, *(self._last.origin.peer_ids if self._last else ()))
        is_of_run = step <= self.outer_step + 1 and self._bans.has_room_for(peer, len(data), known)
        if not (is_of_run and self._bans.is_news(peer, step)):
            return None
        try:
            return check(evidence, signatures, self.run.config)
        except UnprovenToOutsiders as error:
            logger.info("evidence against %s is not taken: %s", peer, error)
            return None

    def _request(self) -> StandingRequest:
        return StandingRequest(run=self._reader.run, step=self.outer_step + 1, watches=True)

    def _following(self, start: Proof, links: list[Proof], peer: str) -> list[Proof]:
        """Return the `links` that follow, each from the one before, from `start`: the state seen last, or a later
        resume order. Raises PeerViolation if the newest link does not follow.
        """
        is_later = start is not self._last
        rank, rosters = start.rank, [start.roster] if is_later else self._rosters
        chain = [start] if is_later else []
        for link in sorted(links, key=lambda each: each.rank):
            if (
                link.rank > rank
                and link.order == start.order
                and self._succession.is_enough_of_any(rosters, link.voters)
            ):
                rank, rosters = link.rank, [link.roster]
                chain.append(link)
        if rank < max(link.rank for link in links):
            raise PeerViolation("its state does not follow from the one seen before", peer_id=peer)
        return chain


def _step(proof: Proof) -> CommittedStep:
    origin = proof.origin
    return CommittedStep(
        outer_step=origin.step,
        loss=proof.mean_loss,
        digest=proof.outcome.state_digest.hex(),
        group=origin.peer_ids,
        num_trainers=origin.num_trainers,
        num_tokens=origin.num_tokens,
        on_probation=origin.on_probation,
        num_on_probation=origin.num_on_probation,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Too few members are ready for a step, by the records that have not expired.

    A step needs `num_needed` members, of which `num_ready` are there. Of the last step's members it needs
    `num_roster_needed`; `num_roster_ready` are there, and `missing` are not. Newcomers cannot replace these: if they
    are gone for good, only an order of the run's author helps (see `outside.resume`). A step also needs
    `num_proven_needed` proven members, since newcomers on probation have few seats beside them.
    """

    num_ready: int
    num_needed: int
    num_roster_ready: int
    num_roster_needed: int
    missing: tuple[str, ...]
    num_joining: int
    num_proven_needed: int = 0

    @property
    def is_of_roster(self) -> bool:
        """True if too few of the last step's members are there, so that newcomers alone do not help."""
        return self.num_roster_ready < self.num_roster_needed

    @property
    def is_of_seats(self) -> bool:
        """True if newcomers do not help because they have too few seats."""
        return not self.is_of_roster and self.num_roster_ready < self.num_proven_needed

    def words(self, name_of: Callable[[str], str]) -> str:
        """Return in words how many of the needed members are there, and who is missing; `name_of` names a peer."""
        counts = self.num_ready, self.num_needed
        if self.is_of_roster:
            counts = self.num_roster_ready, self.num_roster_needed
        text = presence(*counts, of_roster=self.is_of_roster)
        if self.is_of_seats:
            text = f"newcomers on probation have too few seats beside proven members: {self.num_roster_ready} of the "
            text += f"{self.num_proven_needed} that a step needs {'is' if self.num_roster_ready == 1 else 'are'} there"
        if self.num_joining:
            text += f", {self.num_joining} joining"
        if self.is_of_roster or (self.is_of_seats and self.missing):
            text += f"; missing: {first_few(self.missing, MAX_NAMED, name_of)}"
        return text

    @property
    def remedy(self) -> str:
        """A remedy if the missing members never come back; empty if joining members will do."""
        if self.is_of_roster:
            return (
                "if they are gone for good, the run's author can let the others go on: "
                "swarm-node run resume FILE --peers ADDR"
            )
        if self.is_of_seats:
            return "the run's author can name newcomers: swarm-node run resume FILE --peers ADDR --members LIST"
        return "" if self.num_joining else "it goes on once another node joins: swarm-node join --run FILE --peers ADDR"


def shortage_of(
    config: RunConfig, outer_step: int, roster: Sequence[str], members: Mapping[str, TrainerRecord]
) -> Shortage | None:
    """Return why the run of `members` cannot take the step after `outer_step`; None if enough are ready.

    `roster` are the members of the last step, empty before the first; all others count as newcomers. A member that has
    finished counts as ready.
    """
    succession = Succession.of(config)
    num_proven_needed = 0
    if roster:
        num_proven_needed = config.probation.num_proven_needed(config.min_group, config.max_group, outer_step)
    ready = {peer for peer, record in members.items() if record.state in {"training", "finished"}}
    present = ready & set(roster)
    num_roster_needed = succession.num_enough(roster, present)
    if len(ready) >= succession.min_group and len(present) >= max(num_roster_needed, num_proven_needed):
        return None
    return Shortage(
        num_ready=len(ready),
        num_needed=succession.min_group,
        num_roster_ready=len(present),
        num_roster_needed=num_roster_needed,
        missing=tuple(sorted(set(roster) - ready)),
        num_joining=sum(record.state == "joining" for record in members.values()),
        num_proven_needed=num_proven_needed,
    )
