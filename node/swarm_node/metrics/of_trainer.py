"""What a member of a run tells: counted from its events, and its mismatches when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from swarm.training.member.trainer import RunMember
from swarm.training.member.trainer_events import (
    IntervalDone,
    IntervalFailed,
    OuterStep,
    RoundAborted,
    StateFetched,
    TrainingEvent,
    Validated,
)
from swarm_protocol.records import RoundReport

from swarm_node.metrics.metric_registry import Reading, Registry


class TrainerMetrics:
    """Give it every event of the trainer. One in a registry."""

    def __init__(self, registry: Registry, num_outer_steps: int) -> None:
        self._outer_step = registry.gauge("swarm_trainer_outer_step")
        self._loss = registry.gauge("swarm_trainer_loss")
        self._validation_loss = registry.gauge("swarm_trainer_validation_loss")
        self._group_size = registry.gauge("swarm_trainer_group_size")
        self._tokens_per_s = registry.gauge("swarm_trainer_tokens_per_second")
        self._tokens = registry.counter("swarm_trainer_tokens_total")
        rounds = registry.counter("swarm_trainer_rounds_total")
        self._committed, self._aborted = rounds.labels("committed"), rounds.labels("aborted")
        self._failed = registry.counter("swarm_trainer_intervals_failed_total")
        self._step_s = registry.histogram("swarm_trainer_outer_step_seconds")
        self._phase_s = registry.histogram("swarm_trainer_phase_seconds")
        self._refusals = registry.counter("swarm_trainer_refusals_total")
        self._sent = registry.counter("swarm_trainer_sent_bytes_total")
        self._fetched = registry.counter("swarm_trainer_fetched_bytes_total")
        registry.gauge("swarm_trainer_num_outer_steps").set(num_outer_steps)

    def tell(self, event: TrainingEvent) -> None:
        match event:
            case IntervalDone():
                self._tokens.inc(event.num_tokens)
                self._tokens_per_s.set(event.tokens_per_s)
            case IntervalFailed():
                self._failed.inc()
            case RoundAborted():
                self._aborted.inc()
            case StateFetched():
                self._outer_step.set(event.step)
                self._fetched.inc(event.num_bytes)
            case Validated():
                self._validation_loss.set(event.loss)
            case OuterStep():
                self._commit(event)
            case _:
                pass

    def report(self, report: RoundReport) -> None:
        """What the member measured of a committed round."""
        for phase, seconds in report.phases_s.items():
            self._phase_s.labels(phase).observe(seconds)
        self._refusals.inc(len(report.refused))

    def _commit(self, event: OuterStep) -> None:
        self._committed.inc()
        self._outer_step.set(event.step)
        self._loss.set(event.loss)
        self._group_size.set(len(event.group))
        self._sent.inc(event.bytes_sent)
        self._step_s.observe(event.seconds)


def read_trainer(trainer: RunMember) -> Iterator[Reading]:
    yield Reading("swarm_trainer_digest_mismatches_total", trainer.num_mismatches)
