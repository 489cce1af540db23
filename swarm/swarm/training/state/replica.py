"""One member's copy of the run: the committed state, its proof, and proposals for the next state.

A reduction's parts make a proposal: `apply_outer_step` on the committed state, frame by frame. Only the manifest of the
resulting state is kept, since a state takes 8 bytes a parameter. When a certificate names the proposal's outcome,
`make_state` computes the state from the parts again, with the same bits, and `adopt` commits it. Tensors that others
may be reading never change.

The parts of the last rounds are kept for late members, and the previous state if a peer had begun to fetch it.
`RunMember` owns the replica. Proposals are computed in threads, one at a time, and stored on the event loop. If the
caller is cancelled, its proposal is dropped, even though the thread goes on.

Shapes: N values of the flat parameter vector, F of the fragment that a step moves.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch
from swarm_compression import get_codec
from swarm_compression.codec import Data, magnitude
from swarm_protocol.commit_messages import Outcome, ResumeOrder
from swarm_protocol.errors import RoundError
from swarm_protocol.run_credentials import revocation_in
from swarm_protocol.training_messages import Group
from torch import Tensor

from swarm.newest_items import NewestItems
from swarm.threads import in_executor
from swarm.training.allreduce.parts import decoded_frames, part_digests
from swarm.training.round.clusters import Clusters, draw_clusters, samples_used, trainers_after
from swarm.training.round.quorum import Succession
from swarm.training.run.layout import fragment_of
from swarm.training.run.run_config import RunConfig
from swarm.training.standing.held_out_scores import HeldOutScores
from swarm.training.standing.standings import TrainerStandings, grants_in
from swarm.training.state.certificate_history import CertificateHistory, Proof, Rank
from swarm.training.state.lease import Lease, admitted, index_of, lease_of, stripes_after, trainers_of
from swarm.training.state.outer_step import apply_outer_step
from swarm.training.state.replica_state import Manifest, ReplicaState, StateHasher

NUM_PROPOSALS = 2
"""Proposals that are kept: one outcome may be resumed while another is tried."""
NUM_PARTS = 4
"""Rounds whose parts are kept, about a byte a parameter each. A member that is at most this many steps behind can catch
up by parts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """The manifest of a state that may follow the committed one, and the group and parts that lead to it."""

    manifest: Manifest
    origin: Group
    parts: tuple[Data, ...]


class Replica:
    """`proof` certifies `current`; it is None for a run's initial state, and for a state from a checkpoint without a
    valid certificate.

    `bounds` are those of the fragments that outer steps move in turn (see `Layout`); empty: each step moves all
    parameters. `num_mismatches` counts how often this member's state differed from the committed one.
    """

    def __init__(
        self, config: RunConfig, current: ReplicaState, proof: Proof | None = None, bounds: tuple[int, ...] = ()
    ) -> None:
        self.config = config
        self._bounds = bounds or (0, current.manifest.num_values)
        self.current = current
        self.digest = current.digest
        self.num_mismatches = 0
        self.proof = proof
        self.history = CertificateHistory(Succession.of(config), (proof,) if proof else ())
        self._former: tuple[bytes, ReplicaState] | None = None
        self._is_fetched = False  # whether a peer has asked for the committed state
        self._proposals = NewestItems[Outcome, Proposal](NUM_PROPOSALS)
        self._parts = NewestItems[bytes, tuple[Data, ...]](NUM_PARTS)
        self._computing = asyncio.Lock()

    @property
    def outer_step(self) -> int:
        return self.current.manifest.outer_step

    @property
    def rank(self) -> Rank:
        return self.proof.rank if self.proof else (0, self.outer_step, 0, 0, b"")

    @property
    def order(self) -> ResumeOrder | None:
        """The last resume order of the author that applies to the state, or that it follows from."""
        return self.proof.order if self.proof else None

    @property
    def roster(self) -> tuple[str, ...]:
        """The members that decide the next state: the state's, unless the author named others with a resume order."""
        return self.proof.roster if self.proof and self.proof.is_order else self.current.manifest.roster

    @property
    def standings(self) -> TrainerStandings:
        """The standings of all peers. Members that the author's resume order names have no probation."""
        state = self.current.manifest
        known = {*self.roster, *trainers_of(state.stripes)}
        left = {peer: steps for peer, steps in state.probation if peer not in self.roster}
        return TrainerStandings(
            rule=self.config.probation,
            left=left,
            known=known,
            outer_step=state.outer_step,
            entrance=self.config.entrance,
            register=state.register,
        )

    @property
    def held_out(self) -> HeldOutScores:
        """The scores of the committed state, and the peers whose contributions are measured now."""
        state = self.current.manifest
        return HeldOutScores(rule=self.config.held_out_rule, scores=state.held_out, drawn=state.drawn)

    @property
    def is_new(self) -> bool:
        """True if this replica has no outer step yet, and so no state from which certificates must follow.

        It then takes the certificate that `certificate_history.most_supported` returns, so that two first groups become
        one.
        """
        return self.outer_step == 0 and self.order is None

    @property
    def anchors(self) -> tuple[tuple[str, ...], ...]:
        """The rosters whose certificates this replica trusts: the roster of its committed state.

        If one member may go on alone, the rosters of earlier states are included, since the run may have forked from
        any of them.
        """
        rosters = (self.roster, *self.history.rosters) if self.config.min_group == 1 else (self.roster,)
        return tuple(roster for roster in rosters if roster)

    @property
    def certificate(self) -> bytes:
        """The certificate of the committed state, which is shown to peers; empty without a proof."""
        return self.proof.certificate if self.proof else b""

    def fragment(self, step: int) -> slice:
        """Return the slice of the flat vector that outer step `step` moves."""
        index = fragment_of(step, len(self._bounds) - 1)
        return slice(self._bounds[index], self._bounds[index + 1])

    def leased(self, step: int) -> tuple[str, ...]:
        """Return the trainers that have a lease for interval `step`."""
        stripes = self.current.manifest.stripes
        return stripes[index_of(step, len(stripes))].roster

    def clusters(self) -> Clusters:
        """Return the clusters of the round that follows the committed state.

        If rounds overlap, a trainer that the last round left out still has a lease for this one, but has usually left.
        So only trainers in all stripes count.
        """
        config, rosters = self.config, (frozenset(stripe.roster) for stripe in self.current.manifest.stripes)
        return draw_clusters(
            self.digest,
            self.roster,
            frozenset.intersection(*rosters),
            max_group=config.max_group,
            size=config.cluster_size,
            newcomers=frozenset(self.standings.left),
            num_seats=config.probation.num_seats(config.max_group, len(self.roster)),
            min_group=config.min_group,
        )

    def lease(self, peer: str, step: int) -> Lease:
        """Return the lease of `peer` for interval `step`: the next one or, with overlap, also the one after it."""
        return lease_of(self.current.manifest.stripes, step, peer, self.config.samples_per_interval)

    async def propose(
        self, executor: Executor, origin_digest: bytes, origin: Group, parts: tuple[Data, ...]
    ) -> Outcome:
        """Compute the state after `origin`'s contributions, reduced to `parts`; keep its manifest, and return the
        outcome.

        The caller must not change `parts` afterwards. Raises RoundError, and IntegrityError for parts that cannot be
        decoded.
        """
        base = self.current
        await self._computing.acquire()
        try:
            work = in_executor(executor, self._manifest_after, base, origin, parts)
        except BaseException:
            self._computing.release()
            raise
        # cancelling does not stop the thread: the next proposal waits until this one has ended
        work.add_done_callback(lambda _: self._computing.release())
        manifest, digests = await asyncio.shield(work)
        if base is not self.current:
            raise RoundError("another state has been committed meanwhile")
        outcome = Outcome(origin_digest=origin_digest, part_digests=digests, state_digest=manifest.digest())
        self._proposals[outcome] = Proposal(manifest=manifest, origin=origin, parts=parts)
        self.keep_parts(origin_digest, parts)
        return outcome

    def keep_parts(self, origin_digest: bytes, parts: tuple[Data, ...]) -> None:
        """Keep the encoded result of a group's reduction, audited or not: receivers compare digests."""
        self._parts[origin_digest] = parts

    async def make_state(self, executor: Executor, proposal: Proposal) -> ReplicaState:
        """Return the state that `proposal` makes of the committed state."""
        return await in_executor(executor, self._compute_state, self.current, proposal)

    async def find_or_make(self, executor: Executor, proof: Proof) -> ReplicaState | None:
        """Return the state that `proof` certifies if this member has or has proposed it, else None."""
        if proof.is_order:
            return self.current if proof.outcome.state_digest == self.digest else None
        proposal = self.proposal(proof.outcome)
        return None if proposal is None else await self.make_state(executor, proposal)

    def _manifest_after(
        self, base: ReplicaState, origin: Group, parts: tuple[Data, ...]
    ) -> tuple[Manifest, tuple[bytes, ...]]:
        """Return the manifest of the state after `base`, and the digests of `parts`. Without parts nobody has trained:
        the round only admits members. Blocks."""
        digests = part_digests(parts)
        step, standings = base.outer_step + 1, self.standings
        leased, grants = self.leased(step), standings.honoured(grants_in(origin.credentials))
        trainers = standings.without_refused(trainers_after(origin, leased, self.clusters()), grants)
        used = samples_used(origin, leased) if parts else {}
        try:
            stripes = (
                stripes_after(base.manifest.stripes, step, trainers, self.config.samples_per_interval, used)
                if parts
                else admitted(base.manifest.stripes, trainers)
            )
        except ValueError as error:
            raise RoundError(f"a group's members used samples without a lease: {error}") from error
        here = trainers_of(stripes)
        manifest = replace(
            base.manifest,
            outer_step=step if parts else base.outer_step,
            stripes=stripes,
            roster=origin.roster,
            probation=standings.after(here, used, grants=grants, demoted=origin.demoted),
            register=standings.register_after(
                here,
                used,
                num_steps=1 if parts else 0,
                grants=grants,
                demoted=origin.demoted,
                revocation=revocation_in(origin.revocation),
            ),
            held_out=self.held_out.after(here, origin),
            drawn=self.config.held_out_rule.draw(origin, digests) if parts else (),
            chunk_digests=self._chunk_digests_after(base, origin, parts) if parts else base.manifest.chunk_digests,
        )
        return manifest, digests

    def _chunk_digests_after(self, state: ReplicaState, origin: Group, parts: tuple[Data, ...]) -> tuple[bytes, ...]:
        fragment, hasher = self.fragment(state.outer_step + 1), StateHasher(state.manifest.num_values)
        hasher.add(state.theta_N[: fragment.start], state.momentum_N[: fragment.start])
        for _, theta_F, momentum_F in self._stepped_frames(state, origin, parts):
            hasher.add(theta_F, momentum_F)
        hasher.add(state.theta_N[fragment.stop :], state.momentum_N[fragment.stop :])
        return hasher.chunk_digests()

    def _compute_state(self, state: ReplicaState, proposal: Proposal) -> ReplicaState:
        """Return the state that `proposal` makes of `state`. Blocks."""
        if not proposal.parts:
            return replace(state, manifest=proposal.manifest)
        theta_N, momentum_N = torch.empty_like(state.theta_N), torch.empty_like(state.momentum_N)
        fragment = self.fragment(proposal.manifest.outer_step)
        for unchanged in (slice(0, fragment.start), slice(fragment.stop, None)):
            theta_N[unchanged], momentum_N[unchanged] = state.theta_N[unchanged], state.momentum_N[unchanged]
        for where, theta_F, momentum_F in self._stepped_frames(state, proposal.origin, proposal.parts):
            theta_N[where], momentum_N[where] = theta_F, momentum_F
        return ReplicaState(manifest=proposal.manifest, theta_N=theta_N, momentum_N=momentum_N)

    def _stepped_frames(
        self, state: ReplicaState, origin: Group, parts: tuple[Data, ...]
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each frame of the fragment in turn: its slice of the flat vector, and theta and momentum after the
        outer step. Neither the aggregate nor the new state is in memory as a whole."""
        start = self.fragment(state.outer_step + 1).start
        for frame, delta_F in decoded_frames(origin, parts, get_codec(self.config.codec)):
            where = slice(start + frame.start, start + frame.stop)
            theta_F, momentum_F = state.theta_N[where].clone(), state.momentum_N[where].clone()
            apply_outer_step(theta_F, momentum_F, delta_F, self.config.outer)
            if not all(math.isfinite(magnitude(x_F)) for x_F in (theta_F, momentum_F)):
                raise RoundError("the group's pseudo-gradient leads to a state that is not finite")
            yield where, theta_F, momentum_F

    def proposal(self, outcome: Outcome) -> Proposal | None:
        return self._proposals.get(outcome)

    def differing(self, outcome: Outcome) -> Proposal | None:
        """Return this member's proposal from the same parts if its state differs from the outcome's, else None."""
        for mine, proposal in self._proposals.items():
            same_parts = (mine.origin_digest, mine.part_digests) == (outcome.origin_digest, outcome.part_digests)
            if same_parts and mine != outcome:
                return proposal
        return None

    def parts_of(self, origin_digest: bytes) -> tuple[Data, ...]:
        """Return the encoded result of a group's reduction; empty if it is not kept."""
        return self._parts.get(origin_digest, ())

    def donate(self, digest: bytes) -> ReplicaState | None:
        """Return the state with this digest: the committed one, or the previous one if a peer had begun to fetch it.
        Else None."""
        if digest == self.digest:
            self._is_fetched = True
            return self.current
        former_digest, former = self._former or (b"", None)
        return former if digest == former_digest else None

    def damaged(self) -> ReplicaState | None:
        """Return the committed state as it is in memory, if a memory fault has changed its digest; else None.
        Blocks."""
        found = self.current.hashed_again()
        return None if found.digest == self.digest else found

    def repair(self, state: ReplicaState) -> None:
        """Replace the damaged committed state by `state`, and drop its proposals."""
        assert state.digest == self.digest
        self.current = state
        self._proposals.clear()

    def begin(self, state: ReplicaState) -> None:
        """Replace the zeros of a run from a checkpoint by `state`, and drop their proposals."""
        assert self.proof is None
        self.current, self.digest = state, state.digest
        self._proposals.clear()

    def adopt(self, state: ReplicaState, proof: Proof) -> None:
        """Make `state`, which `proof` certifies, the committed state."""
        self._former, self._is_fetched = (self.digest, self.current) if self._is_fetched else None, False
        self.current, self.digest, self.proof = state, state.digest, proof
        self.history.add((proof,))
        self._proposals.clear()
