"""The outer step: Nesterov momentum on the group's mean pseudo-gradient, or plain averaging, bit-identical everywhere.

Leaves to others: how the mean was agreed on. The tensors belong to the caller's ReplicaState.
Shapes: N values of the flat parameter vector.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch
from swarm_compression import get_codec
from swarm_compression.codec import Data, magnitude
from swarm_protocol.errors import RoundError
from swarm_protocol.training_messages import Group, Outcome, ResumeOrder, Standing
from torch import Tensor

from swarm.training.allreduce.parts import decoded_frames
from swarm.training.inner.lease import Lease, admitted, committed, index_of, lease_of
from swarm.training.round.certificate import CertificateHistory, Proof, Rank
from swarm.training.run.run_config import OuterConfig, RunConfig
from swarm.training.state.layout import fragment_of
from swarm.training.state.replica_state import Manifest, ReplicaState

_BLOCK_VALUES = 1 << 16  # the temporary fits a core's cache, whatever the size of the model


def apply_outer_step(theta_N: Tensor, momentum_N: Tensor, delta_N: Tensor, config: OuterConfig) -> None:
    """m <- mu m + delta, then theta <- theta - eta (delta + mu m), both in place, all fp32 on the CPU.

    "average" is theta <- theta - delta, the members' mean weighted by tokens (local SGD; FedAvg, McMahan et al. 2017,
    arXiv 1602.05629, algorithm 1), and leaves the momentum as it is.

    `delta_N` is the mean of theta_start - theta_local. DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1)
    with the Nesterov form of torch.optim.SGD. Replicas that put in equal bits get equal bits out, on any machine and
    with any number of threads: each product and each sum is rounded on its own. (Given an `alpha`, torch fuses them in
    some lanes and not in others.) Raises RoundError, with both tensors untouched, if `delta_N` is not finite.
    """
    for x_N in (theta_N, momentum_N, delta_N):
        if x_N.dtype != torch.float32 or x_N.device.type != "cpu" or x_N.shape != (theta_N.numel(),):
            raise ValueError("the outer step needs three flat fp32 CPU tensors of one size")
    blocks = [torch.split(x_N, _BLOCK_VALUES) for x_N in (theta_N, momentum_N, delta_N)]
    if not all(bool(torch.isfinite(delta_C).all()) for delta_C in blocks[2]):
        raise RoundError("the group's pseudo-gradient is not finite", remedy="the round is tried again")
    if config.optimizer == "average":
        theta_N.sub_(delta_N)
        return
    for theta_C, momentum_C, delta_C in zip(*blocks, strict=True):
        momentum_C.mul_(config.momentum).add_(delta_C)
        step_C = (momentum_C * config.momentum).add_(delta_C).mul_(config.learning_rate)
        theta_C.sub_(step_C)


NUM_PROPOSALS = 2
"""Proposals kept: one outcome may be resumed while another is tried."""
NUM_PARTS = 4
"""Part sets kept, about a byte a parameter each: so far behind a member can be and still follow by parts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A state and its manifest."""

    state: ReplicaState
    manifest: Manifest

    @classmethod
    def of(cls, state: ReplicaState) -> Held:
        """Hashes the state: blocks."""
        return cls(state=state, manifest=state.manifest())

    @property
    def digest(self) -> bytes:
        return self.manifest.digest()


class Replica:
    """`proof` is what committed `current`; None for a run's initial state, and for one from a checkpoint.

    `bounds` are those of the fragments that outer steps move in turn (see `Layout`); none: each moves everything.
    `num_mismatches` counts how often this member's state was found to differ from what was committed.
    """

    def __init__(
        self, config: RunConfig, current: Held, proof: Proof | None = None, bounds: tuple[int, ...] = ()
    ) -> None:
        self.config = config
        self._bounds = bounds or (0, current.manifest.num_values)
        self.current = current
        self.digest = current.digest
        self.num_mismatches = 0
        self.proof = proof
        self.history = CertificateHistory(config.succession, (proof,) if proof else ())
        self._former: tuple[bytes, Held] | None = None
        self._is_fetched = False  # a peer has asked for the committed state
        self._proposals: dict[Outcome, Held] = {}
        self._parts: dict[bytes, tuple[Data, ...]] = {}
        self._computing = asyncio.Lock()

    @property
    def outer_step(self) -> int:
        return self.current.state.outer_step

    @property
    def rank(self) -> Rank:
        return self.proof.rank if self.proof else (0, self.outer_step, 0, 0, b"")

    @property
    def order(self) -> ResumeOrder | None:
        """The author's last resume order that the state follows from, or with which it goes on."""
        return self.proof.order if self.proof else None

    @property
    def roster(self) -> tuple[str, ...]:
        """The members on whom what follows depends: the state's, unless the author named others with a resume order."""
        return self.proof.roster if self.proof and self.proof.is_order else self.current.state.roster

    @property
    def is_new(self) -> bool:
        """Whether this replica has no outer step yet, and so nothing that others' certificates would follow from: see
        `claims`. Two first groups become one in this way."""
        return self.outer_step == 0 and self.order is None

    @property
    def anchors(self) -> tuple[tuple[str, ...], ...]:
        """The rosters that this replica trusts: of the state it has committed.

        Where a single member may go on alone, also those of former states, since the run can have parted from any of
        them.
        """
        rosters = (self.roster, *self.history.rosters) if self.config.min_group == 1 else (self.roster,)
        return tuple(roster for roster in rosters if roster)

    def standing(self) -> Standing:
        certificate = self.proof.certificate if self.proof else b""
        return Standing(outer_step=self.outer_step, state_digest=self.digest, certificate=certificate)

    def fragment(self, step: int) -> slice:
        """What of the flat vector outer step `step` moves."""
        index = fragment_of(step, len(self._bounds) - 1)
        return slice(self._bounds[index], self._bounds[index + 1])

    def leased(self, step: int) -> tuple[str, ...]:
        """Who has a lease for interval `step`."""
        lanes = self.current.state.lanes
        return lanes[index_of(step, len(lanes))].roster

    def lease(self, peer: str, step: int) -> Lease:
        """What `peer` may use in interval `step`, which is the next one, or with overlap also the one after it."""
        return lease_of(self.current.state.lanes, step, peer, self.config.samples_per_interval)

    async def propose(
        self, executor: Executor, origin_digest: bytes, origin: Group, parts: tuple[Data, ...]
    ) -> Outcome:
        """What `origin`'s contributions, reduced to `parts`, make of the committed state. `parts` are not changed any
        more. Raises RoundError, and IntegrityError for parts that cannot be decoded."""
        base = self.current
        await self._computing.acquire()
        try:
            work = asyncio.get_running_loop().run_in_executor(executor, self._following, base, origin, parts)
        except BaseException:
            self._computing.release()
            raise
        # cancelling stops no thread: the next one waits until this one has really ended
        work.add_done_callback(lambda _: self._computing.release())
        held, digests = await asyncio.shield(work)
        if base is not self.current:
            raise RoundError("another state has been committed meanwhile")
        outcome = Outcome(origin_digest=origin_digest, part_digests=digests, state_digest=held.digest)
        self._proposals[outcome] = held
        self._parts[origin_digest] = parts
        while len(self._proposals) > NUM_PROPOSALS:
            del self._proposals[next(iter(self._proposals))]
        while len(self._parts) > NUM_PARTS:
            del self._parts[next(iter(self._parts))]
        return outcome

    def _following(self, base: Held, origin: Group, parts: tuple[Data, ...]) -> tuple[Held, tuple[bytes, ...]]:
        """The state after `base`, and the digests of `parts`. Blocks."""
        digests = tuple(hashlib.sha256(part).digest() for part in parts)
        if parts:
            return Held.of(self._stepped(base.state, origin, parts)), digests
        # nobody has trained: the members are admitted, and nothing else changes
        lanes = admitted(base.state.lanes, origin.roster)
        following = replace(base.state, roster=origin.roster, lanes=lanes)
        return Held(state=following, manifest=replace(base.manifest, roster=origin.roster, lanes=lanes)), digests

    def _stepped(self, state: ReplicaState, origin: Group, parts: tuple[Data, ...]) -> ReplicaState:
        """Decodes frame by frame: the mean is nowhere as a whole."""
        copy, step = state.copy(), state.outer_step + 1
        fragment = self.fragment(step)
        theta_F, momentum_F = copy.theta_N[fragment], copy.momentum_N[fragment]
        for frame, delta_F in decoded_frames(origin, parts, get_codec(self.config.codec)):
            apply_outer_step(theta_F[frame], momentum_F[frame], delta_F, self.config.outer)
            if not all(math.isfinite(magnitude(x_F[frame])) for x_F in (theta_F, momentum_F)):
                raise RoundError("the group's pseudo-gradient leads to a state that is not finite")
        used = {member.peer_id: member.num_samples for member in origin.members if member.num_tokens}
        try:
            lanes = committed(state.lanes, step, origin.roster, self.config.samples_per_interval, used)
        except ValueError as error:
            raise RoundError(f"a group's members used what they had no lease for: {error}") from error
        return replace(copy, outer_step=step, lanes=lanes, roster=origin.roster)

    def proposal(self, outcome: Outcome) -> Held | None:
        return self._proposals.get(outcome)

    def differing(self, outcome: Outcome) -> Held | None:
        """What this member made of the same parts, where that is another state."""
        for mine, held in self._proposals.items():
            same_parts = (mine.origin_digest, mine.part_digests) == (outcome.origin_digest, outcome.part_digests)
            if same_parts and mine != outcome:
                return held
        return None

    def parts_of(self, origin_digest: bytes) -> tuple[Data, ...]:
        """The encoded result of that group's reduction; nothing if it is not here."""
        return self._parts.get(origin_digest, ())

    def donate(self, digest: bytes) -> Held | None:
        """Return the state that a peer fetches, if it is the committed one, or the one before that the peer, or another
        one, had begun to fetch."""
        if digest == self.digest:
            self._is_fetched = True
            return self.current
        former_digest, former = self._former or (b"", None)
        return former if digest == former_digest else None

    def damaged(self) -> Held | None:
        """What the committed state has become, if it is not what was committed: a fault of the memory. Blocks."""
        found = Held.of(self.current.state)
        return None if found.digest == self.digest else found

    def mend(self, held: Held) -> None:
        """`held` is the committed state, undamaged. What was proposed from the damaged one is no more."""
        assert held.digest == self.digest
        self.current = held
        self._proposals.clear()

    def begin(self, held: Held) -> None:
        """`held` is the run's initial state, in the place of zeros. What was proposed from these is no more."""
        assert self.proof is None
        self.current, self.digest = held, held.digest
        self._proposals.clear()

    def adopt(self, held: Held, proof: Proof) -> None:
        """`held` is the committed state from now on."""
        self._former, self._is_fetched = (self.digest, self.current) if self._is_fetched else None, False
        self.current, self.digest, self.proof = held, held.digest, proof
        self.history.add((proof,))
        self._proposals.clear()
