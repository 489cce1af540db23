"""Follows a run from outside: what its members have committed, with the proofs, and what they say of themselves.

An observer trains nothing and is nobody's member. It believes what a joiner would: the first certificate that it is
shown, and then those that follow from it. Owned by one task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from swarm_protocol.errors import PeerTimeout, PeerViolation, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.records import TrainerRecord
from swarm_protocol.training_messages import Standing, StandingRequest

from swarm.network.interface import EndOfStream, Network
from swarm.network.membership import Membership
from swarm.training.certificate import Notary, Proof
from swarm.training.history import MAX_HISTORY_BYTES, MAX_LINKS
from swarm.training.methods import Methods
from swarm.training.signed_run import SignedRun
from swarm.training.vote import continues

CALL_TIMEOUT_S = 5.0
HISTORY_TIMEOUT_S = 60.0
MAX_ASKED = 4
"""Of the members that say they are furthest: one of them answers, and asking costs them little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """An outer step that the run has taken. `loss` is the group's mean training loss, weighted by tokens."""

    outer_step: int
    loss: float
    digest: str
    group: tuple[str, ...]
    num_tokens: int


class Observer:
    """Of one `run`. `look` says what is new."""

    def __init__(self, network: Network, membership: Membership, run: SignedRun) -> None:
        self._network = network
        self._membership = membership
        self._methods = Methods(run.run_id)
        self._run_id = run.run_id
        self._min_group = run.config.min_group
        self._notary = Notary(
            identity=Identity.generate(),
            network_id=network.network_id,
            run=run.run_id,
            min_group=run.config.min_group,
            last_step=run.config.outer_steps,
        )
        self._last: Proof | None = None
        self._rosters: list[tuple[str, ...]] = [()]

    @property
    def outer_step(self) -> int:
        """The last one that was seen; 0 before the first."""
        return self._last.outer_step if self._last else 0

    async def members(self) -> Mapping[str, TrainerRecord]:
        """Who trains the run now, by peer id, as they say themselves. Raises PeerTimeout."""
        records = await self._membership.trainers(self._run_id)
        return {peer: each for peer, each in records.items() if each.state != "leaving"}

    async def look(self, members: Mapping[str, TrainerRecord]) -> list[CommittedStep]:
        """The steps since the last look that `members` can prove, in order: all that they still have proofs of.

        Of the steps before the first look only the last one. Raises SwarmError if nobody answers as members do.
        """
        claims = {peer: each.outer_step for peer, each in members.items() if each.digest}
        failure: SwarmError | None = None
        has_answer = False
        for peer in sorted(claims, key=lambda peer: (-claims[peer], peer))[:MAX_ASKED]:
            try:
                links = await self._links(peer)
            except SwarmError as error:
                failure = error
                continue
            has_answer = True
            before = self.outer_step
            self._remember(links)
            # whoever says that it is further, and shows nothing new, does not hide what others show
            if steps := [_step(link) for link in links if link.outer_step > before and link.origin.num_tokens]:
                return steps
        if failure is not None and not has_answer:
            raise failure
        return []

    def _remember(self, links: list[Proof]) -> None:
        for link in links:
            self._last = link
            # as replicas do (see `replica`): two first groups can become one, and a run of single members part
            kept = self._rosters if self._min_group == 1 else [()] if link.outer_step == 0 else []
            self._rosters = [*kept, link.roster][-MAX_LINKS:]

    async def _links(self, peer: str) -> list[Proof]:
        """From the last seen state to where `peer` is. Raises SwarmError."""
        request = StandingRequest(run=self._run_id, step=self.outer_step + 1, watches=True)
        data = await self._network.call(peer, self._methods.standing, request.to_bytes(), timeout_s=CALL_TIMEOUT_S)
        certificate = Standing.from_bytes(data).certificate
        newest = await self._checked(certificate) if certificate else None
        if newest is None or (self._last is not None and newest.rank <= self._last.rank):
            return []
        if self._last is None:
            return [newest]
        try:
            async with asyncio.timeout(HISTORY_TIMEOUT_S):
                links = [*await self._history(peer, request), newest]
        except TimeoutError:
            raise PeerTimeout("its history does not come", peer_id=peer) from None
        return self._following(links, peer)

    async def _history(self, peer: str, request: StandingRequest) -> list[Proof]:
        links, num_bytes = list[Proof](), 0
        async with self._network.stream(peer, self._methods.history, timeout_s=CALL_TIMEOUT_S) as stream:
            await stream.send(request.to_bytes())
            await stream.finish()
            while True:
                try:
                    data = await stream.receive()
                except EndOfStream:
                    return links
                num_bytes += len(data)
                if num_bytes > MAX_HISTORY_BYTES or len(links) > MAX_LINKS:
                    raise PeerViolation("its history is longer than any", peer_id=peer)
                links.append(await self._checked(data))

    def _following(self, links: list[Proof], peer: str) -> list[Proof]:
        """Those of `links` that follow, one from the other, from what was seen last. Raises PeerViolation."""
        assert self._last is not None
        rank, rosters, chain = self._last.rank, self._rosters, list[Proof]()
        for link in sorted(links, key=lambda each: each.rank):
            if link.rank > rank and any(continues(roster, link.voters, self._min_group) for roster in rosters):
                rank, rosters = link.rank, [link.roster]
                chain.append(link)
        if rank < max(link.rank for link in links):
            raise PeerViolation("its state does not follow from the one seen before", peer_id=peer)
        return chain

    async def _checked(self, certificate: bytes) -> Proof:
        return await asyncio.to_thread(self._notary.check_certificate, certificate, self._network.now())


def _step(proof: Proof) -> CommittedStep:
    origin = proof.origin
    return CommittedStep(
        outer_step=origin.step,
        loss=sum(member.loss * member.num_tokens for member in origin.members) / origin.num_tokens,
        digest=proof.outcome.state_digest.hex(),
        group=origin.peer_ids,
        num_tokens=origin.num_tokens,
    )
