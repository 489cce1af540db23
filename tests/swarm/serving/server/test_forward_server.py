"""The server's side of calls on whole sequences: what it refuses, how it cuts work, and what runs in between."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.leaks import no_leaks
from swarm.network.memory.memory_network import MemoryInternet
from swarm.serving.engine.span_speed import SpanSpeed
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span import Span
from swarm.serving.model.span_loading import load_span
from swarm.serving.peer_shares import Sharer
from swarm.serving.server import forward_call, forward_server
from swarm.serving.server.deployment import Deployment, LoadedSpan, ServerOptions
from swarm.serving.server.forward_call import MAX_PIECE_MS, PIECE_MS, ForwardPace, cut_call
from swarm.serving.server.forward_server import PACE_S, ForwardAdmission, ForwardServer
from swarm.testing import virtual_time
from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerTimeout, PeerViolation, SessionError, SwarmError
from swarm_protocol.rows import Rows
from swarm_protocol.serving_messages import BACKWARD_METHOD, FORWARD_METHOD, Compute, TensorPiece

# --- cutting and room, on their own ----------------------------------------------------------------------------------


@given(
    num_positions=st.integers(1, 4096),
    num_blocks=st.integers(1, 80),
    head_blocks=st.sampled_from([0.0, 0.3, 2.5]),
    position_ms=st.floats(1e-6, 10.0),
)
def test_cut_covers_the_blocks_in_pieces_of_bounded_time(
    num_positions: int, num_blocks: int, head_blocks: float, position_ms: float
) -> None:
    block_ms = num_positions * position_ms
    cut_now = partial(cut_call, num_positions, 3, 3 + num_blocks, head_blocks=head_blocks, block_ms=block_ms)
    if block_ms * max(1.0, head_blocks) > MAX_PIECE_MS:
        for idle_ms, is_final in [(block_ms, True), (1e-6, False)]:
            with pytest.raises(PeerRefused) as refused:
                cut_now(idle_ms=idle_ms)
            assert (refused.value.retry_after_s == 0) is is_final
        return
    cut = cut_now(idle_ms=block_ms)
    assert [block for low, high in cut.spans for block in range(low, high)] == list(range(3, 3 + num_blocks))
    for low, high in cut.spans:
        if cut.num_sequences == high - low == 1:
            assert block_ms <= MAX_PIECE_MS
        else:
            assert cut.num_sequences * (high - low) * block_ms <= PIECE_MS * 1.001


def test_pace_follows_the_measured_times() -> None:
    pace = ForwardPace(1.0)
    assert pace.ms == {"forward": 1.0, "backward": 3.0}
    for _ in range(40):
        pace.took("backward", 10, 2.0, 100.0)
    assert pace.ms["backward"] == pytest.approx(5.0, rel=0.01)
    assert pace.ms["forward"] == 1.0


def test_text_whose_attention_takes_too_long_is_refused_for_good_and_slows_down_no_other(llama_dir: Path) -> None:
    """At 12 H = 384 positions, attention takes as long as the weights."""
    asked = dataclasses.replace(GOOD, num_sequences=1, num_positions=384, head=False)
    with rigs(llama_dir) as rig:
        pace = ForwardPace(2.0)
        with pytest.raises(PeerRefused, match="a block takes 1536 ms for 384 positions here, ") as refused:
            forward_call.ForwardCall(asked, "forward", rig.deployed, pace)
        assert refused.value.retry_after_s == 0
        took = list[float]()
        with patch.object(ForwardPace, "took", lambda *arguments: took.append(arguments[2])):
            asyncio.run(served(rig, lambda rig: rig.call(torch.ones(384, 32), asked)))
        assert set(took) == {2 * 384.0}


def test_text_is_embedded_however_long_its_blocks_would_take(llama_dir: Path) -> None:
    asked = dataclasses.replace(GOOD, start=0, end=0, num_positions=384, of_tokens=True, head=False)
    deployed = deployment(loaded(llama_dir, 0, 3), 1.0)
    assert forward_call.ForwardCall(asked, "forward", deployed, ForwardPace(1000.0)).cut.spans == ()
    with pytest.raises(PeerRefused, match="a block takes"):
        forward_call.ForwardCall(dataclasses.replace(asked, end=1), "forward", deployed, ForwardPace(1000.0))
    deployed.engine.close()


def test_piece_ends_on_the_cpu_and_takes_the_time_of_an_accelerator() -> None:
    """An accelerator computes after the call has returned; reading a number of the result waits for it."""
    now_s = 0.0

    class OnAccelerator:
        def to(self, device: str) -> torch.Tensor:
            nonlocal now_s
            now_s += 0.25
            return X.to(device)

    with patch("swarm.serving.server.forward_server.time.perf_counter", lambda: now_s):
        result, elapsed_ms = forward_server._timed(OnAccelerator)
    assert result.device.type == "cpu"
    assert elapsed_ms == 250.0


def test_room_is_shared_and_freed() -> None:
    room = ForwardAdmission(max_bytes=100, max_calls=(4, 3, 2))
    a, b, c, d = (Sharer(network, name) for network, name in (("a", "a"), ("b", "b"), ("c", "c"), ("a", "d")))
    with pytest.raises(PeerRefused, match="51 bytes") as refused, room.reserved(a, 51):
        pass
    assert (refused.value.retry_after_s, refused.value.lacks_room) == (0, True)
    with room.reserved(a, 30):
        with pytest.raises(PeerRefused, match="of yours") as refused, room.reserved(a, 30):
            pass
        assert refused.value.retry_after_s > 0
        with room.reserved(a, 10):
            with pytest.raises(PeerRefused, match="of yours"), room.reserved(a, 1):
                pass
            with pytest.raises(PeerRefused, match="others"), room.reserved(d, 36):
                pass
            with room.reserved(d, 5):
                with pytest.raises(PeerRefused, match="others"), room.reserved(d, 1):
                    pass
                with room.reserved(b, 50):
                    assert [num_bytes for _, num_bytes in room.calls] == [30, 10, 5, 50]
                    with pytest.raises(PeerRefused, match="others"), room.reserved(c, 1):
                        pass
    assert not room.calls


# --- over a network --------------------------------------------------------------------------------------------------

GOOD = Compute(
    revision="r",
    start=3,
    end=6,
    num_sequences=2,
    num_positions=4,
    of_tokens=False,
    head=True,
    codec="raw",
    deadline_s=60,
)


@functools.cache
def loaded(directory: Path, start: int, end: int) -> Span:
    return load_span(open_model(directory), start, end)


def deployment(span: Span, forward_ms: float) -> Deployment:
    speed = SpanSpeed(prefill_ms=forward_ms, decode_ms=1.0, kv_bytes_per_token=1)
    held = LoadedSpan(span=span, speed=speed, kv_tokens=0, max_step_tokens=1, revision="r", source="", files=b"")
    return Deployment(held, span.new_pool(1), ServerOptions(), ThreadPoolExecutor(1))


class Rig:
    """A server of blocks [3, 6) of the tiny model, and a peer that sends anything."""

    def __init__(self, directory: Path, room: ForwardAdmission | None, forward_ms: float) -> None:
        self.internet = MemoryInternet()
        self.network, self.client = self.internet.network(), self.internet.network()
        self.deployed = deployment(loaded(directory, 3, 6), forward_ms)
        self.engine = self.deployed.engine
        self.server = ForwardServer("tiny", lambda: self.deployed, provider_of=self.network.provider_of, room=room)

    async def serve(self) -> None:
        for method, handler in self.server.methods.items():
            await self.network.serve_stream(method, handler)

    async def ask(self, asked: bytes, *messages: bytes, method: str = FORWARD_METHOD) -> int:
        """Return the response's bytes."""
        async with self.client.stream(self.network.peer_id, f"{method}/tiny", timeout_s=300) as stream:
            for message in (asked, *messages):
                await stream.send(message)
            piece = TensorPiece.from_bytes(await stream.receive())
            return len(piece.rows.payload)

    async def call(self, x: torch.Tensor, asked: Compute = GOOD, method: str = BACKWARD_METHOD) -> int:
        grads = pieces(torch.ones(x.shape[0], 256 if asked.head else 32)) if method == BACKWARD_METHOD else ()
        return await self.ask(asked.to_bytes(), *pieces(x), *grads, method=method)


def pieces(x: torch.Tensor, codec: str = "raw") -> Iterator[bytes]:
    payload = x.numpy().tobytes()
    for row in range(0, len(x), 1024):
        part = payload[row * x.shape[1] * 4 : (row + 1024) * x.shape[1] * 4]
        num_rows = min(1024, len(x) - row)
        yield TensorPiece(rows=Rows(codec=codec, num_rows=num_rows, num_columns=x.shape[1], payload=part)).to_bytes()


@contextmanager
def rigs(directory: Path, room: ForwardAdmission | None = None, forward_ms: float = 1e-3) -> Iterator[Rig]:
    rig = Rig(directory, room, forward_ms)
    try:
        yield rig
    finally:
        rig.engine.close()
    assert not rig.server.room.calls


def ask(directory: Path, scenario: Callable[[Rig], Awaitable[Any]], **options: Any) -> Any:
    async def main(rig: Rig) -> Any:
        await rig.serve()
        try:
            return await scenario(rig)
        finally:
            await rig.client.close()
            await rig.network.close()

    with rigs(directory, **options) as rig:
        return virtual_time.run(main(rig))


X = torch.ones(8, 32)
INT8 = TensorPiece(rows=Rows(codec="int8", num_rows=8, num_columns=32, payload=bytes(272))).to_bytes()


@pytest.mark.parametrize(
    ("changes", "messages", "error", "what"),
    [
        ({}, [*pieces(X / 0 - X / 0)], PeerViolation, "not finite"),
        ({}, [*pieces(torch.ones(8, 31))], PeerViolation, "31 columns"),
        ({}, [*pieces(torch.ones(9, 32))], PeerViolation, "9 rows"),
        ({}, [INT8], PeerViolation, "int8"),
        ({}, [b"\x01rubbish"], PeerViolation, "TensorPiece"),
        ({}, [], PeerTimeout, "30"),
        ({}, [*pieces(X[:4])], PeerTimeout, "30"),
        ({"deadline_s": 5.0}, [], PeerTimeout, "too long"),
        ({"start": 2}, [], PeerRefused, r"3:6"),
        ({"end": 7}, [], PeerRefused, r"3:6"),
        ({"start": 0, "end": 0, "of_tokens": True}, [], PeerRefused, r"3:6"),
        ({"revision": "other"}, [], PeerRefused, "revision"),
        ({"num_sequences": 2**10, "num_positions": 2**10}, [], PeerRefused, "a client may have|ms for 1024"),
        ({"num_sequences": 1, "num_positions": 2**20}, [], PeerRefused, "shorter sequences"),
    ],
)
def test_call_that_breaks_the_rules_is_answered_by_a_typed_error_and_frees_all(
    llama_dir: Path, changes: dict[str, Any], messages: list[bytes], error: type[SwarmError], what: str
) -> None:
    async def scenario(rig: Rig) -> None:
        for method in (FORWARD_METHOD, BACKWARD_METHOD):
            with pytest.raises(error, match=what):
                await rig.ask(dataclasses.replace(GOOD, **changes).to_bytes(), *messages, method=method)
        assert await rig.ask(GOOD.to_bytes(), *pieces(X)) == 8 * 256 * 4

    with no_leaks():
        ask(llama_dir, scenario, room=ForwardAdmission(max_bytes=2**24))


def test_call_gets_a_typed_error_when_its_opening_is_malformed_or_missing(llama_dir: Path) -> None:
    async def scenario(rig: Rig) -> None:
        with pytest.raises(PeerViolation):
            await rig.ask(b"\x01\xff")
        asked = dataclasses.replace(GOOD, start=0, end=3, of_tokens=True, head=False)
        rig.deployed = deployment(loaded(llama_dir, 0, 6), 1e-3)
        with pytest.raises(PeerViolation, match="no gradient"):
            await rig.ask(asked.to_bytes(), method=BACKWARD_METHOD)
        async with rig.client.stream(rig.network.peer_id, f"{FORWARD_METHOD}/tiny", timeout_s=60) as stream:
            with pytest.raises(PeerTimeout, match="too long"):
                await stream.receive()

    ask(llama_dir, scenario)


def test_result_that_is_not_finite_and_a_pass_that_fails_are_session_errors(llama_dir: Path) -> None:
    async def scenario(rig: Rig) -> None:
        with pytest.raises(SessionError, match="not finite"):
            await rig.call(torch.full((8, 32), 3e38))
        exhausted = patch.object(rig.deployed.loaded.span, "backward", side_effect=RuntimeError("out of memory"))
        with exhausted, pytest.raises(SessionError, match="out of memory"):
            await rig.call(X)
        assert await rig.call(X) == 8 * 32 * 4

    ask(llama_dir, scenario)


def test_call_is_refused_with_a_retry_time_when_its_client_has_too_much_in_flight(llama_dir: Path) -> None:
    async def scenario(rig: Rig) -> None:
        async with rig.client.stream(rig.network.peer_id, f"{FORWARD_METHOD}/tiny", timeout_s=60) as stream:
            await stream.send(GOOD.to_bytes())
            await asyncio.sleep(1)
            with pytest.raises(PeerRefused) as refused:
                await rig.call(X)
            assert refused.value.retry_after_s > 0
        await asyncio.sleep(1)
        assert await rig.call(X) == 8 * 32 * 4

    ask(llama_dir, scenario, room=ForwardAdmission(max_calls=(32, 16, 1)))


def test_calls_of_many_keys_of_one_network_leave_room_for_those_of_another_network(llama_dir: Path) -> None:
    async def scenario(rig: Rig) -> None:
        async with AsyncExitStack() as streams:
            keys = [rig.internet.network() for _ in range(12)]
            rig.internet.providers = dict.fromkeys((key.peer_id for key in keys), "one network")
            for key in keys * 4:
                stream = key.stream(rig.network.peer_id, f"{FORWARD_METHOD}/tiny", timeout_s=60)
                await (await streams.enter_async_context(stream)).send(GOOD.to_bytes())
            await asyncio.sleep(1)
            assert len(rig.server.room.calls) == 16
            assert await rig.call(X) == 8 * 32 * 4
        for key in keys:
            await key.close()

    ask(llama_dir, scenario)


def test_server_accepts_calls_again_after_it_was_slow(llama_dir: Path) -> None:
    """Refused calls measure nothing, so an outdated pace would otherwise stay."""

    async def scenario(rig: Rig) -> None:
        assert await rig.call(X) == 8 * 32 * 4
        for pace in rig.server._paces.values():
            pace.took("backward", 8, 1, 1e6)
        with pytest.raises(PeerRefused, match="shorter sequences"):
            await rig.call(X)
        await asyncio.sleep(PACE_S)
        assert await rig.call(X) == 8 * 32 * 4

    ask(llama_dir, scenario)


def test_call_is_refused_when_the_engine_ends_during_it(llama_dir: Path) -> None:
    """Its thread is shut down while one piece runs and another client's piece waits."""

    async def scenario(rig: Rig) -> None:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def end() -> None:
            await begun.wait()
            rig.engine.close(wait=False)

        def slow(*arguments: Any, **options: Any) -> torch.Tensor:
            loop.call_soon_threadsafe(begun.set)
            return X

        with patch("swarm.serving.server.forward_server._forward", slow):
            ending = asyncio.create_task(end())
            calls = [rig.call(X, method=FORWARD_METHOD) for _ in range(3)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            await ending
        assert any(isinstance(result, PeerRefused) for result in results)

    with rigs(llama_dir) as rig:
        asyncio.run(served(rig, scenario))


async def served(rig: Rig, scenario: Callable[[Rig], Awaitable[Any]]) -> None:
    await rig.serve()
    await scenario(rig)
    await rig.client.close()
    await rig.network.close()


@pytest.mark.parametrize("num_calls", [1, 3])
def test_steps_of_sessions_come_between_any_two_pieces(llama_dir: Path, num_calls: int) -> None:
    """Each block is a piece, since sequences are long: a decoding session waits for one piece, however many calls there
    are.
    """
    log: list[str] = []
    timed = forward_server._timed

    def piece(*arguments: Any, **options: Any) -> Any:
        log.append("piece")
        return timed(*arguments, **options)

    async def scenario(rig: Rig) -> None:
        async def decode() -> None:
            while True:
                await rig.engine.in_thread(log.append, "step")

        decoding = asyncio.create_task(decode())
        x = torch.ones(4 * 8, 32)
        asked = dataclasses.replace(GOOD, num_sequences=4, num_positions=8)
        results = await asyncio.gather(*(rig.call(x, asked) for _ in range(num_calls)))
        decoding.cancel()
        assert results == [4 * 8 * 32 * 4] * num_calls

    with (
        patch("swarm.serving.server.forward_server._timed", piece),
        patch("swarm.serving.server.forward_server.ForwardPace.took"),
        rigs(llama_dir, forward_ms=PIECE_MS / 8) as rig,
    ):
        asyncio.run(served(rig, scenario))
    # two blocks of each sequence are run again, and three run backwards
    assert log.count("piece") == num_calls * 4 * 5
    begun = log[log.index("step") :]
    assert ("piece", "piece") not in itertools.pairwise(begun)


async def drip(stream: Any) -> None:
    for _ in range(64):
        await asyncio.sleep(20)
        await stream.send(*pieces(torch.ones(1, 32)))
    await stream.receive()


@pytest.mark.parametrize("method", [FORWARD_METHOD, BACKWARD_METHOD])
def test_room_is_freed_soon_when_a_client_drips_rows(llama_dir: Path, method: str) -> None:
    asked = dataclasses.replace(GOOD, num_sequences=1, num_positions=64, deadline_s=3600.0)

    async def scenario(rig: Rig) -> float:
        clock = asyncio.get_running_loop().time
        since_s = clock()
        async with rig.client.stream(rig.network.peer_id, f"{method}/tiny", timeout_s=3600) as stream:
            await stream.send(asked.to_bytes())
            with pytest.raises(PeerTimeout, match="came to a stop"):
                await drip(stream)
        return clock() - since_s

    assert ask(llama_dir, scenario) < 100


# --- chosen logits ----------------------------------------------------------------------------------------------------

CHOSEN = dataclasses.replace(GOOD, num_top=3, has_targets=True)
TARGETS = torch.tensor([0, 255, 7, 80, 33, 21, 90, 12])


def targets(ids: torch.Tensor) -> bytes:
    rows = Rows(codec="tokens", num_rows=len(ids), num_columns=0, payload=ids.numpy().astype("<i4").tobytes())
    return TensorPiece(rows=rows).to_bytes()


async def chosen(rig: Rig, asked: Compute, x: torch.Tensor) -> torch.Tensor:
    async with rig.client.stream(rig.network.peer_id, f"{FORWARD_METHOD}/tiny", timeout_s=300) as stream:
        for message in (asked.to_bytes(), *pieces(x), *([targets(TARGETS)] if asked.has_targets else [])):
            await stream.send(message)
        rows = TensorPiece.from_bytes(await stream.receive()).rows
    return torch.frombuffer(bytearray(rows.payload), dtype=torch.float32).view(rows.num_rows, rows.num_columns)


@pytest.mark.parametrize("num_last", [0, 2])
def test_chosen_logits_come_from_slices_of_positions_and_are_those_of_all(llama_dir: Path, num_last: int) -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    sizes = list[int]()
    head = Span.head

    def counted(span: Span, hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(hidden.shape[0] * hidden.shape[1])
        return head(span, hidden)

    async def scenario(rig: Rig) -> tuple[torch.Tensor, torch.Tensor]:
        found = await chosen(rig, dataclasses.replace(CHOSEN, num_last=num_last), x)
        own = await chosen(rig, dataclasses.replace(CHOSEN, num_top=0, num_last=num_last), x)
        return found, own

    with (
        patch("swarm.serving.server.forward_call.HEAD_PIECE_BYTES", 3 * 4 * 256),
        patch.object(Span, "head", counted),
    ):
        found, own = ask(llama_dir, scenario)
    with torch.no_grad():
        logits_NV = loaded(llama_dir, 3, 6).forward(x.view(2, 4, 32), 3, 6)[:, -num_last:].flatten(0, 1)
    targets_N = TARGETS.view(2, 4)[:, -num_last:].flatten()
    values, ids = logits_NV.topk(3)
    sums = logits_NV.logsumexp(-1, keepdim=True)
    expected = torch.cat([values, ids.float(), logits_NV.gather(-1, targets_N[:, None]), sums], dim=-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(own, expected[:, -2:], rtol=1e-5, atol=1e-4)
    assert max(sizes) == 3
    assert sum(sizes) == 2 * len(expected)


def test_target_that_the_model_excludes_has_a_finite_logit() -> None:
    logits_11V = torch.tensor([[[0.0, -torch.inf, 1.0]]])
    rows = forward_server.chosen_logits(logits_11V, 1, 1.0, torch.tensor([[1]]))
    assert rows[0, 0, :3].tolist() == [1.0, 2.0, -limits.MAX_LOGPROB]


def test_pieces_of_the_head_measure_no_pace(llama_dir: Path) -> None:
    measured = list[float]()

    def took(_pace: ForwardPace, _direction: str, _num_positions: int, num_blocks: float, _elapsed_ms: float) -> None:
        measured.append(num_blocks)

    with patch.object(ForwardPace, "took", took):
        ask(llama_dir, lambda rig: chosen(rig, CHOSEN, torch.zeros(8, 32)))
    assert measured == [3.0]


def test_targets_that_are_none_and_targets_for_a_server_without_the_head_are_refused(llama_dir: Path) -> None:
    async def scenario(rig: Rig) -> None:
        with pytest.raises(PeerViolation, match="vocabulary of 256"):
            await rig.ask(CHOSEN.to_bytes(), *pieces(X), targets(TARGETS + 1))
        with pytest.raises(PeerViolation, match="at most 8"):
            await rig.ask(CHOSEN.to_bytes(), *pieces(X), targets(torch.cat([TARGETS, TARGETS])))
        with pytest.raises(PeerViolation, match="last block"):
            await rig.ask(dataclasses.replace(CHOSEN, end=5).to_bytes())
        with pytest.raises(PeerViolation, match="no gradient"):
            await rig.ask(CHOSEN.to_bytes(), method=BACKWARD_METHOD)
        assert await rig.ask(CHOSEN.to_bytes(), *pieces(X), targets(TARGETS)) == 8 * 8 * 4

    ask(llama_dir, scenario)


def test_long_prompts_chosen_logits_take_less_room_than_all_of_them(llama_dir: Path) -> None:
    asked = dataclasses.replace(CHOSEN, num_sequences=1, num_positions=2**18)
    with rigs(llama_dir, forward_ms=1e-6) as rig:
        call = forward_call.ForwardCall(asked, "forward", rig.deployed, ForwardPace(1e-6))
        everything = forward_call.ForwardCall(
            dataclasses.replace(asked, num_top=0, has_targets=False), "forward", rig.deployed, ForwardPace(1e-6)
        )
        assert call.head_rows * 4 * 256 <= forward_call.HEAD_PIECE_BYTES
        assert call.num_bytes < everything.num_bytes / 2
        # the inputs, the last block's outputs, the targets, the answer, and the logits of a piece
        assert call.num_bytes == 2**18 * (4 * 32 + 4 * 32 + 8 + 4 * 8) + forward_call.HEAD_PIECE_BYTES
