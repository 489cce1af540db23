"""Volunteers that decide for themselves which blocks to serve, on a simulated internet."""

from __future__ import annotations

import asyncio
import shutil
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch

import pytest
from support.loaded_spans import sharing_load
from swarm.network.membership import Membership
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet
from swarm.router.placement import PlacementDecision, choose_move, choose_span
from swarm.serving.engine.span_speed import SpanSpeed
from swarm.serving.server.capability import VolunteerOptions, measure_capability
from swarm.serving.server.deployment import LoadedSpan, ServerOptions
from swarm.serving.server.span_placer import SETTLE_S, WATCH_S, SpanPlacer
from swarm.serving.server.span_server import SpanServer
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError, IntegrityError

EQUAL = SpanSpeed(prefill_ms=1.0, decode_ms=1.0, kv_bytes_per_token=128)

load_equal = sharing_load()
"""`load` of spans that were measured as EQUAL, for these tests alone."""


class Town:
    """Volunteers with a link of `latency_s` each, and an observer."""

    def __init__(self, stack: AsyncExitStack, directory: Path, latency_s: float) -> None:
        self.internet = MemoryInternet(default_link=LinkModel(latency_s=latency_s))
        self.stack = stack
        self.directory = directory
        self.placers: list[SpanPlacer] = []
        self.decisions: dict[int, list[PlacementDecision]] = {}
        # equal machines, since measured ones would differ with the load of the moment
        stack.enter_context(patch("swarm.serving.server.capability.measure_block", lambda files, options: EQUAL))
        stack.enter_context(patch("swarm.serving.server.deployment.measure", lambda span: EQUAL))
        stack.enter_context(patch("swarm.serving.server.deployment.load", load_equal))
        stack.enter_context(patch("swarm.serving.server.deployment.Deployment.measure_again", AsyncMock()))

    async def add(self, **options: Any) -> SpanPlacer:
        network = self.internet.network()
        membership = await self.stack.enter_async_context(Membership(network))
        index = len(self.placers)
        self.decisions[index] = []
        placer = SpanPlacer(
            network,
            membership,
            self.directory,
            name="tiny",
            options=VolunteerOptions(**options),
            on_decision=self.decisions[index].append,
        )
        self.placers.append(placer)
        self.stack.push_async_callback(placer.close)
        return placer

    def spans(self) -> list[tuple[int, int]]:
        servers = [placer.server for placer in self.placers]
        return sorted((server.start_block, server.end_block) for server in servers if server is not None)


async def town(stack: AsyncExitStack, directory: Path, num_volunteers: int, **options: Any) -> Town:
    place = Town(stack, directory, latency_s=options.pop("latency_s", 0.05))
    for _ in range(num_volunteers):
        await place.add(**options)
    return place


def test_four_volunteers_cover_all_blocks_twice_when_they_start_in_the_same_second(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 4, max_blocks=3)
            await asyncio.gather(*(placer.start() for placer in place.placers))
            assert place.spans() == [(0, 3), (0, 3), (3, 6), (3, 6)]

    virtual_time.run(scenario())


def test_volunteer_does_not_hold_its_node_up_while_it_computes_the_choices_of_others(llama_dir: Path) -> None:
    """The choices of a hundred others take some tenths of a second."""
    chosen_in: list[threading.Thread] = []

    def choose(*arguments: Any) -> PlacementDecision:
        chosen_in.append(threading.current_thread())
        return choose_span(*arguments)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 1, max_blocks=3)
            stack.enter_context(patch("swarm.serving.server.span_placer.choose_span", choose))
            await place.placers[0].start()
            assert len(chosen_in) == 2
            assert threading.current_thread() not in chosen_in

    virtual_time.run(scenario(), jobs="threads")


@pytest.mark.parametrize("gap_s", [0.1, 0.5, 1.5, 2.9, 3.1, 10.0])
def test_four_volunteers_cover_all_blocks_twice_when_they_start_one_after_another(
    llama_dir: Path, gap_s: float
) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 4, max_blocks=3)

            async def start_later(index: int) -> None:
                await asyncio.sleep(index * gap_s)
                await place.placers[index].start()

            await asyncio.gather(*(start_later(index) for index in range(4)))
            assert place.spans() == [(0, 3), (0, 3), (3, 6), (3, 6)]

    virtual_time.run(scenario())


def test_volunteer_announces_the_link_that_its_choice_uses_when_it_found_a_proposal(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 2, max_blocks=3)
            first, second = place.placers
            starting = [asyncio.create_task(first.start())]
            await asyncio.sleep(1.5)
            starting.append(asyncio.create_task(second.start()))
            await asyncio.sleep(1.0)
            proposals = await place.placers[0]._membership.servers("tiny")
            assert proposals[second._network.peer_id].state == "joining"
            assert list(proposals[second._network.peer_id].rtt_ms) == [first._network.peer_id]
            await asyncio.gather(*starting)
            assert place.spans() == [(0, 3), (3, 6)]

    virtual_time.run(scenario())


def test_volunteers_with_little_upload_that_start_in_the_same_second_leave_no_gap(llama_dir: Path) -> None:
    """Alone, each would take the last blocks, whose server sends only tokens and needs no upload."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 2, max_blocks=3, up_bytes_per_s=10_000)
            await asyncio.gather(*(placer.start() for placer in place.placers))
            assert place.spans() == [(0, 3), (3, 6)]

    virtual_time.run(scenario())


def test_volunteer_announces_its_capacity_and_not_the_length_of_its_first_choice(llama_dir: Path) -> None:
    """Two blocks fit beside eight sessions, and all six beside one, which close the gap that it finds."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 1, span=(0, 2))
            await place.placers[0].start()
            joiner = await place.add(max_bytes=700_000, server=ServerOptions(kv_bytes=600_000))
            starting = asyncio.create_task(joiner.start())
            await asyncio.sleep(1.5)
            proposal = (await place.placers[0]._membership.servers("tiny"))[joiner._network.peer_id]
            assert (proposal.free_kv_tokens, proposal.start, proposal.end, proposal.max_blocks) == (0, 0, 2, 6)
            await starting
            assert place.spans() == [(0, 2), (0, 6)]

    virtual_time.run(scenario())


def test_five_volunteers_of_unequal_memory_leave_no_gap(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = Town(stack, llama_dir, latency_s=0.05)
            for max_blocks in (1, 2, 2, 1, 3):
                await place.add(max_blocks=max_blocks)
            await asyncio.gather(*(placer.start() for placer in place.placers))
            assert {block for span in place.spans() for block in range(*span)} == set(range(6))

    virtual_time.run(scenario())


def test_volunteer_serves_the_whole_model_at_once_when_it_has_memory_for_it(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 1)
            since_s = asyncio.get_running_loop().time()
            decision = await place.placers[0].start()
            assert asyncio.get_running_loop().time() - since_s < SETTLE_S
            assert (decision.start, decision.end) == (0, 6)
            assert place.decisions[0] == [decision]

    virtual_time.run(scenario())


def test_volunteer_downloads_the_blocks_that_it_measures_and_those_that_it_serves(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            brought: list[tuple[int, int]] = []

            def bring(start: int, end: int) -> None:
                brought.append((start, end))

            place = await town(stack, llama_dir, 1, max_blocks=2, fetch_blocks=bring)
            decision = await place.placers[0].start()
            assert brought == [(3, 4), (decision.start, decision.end)]
            told = await place.add(span=(2, 4), fetch_blocks=bring)
            await told.start()
            assert brought[2:] == [(2, 4)]

    virtual_time.run(scenario())


def test_volunteer_leaves_nothing_behind_when_its_blocks_cannot_be_downloaded(llama_dir: Path) -> None:
    def bring(_start: int, _end: int) -> None:
        raise ConfigError("the hub is away")

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 1, span=(2, 4), fetch_blocks=bring)
            with pytest.raises(ConfigError, match="the hub is away"):
                await place.placers[0].start()
            assert not place.spans()

    virtual_time.run(scenario())


@pytest.mark.parametrize("options", [{"span": (2, 4)}, {"max_blocks": 2}])
def test_volunteer_refuses_files_that_no_client_takes_before_it_downloads_weights(
    llama_dir: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    directory, bring = tmp_path / "tiny", MagicMock()
    shutil.copytree(llama_dir, directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": "x"}')

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, directory, 1, fetch_blocks=bring, **options)
            with pytest.raises(IntegrityError, match="eos_token_id is 'x'"):
                await place.placers[0].start()
            assert not place.spans()

    virtual_time.run(scenario())
    bring.assert_not_called()


def test_volunteer_serves_the_given_blocks(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 1, span=(2, 4))
            assert (await place.placers[0].start()).reason == "its blocks were given"
            assert place.spans() == [(2, 4)]

    virtual_time.run(scenario())


def test_volunteer_with_little_memory_serves_the_blocks_that_fit(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            # 37,120 bytes a block, 65,664 for both ends
            place = await town(stack, llama_dir, 1, max_bytes=152_000, server=ServerOptions(kv_bytes=10_000))
            await place.placers[0].start()
            assert place.spans() == [(0, 2)]

    virtual_time.run(scenario())


def test_volunteer_moves_to_blocks_that_lost_their_server_before_leaving_its_own(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 3, max_blocks=3)
            await asyncio.gather(*(placer.start() for placer in place.placers))
            assert place.spans() == [(0, 3), (0, 3), (3, 6)]
            lonely = next(v for v in place.placers if v.server is not None and v.server.start_block == 3)
            await lonely.close()
            place.placers.remove(lonely)
            await asyncio.sleep(2 * WATCH_S + 5)
            assert place.spans() == [(0, 3), (3, 6)]
            moved = [decisions for decisions in place.decisions.values() if len(decisions) == 2]
            assert len(moved) == 1
            assert moved[0][1].reason == "blocks without a server go from 3 to 0"

    virtual_time.run(scenario())


def slow_down(network: Any) -> None:
    """Delay what `network` publishes by a second."""
    publish = network.publish

    async def publish_later(*arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(1.0)
        return await publish(*arguments, **options)

    network.publish = publish_later


def test_volunteers_leave_no_gap_when_two_would_move_before_their_records_arrive(llama_dir: Path) -> None:
    """The new blocks load at once here, before either can have seen that the other is about to move."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            stack.enter_context(patch("swarm.serving.server.span_placer.turn_hash", lambda _: "0" * 64))
            place = await town(stack, llama_dir, 3, max_blocks=3)
            for placer in place.placers:
                slow_down(placer._network)
            await asyncio.gather(*(placer.start() for placer in place.placers))
            assert place.spans() == [(0, 3), (0, 3), (3, 6)]
            lonely = next(v for v in place.placers if v.server is not None and v.server.start_block == 3)
            await lonely.close()
            place.placers.remove(lonely)
            num_moves_announced = 0
            for _ in range(60):
                await asyncio.sleep(0.5)
                num_moves_announced += sum(v.server.announcer.moving_to != (0, 0) for v in place.placers if v.server)
                assert place.spans()[0] == (0, 3)
            assert num_moves_announced >= 2

    virtual_time.run(scenario())


def test_volunteers_that_both_stayed_after_they_announced_one_move_at_once_make_it_at_the_next_search(
    llama_dir: Path,
) -> None:
    """Their searches are 0.7 s apart at first, less than a record takes to arrive, and 1.4 s the next time."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 2, max_blocks=3)
            lonely = await place.add(span=(3, 6))
            waits = {p._network.peer_id: f"{nth * int(0.035 * 2**32):08x}" for nth, p in enumerate(place.placers)}
            stack.enter_context(patch("swarm.serving.server.span_placer.turn_hash", waits.__getitem__))
            for placer in place.placers:
                slow_down(placer._network)
            await lonely.start()
            await asyncio.sleep(2.0)
            await asyncio.gather(*(placer.start() for placer in place.placers[:2]))
            assert place.spans() == [(0, 3), (0, 3), (3, 6)]
            place.placers.remove(lonely)
            await lonely.close()
            both_announced = []
            for _ in range(int(2 * WATCH_S + 4 * SETTLE_S)):
                await asyncio.sleep(1.0)
                moves = [v.server.announcer.moving_to for v in place.placers if v.server is not None]
                both_announced.append(moves == [(3, 6), (3, 6)])
                assert place.spans()[0] == (0, 3)
            assert any(both_announced)
            assert not any(both_announced[int(WATCH_S + 2 * SETTLE_S) :])
            assert place.spans() == [(0, 3), (3, 6)]

    virtual_time.run(scenario())


def test_volunteer_keeps_blocks_whose_other_server_was_killed_and_is_still_listed(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 3, max_blocks=3)
            await asyncio.gather(*(placer.start() for placer in place.placers))
            assert place.spans() == [(0, 3), (0, 3), (3, 6)]
            killed, living = (v for v in place.placers if v.server is not None and v.server.start_block == 0)
            lonely = next(v for v in place.placers if v not in (killed, living))
            await asyncio.sleep(WATCH_S / 2)  # all are announced
            place.internet.crash(killed._network.peer_id)
            await lonely.close()
            await asyncio.sleep(2 * WATCH_S + 5)
            assert living._network.peer_id in await living._membership.servers("tiny")
            assert killed._network.peer_id in await living._membership.servers("tiny")
            assert living.server is not None
            assert (living.server.start_block, living.server.end_block) == (0, 3)

    virtual_time.run(scenario())


def test_volunteer_places_itself_by_what_it_observes(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_with: list[float] = []

    def choose(*arguments: Any) -> PlacementDecision | None:
        chosen_with.append(arguments[2].block_ms)
        return choose_move(*arguments)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 1, max_blocks=3)
            await place.placers[0].start()
            server = place.placers[0].server
            assert server is not None
            assert server.deployed is not None
            for _ in range(5):
                server.deployed.engine.observed.measured_again(70.0, 5.0)  # type: ignore[union-attr]
            await asyncio.sleep(2 * WATCH_S)
            assert chosen_with == [pytest.approx(70.0 + 2 * 5.0)]

    monkeypatch.setattr("swarm.serving.server.span_placer.choose_move", choose)
    virtual_time.run(scenario())


def test_volunteers_of_a_balanced_swarm_stay_where_they_are(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 5, max_blocks=3)
            await asyncio.gather(*(placer.start() for placer in place.placers))
            before = place.spans()
            await asyncio.sleep(10 * WATCH_S)
            assert place.spans() == before
            assert all(len(decisions) == 1 for decisions in place.decisions.values())

    virtual_time.run(scenario())


def test_volunteer_withdraws_its_proposal_when_it_fails_to_load(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 1, max_blocks=3)
            network = place.internet.network()
            observer = await stack.enter_async_context(Membership(network))
            failing = patch("swarm.serving.server.deployment.load", side_effect=IntegrityError("a shard is damaged"))
            with failing, pytest.raises(IntegrityError):
                await place.placers[0].start()
            await asyncio.sleep(1)
            (record,) = (await observer.servers("tiny")).values()
            assert record.state == "draining"

    virtual_time.run(scenario())


def test_volunteer_without_memory_for_a_move_stays_and_still_closes(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 4, max_blocks=3)
            for placer in place.placers:
                await placer.start()
            spans = place.spans()
            with patch("swarm.serving.server.deployment.load", side_effect=RuntimeError("out of memory")):
                for placer in place.placers:
                    if placer.server is not None and placer.server.start_block == 0:
                        await placer.close()
                await asyncio.sleep(4 * WATCH_S)
            assert sum(placer.num_failed_moves for placer in place.placers) > 0
            assert place.spans() == spans
            for placer in place.placers:
                await placer.close()

    virtual_time.run(scenario())


BLOCK_BYTES, ENDS_BYTES, KV_BYTES = 37_120, 65_664, 10_000
ROOM_FOR_THREE = {"max_bytes": 3 * BLOCK_BYTES + ENDS_BYTES + KV_BYTES, "server": ServerOptions(kv_bytes=KV_BYTES)}


def spy_on_state(server: SpanServer, seen: list[tuple[str, int]]) -> None:
    announce = server.announcer.announce

    def spy() -> None:
        announce()
        seen.append((server.record.state if server.deployed else "away", server.start_block))

    server.announcer.announce = spy  # type: ignore[method-assign]


def test_volunteer_without_memory_for_both_spans_leaves_first_when_others_have_its_blocks(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 3, **ROOM_FOR_THREE)
            await asyncio.gather(*(placer.start() for placer in place.placers))
            assert place.spans() == [(0, 3), (0, 3), (3, 6)]
            seen: list[tuple[str, int]] = []
            for placer in place.placers:
                assert placer.server is not None
                spy_on_state(placer.server, seen)
            lonely = next(v for v in place.placers if v.server is not None and v.server.start_block == 3)
            await lonely.close()
            place.placers.remove(lonely)
            await asyncio.sleep(2 * WATCH_S + 10)
            assert place.spans() == [(0, 3), (3, 6)]
            assert [entry for entry in seen if entry[0] == "draining"] == [("draining", 0)]
            assert seen.index(("draining", 0)) < seen.index(("serving", 3))

    virtual_time.run(scenario())


def test_volunteer_counts_the_memory_of_blocks_that_sessions_are_still_leaving(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            room = {**ROOM_FOR_THREE, "max_bytes": 2 * ROOM_FOR_THREE["max_bytes"], "max_blocks": 3}
            [placer] = (await town(stack, llama_dir, 1, **room)).placers
            await placer.start()
            server, able = placer.server, measure_capability(llama_dir, "", placer._options)
            assert server is not None

            def fits() -> bool:
                assert server is not None
                back = PlacementDecision(start=0, end=3, reason="")
                return placer._fits_beside(server, server.options, back, able)

            async def yes() -> bool:
                return True

            assert fits()
            gone = asyncio.Event()
            with patch.object(SpanServer, "_let_leave", lambda *_: gone.wait()):
                assert await server.move(3, 6, options=server.options, still_wanted=yes, within_s=30)
                assert not fits()
                gone.set()
                await asyncio.sleep(1)
            assert fits()

    virtual_time.run(scenario())


def test_volunteer_without_memory_for_both_spans_stays_when_no_other_has_its_blocks(
    llama_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It moves as soon as another node serves them."""
    caplog.set_level("INFO", logger="swarm.serving.server.span_placer")
    elsewhere = PlacementDecision(start=3, end=6, reason="it would help")

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 1, **ROOM_FOR_THREE)
            await place.placers[0].start()
            with patch("swarm.serving.server.span_placer.choose_move", return_value=elsewhere):
                await asyncio.sleep(2 * WATCH_S + 10)
            assert place.spans() == [(0, 3)]
            server = place.placers[0].server
            assert server is not None
            assert (server.record.state, server.record.next_end) == ("serving", 0)

    virtual_time.run(scenario())
    assert "staying on blocks 0:3 of tiny, though it would help: others do not serve 0:3" in caplog.text


def test_volunteer_serves_the_old_blocks_again_when_the_new_ones_cannot_be_loaded(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 3, **ROOM_FOR_THREE)
            await asyncio.gather(*(placer.start() for placer in place.placers))

            def broken(model_dir: Path, start: int, end: int, options: ServerOptions) -> LoadedSpan:
                if start == 3:
                    raise IntegrityError("a shard is damaged")
                return load_equal(model_dir, start, end, options)

            lonely = next(v for v in place.placers if v.server is not None and v.server.start_block == 3)
            await lonely.close()
            place.placers.remove(lonely)
            with patch("swarm.serving.server.deployment.load", broken):
                await asyncio.sleep(3 * WATCH_S + 10)
                assert sum(placer.num_failed_moves for placer in place.placers) > 0
            assert place.spans() == [(0, 3), (0, 3)]
            await asyncio.sleep(1)
            network = place.internet.network()
            observer = await stack.enter_async_context(Membership(network))
            records = [record for record in (await observer.servers("tiny")).values() if record.start == 0]
            assert [(record.state, record.next_end) for record in records] == [("serving", 0)] * 2

    virtual_time.run(scenario())


def test_volunteer_announces_its_links_and_its_relay(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 2, max_blocks=3, is_relayed=lambda: True)
            await asyncio.gather(*(placer.start() for placer in place.placers))
            await asyncio.sleep(2 * WATCH_S + 5)
            one, two = (placer.server for placer in place.placers)
            assert one is not None
            assert two is not None
            assert list(one.record.rtt_ms.values()) == pytest.approx([100.0], rel=0.1)
            assert one.record.relayed
            assert two.record.relayed

    virtual_time.run(scenario())


def test_volunteer_reports_a_defect_of_its_watch_and_still_closes(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 1, max_blocks=3)
            await place.placers[0].start()
            assert place.placers[0].failure is None
            with patch("swarm.serving.server.span_placer.choose_move", side_effect=ZeroDivisionError("a bug")):
                await asyncio.sleep(2 * WATCH_S + 5)
            assert place.placers[0].failure is not None
            assert "placing tiny has failed: ZeroDivisionError: a bug" in str(place.placers[0].failure)
            await place.placers[0].close()

    virtual_time.run(scenario())


def test_volunteer_cache_uses_the_memory_that_the_weights_leave(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 1, span=(0, 2), max_bytes=2 * BLOCK_BYTES + ENDS_BYTES + 5000)
            await place.placers[0].start()
            server = place.placers[0].server
            assert server is not None
            assert server.options.kv_bytes == 5000
            await place.add(span=(0, 3), max_bytes=3 * BLOCK_BYTES)
            with pytest.raises(ConfigError, match="3 blocks with embedding and head take"):
                await place.placers[1].start()
            await place.add(span=(0, 99), max_bytes=10**9)
            with pytest.raises(ConfigError, match="6"):
                await place.placers[2].start()

    virtual_time.run(scenario())


def test_volunteer_drains_and_closes(llama_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, llama_dir, 1, max_blocks=3)
            await place.placers[0].start()
            await place.placers[0].drain(within_s=5)
            server = place.placers[0].server
            assert server is not None
            assert server.record.state == "draining"
            await place.placers[0].close()
            await place.placers[0].close()

    virtual_time.run(scenario())


def test_volunteer_fails_to_start_without_a_config_in_its_directory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            place = await town(stack, tmp_path, 1, max_blocks=3)
            with pytest.raises(ConfigError, match=r"no config\.json"):
                await place.placers[0].start()
            await place.placers[0].close()

    virtual_time.run(scenario())


@pytest.mark.parametrize("options", [{"max_blocks": 0}, {"span": (3, 3)}, {"span": (-1, 2)}], ids=str)
def test_invalid_volunteer_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        VolunteerOptions(**options)
