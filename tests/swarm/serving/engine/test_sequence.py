"""One sequence among others: its room, its failures, and what it frees."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import torch
from support.arithmetic_span import (
    GREEDY,
    NUM_BLOCKS,
    NUM_PAGES,
    REVISION,
    VOCAB,
    Sums,
    alone,
    answer,
    generate,
    ids,
    prompt_of,
    with_engine,
)
from support.leaks import no_leaks
from swarm.serving.engine.engine import PASS_S, Engine
from swarm.serving.engine.sequence import EngineSequence, StepOutput
from swarm.serving.model.batch import Batch, Want
from swarm.serving.model.kv_pool import PAGE_TOKENS
from swarm.serving.peer_shares import RETRY_AFTER_S
from swarm.serving.sampling.sampling import Pick
from swarm.serving.server.deployment import ServerOptions
from swarm.serving.wire.page_keys import page_keys
from swarm.testing import virtual_time
from swarm_protocol.errors import IntegrityError, PeerRefused, PeerViolation, SessionError

# --- room -------------------------------------------------------------------------------------------------------------


def test_engine_refuses_a_sequence_when_full_and_accepts_one_when_room_is_freed() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        def open_for(client: str) -> EngineSequence:
            return engine.open(client=client, start=0, end=4, max_tokens=20 * PAGE_TOKENS)

        first, second = open_for("a"), open_for("a")
        assert engine.free_tokens == 0
        with pytest.raises(PeerRefused) as refused:
            open_for("b")
        assert refused.value.retry_after_s > 0
        first.close()
        first.close()
        with pytest.raises(PeerRefused):
            open_for("a")  # others wait
        open_for("b").close()
        second.close()

    with_engine(work)


def test_engine_ends_the_longest_idle_sequences_when_others_need_room() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        ended: list[str] = []

        def open_for(client: str, num_pages: int = 10) -> EngineSequence:
            sequence = engine.open(client=client, start=0, end=4, max_tokens=num_pages * PAGE_TOKENS)
            sequence.on_ended = lambda error: ended.append(f"{client} {type(error).__name__}")
            return sequence

        old = open_for("a")
        await asyncio.sleep(5)
        young = open_for("b")
        await old.step(ids(1), Want.NOTHING)
        rest = [open_for("c"), open_for("d")]
        with pytest.raises(PeerRefused):
            open_for("e")
        await asyncio.sleep(10)
        for sequence in rest:
            await sequence.step(ids(1), Want.NOTHING)
        with pytest.raises(PeerRefused):
            open_for("e", 25)  # more than all idle sequences hold: none is ended in vain
        assert ended == []
        new = open_for("e")
        assert ended == ["b PeerRefused"]  # the younger sequence, but the longest unused
        with pytest.raises(PeerRefused, match="idle"):
            await young.step(ids(1), Want.NOTHING)
        for sequence in (old, young, new, *rest):
            sequence.close()

    with_engine(work)


def open_pages(engine: Engine, client: str, num_pages: int) -> EngineSequence:
    return engine.open(client=client, start=0, end=4, max_tokens=num_pages * PAGE_TOKENS)


async def compute(held: list[EngineSequence], seconds: int) -> None:
    """Let none of the sequences be idle for long."""
    for _ in range(seconds):
        await asyncio.sleep(1)
        for sequence in held:
            await sequence.step(ids(1), Want.NOTHING)


def test_engine_ends_old_sequences_beyond_half_when_another_peer_needs_room() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        open_for = partial(open_pages, engine)
        # 40 pages in all, of which one peer has 30 and another 10
        held = [open_for("a", 10) for _ in range(3)]
        held.append(open_for("b", 10))
        await compute(held, 50)
        with pytest.raises(PeerRefused):
            open_for("c", 1)
        await compute(held, 20)
        with pytest.raises(PeerRefused):
            open_for("c", 11)  # more than the peer has beyond half: none is ended in vain
        assert [sequence for sequence in held if sequence.end_error] == []
        fair = open_for("c", 10)
        ended = held.pop(0)
        assert isinstance(ended.end_error, PeerRefused)
        assert ended.end_error.lacks_room
        with pytest.raises(PeerRefused):
            open_for("d", 1)  # nobody has more than half now
        for sequence in (*held, fair):
            sequence.close()

    with_engine(work)


def test_engine_ends_silent_sequences_before_old_ones_and_counts_none_twice() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        open_for = partial(open_pages, engine)
        silent, held = open_for("a", 4), [open_for("a", 13), open_for("a", 13), open_for("b", 10)]
        await compute(held, 70)
        with pytest.raises(PeerRefused):
            open_for("c", 18)
        assert [sequence for sequence in (silent, *held) if sequence.end_error] == []
        open_for("c", 17)
        assert [sequence for sequence in (silent, *held) if sequence.end_error] == [silent, held[0]]

    with_engine(work)


def test_engine_ends_an_old_sequence_for_no_peer_that_would_then_have_over_half_itself() -> None:
    """Two peers with long sequences would end each other's without end."""

    async def work(engine: Engine, span: Sums) -> None:
        old = open_pages(engine, "a", 40)
        await compute([old], 70)
        with pytest.raises(PeerRefused):
            open_pages(engine, "b", 21)
        assert old.end_error is None
        open_pages(engine, "b", 20)
        assert old.end_error is not None

    with_engine(work)


def test_client_for_which_a_running_sequence_was_ended_may_ask_again_when_the_pass_has_ended() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        old = open_pages(engine, "a", 40)
        await compute([old], 70)
        step = asyncio.create_task(old.step(ids(1), Want.NOTHING))
        await asyncio.sleep(PASS_S / 10)
        assert engine.load.num_running == 1
        with pytest.raises(PeerRefused) as refused:
            open_pages(engine, "b", 20)
        assert refused.value.retry_after_s == PASS_S
        with pytest.raises(PeerRefused):
            await step
        await asyncio.sleep(PASS_S)
        open_pages(engine, "b", 20)
        with pytest.raises(PeerRefused) as refused:
            open_pages(engine, "c", 21)
        assert refused.value.retry_after_s == RETRY_AFTER_S

    with_engine(work, compute_s=PASS_S / 2)


def test_sequence_that_cannot_grow_names_the_cache_and_is_asked_again_when_the_pass_has_ended() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        held = [open_pages(engine, "a", 13), open_pages(engine, "a", 13)]
        grown = engine.open(client="b", start=0, end=4, max_tokens=14 * PAGE_TOKENS, grow_to=20 * PAGE_TOKENS)
        await grown.step(ids(*[1] * 14 * PAGE_TOKENS), Want.NOTHING)
        for age_s, retry_after_s in ((0, RETRY_AFTER_S), (60, PASS_S)):
            await compute(held, age_s)
            steps = [asyncio.create_task(sequence.step(ids(1), Want.NOTHING)) for sequence in held]
            await asyncio.sleep(PASS_S / 10)
            with pytest.raises(PeerRefused, match="its cache has no room for 1 more page: ") as refused:
                await grown.step(ids(1), Want.NOTHING)
            assert refused.value.retry_after_s == retry_after_s
            await asyncio.gather(*steps, return_exceptions=True)
        for sequence in (*held, grown):
            sequence.close()

    with_engine(work, compute_s=PASS_S / 2, max_sessions=3)


def test_engine_ends_no_second_sequence_while_the_pages_of_the_first_are_in_a_pass() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        held = [open_pages(engine, "a", 13) for _ in range(3)]
        await compute(held, 70)
        steps = [asyncio.create_task(sequence.step(ids(1), Want.NOTHING)) for sequence in held]
        await asyncio.sleep(PASS_S / 10)
        assert engine.load.num_running == 3
        for _ in range(2):
            with pytest.raises(PeerRefused) as refused:
                open_pages(engine, "b", 10)
            assert refused.value.retry_after_s == PASS_S
        assert [sequence.end_error is None for sequence in held] == [False, True, True]
        await asyncio.gather(*steps, return_exceptions=True)
        for sequence in (*held, open_pages(engine, "b", 10)):
            sequence.close()

    with_engine(work, compute_s=PASS_S / 2)


def test_sequence_waits_for_the_pages_of_a_closed_one_and_no_other_is_ended_for_it() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        closed, idle = open_pages(engine, "a", 20), open_pages(engine, "a", 10)
        grown = engine.open(client="b", start=0, end=4, max_tokens=8 * PAGE_TOKENS, grow_to=20 * PAGE_TOKENS)
        await grown.step(ids(*[1] * 8 * PAGE_TOKENS), Want.NOTHING)
        await asyncio.sleep(70)
        step = asyncio.create_task(closed.step(ids(1), Want.NOTHING))
        await asyncio.sleep(PASS_S / 10)
        closed.close()
        last = open_pages(engine, "c", 2)
        with pytest.raises(PeerRefused) as refused:
            await grown.step(ids(1), Want.NOTHING)
        assert refused.value.retry_after_s == PASS_S
        assert idle.end_error is None
        await asyncio.gather(step, return_exceptions=True)
        await asyncio.sleep(PASS_S)
        await grown.step(ids(1), Want.NOTHING)
        for sequence in (idle, grown, last):
            sequence.close()

    with_engine(work, compute_s=PASS_S / 2, max_sessions=3)


def test_sequence_grows_while_pages_are_free_and_no_further_than_it_asked() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        sequence = engine.open(client="a", start=0, end=4, max_tokens=PAGE_TOKENS, grow_to=4 * PAGE_TOKENS)
        assert engine.free_tokens == (NUM_PAGES - 1) * PAGE_TOKENS
        assert await generate(sequence, [1, 2], 3 * PAGE_TOKENS) == answer([1, 2], 3 * PAGE_TOKENS)
        assert engine.free_tokens == (NUM_PAGES - 4) * PAGE_TOKENS
        with pytest.raises(AssertionError, match="beyond the room"):
            await sequence.step(ids(*range(PAGE_TOKENS)), Want.NOTHING)
        sequence.close()

    with_engine(work)


def test_sequence_that_finds_no_page_is_refused_and_may_try_again() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        sequence = engine.open(client="a", start=0, end=4, max_tokens=PAGE_TOKENS, grow_to=4 * PAGE_TOKENS)
        await sequence.step(ids(*[1] * PAGE_TOKENS), Want.NOTHING)
        other = engine.open(client="b", start=0, end=4, max_tokens=(NUM_PAGES - 1) * PAGE_TOKENS)
        with pytest.raises(PeerRefused, match="the server is full: its cache has no room for 1 more page:") as refused:
            await sequence.step(ids(1), Want.NOTHING)
        assert refused.value.retry_after_s > 0
        assert refused.value.lacks_room
        # the other one may be ended only once it is idle for long
        await asyncio.sleep(15)
        await sequence.step(ids(1), Want.NOTHING)
        assert isinstance(other.end_error, PeerRefused)
        assert other.end_error.lacks_room
        sequence.close()
        assert engine.free_tokens == NUM_PAGES * PAGE_TOKENS

    with_engine(work)


def test_sequence_that_holds_all_pages_learns_that_it_never_gets_more() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        most = (NUM_PAGES + 1) * PAGE_TOKENS
        sequence = engine.open(client="a", start=0, end=4, max_tokens=PAGE_TOKENS, grow_to=most)
        for _ in range(NUM_PAGES):
            await sequence.step(ids(*[1] * PAGE_TOKENS), Want.NOTHING)
        with pytest.raises(PeerRefused, match=f"over the {NUM_PAGES} pages of this server") as refused:
            await sequence.step(ids(1), Want.NOTHING)
        assert (refused.value.retry_after_s, refused.value.lacks_room) == (0, True)
        sequence.close()

    with_engine(work)


def test_sequence_over_half_of_the_pages_grows_no_more_while_another_peer_waits() -> None:
    """Without that, one answer that grows would keep all others out for as long as it takes."""

    async def work(engine: Engine, span: Sums) -> None:
        sequence = engine.open(client="a", start=0, end=4, max_tokens=PAGE_TOKENS, grow_to=NUM_PAGES * PAGE_TOKENS)
        half = NUM_PAGES // 2
        for _ in range(half + 1):
            await sequence.step(ids(*[1] * PAGE_TOKENS), Want.NOTHING)
        with pytest.raises(PeerRefused, match="the server is full"):
            engine.open(client="b", start=0, end=4, max_tokens=half * PAGE_TOKENS)
        with pytest.raises(PeerRefused, match="are waiting"):
            await sequence.step(ids(1), Want.NOTHING)
        sequence.close()
        engine.open(client="b", start=0, end=4, max_tokens=half * PAGE_TOKENS).close()

    with_engine(work)


@pytest.mark.parametrize("blocks", [(0, 5), (2, 2), (-1, 3)])
def test_engine_refuses_blocks_outside_its_span(blocks: tuple[int, int]) -> None:
    async def work(engine: Engine, span: Sums) -> None:
        with pytest.raises(PeerRefused):
            engine.open(client="a", start=blocks[0], end=blocks[1], max_tokens=10)

    with_engine(work)


def test_engine_refuses_a_sequence_beyond_the_context_for_good() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        with pytest.raises(PeerRefused) as refused:
            engine.open(client="a", start=0, end=4, max_tokens=2**40)
        assert refused.value.retry_after_s == 0

    with_engine(work)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_engine_ends_only_the_sequence_whose_numbers_are_not_finite() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        sequences = [engine.open(client="a", start=1, end=4, max_tokens=30) for _ in range(3)]
        bad = torch.full((1, 4), math.nan)
        results = await asyncio.gather(
            sequences[0].step(torch.zeros(1, 4), Want.LAST),
            sequences[1].step(bad, Want.LAST),
            sequences[2].step(torch.zeros(1, 4), Want.NOTHING, GREEDY),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [StepOutput, SessionError, StepOutput]
        assert len(span.batches) == 1
        assert engine.num_sequences == 2
        with pytest.raises(SessionError):
            await sequences[1].step(bad, Want.LAST)
        for sequence in sequences:
            sequence.close()

    with_engine(work)


def test_engine_retries_each_sequence_alone_when_a_pass_fails() -> None:
    def fail(batch: Batch) -> None:
        if 13 in batch.x:
            raise RuntimeError("a bug")

    async def work(engine: Engine, span: Sums) -> None:
        sequences = [engine.open(client="a", start=0, end=4, max_tokens=30) for _ in range(3)]
        steps = [sequence.step(ids(token), Want.LAST) for sequence, token in zip(sequences, (1, 13, 2), strict=True)]
        first, failed, third = await asyncio.gather(*steps, return_exceptions=True)
        assert isinstance(first, StepOutput)
        assert isinstance(third, StepOutput)
        assert torch.equal(third.output, alone([2]))  # type: ignore[arg-type]
        assert isinstance(failed, SessionError)
        assert "a bug" in str(failed)
        for sequence in sequences:
            sequence.close()

    with_engine(work, span=Sums(on_run=fail))


# --- cancelling -------------------------------------------------------------------------------------------------------


def test_engine_never_runs_a_step_that_is_cancelled_while_it_waits() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        first, second = (engine.open(client="a", start=0, end=4, max_tokens=20) for _ in range(2))
        running = asyncio.create_task(first.step(ids(1), Want.NOTHING))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(second.step(ids(2), Want.NOTHING))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting, running})
        assert waiting.cancelled()
        assert len(span.batches) == 1
        done = await second.step(ids(3), Want.LAST)
        assert done.output is not None
        assert torch.equal(done.output, alone([3]))
        first.close()
        second.close()

    with_engine(work, compute_s=0.1)


def test_engine_frees_the_pages_of_a_cancelled_running_step_when_its_pass_ends() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        sequence = engine.open(client="a", start=0, end=4, max_tokens=20)
        stepping = asyncio.create_task(sequence.step(ids(1), Want.NOTHING))
        await asyncio.sleep(0.05)
        stepping.cancel()
        await asyncio.wait({stepping})
        # the running pass still writes them
        assert engine.num_sequences == 0
        assert engine.pages.num_free == NUM_PAGES - 2
        await asyncio.sleep(0.1)
        assert engine.pages.num_free == NUM_PAGES

    with_engine(work, compute_s=0.1)


def test_engine_fails_a_step_when_its_sequence_is_closed() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        sequences = [engine.open(client="a", start=0, end=4, max_tokens=20) for _ in range(2)]
        running = asyncio.create_task(sequences[0].step(ids(1), Want.NOTHING))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(sequences[1].step(ids(1), Want.NOTHING))
        await asyncio.sleep(0.01)
        for sequence in sequences:
            sequence.close()
        assert engine.num_waiting == 0
        assert engine.pages.num_free == NUM_PAGES - 2
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(result) for result in results] == [SessionError, SessionError]
        await asyncio.sleep(0.1)
        assert len(span.batches) == 1
        assert engine.pages.num_free == NUM_PAGES

    with_engine(work, compute_s=0.1)


def test_engine_fails_waiting_steps_and_refuses_new_ones_when_it_ends() -> None:
    async def run() -> None:
        span = Sums()
        engine = Engine(span, span.pool(), ServerOptions(), revision=REVISION)
        running = asyncio.create_task(engine.run())
        sequences = [engine.open(client="a", start=0, end=4, max_tokens=20) for _ in range(3)]
        ended: list[Exception] = []
        sequences[2].on_ended = ended.append
        steps = [asyncio.create_task(sequence.step(ids(1), Want.NOTHING)) for sequence in sequences[:2]]
        await asyncio.sleep(0.05)
        running.cancel()
        results = await asyncio.gather(*steps, return_exceptions=True)
        assert [type(result) for result in results] == [PeerRefused, PeerRefused]
        assert len(ended) == 1
        with pytest.raises(PeerRefused):
            engine.open(client="a", start=0, end=4, max_tokens=20)
        assert engine.pages.num_free == NUM_PAGES
        engine.close(wait=True)

    with no_leaks():
        virtual_time.run(run(), compute_s=lambda function: 0.1)


def test_closed_engine_refuses_new_work_and_work_that_waited_for_its_thread() -> None:
    async def run() -> None:
        span = Sums()
        engine = Engine(span, span.pool(), ServerOptions(), revision=REVISION)
        go_on = threading.Event()
        running, waiting = [asyncio.create_task(engine.in_thread(go_on.wait, 60)) for _ in range(2)]
        await asyncio.sleep(0)
        engine.close(wait=False)
        go_on.set()
        assert await running
        with pytest.raises(PeerRefused, match="has stopped computing"):
            await waiting
        with pytest.raises(PeerRefused, match="has stopped computing"):
            await engine.in_thread(int)

    asyncio.run(run())


# --- hand-over --------------------------------------------------------------------------------------------------------


async def pieces_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def test_sequence_continues_when_it_moves_to_another_engine() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        other = Engine(span, span.pool(), ServerOptions(), revision=REVISION)
        running = asyncio.create_task(other.run())
        prompt = prompt_of(50)
        # the pages that the sequence gets hold data of others
        stranger = engine.open(client="z", start=0, end=4, max_tokens=NUM_PAGES * PAGE_TOKENS)
        await stranger.step(ids(*[63] * NUM_PAGES * PAGE_TOKENS), Want.NOTHING)
        stranger.close()
        sequence = engine.open(client="a", start=0, end=4, max_tokens=80)
        await sequence.step(ids(*prompt), Want.NOTHING)
        content = [piece async for piece in sequence.export(*sequence.blocks)]
        numbers = torch.frombuffer(bytearray(b"".join(content[1:])), dtype=torch.float32).view(NUM_BLOCKS, 2, -1)
        assert not numbers[:, :, 50:].any()
        sequence.close()
        moved = other.open(client="a", start=0, end=4, max_tokens=80)
        await moved.adopt(50, pieces_of(*content))
        assert moved.length == 50
        done = await moved.step(ids(*prompt_of(20, 3)), Want.LAST)
        assert done.output is not None
        assert torch.equal(done.output, alone([*prompt, *prompt_of(20, 3)])[-1:])
        # unchecked pages are shared with nobody, neither under their own key nor as a prefix of later ones
        for tokens in (prompt, prompt_of(20, 3)):
            keys = page_keys(REVISION, tokens)
            assert other.open(client="a", start=0, end=4, max_tokens=80, may_skip=80, page_keys=keys).length == 0
        running.cancel()
        await asyncio.wait({running})
        assert other.pages.num_free == NUM_PAGES
        other.close(wait=True)

    with_engine(work)


def test_sequence_that_adopts_more_than_its_first_room_grows() -> None:
    """The old server has run further since the client asked for room at the new one."""

    async def work(engine: Engine, span: Sums) -> None:
        old = engine.open(client="a", start=0, end=4, max_tokens=3 * PAGE_TOKENS)
        await old.step(ids(*prompt_of(3 * PAGE_TOKENS)), Want.NOTHING)
        moved = [piece async for piece in old.export(0, 4)]
        new, late = (engine.open(client="a", start=0, end=4, max_tokens=1, grow_to=99) for _ in range(2))
        await new.adopt(3 * PAGE_TOKENS, pieces_of(*moved))
        assert (new.length, new.num_pages) == (3 * PAGE_TOKENS, 3)
        rest = engine.open(client="a", start=0, end=4, max_tokens=engine.free_tokens)
        with pytest.raises(PeerRefused, match="no room for 2 more pages:"):
            await late.adopt(3 * PAGE_TOKENS, pieces_of(*moved))
        for sequence in (old, new, late, rest):
            sequence.close()
        assert engine.free_tokens == NUM_PAGES * PAGE_TOKENS

    with_engine(work)


def test_sequence_adopts_nothing_when_the_pages_are_damaged() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        sequence = engine.open(client="a", start=0, end=4, max_tokens=40)
        await sequence.step(ids(*prompt_of(40)), Want.NOTHING)
        layout, *exported = [piece async for piece in sequence.export(*sequence.blocks)]
        content = b"".join(exported)
        sequence.close()
        nan = torch.full((len(content) // 4,), math.nan).numpy().tobytes()
        target = engine.open(client="a", start=0, end=4, max_tokens=40)
        for pieces in ([content[:-4]], [content, content], [content[: len(content) // 3]], [nan], [b"", content], []):
            with pytest.raises(IntegrityError):
                await target.adopt(40, pieces_of(layout, *pieces))
            assert target.length == 0
        other = layout.replace(b"float32", b"int32")
        assert other != layout
        for pieces in ([], [content], [other, content]):
            with pytest.raises(IntegrityError, match="a different layout"):
                await target.adopt(40, pieces_of(*pieces))
        with pytest.raises(PeerViolation):
            await target.adopt(41, pieces_of(layout, content))
        done = await target.step(ids(7), Want.LAST)
        assert done.output is not None
        assert torch.equal(done.output, alone([7]))
        target.close()

    with_engine(work)


# --- drafts -----------------------------------------------------------------------------------------------------------


def test_drafts_are_drawn_after_as_long_as_they_are_right() -> None:
    prompt = prompt_of(5)
    known = answer(prompt, 6)

    async def work(engine: Engine, span: Sums) -> None:
        for num_right in range(4):
            drafts = [*known[1 : 1 + num_right], *[(token + 1) % VOCAB for token in known[1 + num_right : 4]]]
            sequence = engine.open(client="a", start=0, end=4, max_tokens=32)
            await sequence.step(ids(*prompt), Want.NOTHING, GREEDY)
            pick = Pick(GREEDY.draw, drafts=tuple((token, None) for token in drafts))
            done = await sequence.step(ids(known[0], *drafts), Want.NOTHING, pick, num_drafts=3)
            assert [token.token_id for token in done.tokens] == known[1 : 2 + num_right]
            assert (sequence.firm_length, sequence.length) == (6, 9)
            sequence.settle(6 + num_right)
            assert sequence.firm_length == sequence.length == 6 + num_right
            last = await sequence.step(ids(known[1 + num_right]), Want.NOTHING, GREEDY)
            assert [token.token_id for token in last.tokens] == known[2 + num_right : 3 + num_right]
            sequence.close()

    with_engine(work)


def test_wrong_drafts_do_not_count_as_tokens() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        sequence = engine.open(client="a", start=0, end=4, max_tokens=32)
        await sequence.step(ids(*prompt_of(5)), Want.NOTHING)
        await sequence.step(ids(1, 2, 3, 4), Want.NOTHING, num_drafts=3)
        assert steps == [5, 1], "a pass with drafts is a step of one token"
        assert engine.num_tokens == 6
        sequence.settle(8)
        assert right == [2]
        assert engine.num_tokens == 8
        sequence.close()

    steps, right = list[int](), list[int]()
    with_engine(work, on_step=lambda positions, _compute, _queue: steps.append(positions), on_drafts=right.append)


def test_pages_with_drafts_are_not_found_by_others_until_the_drafts_were_right() -> None:
    prompt = prompt_of(PAGE_TOKENS - 2)

    async def work(engine: Engine, span: Sums) -> None:
        def num_found(tokens: list[int]) -> int:
            keys = page_keys(REVISION, tokens)
            sequence = engine.open(client="b", start=0, end=4, max_tokens=64, may_skip=64, page_keys=keys)
            sequence.close()
            return sequence.length

        for right in (False, True):
            first = prompt if right else [token ^ 1 for token in prompt]
            sequence = engine.open(client="a", start=0, end=4, max_tokens=64)
            await sequence.step(ids(*first), Want.NOTHING)
            await sequence.step(ids(1, 2, 3), Want.NOTHING, num_drafts=2)
            assert num_found([*first, 1, 2]) == 0
            sequence.settle(sequence.length if right else sequence.firm_length)
            assert num_found([*first, 1, 2]) == (PAGE_TOKENS if right else 0)
            await sequence.step(ids(5), Want.NOTHING)
            assert num_found([*first, 1, 5]) == (0 if right else PAGE_TOKENS)
            sequence.close()

    with_engine(work)


def test_draft_takes_no_page_and_no_room_beside_others() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        sequence = engine.open(client="a", start=0, end=4, max_tokens=PAGE_TOKENS, grow_to=4 * PAGE_TOKENS)
        assert [sequence.room_for_drafts(position) for position in (1, 6, 14, 16)] == [15, 10, 2, 0]
        others = [engine.open(client=name, start=0, end=4, max_tokens=32) for name in "bcdefghi"]
        found = []
        for other in others:
            other.num_queued = 1
            found.append(sequence.room_for_drafts(1))
        assert found == [7, 4, 3, 2, 1, 1, 1, 0]
        for each in (sequence, *others):
            each.close()

    with_engine(work)


def test_step_that_begins_at_no_draft_is_refused() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        sequence = engine.open(client="a", start=0, end=4, max_tokens=64)
        await sequence.step(ids(1, 2, 3, 4), Want.NOTHING, num_drafts=3)
        for position in (0, 5):
            with pytest.raises(PeerViolation, match="with 3 drafts"):
                sequence.settle(position)
        sequence.settle(2)
        with pytest.raises(PeerViolation, match="with 0 drafts"):
            sequence.settle(1)
        sequence.close()

    with_engine(work)


class OverflowingSums(Sums):
    """The number of the token 13 is too large for its dtype."""

    def _one(self, values: torch.Tensor, *others: Any) -> torch.Tensor | None:
        return super()._one(torch.where(values == 13, math.nan, values), *others)


@pytest.mark.parametrize("end", [3, 4], ids=["middle", "last"])
def test_drafts_that_overflow_are_dropped_and_leave_no_trace(end: int) -> None:
    pick = Pick(GREEDY.draw, drafts=tuple((token, None) for token in (2, 13, 3))) if end == 4 else None
    want = Want.NOTHING if pick else Want.ALL

    async def work(engine: Engine, span: Sums) -> None:
        sequence, plain = (engine.open(client="a", start=0, end=end, max_tokens=32) for _ in range(2))
        for each in (sequence, plain):
            await each.step(ids(*prompt_of(5)), Want.NOTHING)
        found, other = await asyncio.gather(
            sequence.step(ids(1, 2, 13, 3), want, pick, num_drafts=3), plain.step(ids(1), want, pick and GREEDY)
        )
        assert pick or torch.equal(found.output, other.output)  # type: ignore[arg-type]
        assert [token.token_id for token in found.tokens] == [token.token_id for token in other.tokens]
        assert found.num_drafts == 0
        assert sequence.length == sequence.firm_length == 6
        assert steps == [5, 5, 1, 1]
        assert engine.num_tokens == 12
        assert all(keys.isfinite().all() for keys in engine.pool.keys_SKD)
        sequence.settle(6)
        with pytest.raises(SessionError, match="not finite"):
            await sequence.step(ids(13, 1), Want.ALL, num_drafts=1)
        plain.close()

    steps = list[int]()
    with_engine(work, span=OverflowingSums(), on_step=lambda positions, _compute, _queue: steps.append(positions))


def test_handover_has_no_drafts() -> None:
    async def work(engine: Engine, span: Sums) -> None:
        old = engine.open(client="a", start=0, end=4, max_tokens=64)
        new = engine.open(client="a", start=0, end=4, max_tokens=64)
        await old.step(ids(*prompt_of(PAGE_TOKENS)), Want.NOTHING)
        await old.step(ids(1, 2, 3), Want.NOTHING, num_drafts=2)
        await new.adopt(old.firm_length, old.export(0, 4))
        old.settle(old.length)  # the drafts were right, and are still there
        for sequence, row in ((new, (2, 3, 4)), (old, (4,))):
            done = await sequence.step(ids(*row), Want.LAST)
            assert done.output is not None
            assert torch.equal(done.output[0], alone([*prompt_of(PAGE_TOKENS), 1, 2, 3, 4])[-1])
            sequence.close()

    with_engine(work)
