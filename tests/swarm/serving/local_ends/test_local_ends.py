"""A client that keeps text at home gets the same tokens as with ordinary serving, whatever happens to servers.

`test_text_stays_home` tests what servers learn.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from support.faults import Fault
from support.leaks import no_leaks
from support.local_hub import MODEL, local_hub
from support.published_models import flip_a_byte, published_copy
from swarm.client import KeptModel
from swarm.network.interface import Network
from swarm.serving.checking.spot_checks import SpotCheckOptions
from swarm.serving.engine.engine import Engine
from swarm.serving.engine.page_allocator import PageAllocator
from swarm.serving.local_ends import local_ends
from swarm.serving.local_ends.local_ends import LocalEnds
from swarm.serving.server.server_session import ServerSession
from swarm.serving.session.client_state import SessionOptions
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError, IntegrityError, SessionError
from swarm_protocol.rows import Rows
from swarm_protocol.session_frames import Frame, StepResult

HALVES = [(0, 3), (3, 6)]
THIRDS = [(0, 2), (0, 2), (2, 4), (2, 4), (4, 6), (4, 6)]

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.5, "top_p": 0.95, "top_k": 50, "min_p": 0.001, "seed": 11},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.3,
        "logit_bias": {5: 3.0},
        "min_tokens": 16,
        "seed": 3,
        "temperature": 1.0,
    },
    "logprobs": {"num_logprobs": 5, "temperature": 0.7, "seed": 1},
    "stop": {"stop_token_ids": [7, 8, 9], "temperature": 1.9, "seed": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_text_at_home_gives_the_tokens_of_ordinary_serving(boxes: Any, llama_dir: Path, way: str) -> None:
    async def answer(**options: Any) -> list[Any]:
        async with boxes(llama_dir, HALVES, **options) as box:
            tokens = [token async for token in box.generate(**WAYS[way])]
            assert not box.client.trace()["replays"]
            await box.all_freed()
            return tokens

    with no_leaks():
        at_home = virtual_time.run(answer(text_at_home={"tiny": llama_dir}))
        assert at_home == virtual_time.run(answer()), "texts and probabilities must be equal, too"
    assert len(at_home) > 1


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_text_at_home_gives_local_tokens_when_a_family_has_special_ends(
    boxes: Any, model_dirs: Callable[[str], Path], family: str
) -> None:
    directory = model_dirs(family)

    async def scenario() -> None:
        kept = KeptModel(source=directory, num_first_blocks=2)
        async with boxes(directory, HALVES, text_at_home={"tiny": kept}) as box:
            assert await box.tokens() == box.expected()
            assert [(hop["start"], hop["end"]) for hop in box.client.trace()["hops"]] == [
                (0, 2),
                (2, 3),
                (3, 5),
                (5, 6),
            ]

    virtual_time.run(scenario())


def test_text_at_home_encodes_activations_as_servers_do(boxes: Any, llama_dir: Path) -> None:
    async def answer(spans: list[tuple[int, int]], **options: Any) -> list[int]:
        async with boxes(llama_dir, spans, session=SessionOptions(codec="int8"), **options) as box:
            found: list[int] = await box.tokens(24)
            return found

    at_home = virtual_time.run(answer([(0, 6)], text_at_home={"tiny": llama_dir}))
    assert at_home == virtual_time.run(answer([(0, 1), (1, 5), (5, 6)])), (
        "must equal a chain that is cut at the same places"
    )


def test_text_at_home_works_when_servers_hold_neither_embedding_nor_head(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(1, 3), (3, 5)], text_at_home={"tiny": llama_dir}) as box:
            status = await box.client.model("tiny")
            assert (status.missing, status.unreachable) == ((), ())
            assert await box.tokens() == box.expected()

    virtual_time.run(scenario())


@pytest.mark.parametrize(
    ("phase", "what", "nth"), [("serve/prefill", "kill", 2), ("serve/decode", "stall", 8), ("serve/reply", "raise", 13)]
)
def test_text_at_home_loses_no_token_when_a_server_dies(
    boxes: Any, llama_dir: Path, phase: str, what: Any, nth: int
) -> None:
    faults = [Fault(who="*", phase=phase, what=what, nth=nth)]

    async def scenario() -> None:
        async with boxes(llama_dir, THIRDS, faults=faults, text_at_home={"tiny": llama_dir}) as box:
            generation = box.generate(**WAYS["seeded"])
            tokens = [token.token_id async for token in generation]
            (replay,) = generation.trace()["replays"]
            assert not replay["lost_peer"].startswith("home/")
            assert tokens == await box.tokens(**WAYS["seeded"]), "must equal the undisturbed answer"
            await box.all_freed()

    virtual_time.run(scenario(), compute_s=lambda function: 0.02)


def test_leaving_server_hands_over_its_cache_when_text_is_at_home(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        spans = [(0, 3), (3, 6), (3, 6)]
        async with boxes(llama_dir, spans, text_at_home={"tiny": llama_dir}) as box, asyncio.TaskGroup() as tasks:
            generation, tokens = box.generate(), list[int]()
            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    leaver = generation.trace()["hops"][2]["peer_id"]
                    tasks.create_task(box.servers[leaver].drain(within_s=30))
                    await asyncio.sleep(0)
            assert tokens == box.expected()
            (replay,) = generation.trace()["replays"]
            assert (replay["lost_peer"], replay["was_handed_over"]) == (leaver, True)

    virtual_time.run(scenario())


def broken(change: Callable[[Rows], Rows], send: Callable[[Frame], None]) -> Callable[[Frame], None]:
    def lie(frame: Frame) -> None:
        is_result = isinstance(frame, StepResult) and frame.rows is not None
        send(dataclasses.replace(frame, rows=change(frame.rows)) if is_result else frame)  # type: ignore[union-attr, arg-type]

    return lie


def nan_rows(rows: Rows) -> Rows:
    values = np.frombuffer(rows.payload, "<f4").copy()
    values[-1] = np.nan
    return dataclasses.replace(rows, payload=values.tobytes())


def narrow_rows(rows: Rows) -> Rows:
    return dataclasses.replace(
        rows, num_columns=rows.num_columns // 2, payload=bytes(rows.payload)[: len(rows.payload) // 2]
    )


def extra_rows(rows: Rows) -> Rows:
    return dataclasses.replace(rows, num_rows=rows.num_rows + 9, payload=bytes(rows.payload) * (rows.num_rows + 9))


def test_rows_are_dropped_and_come_from_another_server_when_home_cannot_compute_with_them(
    boxes: Any, model_dirs: Callable[[str], Path]
) -> None:
    directory = model_dirs("gpt2")
    prompt = "a prompt of more than two pages, of which the client keeps the rows for the next time that it asks"
    honest, reserve, liars = ServerSession._compute, PageAllocator.reserve, set[str]()

    def reserve_without_keys(self: PageAllocator, num_pages: int, _keys: Any = ()) -> Any:
        return reserve(self, num_pages)

    async def compute(self: ServerSession, step: Any) -> Any:
        output, peer_id = await honest(self, step), self._link._push_connections.peer_id
        if self.sequence.blocks == (1, 5) and output.output is not None and peer_id in (liars or {peer_id}):
            liars.add(peer_id)
            # finite numbers with which the next block cannot compute
            return dataclasses.replace(output, output=torch.full_like(output.output, 3e38))
        return output

    async def scenario() -> None:
        in_pages = SessionOptions(max_step_tokens=16)  # so that home has kept pages of them before it fails
        async with boxes(directory, [(0, 5)] * 3, session=in_pages, text_at_home={"tiny": directory}) as box:
            with patch.object(ServerSession, "_compute", compute):
                first, second = box.generate(prompt=prompt), box.generate(prompt=prompt)
                tokens = [token.token_id async for token in first]
                assert tokens == [token.token_id async for token in second]
            (liar,) = liars
            assert liar in {replay["lost_peer"] for replay in first.trace()["replays"]}
            assert not second.trace()["replays"], "neither home nor the client may keep pages from it"
            assert liar not in {hop["peer_id"] for hop in second.trace()["hops"]}
            pages = box.client._state.prefixes._pages
            pages.update({name: np.full(len(page) // 4, 3e38, "<f4").tobytes() for name, page in pages.items()})
            with patch.object(PageAllocator, "reserve", reserve_without_keys):
                assert tokens == await box.tokens(prompt=prompt), "also when an earlier session has left such rows"
                assert box.client.trace()["replays"]
                assert tokens == await box.tokens(prompt=prompt)
                assert not box.client.trace()["replays"]
        async with boxes(directory, [(0, 5)], text_at_home={"tiny": directory}) as box:
            assert tokens == await box.tokens(prompt=prompt)

    virtual_time.run(scenario(), compute_s=lambda function: 0.05)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(nan_rows, "not all finite"), (narrow_rows, "16 columns"), (extra_rows, "")],
    ids=["NaN", "narrow", "more rows than positions"],
)
def test_server_is_replaced_when_its_hidden_states_are_malformed(
    boxes: Any, llama_dir: Path, change: Callable[[Rows], Rows], reason: str
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6), (3, 6)], text_at_home={"tiny": llama_dir}) as box:
            generation, tokens = box.generate(), list[int]()
            async for token in generation:
                tokens.append(token.token_id)
                if len(tokens) == 5:
                    liar = generation.trace()["hops"][2]["peer_id"]
                    (served,) = box.servers[liar].sessions
                    served.connection.send = broken(change, served.connection.send)
            assert tokens == box.expected()
            if reason:
                (replay,) = generation.trace()["replays"]
                assert replay["lost_peer"] == liar
                assert reason in replay["reason"]
                assert liar not in {hop["peer_id"] for hop in (await box.tokens(2)) and box.client.trace()["hops"]}

    virtual_time.run(scenario(), compute_s=lambda function: 0.05)


def test_sessions_share_batches_and_later_ones_reuse_what_servers_and_home_kept(boxes: Any, llama_dir: Path) -> None:
    batches: list[int] = []
    deliver = Engine._deliver

    def counted(self: Engine, plan: Any, *rest: Any) -> None:
        if self.span.end == 6 and self.span.start == 5:
            batches.append(plan.num_decodes)
        deliver(self, plan, *rest)

    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, text_at_home={"tiny": llama_dir}) as box:
            prompt = "a prompt of more than two pages, of which all but the last part is the same each time"
            # how much of a prompt a pass takes must not depend on how busy this machine is
            clock = patch("swarm.serving.engine.compute.time.perf_counter", asyncio.get_running_loop().time)
            with patch.object(Engine, "_deliver", counted), clock:
                together = await asyncio.gather(*(box.tokens(prompt=prompt, seed=3, temperature=1.0) for _ in range(4)))
            assert max(batches) > 1
            alone = box.generate(prompt=prompt, seed=3, temperature=1.0)
            assert [[token.token_id async for token in alone]] * 4 == together
            assert alone.trace()["num_reused_tokens"] >= 32

    virtual_time.run(scenario(), compute_s=lambda function: 0.01)


def test_spot_checks_check_servers_and_not_home(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        checks = SpotCheckOptions(share=1.0)
        async with boxes(llama_dir, HALVES * 3, checks=checks, text_at_home={"tiny": llama_dir}) as box:
            await box.tokens(24, temperature=1.0)
            await box.client.checks.settled()
            reports = list(box.client.checks.reports)
            assert [(report.start, report.end, report.result) for report in reports] == [
                (1, 3, "passed"),
                (3, 5, "passed"),
            ]
            honest, liars = ServerSession._compute, list[str]()

            async def compute(self: ServerSession, step: Any) -> Any:
                """Make the first server of blocks 3 to 5 that the next answer uses lie."""
                output, me = await honest(self, step), self._link._push_connections.peer_id
                if not liars and self.sequence.blocks == (3, 5):
                    liars.append(me)
                lies = me in liars and output.output is not None
                return dataclasses.replace(output, output=1.01 * output.output) if lies else output

            with patch.object(ServerSession, "_compute", compute):
                await box.tokens(24, temperature=1.0)
                await box.client.checks.settled()
            assert {report.named for report in box.client.checks.reports} == {"", *liars}
            assert len(liars) == 1

    with no_leaks():
        virtual_time.run(scenario())


def test_trace_has_the_times_of_home_and_of_servers(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, text_at_home={"tiny": llama_dir}) as box:
            await box.tokens()
            hops = box.client.trace()["hops"]
            assert [hop["peer_id"] for hop in (hops[0], hops[-1])] == ["home/0:1", "home/5:6"]
            assert [hop["num_steps"] for hop in hops] == [15] * 4
            assert all(hop["compute_ms"] > 0 for hop in hops)

    virtual_time.run(scenario())


def test_requests_that_would_show_text_to_servers_are_refused(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, text_at_home={"tiny": llama_dir}) as box:
            await box.add(0, 6, name="other")
            await box.known(1, "other")
            with pytest.raises(ConfigError, match="has no part of other here: servers would see the text") as refused:
                await box.tokens(model="other")
            assert "ask for tiny" in refused.value.remedy
            for call in (box.client.embed("secret", model="tiny"), box.client.pooled("secret", model="tiny")):
                with pytest.raises(ConfigError, match="an embedding would give it to servers"):
                    await call
            hidden = box.client._text_at_home
            with pytest.raises(ConfigError, match="first block"):
                hidden.refuse("a pass through the model's first block")
            assert not any(server.sessions for server in box.servers.values())

    virtual_time.run(scenario())


def test_forward_is_refused_only_when_it_begins_at_the_first_block(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, text_at_home={"tiny": llama_dir}) as box:
            with pytest.raises(ConfigError, match="first block"):
                await box.client.forward(torch.ones(3, dtype=torch.int64), model="tiny")
            assert (await box.client.forward(torch.ones(3, 32), model="tiny", start=2, end=4)).shape == (3, 32)

    virtual_time.run(scenario())


def test_files_of_another_revision_are_refused(boxes: Any, llama_dir: Path, write_tiny: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        other = write_tiny(tmp_path / "other", "llama", seed=3)
        async with boxes(llama_dir, HALVES, text_at_home={"tiny": other}) as box:
            with pytest.raises(ConfigError, match="not of the revision that is served"):
                await box.tokens()
            assert not box.client._text_at_home._opening, "failures are not kept, whatever revisions are served"

    virtual_time.run(scenario())


@pytest.mark.parametrize(("num_first", "is_refused"), [(4, False), (5, True)])
def test_local_ends_that_leave_no_block_for_servers_are_refused(
    boxes: Any, llama_dir: Path, num_first: int, is_refused: bool
) -> None:
    async def scenario() -> None:
        kept = KeptModel(source=llama_dir, num_first_blocks=num_first)
        async with boxes(llama_dir, HALVES, text_at_home={"tiny": kept}) as box:
            if is_refused:
                with pytest.raises(ConfigError, match="none is left for servers") as refused:
                    await box.tokens()
                assert refused.value.remedy == "keep at most 4"
            else:
                assert await box.tokens() == box.expected()

    virtual_time.run(scenario())


def test_model_too_large_for_home_is_refused_with_the_memory_that_it_needs(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, text_at_home={"tiny": llama_dir}) as box:
            free = psutil.virtual_memory()._replace(available=2**10)
            with (
                patch.object(local_ends.psutil, "virtual_memory", lambda: free),
                pytest.raises(ConfigError, match=r"embedding, head and 2 blocks of tiny take \d+ MiB.*0 MiB are free"),
            ):
                await box.tokens()
            assert await box.tokens() == box.expected(), "works once there is memory"

    virtual_time.run(scenario())


def test_published_model_is_checked_byte_by_byte(boxes: Any, llama_dir: Path, tmp_path: Path) -> None:
    for name in ("served", "kept", "changed"):
        published_copy(llama_dir, tmp_path / name)
    index = json.loads((tmp_path / "changed" / "model.safetensors.index.json").read_text())
    head = index["weight_map"]["lm_head.weight"]
    flip_a_byte(tmp_path / "changed" / head)

    async def scenario() -> None:
        async with boxes(tmp_path / "served", HALVES, text_at_home={"tiny": tmp_path / "kept"}) as box:
            assert await box.tokens() == box.expected()
        async with boxes(tmp_path / "served", HALVES, text_at_home={"tiny": tmp_path / "changed"}) as box:
            with pytest.raises(IntegrityError, match=rf"{head}.*keep the files of \w+ that are served"):
                await box.tokens()

    virtual_time.run(scenario())


def test_only_the_shards_of_both_ends_come_from_a_hub(llama_dir: Path, tmp_path: Path) -> None:
    with local_hub(llama_dir, tmp_path / "hub") as hub:
        kept = KeptModel(source=MODEL, cache=tmp_path / "cache", endpoint=hub.endpoint)
        wanted = local_ends.WantedModel(
            name="tiny", revision=local_ends.open_model(llama_dir).revision(), published=None
        )
        with pytest.raises(ConfigError, match="not of the revision"):
            local_ends.find_parts(kept, wanted)  # the revision of a directory differs from that of a hub
        served = next((tmp_path / "cache").glob("*/*/"))
        revision = local_ends.open_model(served).revision("bfloat16")
        parts = local_ends.find_parts(kept, dataclasses.replace(wanted, revision=revision))
        assert [(part.start, part.end, part.options.dtype) for part in parts] == [
            (0, 1, "bfloat16"),
            (5, 6, "bfloat16"),
        ]
        came = {path.name for path in served.glob("*.safetensors")}
        assert 0 < len(came) < len(list(llama_dir.glob("*.safetensors")))


def test_download_for_local_ends_stops_when_its_client_closes(llama_dir: Path, tmp_path: Path) -> None:
    began, goes_on, calls = threading.Event(), threading.Event(), list[int]()

    def hold(num_bytes: int, _total_bytes: int) -> None:
        calls.append(num_bytes)
        began.set()
        goes_on.wait(60)

    async def scenario(kept: KeptModel, wanted: local_ends.WantedModel) -> None:
        opening = asyncio.create_task(LocalEnds.open(cast("Network", None), kept, wanted))
        await asyncio.to_thread(began.wait, 60)
        opening.cancel()
        await asyncio.wait({opening})
        assert opening.cancelled()
        goes_on.set()

    with local_hub(llama_dir, tmp_path / "hub") as hub:
        kept = KeptModel(source=MODEL, cache=tmp_path / "cache", endpoint=hub.endpoint, on_progress=hold)
        wanted = local_ends.WantedModel(name="tiny", revision="none", published=None)
        with pytest.raises(ConfigError, match="not of the revision"):
            local_ends.find_parts(kept, wanted)
        revision = local_ends.open_model(next((tmp_path / "cache").glob("*/*/"))).revision("bfloat16")
        asyncio.run(scenario(kept, dataclasses.replace(wanted, revision=revision)))  # it waits for its threads
        assert len(calls) == 1
        assert len(list((tmp_path / "cache").rglob("*.safetensors"))) <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "a", "num_first_blocks": 0}, "0 blocks are to be kept"),
        ({"source": "someone/model"}, "no cache to download it to"),
    ],
)
def test_kept_model_refuses_invalid_values(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KeptModel(**settings)


def test_request_that_exceeds_the_room_at_home_is_refused_with_the_setting_to_raise(
    boxes: Any, llama_dir: Path
) -> None:
    async def scenario() -> None:
        with patch.object(local_ends, "MAX_SESSIONS", 1):
            async with boxes(llama_dir, HALVES, text_at_home={"tiny": llama_dir}) as box:
                first = box.generate(100)
                await anext(aiter(first))
                with pytest.raises(SessionError, match="no room for another session"):
                    await box.tokens()
                await first.aclose()
                await asyncio.sleep(5)
                assert await box.tokens() == box.expected()

    virtual_time.run(scenario())


def test_defect_at_home_is_reported_and_spares_other_clients(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, text_at_home={"tiny": llama_dir}) as box:
            assert await box.tokens() == box.expected()
            (ends,) = [opening.result() for opening in box.client._text_at_home._opening.values()]
            with patch.object(Engine, "_deliver", side_effect=ZeroDivisionError), pytest.raises(SessionError):
                await box.tokens()
            assert isinstance(ends, LocalEnds)
            with pytest.raises(SessionError, match="has failed"):
                await box.tokens()

    virtual_time.run(scenario())


def test_other_requests_succeed_when_one_is_cancelled_while_home_loads(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, text_at_home={"tiny": llama_dir}) as box:
            first, second = asyncio.create_task(box.tokens()), asyncio.create_task(box.tokens())
            while not box.client._text_at_home._opening:
                await asyncio.sleep(0.001)
            first.cancel()
            assert await second == box.expected()
            await box.all_freed()

    with no_leaks():
        virtual_time.run(scenario())
