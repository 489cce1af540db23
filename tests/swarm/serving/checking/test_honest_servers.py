"""No honest server is accused, whatever happens between the servers of an answer with drafts.

A row that a server runs twice gets another rounding. So the tests follow which of the two a server signs, which one the
next server has, and which one the client compares with both.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
from support.toy_chain import ROW_BYTES, ToySequence, ToyServer, ToyWorld, wire_rows
from swarm.serving.checking.finished_answer import AnsweredSpan, CheckReport, FinishedAnswer
from swarm.serving.checking.span_check import CheckContext, check_span
from swarm.serving.model.shape import ModelShape
from swarm.serving.session.stage import Stage
from swarm.testing import virtual_time
from swarm_protocol.envelope import seal_now
from swarm_protocol.identity import Identity
from swarm_protocol.served_evidence_messages import COMMITMENT_PURPOSE

MODEL = ModelShape(name="m", revision="r", num_blocks=3, hidden_size=ROW_BYTES // 4, vocab_size=1000)
SERVER = Identity(b"s" * 32)
PROMPT = [1, 2, 3]


@pytest.mark.parametrize("fault", ["none", "lost pushes", "kill", "connection"])
def test_honest_servers_are_not_accused_after_any_order_of_messages(fault: str) -> None:
    reasons, num_drafted = Counter[str](), 0
    for seed in range(50):
        world, index = ToyWorld(seed, num_blocks=3, spans=[(0, 1), (1, 2), (2, 3)] * 4), seed % 3
        world.draws_vary = world.has_drafts = True
        draw = random.Random(seed)
        world.max_delay_s = draw.choice([0.3, 1.0])
        world.later(draw.uniform(0.05, 3.0), partial(strike, world, fault, index))
        world.ask(PROMPT, ahead=30)
        ended = dict[Stage, ToySequence]()
        if seed % 2:  # the client may close the session before rows are run again
            world.wait(3.0)
        for stage in world.state.stages:
            world.to_server(stage, partial(close, stage, ended))
        world.wait(3.0)
        for stage, sequence in ended.items():
            report = check(world, stage, sequence)
            assert report.result == "unchecked", f"seed {seed}, block {stage.start}: {report.reason}, {report.detail}"
            reasons[report.reason] += 1
        assert not world.judged
        num_drafted += world.num_drafted
    assert num_drafted > 150
    assert reasons["alone"] > 75, "most commitments agree with the client's rows"
    assert (reasons["replayed"] > 0) == (fault in {"kill", "connection"})


def strike(world: ToyWorld, fault: str, index: int) -> None:
    if fault == "lost pushes":
        world.push_loss = 0.5
        world.later(0.1, partial(setattr, world, "push_loss", 0.0))
    elif fault != "none" and world.state.stages:
        stages = world.state.stages
        world.strike(fault, world.servers[stages[index % len(stages)].peer_id])


def close(stage: Stage, ended: dict[Stage, ToySequence], server: ToyServer) -> None:
    sequence = server.sequences.pop(stage.sequence_id, None)
    if sequence is not None and stage.end < MODEL.num_blocks:
        ended[stage] = sequence


def check(world: ToyWorld, stage: Stage, sequence: ToySequence) -> CheckReport:
    """Check what the server of a stage has signed against what the client holds."""
    pipeline = world.state.pipeline
    stated = sequence.log.commitment(pipeline.length)
    signed = seal_now(
        SERVER, "n", purpose=COMMITMENT_PURPOSE, subject="m", payload=stated.to_bytes(), now=1.0, lifetime_s=60.0
    )
    inputs, outputs = pipeline.buffers[stage.start], pipeline.buffers[stage.end]
    span = AnsweredSpan(
        peer_id=SERVER.peer_id,
        previous_peer_id="",
        start=stage.start,
        end=stage.end,
        sequence_id=stage.sequence_id,
        inputs=bytes(wire_rows(inputs.rows(0, inputs.length), stage.start).payload),
        num_rows=pipeline.length,
        outputs=outputs.rows(stage.outputs_from, outputs.length) if stage.outputs_from < outputs.length else b"",
        outputs_from=stage.outputs_from,
        draws=(),
        signed=signed,
        is_taken_over=stage.is_taken_over,
    )
    answer = FinishedAnswer(
        model=MODEL, codec="raw", has_plain_draws=True, was_replayed=len(world.repaired) > 1, spans=(span,)
    )

    async def checked() -> CheckReport:
        return await check_span(answer, span, CONTEXT)

    return virtual_time.run(checked())


async def _nobody(_peer_id: str, _inputs: object) -> object:
    raise AssertionError("there is nobody to ask")


CONTEXT = CheckContext(network_id="n", now=1.0, dtype="float32", candidates=(), recompute=_nobody)  # type: ignore[arg-type]
