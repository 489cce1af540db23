"""Tests that a run's file from a stranger is the one that its id names, or that a typed error is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training_swarm import Swarm
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet
from swarm.testing import virtual_time
from swarm.training.run import run_copy
from swarm.training.run.methods import Methods
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_copy import MAX_ASKED_AT_ONCE, fetch_run, find_run, serve_run
from swarm.training.run.run_file import load_checked_run, new_run_file, sign_file, sign_run
from swarm.training.run.run_tables import MODULE_TYPE
from swarm.training.run.signed_run import MAX_RUN_FILE_BYTES, SignedRun, parse_signed_run
from swarm_protocol.errors import ConfigError, IntegrityError, PeerError, PeerRefused, PeerTimeout, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.records import TrainerRecord

AUTHOR = Identity(bytes(32))
MODEL = {"model_type": MODULE_TYPE, "num_values": 12, "digest": "0" * 64, "num_samples": 0}
RUN = sign_run(RunConfig(name="test", model=MODEL), AUTHOR, issued_at=1_700_000_000)


def in_virtual_time(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        virtual_time.run(test())

    return run


async def fetch_from_one_who_says(data: bytes, run_id: str = RUN.run_id) -> SignedRun:
    internet = MemoryInternet()
    member, visitor = internet.network(), internet.network()

    async def give(_peer_id: str, _request: bytes) -> bytes:
        return data

    await member.serve(Methods(run_id).run_file, give)
    try:
        return await fetch_run(visitor, member.peer_id, run_id)
    finally:
        await internet.close()


@in_virtual_time
async def test_fetch_run_from_a_member_gives_the_signed_run() -> None:
    internet = MemoryInternet()
    member, visitor = internet.network(), internet.network()
    await serve_run(member, RUN)
    fetched = await fetch_run(visitor, member.peer_id, RUN.run_id)
    assert fetched == RUN
    assert fetched.text == RUN.text
    await internet.close()


@in_virtual_time
async def test_find_run_asks_members_until_one_gives_the_file_with_the_runs_id() -> None:
    internet = MemoryInternet()
    visitor, honest = internet.network(), internet.network()
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(Membership(internet.network())) for _ in range(2 * MAX_ASKED_AT_ONCE)
        ]
        for liar in members:
            liar.announce(TrainerRecord(run=RUN.run_id, outer_step=9, digest=bytes(32), state="training"))
        last = await stack.enter_async_context(Membership(honest))
        last.announce(TrainerRecord(run=RUN.run_id, outer_step=0, state="joining"))
        await serve_run(honest, RUN)
        looking = await stack.enter_async_context(Membership(visitor))
        assert await find_run(visitor, looking, RUN.run_id, timeout_s=60.0) == RUN
    await internet.close()


@in_virtual_time
async def test_find_run_asks_members_in_an_order_that_no_peer_can_influence() -> None:
    """There are more strangers than can be asked. They claim to be further than the only member, and never answer."""
    internet = MemoryInternet()
    honest = internet.network()
    async with AsyncExitStack() as stack:
        for _ in range(3 * MAX_ASKED_AT_ONCE):
            silent = internet.network()
            await silent.serve(Methods(RUN.run_id).run_file, lambda *_: asyncio.sleep(1e6))
            membership = await stack.enter_async_context(Membership(silent))
            membership.announce(TrainerRecord(run=RUN.run_id, outer_step=9, digest=bytes(32), state="training"))
        last = await stack.enter_async_context(Membership(honest))
        last.announce(TrainerRecord(run=RUN.run_id, outer_step=0, state="joining"))
        await serve_run(honest, RUN)
        found = 0
        for _ in range(40):
            visitor = internet.network()
            async with Membership(visitor) as looking:
                with suppress(PeerTimeout):
                    found += await find_run(visitor, looking, RUN.run_id) == RUN
        # 16 of 25 peers are asked: the probability that no visitor finds the run is 1e-17
        assert found
    await internet.close()


@in_virtual_time
async def test_find_run_raises_an_error_with_a_remedy_when_nobody_trains_it() -> None:
    internet = MemoryInternet()
    visitor = internet.network()
    async with Membership(visitor) as membership:
        with pytest.raises(PeerTimeout, match="nobody trains it on this network") as caught:
            await find_run(visitor, membership, RUN.run_id)
    assert "--peers" in caught.value.remedy
    await internet.close()


def test_member_that_trains_answers_fetch_run() -> None:
    async def main() -> None:
        swarm = Swarm(RunConfig(name="test", outer_steps=1, min_group=1, model=MODEL))
        swarm.run = sign_run(swarm.run.config, AUTHOR, issued_at=1_700_000_000)
        async with swarm:
            member = await swarm.join("a")
            await swarm.finish()
            visitor = swarm.internet.network()
            assert await fetch_run(visitor, member.peer_id, swarm.run.run_id) == swarm.run
            await visitor.close()

    virtual_time.run(main())


def test_run_from_a_file_edited_by_hand_is_given_with_its_signed_bytes(tmp_path: Path) -> None:
    """Whole numbers for fractional settings are other bytes than those of the config that they give."""
    path = tmp_path / "run.toml"
    new_run_file(path, RunConfig(name="test", model=MODEL))
    text = path.read_text().replace("quorum_grace_s = 2.0", "quorum_grace_s = 3  # private words of the author")
    path.write_text(text)
    signed = sign_file(path, AUTHOR, issued_at=1_700_000_000)
    loaded = load_checked_run(path)
    for run in (signed, loaded):
        assert "quorum_grace_s = 3\n" in run.text
        assert "private" not in run.text
        copied = parse_signed_run(run.text.encode(), "a test")
        assert copied == loaded
        assert copied.run_id == signed.run_id


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"name = ",
        b"[" * 30_000,
        b"name = 1979-05-27T07:32:00Z",
        b'name = "test"\n',
        RUN.text.encode()[:-20],
        RUN.text.replace("outer_steps = 40", "outer_steps = 41").encode(),
        RUN.text.replace('name = "test"', 'name = "\\u001b[2J"').encode(),
        (RUN.text + "more = 1\n").encode(),
        ("surprise = 1\n" + RUN.text).encode(),
        RUN.text.replace(AUTHOR.peer_id, Identity(b"x" * 32).peer_id).encode(),
        RUN.text.replace("issued_at = 1700000000", "issued_at = 1700000001").encode(),
        RUN.text.replace("issued_at = 1700000000", "issued_at = 1.0e400").encode(),
    ],
    ids=range(14),
)
def test_fetch_run_raises_integrity_error_for_an_unsigned_answer(data: bytes) -> None:
    assert data != RUN.text.encode()
    with pytest.raises(IntegrityError, match="did not give the file of run") as caught:
        virtual_time.run(fetch_from_one_who_says(data))
    assert caught.value.peer_id != AUTHOR.peer_id, "the error must name the peer that gave the file, not its author"


def test_fetch_run_refuses_another_run_and_names_the_peer() -> None:
    other = sign_run(RUN.config, AUTHOR, issued_at=1_700_000_001)
    stranger = sign_run(RUN.config, Identity(b"x" * 32), issued_at=1_700_000_000)
    for run in (other, stranger):
        with pytest.raises(IntegrityError, match="instead of") as caught:
            virtual_time.run(fetch_from_one_who_says(run.text.encode()))
        assert caught.value.peer_id


def test_fetch_run_raises_violation_when_the_answer_is_too_large() -> None:
    padded = RUN.text + "#" * (MAX_RUN_FILE_BYTES - len(RUN.text))
    assert virtual_time.run(fetch_from_one_who_says(padded.encode())) == RUN
    with pytest.raises(PeerViolation, match="more than"):
        virtual_time.run(fetch_from_one_who_says((padded + "#").encode()))


@given(at=st.integers(0, len(RUN.text) - 1), byte=st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_run_file_with_one_changed_byte_is_the_same_run_or_refused(at: int, byte: int) -> None:
    data = bytearray(RUN.text.encode())
    data[at] = byte
    try:
        run = parse_signed_run(bytes(data), "a test")
    except (ConfigError, IntegrityError):
        return
    assert run.run_id == RUN.run_id


@in_virtual_time
async def test_fetch_run_raises_peer_error_when_peer_has_no_file_or_is_no_member_or_hangs() -> None:
    internet = MemoryInternet()
    member, stranger, stuck, visitor = (internet.network() for _ in range(4))
    without = replace(RUN, text="")
    await serve_run(member, without)

    async def hang(_peer_id: str, _request: bytes) -> bytes:
        await asyncio.sleep(1000)
        return b""

    await stuck.serve(Methods(RUN.run_id).run_file, hang)
    with pytest.raises(PeerRefused, match="does not have"):
        await fetch_run(visitor, member.peer_id, RUN.run_id)
    with pytest.raises(PeerError):
        await fetch_run(visitor, stranger.peer_id, RUN.run_id)
    started = asyncio.get_running_loop().time()
    with pytest.raises(PeerTimeout):
        await fetch_run(visitor, stuck.peer_id, RUN.run_id)
    assert asyncio.get_running_loop().time() - started <= run_copy.FETCH_TIMEOUT_S + 1
    await internet.close()
