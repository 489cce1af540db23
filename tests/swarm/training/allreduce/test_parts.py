"""Tests which values parts and their frames cover, and which bytes are refused when they are decoded."""

from __future__ import annotations

import asyncio

import pytest
import torch
from swarm.testing import virtual_time
from swarm.training.allreduce import parts as module
from swarm.training.allreduce.parts import (
    PartResult,
    check_frame,
    decode_frame,
    decoded_frames,
    part_bytes,
    part_frames,
)
from swarm_compression import CodecError, get_codec
from swarm_protocol import limits
from swarm_protocol.errors import IntegrityError, RoundError
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Group

CODEC = get_codec("int8")
X_N = torch.randn(3000, generator=torch.Generator().manual_seed(0))


def group_of(*part_values: int) -> Group:
    peers = sorted(Identity(bytes([index]) * 32).peer_id for index in range(len(part_values)))
    return Group(
        run="run",
        step=1,
        attempt=0,
        state_digest=bytes(32),
        members=tuple(Contribution(peer_id=peer, num_tokens=1, num_samples=1) for peer in peers),
        part_values=part_values,
        reduce_s=1.0,
        vote_s=1.0,
    )


GROUP = group_of(1024, 0, 1976)


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_VALUES", 512)


def encoded() -> list[bytes]:
    return [
        b"".join(CODEC.encode(X_N[frame]) for frame in part_frames(GROUP, index))
        for index in range(len(GROUP.part_values))
    ]


def test_part_frames_cover_the_vector_in_order_and_each_belongs_to_one_part() -> None:
    frames = [part_frames(GROUP, index) for index in range(3)]
    assert [frame for part in frames for frame in part] == [
        *(slice(at, at + 512) for at in (0, 512, 1024, 1536, 2048)),
        slice(2560, 3000),
    ]
    assert [len(part) for part in frames] == [2, 0, 4]


def test_decoded_frames_hold_the_values_in_their_places() -> None:
    parts = encoded()
    assert [len(part) for part in parts] == [part_bytes(GROUP, index, CODEC) for index in range(3)]
    got_N = torch.cat([x_F for _, x_F in decoded_frames(GROUP, parts, CODEC)])
    assert len(got_N) == 3000
    assert (got_N - X_N).norm() < 0.01 * X_N.norm()
    # read-only and writable bytes decode alike
    again_N = torch.cat([x_F for _, x_F in decoded_frames(GROUP, [*map(bytearray, parts)], CODEC)])
    assert torch.equal(got_N, again_N)


@pytest.mark.parametrize("spoil", [lambda part: part + b"x", lambda part: part[:-1], lambda part: b"\xff" * len(part)])
def test_decoding_names_the_part_when_no_encoder_wrote_its_bytes(spoil) -> None:  # type: ignore[no-untyped-def]
    parts = encoded()
    parts[2] = spoil(parts[2])
    with pytest.raises(IntegrityError, match="part 2"):
        list(decoded_frames(GROUP, parts, CODEC))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "e3m0"])  # fp16 cannot hold a number this large
def test_check_and_decode_refuse_a_frame_that_moves_a_parameter_out_of_bounds(name: str) -> None:
    codec, x_N = get_codec(name), torch.full((300,), 0.7 * limits.MAX_PARAMETER_MOVE)
    check_frame(codec, codec.encode(x_N), 300)
    assert torch.equal(decode_frame(codec, codec.encode(x_N), 300), codec.decode(codec.encode(x_N), 300))
    for refuse in (check_frame, decode_frame):
        with pytest.raises(CodecError, match=r"a parameter moves by 1\.[34]"):
            refuse(codec, codec.encode(2 * x_N), 300)


def test_decoding_refuses_too_few_parts() -> None:
    with pytest.raises(IntegrityError, match="2 parts of 3"):
        list(decoded_frames(GROUP, encoded()[:2], CODEC))


def test_part_ends_its_waiters_and_keeps_no_frame_once_the_step_is_over() -> None:
    """Peers may hold streams open that are served beyond the step."""

    async def main() -> None:
        part = PartResult(GROUP, 0, CODEC)
        waiting = [asyncio.create_task(wait) for wait in (part.wait_for_frames(1), part.wait_for_kept(1))]
        await asyncio.sleep(1.0)
        part.drop()
        for each in waiting:
            with pytest.raises(RoundError, match="the step is over"):
                await asyncio.wait_for(each, 1.0)
        with pytest.raises(RoundError, match="the step is over"):
            part.keep(CODEC.encode(X_N[part.frames[0]]))
        assert not part.kept

    virtual_time.run(main())
