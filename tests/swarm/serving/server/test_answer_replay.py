"""Evidence of a wrong answer can be verified with the published model's files, and an honest server's work is never
evidence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.leaks import no_leaks
from support.published_models import flip_a_byte, published_copy
from swarm.serving.checking import spot_checks
from swarm.serving.checking.finished_answer import AnsweredSpan, CheckReport, FinishedAnswer
from swarm.serving.checking.span_check import CheckContext, check_span
from swarm.serving.checking.span_commitment import evidence_of
from swarm.serving.checking.spot_checks import SpotCheckOptions
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span_loading import load_span
from swarm.serving.server import answer_replay
from swarm.serving.server.answer_replay import replay_answer
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError, IntegrityError, PeerViolation
from swarm_protocol.served_evidence_messages import ServedEvidence
from transformers import LlamaForCausalLM

NETWORK = "test"
ALL = SpotCheckOptions(share=1.0)
SPANS = [(0, 3), (3, 6)]


@dataclasses.dataclass
class Found:
    """The results of checks: `wrong` is the evidence against `liar`, `right` that about honest spans."""

    directory: Path
    liar: str = ""
    wrong: bytes = b""
    right: list[bytes] = dataclasses.field(default_factory=list)


@pytest.fixture(scope="module", params=[0, 3], ids=["rows", "draws"])
def found(request: pytest.FixtureRequest, boxes: Any, llama_dir: Path, tmp_path_factory: Any) -> Found:
    """Run requests on servers of a published model. One of them computes with other weights than it announces."""
    folder: Path = tmp_path_factory.mktemp("replay")
    result, start = Found(directory=folder / "model"), int(request.param)
    published_copy(llama_dir, result.directory)
    other = _scaled(llama_dir, folder / "other")

    async def noting(answer: FinishedAnswer, span: AnsweredSpan, context: CheckContext) -> CheckReport:
        # if the liar were named as a checker, routing would never choose it for an answer
        others = tuple(peer_id for peer_id in context.candidates if peer_id != result.liar)
        report = await check_span(answer, span, dataclasses.replace(context, candidates=others))
        if report.result == "passed" and span.peer_id != result.liar:
            result.right.append(evidence_of(answer, span, context.network_id))
        return report

    async def scenario() -> None:
        async with boxes(result.directory, [*SPANS, *[(start, start + 3)] * 2], checks=ALL) as box:
            await box.tokens(num_tokens=8)
            hops = box.client.trace()["hops"]
            await box.client.checks.settled()
            result.liar = next(hop["peer_id"] for hop in hops if hop["start"] == start)
            deployed = box.servers[result.liar].deployed
            span = load_span(open_model(other), start, start + 3)
            deployed.loaded = dataclasses.replace(deployed.loaded, span=span)
            deployed.engine.span = span
            while not result.wrong:
                await box.tokens(num_tokens=24)
                await box.client.checks.settled()
                result.wrong = next((each.evidence for each in box.client.checks.reports if each.evidence), b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spot_checks, "check_span", noting)
        _run(scenario)
    return result


def _run(scenario: Callable[[], Awaitable[None]]) -> None:
    with no_leaks():
        virtual_time.run(scenario())


def _scaled(directory: Path, into: Path) -> Path:
    """Write the model with other weights in its blocks."""
    model = LlamaForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    model.save_pretrained(into)
    return into


def test_answer_replay_proves_other_weights_with_the_published_files(found: Found) -> None:
    verdict = replay_answer(ServedEvidence.from_bytes(found.wrong), NETWORK, found.directory)
    assert (verdict.peer_id, verdict.model) == (found.liar, "tiny")
    assert "times the tolerance" in verdict.reason


def test_answer_replay_proves_nothing_when_the_server_is_honest(found: Found) -> None:
    assert found.right
    for each in found.right:
        with pytest.raises(PeerViolation, match="that an honest server may give"):
            replay_answer(ServedEvidence.from_bytes(each), NETWORK, found.directory)


def test_answer_replay_proves_nothing_when_the_evidence_was_changed(found: Found) -> None:
    genuine = ServedEvidence.from_bytes(found.right[0])
    changed = [
        dataclasses.replace(genuine, inputs=bytes([genuine.inputs[0] ^ 1]) + genuine.inputs[1:]),
        dataclasses.replace(genuine, inputs=genuine.inputs[:-1]),
        dataclasses.replace(genuine, outputs=genuine.outputs[:-8] + bytes(8), draws=genuine.draws[:-1]),
        dataclasses.replace(genuine, commitment=genuine.commitment[:-1] + b"x"),
    ]
    for each in changed:
        with pytest.raises((PeerViolation, IntegrityError)):
            replay_answer(each, NETWORK, found.directory)
    with pytest.raises(PeerViolation, match="network"):
        replay_answer(genuine, "other", found.directory)


def test_answer_replay_proves_nothing_when_rounding_explains_the_difference(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accuser that chooses the inputs can choose ones with which an honest server's rounding changes everything."""
    monkeypatch.setattr(answer_replay, "ROUNDING", {"float32": 0.2})
    with pytest.raises(PeerViolation, match="for a rounding of the inputs"):
        replay_answer(ServedEvidence.from_bytes(found.wrong), NETWORK, found.directory)


@pytest.mark.parametrize("number", [1e20, float("inf"), float("nan")])
def test_answer_replay_proves_nothing_when_no_model_has_such_inputs(
    found: Found, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The squares of large numbers overflow in one implementation of a norm and not in another."""
    decode = answer_replay.decoded_rows

    def large(rows: bytes, codec: str, num_columns: int) -> Any:
        decoded = decode(rows, codec, num_columns).copy()
        decoded[0, 0] = number
        return decoded

    evidence = ServedEvidence.from_bytes(found.wrong)
    _, stated = answer_replay.signed_by(evidence.commitment, NETWORK)
    if not stated.start:
        pytest.skip("the first blocks take tokens")
    monkeypatch.setattr(answer_replay, "decoded_rows", large)
    with pytest.raises(PeerViolation, match="inputs that no model computes with"):
        replay_answer(evidence, NETWORK, found.directory)


def test_answer_replay_refuses_files_that_are_not_the_published_ones(
    found: Found, llama_dir: Path, tmp_path: Path
) -> None:
    evidence = ServedEvidence.from_bytes(found.wrong)
    with pytest.raises(ConfigError, match="no signed manifest"):
        replay_answer(evidence, NETWORK, llama_dir)
    published_copy(llama_dir, tmp_path / "another", name="another")
    with pytest.raises(ConfigError, match="another model than tiny"):
        replay_answer(evidence, NETWORK, tmp_path / "another")
    published_copy(llama_dir, tmp_path / "damaged")
    flip_a_byte(next((tmp_path / "damaged").glob("*.safetensors")))
    with pytest.raises(IntegrityError, match="is not the file in"):
        replay_answer(evidence, NETWORK, tmp_path / "damaged")
