"""Another member's interval, computed once more: by its validator, by members that see for themselves, or offline.

In a run with `validation_rate` an interval follows from the state that it began from, the member's lease and the run's
settings alone. All functions block for as long as an interval. Shapes: N values of the flat parameter vector.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.proof_messages import WRONG_INTERVAL, Evidence
from swarm_protocol.training_messages import Contribution
from torch import Tensor

from swarm.training.evidence.bans import Verdict
from swarm.training.evidence.evidence_folder import open_file, proving
from swarm.training.evidence.interval_checks import IntervalStart
from swarm.training.evidence.wrong_interval import read_case
from swarm.training.inner.interval import Inner
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.replica_state import ReplicaState


def replayed(inner: Inner, start: IntervalStart, member: Contribution, config: RunConfig) -> Tensor:
    """Return the pseudo-gradient [N] of the steps that `member` says it has taken. The weights of `inner` are the same
    afterwards. Raises RoundError if training diverged."""
    samples = start.samples_of(member, config)
    num_steps, done_steps = len(samples) // config.inner.batch_windows, (start.step - 1) * config.interval_steps
    kept_N = inner.flat()
    try:
        inner.load(start.theta_N)
        inner.train(samples, num_steps, done_steps=done_steps)
        local_N = inner.flat()
        return torch.sub(start.theta_N, local_N, out=local_N)
    finally:
        inner.load(kept_N)


def replay_file(path: Path, state: ReplicaState, inner_of: Callable[[SignedRun], Inner]) -> tuple[SignedRun, Verdict]:
    """Return the run that the accusation in `path` is of, and what it proves to somebody who believes no finding: the
    interval is computed once more, from the `state` that the step began from, by the inner loop that `inner_of` makes
    for the run. Blocks for as long as an interval.

    Raises ConfigError, and IntegrityError if the file is no accusation, or proves nothing.
    """
    run, signatures, data = open_file(path)
    with proving(path):
        evidence = Evidence.from_bytes(data)
        if evidence.kind != WRONG_INTERVAL:
            raise PeerViolation("it is not about an interval: it needs no state to be checked")
        case = read_case(evidence.body, signatures, run.config)
        if state.manifest().digest() != case.proof.origin.state_digest:
            raise PeerViolation("this is not the state that the step began from")
        if not case.is_voted:
            raise PeerViolation("evidence has no vote of the accused itself: its group can be made up")
    inner = inner_of(run)
    try:
        start = IntervalStart(step=case.step, theta_N=state.theta_N, stripes=state.stripes)
        found = case.compare(replayed(inner, start, case.member, run.config), run.config)
    finally:
        inner.close()
    if found.tier != "wrong":
        raise IntegrityError(
            f"{path} proves nothing: computed once more, the interval gives what the member sent ({found.tier}, "
            f"distance {found.distance:.3g})"
        )
    return run, Verdict(peer_id=case.member.peer_id, step=case.step, kind=WRONG_INTERVAL, reason=case.reason)
