"""Servers learn from a client that keeps text at home no token, no draw, and no name that follows from tokens.

The last test shows what remains possible: a server that has the model's first blocks, as anyone has of a public model,
computes the prompt from its activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.text_models import byte_tokenizer
from swarm.client import KeptModel
from swarm.network.memory.memory_network import MemoryNetwork
from swarm.serving.checking.spot_checks import SpotCheckOptions
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span_loading import load_span
from swarm.serving.server.connection_server import ConnectionServer
from swarm.serving.server.push_connections import PushConnections
from swarm.serving.wire.page_keys import page_keys
from swarm.testing import virtual_time
from swarm_protocol.rows import TOKENS
from swarm_protocol.session_frames import AnswerTokens, Frame, OpenSequence, Push, StepRequest

HALVES = [(0, 3), (3, 6)]
PROMPT = "The password of the safe is 4711, and nobody else should read it."
SECRET = "it is 4711, tell nobody"
STEERED: dict[str, Any] = {
    "prompt": PROMPT,
    "temperature": 1.0,
    "seed": 1234567,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {65: 1.0},
    "num_logprobs": 3,
}


@contextmanager
def received_by_servers(box: Any) -> Iterator[list[Frame]]:
    """Collect every frame that a server receives. What runs in the client's process is on the client's own network."""
    heard: list[Frame] = []
    take = ConnectionServer._on_frame

    def listen(self: ConnectionServer, frame: Frame, state: Any) -> None:
        if self._services.network is not box.network:
            heard.append(frame)
        take(self, frame, state)

    with patch.object(ConnectionServer, "_on_frame", listen):
        yield heard


def rows_to(heard: list[Frame], start: int) -> np.ndarray:
    """Return the hidden states [T, H] that the client sent to the server whose blocks begin at `start`."""
    (opened,) = [each for each in heard if isinstance(each, OpenSequence) and each.start == start]
    steps = [each for each in heard if isinstance(each, StepRequest) and each.sequence_id == opened.sequence_id]
    return np.concatenate(
        [np.frombuffer(step.rows.payload, "<f4").reshape(step.rows.num_rows, step.rows.num_columns) for step in steps]
    )


def test_servers_receive_no_token_and_no_draw(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        checks = SpotCheckOptions(share=1.0)
        async with boxes(llama_dir, HALVES * 2, checks=checks, text_at_home={"tiny": llama_dir}) as box:
            sent: list[bytes] = []
            call = MemoryNetwork.call

            async def calling(self: MemoryNetwork, peer_id: str, method: str, request: bytes, **options: Any) -> bytes:
                if self is box.network:
                    sent.append(request)
                return await call(self, peer_id, method, request, **options)

            with received_by_servers(box) as heard, patch.object(MemoryNetwork, "call", calling):
                await box.tokens(24, **STEERED)
                await box.client.checks.settled()
            steps = [frame for frame in heard if isinstance(frame, StepRequest | Push)]
            assert len(steps) >= 2 * 24, "methods of the client, and of the first server"
            assert {frame.rows.codec for frame in steps} == {"raw"}
            assert {(frame.want, frame.draw) for frame in steps} == {("nothing", None)}
            opened = [frame for frame in heard if isinstance(frame, OpenSequence)]
            assert {(frame.start, frame.end, frame.sampler) for frame in opened} == {(1, 3, None), (3, 5, None)}
            assert not any(isinstance(frame, AnswerTokens) for frame in heard)
            assert TOKENS not in {frame.rows.codec for frame in steps}
            assert not any(b"password" in request for request in sent)
            assert {report.result for report in box.client.checks.reports} == {"passed"}

    virtual_time.run(scenario())


def test_servers_are_not_linked_to_home(boxes: Any, llama_dir: Path) -> None:
    """Its rows pass through the client anyway, and a server whose link does not name the sender refuses the push."""
    pushed_to: list[str] = []
    push = PushConnections.push

    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, text_at_home={"tiny": llama_dir}) as box:

            def pushing(self: PushConnections, peer_id: str, frame: Push) -> None:
                if self._network is box.network:
                    pushed_to.append(peer_id)
                push(self, peer_id, frame)

            with received_by_servers(box) as heard, patch.object(PushConnections, "push", pushing):
                assert await box.tokens() == box.expected()
            neighbours = [
                named for frame in heard if isinstance(frame, OpenSequence) for named in (frame.previous, frame.next)
            ]
            assert {named.peer_id for named in neighbours if named is not None} <= box.servers.keys()
            assert any(isinstance(frame, Push) for frame in heard), "servers are linked to each other"

    virtual_time.run(scenario())
    assert not pushed_to


def test_servers_receive_tokens_and_draws_in_ordinary_serving(boxes: Any, llama_dir: Path) -> None:
    """Without this, the test above could pass because it looks in the wrong place."""

    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            with received_by_servers(box) as heard:
                await box.tokens(24, **STEERED)
            steps = [frame for frame in heard if isinstance(frame, StepRequest)]
            assert TOKENS in {frame.rows.codec for frame in steps}
            assert 1234567 in {frame.draw.seed for frame in steps if frame.draw is not None}
            assert any(isinstance(frame, OpenSequence) and frame.sampler is not None for frame in heard)

    virtual_time.run(scenario())


def test_names_of_kept_pages_do_not_depend_on_tokens_alone(boxes: Any, llama_dir: Path) -> None:
    """A server could otherwise compare the names with those of prompts that it suspects."""

    async def keys_of(**options: Any) -> list[tuple[bytes, ...]]:
        async with boxes(llama_dir, HALVES, **options) as box:
            await box.tokens(2, prompt=PROMPT)
            with received_by_servers(box) as heard:
                await box.tokens(2, prompt=PROMPT)
            return [frame.page_keys for frame in heard if isinstance(frame, OpenSequence)]

    revision = open_model(llama_dir).revision()
    tokens = byte_tokenizer()(PROMPT)["input_ids"]
    guessed = {key for root in (revision, f"{revision}/raw") for key in page_keys(root, tokens)}
    ordinary = virtual_time.run(keys_of())
    assert {key for keys in ordinary for key in keys} <= guessed
    first, second = (virtual_time.run(keys_of(text_at_home={"tiny": llama_dir})) for _ in range(2))
    assert all(len(keys) == 4 for keys in (*first, *second)), "the kept pages are used"
    for keys in (*first, *second):
        assert not guessed & set(keys)
    assert not set(first[0]) & set(second[0]), "another process has another secret"


@pytest.mark.parametrize("num_first", [1, 3])
def test_server_with_the_first_blocks_can_compute_the_prompt(boxes: Any, llama_dir: Path, num_first: int) -> None:
    """This is the limit of text at home that SECURITY.md states; the attack takes V passes over the first blocks for
    each token.
    """

    async def scenario() -> np.ndarray:
        kept = KeptModel(source=llama_dir, num_first_blocks=num_first)
        async with boxes(llama_dir, [(0, 6)], text_at_home={"tiny": kept}) as box:
            with received_by_servers(box) as heard:
                await box.tokens(1, prompt=SECRET)
            return rows_to(heard, num_first)

    seen_TH = torch.from_numpy(virtual_time.run(scenario()).copy())
    span = load_span(open_model(llama_dir), 0, num_first)
    candidates_V, found = torch.arange(span.vocab_size), list[int]()
    for seen_H in seen_TH:
        tried_VT = torch.cat(
            [torch.tensor(found, dtype=torch.int64).expand(len(candidates_V), -1), candidates_V[:, None]], 1
        )
        hidden_VH = span.forward(tried_VT, 0, num_first)[:, -1]
        found.append(int((hidden_VH - seen_H).norm(dim=1).argmin()))
    assert byte_tokenizer().decode(found, skip_special_tokens=True) == SECRET
