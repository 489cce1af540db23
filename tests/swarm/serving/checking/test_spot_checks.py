"""Spot checks of real small models: each server that lies is named, and no honest server is."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.faults import Fault
from support.leaks import no_leaks
from swarm.serving.checking.comparison import TOLERANCES, LargestLogits, fingerprint_error
from swarm.serving.checking.finished_answer import CheckReport
from swarm.serving.checking.span_check import NUM_TOP, SpanInputs, largest_logits, recompute
from swarm.serving.checking.spot_checks import MAX_WAITING, SpotCheckOptions
from swarm.serving.engine.span_speed import ObservedSpeed
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span_loading import load_span
from swarm.serving.server.answer_log import AnswerLog
from swarm.serving.server.connection_server import ConnectionServer
from swarm.serving.server.push_connections import SessionLink
from swarm.serving.server.server_session import ServerSession
from swarm.serving.server.session_sampler import SessionDraws
from swarm.serving.session.client_state import SessionOptions
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError
from swarm_protocol.served_evidence_messages import PositionDigests
from swarm_protocol.session_frames import CloseSequence, Commitment, OpenSequence, SampledToken, StepRequest, TokenDraw
from torch import Tensor
from transformers import LlamaForCausalLM

ALL = SpotCheckOptions(share=1.0)
PAIRS = [(0, 3), (3, 6)] * 2
THREE = [(0, 3), (3, 6)] * 3


@pytest.fixture(autouse=True)
def equal_speeds() -> Iterator[None]:
    """Give all servers of a span the speed that was measured when it was loaded.

    Routing would otherwise avoid a server that this machine slowed down, and might never choose the server that lies.
    """
    with patch.object(ObservedSpeed, "speed", property(lambda observed: observed._measured)):
        yield


async def checked(box: Any, num_answers: int = 1, **options: Any) -> list[CheckReport]:
    """Run some requests, and return the reports of the checks of their answers."""
    for _ in range(num_answers):
        await box.tokens(**options)
        await box.client.checks.settled()
    return list(box.client.checks.reports)


def named(reports: Sequence[CheckReport]) -> set[str]:
    return {report.named for report in reports} - {""}


def answered_by(box: Any, start: int) -> str:
    """Return the server whose span begins at `start` in the last answer."""
    return next(hop["peer_id"] for hop in box.client.trace()["hops"] if hop["start"] == start)


@contextmanager
def lying_session(change: Callable[[ServerSession, Any], Any], who: Callable[[ServerSession], bool]) -> Iterator[None]:
    """Replace the outputs of sessions for which `who` holds by `change` of them."""
    honest = ServerSession._compute

    async def compute(self: ServerSession, step: Any) -> Any:
        output = await honest(self, step)
        return change(self, output) if who(self) else output

    with patch.object(ServerSession, "_compute", compute):
        yield


def scaled(_session: ServerSession, output: Any) -> Any:
    """Scale the outputs by 1.01, which is far less than other weights change them."""
    return output if output.output is None else dataclasses.replace(output, output=1.01 * output.output)


def is_at(peer_id: str) -> Callable[[ServerSession], bool]:
    return lambda session: session._link._push_connections.peer_id == peer_id


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    with no_leaks():
        virtual_time.run(scenario())


@pytest.mark.parametrize("codec", ["raw", "bf16", "int8"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 5}, {"presence_penalty": 1.0}])
def test_honest_servers_pass_with_any_sampling_and_codec(
    boxes: Any, llama_dir: Path, codec: str, options: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, PAIRS, checks=ALL, session=SessionOptions(codec=codec)) as box:
            reports = await checked(box, 2, num_tokens=24, **options)
            assert [report.result for report in reports] == ["passed"] * 4
            assert [report["result"] for report in box.client.trace()["checks"]] == ["passed"] * 2
            standings = box.client.checks.reputation.track_records
            assert sum(standing.num_passed for standing in standings.values()) == pytest.approx(4, abs=1e-3)
            await box.all_freed()

    run(scenario)


@pytest.mark.parametrize("start", [0, 3])
def test_server_that_swaps_in_four_bit_weights_is_named(
    boxes: Any, llama_dir: Path, start: int, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, THREE, checks=ALL) as box:
            liar = await trusted(box, start)
            deployed = box.servers[liar].deployed
            span = load_span(open_model(_in_four_bits(llama_dir, tmp_path)), start, start + 3)
            deployed.loaded = dataclasses.replace(deployed.loaded, span=span)
            deployed.engine.span = span
            reports = list[CheckReport]()
            while not named(reports):
                reports = await checked(box, num_tokens=24, temperature=1.0)
            assert named(reports) == {liar}
            report = reports[-1] if reports[-1].named else reports[-2]
            assert report.reason == ("draws" if start else "rows")
            assert report.evidence or report.peer_id != liar, "a named server must be convicted by what it signed"
            for _ in range(20):
                await box.tokens(1)
                assert answered_by(box, start) != liar, "a named server must not be used again"

    run(scenario)


def _in_four_bits(directory: Path, into: Path) -> Path:
    """Write the model with the weights of its blocks rounded to four bits in groups of 32."""
    model = LlamaForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for weight_OI in model.model.layers.parameters():
            if weight_OI.ndim == 2:
                groups = weight_OI.view(-1, 32)
                scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-9) / 7
                groups.copy_((groups / scale).round() * scale)
    model.save_pretrained(into)
    return into


async def trusted(box: Any, start: int) -> str:
    """Return a server of these blocks that has passed a hundred checks more than the others.

    Routing then chooses it for every answer that does not explore, even if another server has passed some checks
    meanwhile.
    """
    await checked(box)
    peer_id = answered_by(box, start)
    for _ in range(100):
        box.client.checks.reputation.note(peer_id, "passed", time.time())
    return peer_id


async def _until_asked(box: Any, start: int, peer_id: str) -> list[CheckReport]:
    """Run requests until the server takes part in an answer, and return that answer's reports."""
    for _ in range(40):
        before = len(box.client.checks.reports)
        reports = await checked(box, num_tokens=24, temperature=1.0)
        if answered_by(box, start) == peer_id:
            return reports[before:]
    raise AssertionError("the server was never asked")


def test_last_server_is_named_when_it_draws_other_tokens(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, THREE, checks=ALL) as box:
            liar = await trusted(box, 3)
            honest = SessionDraws.pick

            async def greedy(self: SessionDraws, draw: TokenDraw, num_drafts: int) -> Any:
                pick = await honest(self, draw, num_drafts)
                if all(session.draws is not self for session in box.servers[liar].sessions):
                    return pick
                return dataclasses.replace(pick, draw=dataclasses.replace(pick.draw, temperature=0.0))

            with patch.object(SessionDraws, "pick", greedy):
                for seed in range(40):
                    reports = await checked(box, num_tokens=24, temperature=2.0, seed=seed)
                    if answered_by(box, 3) == liar:
                        break
            assert named(reports) == {liar}
            assert reports[-1].reason == "draws"

    run(scenario)


def test_server_is_named_when_it_returns_the_rows_of_another_answer(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, THREE, checks=ALL) as box:
            liar = await trusted(box, 0)
            copies: list[Tensor] = []

            def copied(_session: ServerSession, output: Any) -> Any:
                copies.append(output.output)
                wanted = output.output
                known = next((copy for copy in copies if copy.shape == wanted.shape), wanted)
                return dataclasses.replace(output, output=known)

            with lying_session(copied, is_at(liar)):
                for index in range(40):
                    reports = await checked(box, num_tokens=8, prompt=f"{index:03} is a number")
                    if named(reports):
                        break
            assert named(reports) == {liar}

    run(scenario)


def test_server_is_named_when_it_lies_in_sessions_and_not_in_checks(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, THREE, checks=ALL) as box:
            liar = await trusted(box, 0)
            with lying_session(scaled, is_at(liar)):
                reports = await _until_asked(box, 0, liar)
            assert named(reports) == {liar}

    run(scenario)


def test_middle_server_is_named_when_it_lies_and_claims_that_its_inputs_were_cached(
    boxes: Any, llama_dir: Path
) -> None:
    honest = AnswerLog.commitment

    def without_inputs(self: AnswerLog, until: int) -> Any:
        signed = honest(self, until)
        nothing = PositionDigests().digest(0)
        return dataclasses.replace(signed, inputs_from=signed.inputs_to, inputs_digest=nothing)

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 2), (2, 4), (4, 6), (2, 4), (2, 4)], checks=ALL) as box:
            liar = await trusted(box, 2)
            with patch.object(AnswerLog, "commitment", without_inputs), lying_session(scaled, is_at(liar)):
                reports = await _until_asked(box, 2, liar)
            assert named(reports) == {liar}

    run(scenario)


def test_server_is_not_named_when_it_takes_over_from_one_with_other_weights(
    boxes: Any, llama_dir: Path, tmp_path: Path
) -> None:
    wrong = load_span(open_model(_in_four_bits(llama_dir, tmp_path)), 0, 3)

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6), (0, 3), (0, 3), (0, 3)], checks=ALL) as box:
            engines = {peer: each.deployed.engine for peer, each in box.servers.items() if each.record.start == 0}
            right = {peer: engine.span for peer, engine in engines.items()}
            for engine in engines.values():
                engine.span = wrong
            generation, num_tokens = box.generate(24), 0
            async with asyncio.TaskGroup() as tasks:
                async for _ in generation:
                    num_tokens += 1
                    if num_tokens == 5:
                        leaver = generation.trace()["hops"][0]["peer_id"]
                        for peer in engines.keys() - {leaver}:
                            engines[peer].span = right[peer]
                        tasks.create_task(box.servers[leaver].drain(within_s=30))
                        await asyncio.sleep(0)
            await box.client.checks.settled()
            assert [replay["was_handed_over"] for replay in generation.trace()["replays"]] == [True]
            [report] = [report for report in box.client.checks.reports if report.start == 0]
            assert report.peer_id != leaver
            assert (report.result, report.reason, report.outcomes) == ("unchecked", "taken over", ())

    run(scenario)


def test_check_is_disputed_and_bars_nobody_when_only_two_servers_can_compare(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, PAIRS, checks=ALL) as box:
            liar = await trusted(box, 0)
            with lying_session(scaled, is_at(liar)):
                reports = await _until_asked(box, 0, liar)
            [report] = [report for report in reports if report.result == "disputed"]
            assert len(report.outcomes) == 2
            assert named(reports) == set()
            assert not box.client.checks.reputation.for_routing(box.servers, 0.0, "").barred

    run(scenario)


def test_check_is_counted_as_unchecked_when_no_other_server_has_the_blocks(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6), (3, 6)], checks=ALL) as box:
            reports = await checked(box)
            assert [(report.start, report.result, report.reason) for report in reports] == [
                (0, "unchecked", "alone"),
                (3, "passed", ""),
            ]
            assert box.client.checks.num_results == {"unchecked": 1, "passed": 1}

    run(scenario)


def test_checker_is_named_when_it_lies_about_an_honest_server(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, THREE, checks=ALL) as box:
            # routing chooses the server with passed checks for answers, so that the others check it
            asked = await trusted(box, 0)
            liar, server = next((who, it) for who, it in box.servers.items() if not it.record.start and who != asked)
            honest = server.calls._forward

            async def forward(*asked: Any) -> Tensor:
                return 1.5 * await honest(*asked)

            with patch.object(server.calls, "_forward", forward):
                for _ in range(40):
                    reports = await checked(box)
                    if named(reports):
                        break
            assert named(reports) == {liar}
            assert all(report.result == "passed" for report in reports)

    run(scenario)


def test_check_fails_when_a_server_signs_nothing_or_other_outputs(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, PAIRS, checks=ALL) as box:
            with patch.object(ServerSession, "sign_answer", lambda _self, _until: None):
                reports = await checked(box)
            assert [(report.result, report.reason) for report in reports] == [
                ("disputed", "withheld"),
                ("unchecked", "no inputs"),
            ]
            gave, drew = AnswerLog.gave, AnswerLog.drew

            def gave_other(self: AnswerLog, *outputs: Any) -> None:
                gave(self, *outputs)
                self.outputs._digests[-1:] = b"x"

            def drew_other(self: AnswerLog, *outputs: Any, of_step: int) -> None:
                drew(self, *outputs, of_step=of_step)
                self.outputs._digests[-1:] = b"x"

            with patch.object(AnswerLog, "gave", gave_other), patch.object(AnswerLog, "drew", drew_other):
                reports = (await checked(box))[2:]
            assert [(report.result, report.reason) for report in reports] == [("failed", "commitment")] * 2

    run(scenario)


def test_check_is_disputed_when_a_server_pushes_other_rows_than_it_reports(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6), (3, 6)], checks=ALL) as box:
            liar = next(iter(box.servers))
            honest = SessionLink.push_rows

            def push(self: SessionLink, step: Any, rows: Any, spent_ms: Any) -> None:
                payload = bytearray(rows.payload)
                payload[0] ^= 0x40
                honest(self, step, dataclasses.replace(rows, payload=bytes(payload)), spent_ms)

            with patch.object(SessionLink, "push_rows", push):
                reports = await checked(box)
            [report] = [report for report in reports if report.start == 3]
            assert (report.result, report.reason) == ("disputed", "inputs")
            assert {peer for peer, _ in report.outcomes} == {liar, report.peer_id}

    run(scenario)


def test_servers_get_the_same_frames_when_an_answer_is_checked_and_when_it_is_not(boxes: Any, llama_dir: Path) -> None:
    seen: list[Any] = []
    honest = ConnectionServer._on_frame

    def listen(self: ConnectionServer, frame: Any, state: Any) -> None:
        seen.append(_without_ids(frame))
        honest(self, frame, state)

    async def scenario() -> None:
        draws = iter([0.99, 0.0])
        async with boxes(
            llama_dir, [(0, 3), (3, 6)] * 2, checks=SpotCheckOptions(share=0.5, draw=lambda: next(draws))
        ) as box:
            with patch.object(ConnectionServer, "_on_frame", listen):
                await checked(box, temperature=1.0, seed=1, prompt="one")
                assert not box.client.checks.reports
                await box.all_freed()
                first = sorted(map(repr, seen))
                seen.clear()
                await checked(box, temperature=1.0, seed=1, prompt="two")
                await box.all_freed()
            assert len(box.client.checks.reports) == 2
            assert sorted(map(repr, seen)) == first

    run(scenario)


def _without_ids(frame: Any) -> Any:
    match frame:
        case OpenSequence():
            return ("open", frame.start, frame.end, frame.max_tokens)
        case StepRequest():
            return ("step", frame.position, frame.want, frame.forward, frame.rows.num_rows)
        case CloseSequence() | Commitment():
            return (type(frame).__name__, getattr(frame, "commit_to", 0))
    return type(frame).__name__


def test_check_names_nobody_after_a_failover_in_mid_answer(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        faults = [Fault(who="*", phase="serve/decode", what="kill", nth=9)]
        async with boxes(llama_dir, [(0, 3), (3, 6), (0, 3), (3, 6), (0, 3), (3, 6)], checks=ALL, faults=faults) as box:
            for _ in range(12):
                await checked(box)
            reports = box.client.checks.reports
            assert {report.result for report in reports} <= {"passed", "unchecked"}
            assert len([report for report in reports if report.result == "passed"]) > len(reports) / 2

    run(scenario)


def test_server_that_still_runs_rows_again_when_the_answer_ends_is_not_blamed(boxes: Any, llama_dir: Path) -> None:
    """The last token needs no copy from it, and when its session is closed it stops."""
    boxed: list[Any] = []

    def kill_first(_who: str) -> None:
        (box,) = boxed
        box.internet.crash(answered_by(box, 0))

    last_draw = Fault(who="*", phase="serve/decode", what=kill_first, nth=2 * 15)

    async def scenario() -> None:
        async with boxes(llama_dir, PAIRS, checks=ALL, faults=[last_draw]) as box:
            boxed.append(box)
            reports = await checked(box, num_tokens=16)
            assert len(box.client.trace()["replays"]) == 1
            assert [(report.start, report.result, report.reason) for report in reports] == [
                (0, "unchecked", "replayed"),
                (3, "unchecked", "no inputs"),
            ]

    run(scenario)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_last_server_returns_the_largest_logits_of_the_last_positions(
    boxes: Any, llama_dir: Path, temperature: float
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box:
            tokens = list(range(40))
            [peer_id] = box.servers
            shape = (await box.kit()).shape
            inputs = SpanInputs(
                start=0,
                end=6,
                rows=np.array(tokens, "<i4").tobytes(),
                num_rows=40,
                num_draws=5,
                temperature=temperature,
            )
            found = largest_logits(await recompute(box.network, shape, peer_id, inputs))
            logits = await box.client.forward(torch.tensor(tokens), model="tiny", head=True)
            assert len(found) == 5
            for each, row_V in zip(found, logits[-5:], strict=True):
                values, ids = row_V.topk(NUM_TOP)
                assert each.ids_K.tolist() == ids.tolist()
                assert each.values_K == pytest.approx(values.numpy(), abs=1e-5)
                assert each.log_sum == pytest.approx(float((row_V / (temperature or 1.0)).logsumexp(0)), abs=1e-4)

    run(scenario)


def test_check_is_skipped_when_too_many_answers_wait(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        may_check = asyncio.Event()

        async def held(*asked: Any) -> Any:
            await may_check.wait()
            return await recompute(*asked)

        async with boxes(llama_dir, PAIRS, checks=ALL) as box:
            with patch("swarm.serving.checking.spot_checks.recompute", held):
                for _ in range(MAX_WAITING + 3):
                    await box.tokens(num_tokens=2)
                may_check.set()
                await box.client.checks.settled()
            assert sum(box.client.checks.num_results.values()) / 2 == MAX_WAITING + 1, (
                "one is checked while others wait"
            )

    run(scenario)


@pytest.mark.parametrize("damage", [bytes(127), bytes(128), b"\xff" * 128])
def test_malformed_fingerprint_differs(damage: bytes) -> None:
    logits = LargestLogits(values_K=np.arange(64.0)[::-1].copy(), ids_K=np.arange(64), log_sum=70.0)
    if len(damage) == 128:
        assert fingerprint_error(damage, logits) > TOLERANCES["int4"].after(64).fingerprint
    else:
        with pytest.raises(ValueError, match="fingerprint has"):
            SampledToken(token_id=1, fingerprint=damage)


def test_share_outside_its_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="use a share of 0 to 1"):
        SpotCheckOptions(share=1.5)
