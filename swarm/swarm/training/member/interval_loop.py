"""Runs a member's intervals one after the other, while rounds run beside them.

    interval k:  the first overlap_steps inner steps, while round k - 1 may still run
                 wait until round k - 1 is committed, and take in the fragment that it moved
                 the other inner steps; offer the fragment's pseudo-gradient to round k; interval k + 1 begins at once

This is Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, algorithm 2), with an interval for its H / P, and
fragments in the order of committed outer steps. Without overlap, with one fragment and no mixing it is DiLoCo (arXiv
2311.08105).

Only a member that trained for the committed round goes on like this. All other members start over from the committed
state: those that were late, were overtaken, fetched the state, diverged, or had no lease. Their work is lost, and its
samples return with later leases.

The loop owns the training task. `outer_steps` tells it what has been committed; `round_driver` takes the offers.

Shapes: F values of a fragment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from swarm_protocol.checks import shared_fields
from swarm_protocol.errors import RoundError
from swarm_protocol.hash_tree import HashTree
from swarm_protocol.training_messages import Contribution
from torch import Tensor

from swarm.training.evidence.interval_audits import IntervalAudits
from swarm.training.inner.inner_loop import IntervalResult
from swarm.training.inner.interval import Interval, Intervals, MemberMomentum
from swarm.training.member.held_out_effects import HeldOutEffects
from swarm.training.state.lease import SampleIds
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import IntervalDone, IntervalFailed, TrainingEvent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntervalOffer:
    """The contribution of an interval to its round, after `interval_s` seconds of inner steps. `delta_F` is the
    pseudo-gradient of the round's fragment, or None; `made_at` is the loop's time when the interval ended. `tree` is
    the hash tree to whose root the contribution commits."""

    contribution: Contribution
    delta_F: Tensor | None
    made_at: float
    interval_s: float
    tree: HashTree | None = None


class IntervalLoop:
    """Runs the intervals of one member in `tasks`, until all are done or `end` is called. If `audits` has a validation
    due, it is run instead of an interval. Offers carry the member's measured `effects`."""

    def __init__(
        self,
        context: RunContext,
        intervals: Intervals,
        *,
        tasks: asyncio.TaskGroup,
        on_event: Callable[[TrainingEvent], None],
        audits: IntervalAudits,
        effects: HeldOutEffects,
    ) -> None:
        self.latest: IntervalResult | None = None
        """The result of the last interval that trained."""
        self._context = context
        self._intervals = intervals
        self._tasks = tasks
        self._on_event = on_event
        self._audits = audits
        self._effects = effects
        momentum = context.replica.config.member_momentum
        self._momentum = MemberMomentum(momentum) if momentum else None
        self._task: asyncio.Task[None] | None = None
        # the running interval, and the last interval that was asked to hurry
        self._step = self._hurried = 0
        self._awaited: int | None = None
        self._committed = asyncio.Event()
        self._offers: dict[int, asyncio.Future[IntervalOffer]] = {}

    @property
    def interval_s(self) -> float:
        """The seconds that this member's last interval took, or 0 if none has trained."""
        return self.latest.seconds if self.latest else 0.0

    @property
    def is_leaving(self) -> bool:
        """Return whether this member is leaving, and starts no more training."""
        return self._intervals.is_leaving.is_set()

    def begin(self) -> None:
        """Start over from the committed state."""
        self.end()
        self._offers.clear()
        self._awaited = None
        # a step that is repeated, as after a round that only admitted members, is another interval
        self._hurried = 0
        self._task = self._tasks.create_task(self._run(), name="intervals")

    def adopted(self, *, fetched: bool) -> None:
        """Go on from a new committed state. It is `fetched` if it does not follow from the former one by a round's
        result."""
        self.drop_offers(self._context.replica.outer_step)
        if self._awaited == self._context.replica.outer_step and not fetched:
            self._awaited = None
            self._committed.set()
        else:
            self.begin()

    def drop_offers(self, outer_step: int) -> None:
        """Free the pseudo-gradients of all rounds up to that of `outer_step`, which take 4 bytes per parameter each.
        Call this only once this member is sure to go on from there: until then the rounds may need them again."""
        for step in [step for step in self._offers if step <= outer_step]:
            del self._offers[step]

    async def offer(self, step: int) -> IntervalOffer:
        """Return the offer of interval `step` once it has ended. Each call returns the same one."""
        return await asyncio.shield(self._offer_future(step))

    def hurry(self, step: int) -> None:
        """End interval `step` with the work done so far, but not before its first inner step."""
        self._hurried = step
        if step == self._step:
            self._intervals.hurry()

    def end(self) -> None:
        self._intervals.stop()
        if self._task is not None:
            self._task.cancel()

    def _offer_future(self, step: int) -> asyncio.Future[IntervalOffer]:
        if step not in self._offers:
            self._offers[step] = asyncio.get_running_loop().create_future()
        return self._offers[step]

    async def _run(self) -> None:
        replica = self._context.replica
        first = self._step = replica.outer_step + 1
        try:
            await self._intervals.off_loop(self._intervals.inner.load, replica.current.theta_N)
        except RoundError as error:
            # the next state, or the same one after a round that only admitted members, is loaded anew
            self._on_event(IntervalFailed(step=self._step, reason=error.message))
            self._put_offer(None, None, 0.0)
            return
        try:
            while self._step <= replica.config.outer_steps and await self._one_interval(follows=self._step > first):
                self._step += 1
        finally:
            # a thread cannot be cancelled, only asked to stop
            self._intervals.stop()

    async def _one_interval(self, *, follows: bool) -> bool:
        """Run one interval. If it `follows`, it continues from the one before, whose round may still run, else it
        starts from the committed state. Return whether the next interval can follow from it."""
        config = self._context.replica.config
        interval = self._intervals.begin((self._step - 1) * config.interval_steps)
        if self.is_leaving:
            interval.stop()
        if self._hurried == self._step:
            interval.hurry()
        try:
            if follows:
                await self._train(interval, config.overlap_steps)
                await self._take_in()
            if self._start_validation():
                return False
            has_lease = await self._train(interval, config.interval_steps)
            delta_F = await self._delta(interval) if interval.done.num_tokens else None
        except RoundError as error:
            self._on_event(IntervalFailed(step=self._step, reason=error.message))
            has_lease, delta_F = False, None
        # after an interval without a lease, or a failed one, there is nothing to continue from
        self._awaited = self._step if has_lease else None
        self._committed = asyncio.Event()
        done, contribution = interval.done, None
        if delta_F is not None:
            self.latest, loss = done, done.mean_loss
            told = shared_fields(done, IntervalDone)
            self._on_event(IntervalDone(step=self._step, loss=loss, tokens_per_s=done.tokens_per_s, **told))
            shared = shared_fields(done, Contribution)
            contribution = Contribution(peer_id=self._context.network.peer_id, loss=loss, **shared)
        self._put_offer(contribution, delta_F, done.seconds if contribution else 0.0)
        return has_lease

    def _start_validation(self) -> bool:
        """If a validation of another member's interval is due, start it, and offer nothing to the round. Return whether
        one was due."""
        if (due := self._audits.next()) is None:
            return False
        # the validation may end later than the round
        self._tasks.create_task(self._audits.run(due), name="validate an interval")
        self._awaited = None
        self._put_offer(None, None, 0.0)
        return True

    async def _train(self, interval: Interval, num_steps: int) -> bool:
        """Train until `num_steps` steps of the interval are done. Return whether this member has a lease."""
        lease = self._context.replica.lease(self._context.network.peer_id, self._step)
        if lease and num_steps:
            if not interval.done.num_steps:
                await self._context.failpoints.reached("interval")
            await interval.train(SampleIds(lease), num_steps)
        return bool(lease)

    async def _take_in(self) -> None:
        await self._committed.wait()
        replica = self._context.replica
        where = replica.fragment(self._step - 1)
        theta_F, mixing = replica.current.theta_N[where], replica.config.mixing
        await self._intervals.off_loop(self._intervals.inner.take_in, where, theta_F, mixing)

    async def _delta(self, interval: Interval) -> Tensor:
        where = self._context.replica.fragment(self._step)
        delta_F = await interval.delta(self._context.replica.current.theta_N[where], where)
        if self._momentum is None:
            return delta_F
        return await self._intervals.off_loop(self._momentum.averaged, where, delta_F)

    def _put_offer(self, contribution: Contribution | None, delta_F: Tensor | None, interval_s: float) -> None:
        contribution = contribution or Contribution(peer_id=self._context.network.peer_id)
        effects = self._effects.of(self._context.replica.digest)
        offer = IntervalOffer(
            contribution=replace(contribution, effects=effects),
            delta_F=delta_F,
            made_at=asyncio.get_running_loop().time(),
            interval_s=interval_s,
        )
        self._offer_future(self._step).set_result(offer)
