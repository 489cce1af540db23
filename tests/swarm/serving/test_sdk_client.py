"""The SDK over a simulated internet: answers, models, files, and the errors of invalid or impossible requests."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock, patch

import numpy as np
import pytest
import torch
from support.faults import Fault
from support.leaks import no_leaks
from support.tokenizer_here import TokenizerHere
from swarm.client import assets_cache
from swarm.client.assets_cache import MAX_BAD_FILES, MAX_PROCESSES, AssetsCache
from swarm.client.request import ContextExceeded, Prompt, check_prompt_ids, checked, encode
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet
from swarm.router.routing import NoChain
from swarm.serving.checking.spot_checks import SpotCheckOptions
from swarm.serving.model.model_files import open_model
from swarm.serving.server.deployment import ServerOptions
from swarm.serving.session.stage_connections import DIAL_S
from swarm.serving.tokenizer.model_assets import ModelAssets, fetch_files, open_assets
from swarm.testing import virtual_time
from swarm_protocol import limits
from swarm_protocol.errors import (
    ConfigError,
    IntegrityError,
    PeerError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    SessionError,
    StartError,
)
from swarm_protocol.serving_messages import FILES_METHOD, FilesResponse

import swarm
from swarm import client

HALVES = [(0, 3), (3, 6)]


def kit_of(files: Mapping[str, bytes]) -> ModelAssets:
    return asyncio.run(open_assets("tiny", "r", TokenizerHere("tiny", files)))


def test_generate_streams_the_tokens_of_a_single_machine(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            generation = box.generate()
            tokens = [token async for token in generation]
            assert [token.token_id for token in tokens] == box.expected()
            assert [token.finish_reason for token in tokens] == [None] * 15 + ["length"]
            kit = await box.kit()
            assert "".join(token.text for token in tokens) == await kit.decode(box.expected())
            await box.all_freed()

    with no_leaks():
        virtual_time.run(scenario())


def test_generate_not_streamed_is_one_token_with_the_whole_text(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            streamed = "".join([token.text async for token in box.generate()])
            (whole,) = [token async for token in box.generate(stream=False)]
            assert whole.text == streamed
            assert whole.finish_reason == "length"

    virtual_time.run(scenario())


def test_generate_with_a_seed_repeats_its_tokens_even_through_a_failover(boxes: Any, llama_dir: Path) -> None:
    sampled = {"temperature": 1.5, "top_p": 0.95, "top_k": 50, "seed": 11}

    async def answer(faults: list[Fault]) -> list[int]:
        async with boxes(llama_dir, [*HALVES, *HALVES], faults=faults) as box:
            tokens: list[int] = await box.tokens(**sampled)
            assert tokens != await box.tokens(**{**sampled, "seed": 12})
            return tokens

    undisturbed = virtual_time.run(answer([]))
    assert virtual_time.run(answer([Fault(who="*", phase="serve/decode", what="kill", nth=9)])) == undisturbed


def test_generate_stops_at_the_end_token_and_does_not_return_it(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            kit = await box.kit()
            fifth = box.expected()[4]
            object.__setattr__(kit, "end_ids", frozenset({fifth}))
            tokens = [token async for token in box.generate()]
            assert [token.token_id for token in tokens] == box.expected()[:5]
            assert tokens[-1].finish_reason == "stop"
            assert "".join(token.text for token in tokens) == await kit.decode(box.expected()[:4])

    virtual_time.run(scenario())


def test_generate_stop_string_over_several_tokens_ends_the_text_before_it(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            text = "".join([token.text async for token in box.generate(40)])
            stop = text[10:13]
            tokens = [token async for token in box.generate(40, stop=stop)]
            assert "".join(token.text for token in tokens) == text[: text.index(stop)]
            assert tokens[-1].finish_reason == "stop"
            await box.all_freed()

    virtual_time.run(scenario())


def test_generate_closed_early_frees_the_whole_chain_at_once(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            generation = box.generate(100)
            assert await anext(aiter(generation))
            assert sum(len(server.sessions) for server in box.servers.values()) == 2
            await generation.aclose()
            await box.all_freed()
            await generation.aclose()

    virtual_time.run(scenario())


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.05, 0.2, 1.0])
def test_generate_cancelled_at_any_moment_frees_the_whole_chain(boxes: Any, llama_dir: Path, delay_s: float) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            task = asyncio.create_task(box.tokens(100))
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.wait([task])
            await box.all_freed()
            assert not box.client._state.health.load

    virtual_time.run(scenario(), compute_s=lambda function: 0.004)


@pytest.mark.parametrize("stream", [True, False])
def test_answer_that_takes_longer_than_it_may_ends_and_frees_the_whole_chain(
    boxes: Any, llama_dir: Path, stream: bool
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            for first, second in combinations([box.network.peer_id, *box.servers], 2):
                box.internet.link(first, second, LinkModel(latency_s=0.03))
            tokens = []

            async def read() -> None:
                async for token in box.generate(200, stream=stream, timeout_s=1):
                    tokens.append(token)

            with pytest.raises(SessionError, match=r"^the answer took over 1 s: allow more with timeout_s"):
                await read()
            assert bool(tokens) == stream
            await box.all_freed()
            assert await box.tokens(timeout_s=3600) == box.expected()

    with no_leaks():
        virtual_time.run(scenario())


def test_answers_end_when_their_client_is_closed(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            answers = [asyncio.create_task(box.tokens(200)) for _ in range(3)]
            await asyncio.sleep(0.3)
            await box.client.aclose()
            async with asyncio.timeout(5):
                await asyncio.wait(answers)
            for each in answers:
                assert isinstance(each.exception(), SessionError)
                assert "the client has been closed" in str(each.exception())
            await asyncio.sleep(0.1)  # servers free a sequence once the running step is over
            await box.all_freed()

    with no_leaks():
        virtual_time.run(scenario(), compute_s=lambda function: 0.01)


def test_closed_client_says_so_at_each_call(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            client = box.client
            await client.embed([1, 2], model="tiny")
            await client.aclose()
            for call in (
                client.models,
                partial(client.model, "tiny"),
                partial(client.servers, "tiny"),
                partial(client.tokenize, "a", model="tiny"),
                partial(client.embed, [1, 2], model="tiny"),
                box.tokens,
            ):
                with pytest.raises(SessionError, match="the client has been closed"):
                    await call()

    asyncio.run(scenario())


def test_generate_gives_exact_tokens_for_many_simultaneous_requests(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            answers = await asyncio.gather(*(box.tokens() for _ in range(8)))
            assert all(answer == box.expected() for answer in answers)
            await box.all_freed()

    virtual_time.run(scenario())


def test_trace_names_servers_spans_and_times(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            generation = box.generate()
            assert generation.num_prompt_tokens == 0
            async for _ in generation:
                pass
            trace = generation.trace()
            assert [(hop["peer_id"], hop["start"], hop["end"]) for hop in trace["hops"]] == [
                (box.who["s0"], 0, 3),
                (box.who["s1"], 3, 6),
            ]
            assert all(
                hop["num_steps"] == 15 and hop["prompt_ms"] > 0 and hop["ms_per_step"] > 0 for hop in trace["hops"]
            )
            assert (trace["num_prompt_tokens"], trace["num_tokens"], trace["replays"]) == (25, 16, [])
            assert generation.num_prompt_tokens == 25
            assert box.client.trace() == trace
            assert json.loads(json.dumps(trace)) == trace

    virtual_time.run(scenario())


def test_messages_without_a_template_are_joined_plainly(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
            chat = await box.tokens(prompt=None, messages=messages)
            assert chat == await box.tokens(prompt="system: be brief\nuser: hi\nassistant:")

    virtual_time.run(scenario())


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture
def templated(llama_dir: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(llama_dir, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def test_messages_follow_the_model_template(boxes: Any, templated: Path) -> None:
    async def scenario() -> None:
        async with boxes(templated, HALVES) as box:
            chat = await box.tokens(prompt=None, messages=[{"role": "user", "content": "hi"}])
            assert chat == await box.tokens(prompt="<user>hi<bot>")

    virtual_time.run(scenario())


def test_template_that_refuses_is_a_config_error(boxes: Any, templated: Path) -> None:
    (templated / "chat_template.jinja").write_text("{{ raise_exception('no system messages') }}")

    async def scenario() -> None:
        async with boxes(templated, HALVES) as box:
            with pytest.raises(ConfigError, match="no system messages"):
                await box.tokens(prompt=None, messages=[{"role": "user", "content": "hi"}])

    virtual_time.run(scenario())


def test_models_lists_served_and_missing_blocks(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 2), (3, 6)]) as box:
            (status,) = await box.client.models()
            assert (status.name, status.num_blocks, status.num_servers) == ("tiny", 6, 2)
            assert status.missing == ((2, 3),)

    virtual_time.run(scenario())


def test_models_say_how_old_the_records_of_their_servers_are(boxes: Any, llama_dir: Path) -> None:
    async def main() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6)]) as box:
            await asyncio.sleep(100)
            (alive,) = await box.client.models()
            assert alive.age_s <= limits.RECORD_LIFETIME_S / 2 + 1
            box.internet.crash(box.who["s1"])
            await asyncio.sleep(limits.RECORD_LIFETIME_S / 2)
            (dead,) = await box.client.models()
            assert (dead.missing, dead.unreachable) == ((), ())  # no client has tried to reach it
            assert dead.age_s >= limits.RECORD_LIFETIME_S / 2
            await asyncio.sleep(limits.RECORD_LIFETIME_S / 2 + 3)
            (gone,) = await box.client.models()
            assert gone.missing == ((3, 6),)
            assert gone.age_s <= limits.RECORD_LIFETIME_S / 2 + 1

    virtual_time.run(main())


def test_server_that_failed_is_unreachable_until_its_record_is_newer_or_it_answers(boxes: Any, llama_dir: Path) -> None:
    async def main() -> None:
        async with boxes(llama_dir, [(0, 3), (3, 6)]) as box:
            health, (alive, killed) = box.client.health, box.servers

            async def unreachable() -> tuple[tuple[int, int], ...]:
                (status,) = await box.client.models()
                return status.unreachable

            await asyncio.sleep(5)
            box.internet.crash(killed)
            for peer_id in (alive, killed):
                health.failed(peer_id, PeerUnreachable("gone"))
            assert await unreachable() == ((0, 6),)
            await asyncio.sleep(limits.RECORD_LIFETIME_S / 2)
            assert health.avoid == set()
            assert await unreachable() == ((3, 6),)
            health.worked(killed)
            assert await unreachable() == ()

    virtual_time.run(main())


def test_model_is_looked_up_alone_and_once_for_later_requests(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            everything = patch.object(box.membership, "models", AsyncMock(side_effect=AssertionError))
            one = patch.object(box.membership, "servers", AsyncMock(side_effect=box.membership.servers))
            with everything, one as look_up:
                status = await box.client.model("tiny")
                assert (status.name, status.num_blocks, status.num_servers, status.missing) == ("tiny", 6, 2, ())
                assert await box.tokens(2) == box.expected()[:2]
                look_up.assert_awaited_once_with("tiny")
                assert await box.client.model("tyni") is None
                assert await box.client.model("../etc") is None

    virtual_time.run(scenario())


def test_unknown_model_lists_the_known_ones(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            with pytest.raises(ConfigError, match="nobody serves a model 'tyni'; known models: tiny: use one of these"):
                await box.tokens(model="tyni")
            with pytest.raises(ConfigError, match=r"a model 'tinny'; known models: tiny: did you mean tiny\?"):
                await box.tokens(model="tinny")
            with pytest.raises(ConfigError, match="tiny: use one of these; after the @ belong 8 or more digits"):
                await box.tokens(model="tiny@1a2b")
            with pytest.raises(ConfigError, match="not a name"):
                await box.tokens(model="../etc")
            with patch.object(box.membership, "models", AsyncMock(return_value=[])), pytest.raises(ConfigError) as told:
                await box.tokens(model="tyni")
            assert (told.value.message, told.value.remedy) == (
                "nobody serves a model 'tyni'; known models: none",
                "serve it: swarm-node join --model MODEL",
            )

    virtual_time.run(scenario())


def test_uncovered_blocks_are_named_at_once(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 4)]) as box:
            since_s = asyncio.get_running_loop().time()
            with pytest.raises(NoChain, match=r"blocks 4:6 are not available: nobody serves them"):
                await box.tokens()
            assert asyncio.get_running_loop().time() - since_s < 1

    virtual_time.run(scenario())


def test_more_min_tokens_than_the_answer_may_have_are_refused(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            with pytest.raises(ConfigError, match="min_tokens is 9, and the answer may have 8 tokens"):
                await anext(aiter(box.generate(8, min_tokens=9)))
            assert [token async for token in box.generate(8, min_tokens=8)]

    virtual_time.run(scenario())


def test_prompt_over_the_context_is_refused_with_the_excess(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            with pytest.raises(
                ConfigError, match="a prompt of 300 tokens with an answer of 16 is 60 over the context of 256"
            ):
                await box.tokens(prompt="x" * 300)
            with pytest.raises(
                ConfigError, match=r"a prompt of 1 token with an answer of 300 is 45 over .*: ask for 255 at most$"
            ):
                await box.tokens(prompt="x", max_tokens=300)
            with pytest.raises(ConfigError, match="shorten the prompt or ask for 6 at most"):
                await box.tokens(prompt="x" * 250, max_tokens=300)
            with pytest.raises(ConfigError, match="the prompt is empty"):
                await box.tokens(prompt="")
            assert len(await box.tokens(prompt="x" * 240)) == 16

    virtual_time.run(scenario())


def test_answer_without_a_number_of_tokens_goes_to_the_end_of_the_context_at_most(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            assert len(await box.tokens(None, prompt="x" * 250)) == 6
            with pytest.raises(ConfigError, match="a prompt of 256 tokens with an answer of 1 is 1 over"):
                await box.tokens(None, prompt="x" * 256)

    virtual_time.run(scenario())


BAD_REQUESTS = [
    {"temperature": -1},
    {"temperature": math.nan},
    {"top_p": 0},
    {"top_k": -1},
    {"num_tokens": 0},
    {"stop": ""},
    {"prompt": None},
    {"messages": []},
]


@pytest.mark.parametrize("values", BAD_REQUESTS, ids=str)
def test_invalid_request_is_refused_before_any_server_is_asked(
    boxes: Any, llama_dir: Path, values: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, []) as box:
            with pytest.raises(ConfigError):
                box.generate(**values)

    virtual_time.run(scenario())


def test_other_weights_of_the_same_name_are_never_mixed(
    boxes: Any, llama_dir: Path, tmp_path: Path, write_tiny: Any
) -> None:
    other = write_tiny(tmp_path / "other", "llama", seed=1)

    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            box.directory = other
            await box.add(0, 3)
            await box.add(0, 3)
            await box.known(4)
            box.directory = llama_dir
            assert await box.tokens() == box.expected()
            box.internet.crash(box.who["s1"])  # the second half has no revision now
            with pytest.raises(NoChain, match=r"3:6"):
                await box.tokens()

    virtual_time.run(scenario())


def test_servers_dead_before_the_first_token_are_passed_over(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [*HALVES, *HALVES], detection_s=0.1) as box:
            await box.tokens(1)
            box.internet.crash(box.who["s0"])
            box.internet.crash(box.who["s3"])
            for _ in range(4):
                assert await box.tokens() == box.expected()
                assert box.client.trace()["replays"] == []

    virtual_time.run(scenario())


def test_full_servers_are_passed_over_and_the_refusal_says_why_when_all_are_full(boxes: Any, llama_dir: Path) -> None:
    options = ServerOptions(kv_bytes=384 * 50)  # 50 tokens a half, which is one session of 41

    async def scenario() -> None:
        async with boxes(llama_dir, [*HALVES, *HALVES], options=options) as box:
            first, second, third = box.generate(), box.generate(), box.generate()
            await anext(aiter(first))
            await anext(aiter(second))
            with pytest.raises(NoChain):
                await anext(aiter(third))
            await first.aclose()
            await second.aclose()
            await box.all_freed()
            await asyncio.sleep(10)
            assert await box.tokens() == box.expected()

    virtual_time.run(scenario())


def test_prompt_over_every_cache_is_refused_for_good(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [*HALVES, *HALVES], options=ServerOptions(kv_bytes=384 * 50)) as box:
            with pytest.raises(ContextExceeded, match=r"the cache of each server of blocks 0:3 is too small .*shorten"):
                await box.tokens(40)
            assert await box.tokens() == box.expected()

    virtual_time.run(scenario())


def test_prompt_over_every_cache_is_refused_for_good_after_a_server_with_a_larger_one_has_left(
    boxes: Any, llama_dir: Path
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, options=ServerOptions(kv_bytes=384 * 50)) as box:
            large = await box.add(0, 6)
            await box.known(3)
            assert len(await box.tokens(100)) == 100
            await large.drain(within_s=0.0)
            with pytest.raises(ContextExceeded, match="the cache of each server of blocks 0:3 is too small"):
                await box.tokens(100)

    virtual_time.run(scenario())


def test_files_are_fetched_from_another_server_when_one_fails(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [*HALVES, *HALVES]) as box:
            first = min(box.servers)
            box.internet.crash(first)
            assert await box.tokens() == box.expected()

    virtual_time.run(scenario())


@pytest.mark.parametrize(("num_gone", "max_pinged", "num_pings"), [(1, 16, 1), (5, 16, 2), (5, 2, 4)])
def test_files_are_soon_fetched_from_another_server_when_the_first_ones_are_gone(
    boxes: Any, llama_dir: Path, monkeypatch: pytest.MonkeyPatch, num_gone: int, max_pinged: int, num_pings: int
) -> None:
    """A server that was cut off stays listed for a minute, and a call to it ends only after its time-out. At most
    `max_pinged` servers are pinged at once."""
    monkeypatch.setattr(assets_cache, "MAX_PINGED", max_pinged)

    async def scenario() -> float:
        async with boxes(llama_dir, [(0, 6)] * 6, detection_s=600.0) as box:
            for gone in sorted(box.servers)[:num_gone]:
                box.internet.crash(gone)
            since_s = asyncio.get_running_loop().time()
            await box.kit()
            return asyncio.get_running_loop().time() - since_s

    assert num_pings * DIAL_S <= virtual_time.run(scenario()) < num_pings * DIAL_S + 1.0


def test_files_are_fetched_from_a_server_that_is_slow_to_answer_if_there_is_no_other(
    boxes: Any, llama_dir: Path
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as box:
            [server] = box.servers
            box.internet.link(box.network.peer_id, server, LinkModel(latency_s=DIAL_S))
            assert await box.kit()

    virtual_time.run(scenario())


@pytest.mark.parametrize("num_silent", [1, 6])
def test_files_are_soon_fetched_from_another_server_when_the_first_ones_answer_only_pings(
    boxes: Any, llama_dir: Path, num_silent: int
) -> None:
    async def scenario() -> float:
        async with boxes(llama_dir, [(0, 6)] * 7) as box:
            silent = sorted(box.servers)[:num_silent]
            num_cancelled = 0

            async def fetch(network: Any, model: str, revision: str, peer_id: str) -> dict[str, bytes]:
                nonlocal num_cancelled
                if peer_id in silent:
                    try:
                        await asyncio.Event().wait()
                    finally:
                        num_cancelled += 1
                return await fetch_files(network, model, revision, peer_id)

            with patch("swarm.client.assets_cache.fetch_files", fetch):
                since_s = asyncio.get_running_loop().time()
                await box.kit()
            assert num_cancelled == num_silent
            return asyncio.get_running_loop().time() - since_s

    patience_s = num_silent * assets_cache.PATIENCE_S
    assert virtual_time.run(scenario()) == pytest.approx(patience_s, abs=1.0)


def test_files_are_not_asked_of_a_second_server_while_the_first_one_sends_them(boxes: Any, llama_dir: Path) -> None:
    """On a slow line a second download would make both too slow."""
    asked: list[str] = []

    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] * 2) as box:

            async def fetch(network: Any, model: str, revision: str, peer_id: str) -> dict[str, bytes]:
                asked.append(peer_id)
                for _ in range(int(4 * assets_cache.PATIENCE_S)):
                    network.links.heard(peer_id)
                    await asyncio.sleep(1.0)
                return await fetch_files(network, model, revision, peer_id)

            with patch("swarm.client.assets_cache.fetch_files", fetch):
                await box.kit()
            assert len(asked) == 1

    virtual_time.run(scenario())


@pytest.mark.parametrize("num_slow", [1, 3])
def test_files_are_fetched_from_another_server_when_the_first_ones_send_only_a_trickle(
    boxes: Any, llama_dir: Path, num_slow: int
) -> None:
    async def scenario() -> float:
        async with boxes(llama_dir, [(0, 6)] * 4) as box:
            slow = sorted(box.servers)[:num_slow]

            async def fetch(network: Any, model: str, revision: str, peer_id: str) -> dict[str, bytes]:
                while peer_id in slow:
                    network.links.heard(peer_id)
                    await asyncio.sleep(1.0)
                return await fetch_files(network, model, revision, peer_id)

            with patch("swarm.client.assets_cache.fetch_files", fetch):
                since_s = asyncio.get_running_loop().time()
                await asyncio.wait_for(box.kit(), 2 * assets_cache.FETCH_S)
            return asyncio.get_running_loop().time() - since_s

    trickle_s = num_slow * assets_cache.TRICKLE_S
    assert virtual_time.run(scenario()) == pytest.approx(trickle_s, abs=1.0)


def test_files_that_no_server_sends_are_given_up_in_the_end(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)] * 12) as box:
            since_s = asyncio.get_running_loop().time()

            async def fetch(*_: object) -> None:
                await asyncio.sleep(60.0)
                raise PeerTimeout("no answer within 60 s")

            with patch("swarm.client.assets_cache.fetch_files", fetch), pytest.raises(PeerTimeout, match="no answer"):
                await box.kit()
            assert asyncio.get_running_loop().time() - since_s <= assets_cache.FETCH_S + assets_cache.PATIENCE_S

    virtual_time.run(scenario())


def test_files_are_fetched_from_another_server_when_one_sends_malformed_ones(boxes: Any, llama_dir: Path) -> None:
    """A server that claims the revision of others could otherwise take the model from all clients."""
    asked: list[str] = []

    async def scenario() -> None:
        async with boxes(llama_dir, [*HALVES, *HALVES]) as box:
            hostile = min(box.servers)

            async def fetch(network: Any, model: str, revision: str, peer_id: str) -> dict[str, bytes]:
                asked.append(peer_id)
                files = await fetch_files(network, model, revision, peer_id)
                return {**files, "config.json": b"{"} if peer_id == hostile else files

            with patch("swarm.client.assets_cache.fetch_files", fetch):
                assert await box.tokens() == box.expected()
                assert asked[0] == hostile
                box.client._assets._assets.clear()
                assert await box.tokens() == box.expected()
                assert asked[2:] == [asked[1]]

    virtual_time.run(scenario())


def test_files_are_refused_after_a_few_servers_sent_malformed_ones(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [*HALVES, *HALVES]) as box:
            fetch = AsyncMock(return_value={"config.json": b"{"})
            with patch("swarm.client.assets_cache.fetch_files", fetch):
                with pytest.raises(IntegrityError, match="the files of tiny cannot be used"):
                    await box.tokens()
                assert fetch.await_count == MAX_BAD_FILES

    virtual_time.run(scenario())


def test_files_that_no_server_sends_are_a_peer_error(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            for peer_id in box.servers:
                box.internet.crash(peer_id)
            with pytest.raises(PeerError):
                await box.tokens()

    virtual_time.run(scenario())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}'),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b"{}"),
        ("generation_config.json", b'{"eos_token_id": "x"}'),
        ("generation_config.json", b"[]"),
    ],
)
def test_kit_of_malformed_files_is_refused_with_one_line(
    llama_dir: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    files = {**open_model(llama_dir).small_files(), name: content}
    with pytest.raises(IntegrityError, match="the files of tiny cannot be used") as caught:
        kit_of(files)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3", "num_hidden_layers": 10**7},
        {"num_hidden_layers": 10**7},
        {"num_hidden_layers": 0},
        {"vocab_size": 2**40},
        {"text_config": {"num_hidden_layers": 10**7}},
    ],
)
def test_kit_of_a_config_beyond_any_model_is_refused_at_once(
    llama_dir: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Each of these could take a second or a gigabyte, and bring down a gateway that knows a hostile server."""
    files = open_model(llama_dir).small_files()
    config = json.dumps({**json.loads(files["config.json"]), **changes}).encode()
    with pytest.raises(IntegrityError, match="the files of tiny cannot be used"):
        kit_of({**files, "config.json": config})


def test_kit_context_is_that_of_the_network_at_most(llama_dir: Path, tmp_path: Path) -> None:
    files = open_model(llama_dir).small_files()
    config = json.dumps({**json.loads(files["config.json"]), "max_position_embeddings": 10**9}).encode()
    kit = kit_of({**files, "config.json": config})
    assert kit.context_tokens == limits.MAX_SESSION_TOKENS


def test_kit_opens_no_file_that_its_settings_name(llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root:x:0\n")
    files = open_model(llama_dir).small_files()
    del files["tokenizer.json"]
    settings = {"tokenizer_class": "GPT2Tokenizer", "merges_file": str(tmp_path / "secret")}
    own = {"vocab.json": b'{"a": 0, "b": 1, "ab": 2}', "merges.txt": b"#version: 0.2\na b\n"}
    kit = kit_of({**files, **own, "tokenizer_config.json": json.dumps(settings).encode()})
    assert asyncio.run(kit.encode("ab")) == [2]


def test_model_whose_servers_stall_delays_no_other(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES, detection_s=1e6) as box:
            stuck = await box.add(0, 6, name="stuck")
            await box.known(1, "stuck")
            box.internet.crash(next(peer_id for peer_id, server in box.servers.items() if server is stuck))
            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(anext(aiter(box.generate(model="stuck"))))
                await asyncio.sleep(0.1)
                since_s = asyncio.get_running_loop().time()
                assert await box.tokens() == box.expected()
                assert asyncio.get_running_loop().time() - since_s < 10
                waiting.cancel()

    virtual_time.run(scenario())


def test_internal_error_of_a_server_that_sends_files_is_a_peer_error() -> None:
    """Its error is not the client's: a remote "config" is no mistake in the request."""

    async def broken(_peer_id: str, _request: bytes) -> bytes:
        raise ConfigError("my disk is broken")

    async def good(_peer_id: str, _request: bytes) -> bytes:
        return FilesResponse(revision="r", files={"config.json": b"{}"}).to_bytes()

    async def scenario() -> None:
        internet = MemoryInternet()
        asker, first, second = (internet.network() for _ in range(3))
        await first.serve(f"{FILES_METHOD}/tiny", broken)
        await second.serve(f"{FILES_METHOD}/tiny", good)
        assert await fetch_files(asker, "tiny", "r", second.peer_id) == {"config.json": b"{}"}
        with pytest.raises(PeerError, match="my disk is broken"):
            await fetch_files(asker, "tiny", "r", first.peer_id)
        with pytest.raises(PeerError, match="another revision"):
            await fetch_files(asker, "tiny", "s", second.peer_id)

    virtual_time.run(scenario())


def test_kit_end_tokens_may_be_several(llama_dir: Path, tmp_path: Path) -> None:
    files = {**open_model(llama_dir).small_files(), "generation_config.json": b'{"eos_token_id": [3, 4]}'}
    assert kit_of(files).end_ids == {3, 4}


def test_kit_end_tokens_beyond_the_vocabulary_are_none(llama_dir: Path) -> None:
    """A server refuses such ids, and a client would blame each server that it uses with `min_tokens`."""
    files = {**open_model(llama_dir).small_files(), "generation_config.json": b'{"eos_token_id": [3, 100000, -1]}'}
    assert kit_of(files).end_ids == {3}


def test_chat_template_gets_only_the_names_that_it_uses(llama_dir: Path) -> None:
    template = b"{# no tools #}{% if enable_thinking %}role{% endif %}{{ messages[0].content }}"
    kit = kit_of({**open_model(llama_dir).small_files(), "chat_template.jinja": template})
    plain_kit = kit_of(open_model(llama_dir).small_files())
    messages = [{"role": "user", "content": "hi"}]

    async def scenario() -> None:
        plain = await kit.encode_chat(messages)
        assert await kit.encode_chat(messages, (), {"enable_thinking": True}) == [*await kit.encode("role"), *plain]
        for name in ("enable", "role", "content", "messages", "tools"):
            with pytest.raises(ConfigError, match=f"does not use {name}"):
                await kit.encode_chat(messages, (), {name: True})
        with pytest.raises(ConfigError, match=r"^the chat template of .* does not support tools"):
            await kit.encode_chat(messages, [{"type": "function"}])
        with pytest.raises(ConfigError, match=r"without a chat template, .* does not support tools"):
            await plain_kit.encode_chat(messages, [{"type": "function"}])

    asyncio.run(scenario())


def test_chat_template_may_use_what_openais_clients_send_for_any_model(llama_dir: Path) -> None:
    template = b"{% if reasoning_effort %}{{ reasoning_effort }} {% endif %}{{ messages[0].content }}"
    kit = kit_of({**open_model(llama_dir).small_files(), "chat_template.jinja": template})
    plain_kit = kit_of(open_model(llama_dir).small_files())
    messages, wishes = [{"role": "user", "content": "hi"}], {"reasoning_effort": "low", "verbosity": "high"}

    async def scenario() -> None:
        assert await kit.encode_chat(messages, (), wishes) == await kit.encode("low hi")
        assert await plain_kit.encode_chat(messages, (), wishes) == await plain_kit.encode_chat(messages)

    asyncio.run(scenario())


def test_malformed_chat_template_is_refused_with_one_line(llama_dir: Path) -> None:
    kit = kit_of({**open_model(llama_dir).small_files(), "chat_template.jinja": b"{% if %}"})
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        asyncio.run(kit.encode_chat([{"role": "user", "content": "hi"}]))
    assert "\n" not in str(caught.value)


class Slow:
    """A stand-in for a connected AsyncClient that answers when the test says so."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answer = True

    async def models(self) -> tuple[()]:
        self.asked.set()
        await asyncio.sleep(0 if self.answer else 3600)
        return ()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    made = Slow()

    @asynccontextmanager
    async def connect(**_: object) -> AsyncIterator[Slow]:
        yield made

    monkeypatch.setattr(client.AsyncClient, "connect", connect)
    return made


def test_call_while_another_thread_closes_the_client_is_scheduled_before_the_end(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = asyncio.run_coroutine_threadsafe
    with client.Client(peers=[]) as connected:
        closing = threading.Thread(target=connected.close)

        def close_meanwhile(*arguments: Any) -> Any:
            closing.start()
            closing.join(0.2)  # without the guard it ends within this time
            return schedule(*arguments)

        monkeypatch.setattr("swarm.client.sync_client.asyncio.run_coroutine_threadsafe", close_meanwhile)
        with suppress(SessionError):  # the end came first, and the call failed
            assert connected.models() == ()
        closing.join(10)
        assert not closing.is_alive()
        assert slow.asked.wait(10)


def test_waiting_call_fails_with_the_reason_when_the_client_is_closed(slow: Slow) -> None:
    slow.answer = False
    with client.Client(peers=[]) as connected:
        closing = threading.Thread(target=lambda: slow.asked.wait(10) and connected.close())
        closing.start()
        with pytest.raises(SessionError, match="closed"):
            connected.models()
        closing.join(10)
        with pytest.raises(SessionError):
            connected.models()


def test_client_that_is_connected_is_not_entered_again_and_stays_usable(slow: Slow) -> None:
    with client.Client(peers=[]) as connected:
        with pytest.raises(SessionError, match="connected already"), connected:
            pass
        assert connected.models() == ()
    with connected:  # again after its end
        assert connected.models() == ()


@pytest.mark.parametrize("fails", [False, True])
def test_interrupted_connecting_leaves_no_thread(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    begun, go_on, was_closed = threading.Event(), threading.Event(), threading.Event()

    @asynccontextmanager
    async def connect(**_: object) -> AsyncIterator[Slow]:
        begun.set()
        await asyncio.to_thread(go_on.wait, 10)
        if fails:
            raise StartError("no network")
        yield Slow()
        was_closed.set()

    def press_ctrl_c() -> None:
        begun.wait(10)
        while not go_on.is_set():  # Python does not notice a signal that comes just before it begins to wait
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            go_on.wait(5)

    monkeypatch.setattr(client.AsyncClient, "connect", connect)
    connecting, pressing = client.Client(peers=[]), threading.Thread(target=press_ctrl_c)
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt), connecting:
            pass
    finally:
        go_on.set()
    pressing.join(10)
    assert connecting._thread is not None
    connecting._thread.join(10)
    assert not connecting._thread.is_alive()
    assert was_closed.is_set() != fails


def test_connecting_that_is_interrupted_as_its_thread_starts_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    was_closed = threading.Event()

    @asynccontextmanager
    async def connect(**_: object) -> AsyncIterator[Slow]:
        await asyncio.to_thread(was_interrupted.wait, 10)
        yield Slow()
        was_closed.set()

    def start(thread: threading.Thread) -> None:
        really_start(thread)
        if thread.name == "swarm-client":
            raise KeyboardInterrupt

    was_interrupted, really_start = threading.Event(), threading.Thread.start
    monkeypatch.setattr(client.AsyncClient, "connect", connect)
    monkeypatch.setattr(threading.Thread, "start", start)
    connecting = client.Client(peers=[])
    with pytest.raises(KeyboardInterrupt), connecting:
        pass
    was_interrupted.set()
    assert connecting._thread is not None
    connecting._thread.join(10)
    assert not connecting._thread.is_alive()
    assert was_closed.is_set()


def test_interrupted_answer_is_ended_and_the_client_stays_usable(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C interrupts it while a token is awaited."""
    ended = threading.Event()

    async def hang(_trace: object) -> AsyncGenerator[Any, None]:
        try:
            slow.asked.set()
            await asyncio.sleep(3600)
            yield
        finally:
            await asyncio.sleep(0.01)  # the chain is freed
            ended.set()

    monkeypatch.setattr(Slow, "answer_to", lambda _self, _request: client.Generation(hang, "tiny"), raising=False)
    with client.Client(peers=[]) as connected:
        monkeypatch.setattr(slow, "answer", slow.answer_to)

        def press_ctrl_c() -> None:
            slow.asked.wait(10)
            while not ended.is_set():  # Python does not notice a signal that comes just before it begins to wait
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                ended.wait(5)

        pressing = threading.Thread(target=press_ctrl_c)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            next(connected.generate(model="tiny", prompt="hi"))
        pressing.join(10)
        assert ended.wait(10)
        assert connected.models() == ()


OPENED = """
from contextlib import asynccontextmanager
from swarm import client

class Endless:
    def answer(self, _request):
        async def tokens(_trace):
            while True:
                yield "x"
        return client.Generation(tokens, "tiny")

    async def models(self):
        return ()

@asynccontextmanager
async def connect(**_):
    yield Endless()
    print("closed", flush=True)

client.AsyncClient.connect = connect
opened = client.Client(peers=[]).__enter__()
"""
"""A module with a client that is open, and stays so."""


def run_with_opened(code: str, folder: Path) -> tuple[str, str]:
    """Run the program `code`, which may import the module `opened`. Return what it wrote to stdout and stderr."""
    (folder / "opened.py").write_text(OPENED)
    command = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=60)
    return ended.stdout, ended.stderr


def test_program_that_leaves_its_client_and_an_answer_open_ends_and_closes_them(tmp_path: Path) -> None:
    code = "from opened import opened\nanswer = opened.generate(model='tiny', prompt='hi')\nprint(next(answer))"
    assert run_with_opened(code, tmp_path) == ("x\nclosed\n", "")


def test_closed_client_is_not_kept_until_the_program_ends(tmp_path: Path) -> None:
    code = """
import gc, weakref
import opened

kept = weakref.ref(opened.opened)
opened.opened.close()
del opened.opened
gc.collect()
print(kept())
"""
    assert run_with_opened(code, tmp_path) == ("closed\nNone\n", "")


def test_forked_process_is_told_that_the_client_is_another_process_s(tmp_path: Path) -> None:
    """A worker of `multiprocessing` that the system forks has the client, but not its thread, nor any other, of which
    one may have held the client's lock."""
    code = """
import os, signal, threading
from opened import opened
from swarm_protocol.errors import SessionError

held, forked = threading.Event(), threading.Event()

def hold():
    with opened._open:
        held.set()
        forked.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    try:
        opened.models()
    except SessionError as error:
        print(error, flush=True)
    opened.close()
    os._exit(0)
forked.set()
holder.join()
assert os.waitpid(child, 0)[1] == 0
print(opened.models())
"""
    told = "this client belongs to another process: open a client in each process"
    assert run_with_opened(code, tmp_path) == (f"{told}\n()\nclosed\n", "")


def test_import_of_swarm_is_light() -> None:
    """A command line that must answer at once imports its packages, and a client of texts needs no tensors."""

    code = "import swarm, sys; swarm.Client; assert not {'torch', 'transformers', 'hivemind'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_names_of_the_package_exist() -> None:
    for name in swarm.__all__:
        assert getattr(swarm, name).__name__ == name
    with pytest.raises(AttributeError):
        swarm.nothing  # noqa: B018


def test_client_without_peers_is_refused_and_starts_no_network_of_its_own() -> None:
    with pytest.raises(ConfigError, match="needs the address of a node"), client.Client(peers=[]):
        pass


def test_client_without_free_files_fails_at_once_with_the_reason() -> None:
    exhausted = OSError(errno.EMFILE, "Too many open files")
    with (
        patch("asyncio.events.new_event_loop", side_effect=exhausted),
        pytest.raises(StartError, match="Too many open files"),
        client.Client(peers=["/ip4/127.0.0.1/tcp/1/p2p/x"]),
    ):
        pass


def test_client_refuses_one_address_in_place_of_a_list() -> None:
    address = "/ip4/127.0.0.1/tcp/1/p2p/x"
    with pytest.raises(ConfigError, match="one address and not a list") as error, client.Client(peers=address):
        pass
    assert error.value.remedy == f"give peers=['{address}']"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": [3]}, "peers has 3, which is no address"),
        ({"peers": 3}, "peers is 3 and not a list"),
        ({"peers": ["/ip4/127.0.0.1/tcp/1"], "invite": 3}, "invite is 3 and not an invitation"),
    ],
)
def test_client_refuses_values_of_another_type_with_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error, client.Client(**options):
        pass
    assert error.value.remedy.startswith("give ")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("publishers", "story=12D3KooW", "give publishers=['story=12D3KooW']"),
        ("publishers", 3, 'give publishers=["[MODEL=]PEER_ID"]'),
        ("publishers", [3], 'give publishers=["[MODEL=]PEER_ID"]'),
        ("used", 3, "give used=UsedRevisions(…)"),
        ("pins", ["story@1a2b3c4d"], 'give pins={"MODEL": "REVISION"}'),
        ("text_at_home", ["story"], 'give text_at_home={"MODEL": "DIRECTORY"}'),
        ("text_at_home", {"story": 3}, 'give text_at_home={"MODEL": "DIRECTORY"}'),
    ],
)
def test_client_refuses_an_option_of_another_type_and_says_how_to_write_it(name: str, value: Any, remedy: str) -> None:
    options = client.ClientOptions(**{name: value})
    with pytest.raises(ConfigError, match=name) as error:
        client.AsyncClient(network=MagicMock(), membership=MagicMock(), options=options)
    assert error.value.remedy == remedy


def test_client_refuses_a_share_of_spot_checks_that_is_no_number() -> None:
    with pytest.raises(ConfigError, match="share of spot checks is 'a'"):
        SpotCheckOptions(share=cast("Any", "a"))


def test_tokens_that_are_no_numbers_are_refused(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no list of token ids"):
        checked(kit_of(open_model(llama_dir).small_files()), cast("Any", "ab"))
    with pytest.raises(ConfigError, match="no list of token ids"):
        check_prompt_ids([2**63])  # no tensor holds it
    assert check_prompt_ids(np.array([1, 2])) == [1, 2]


def test_model_that_is_no_name_is_refused() -> None:
    async def main() -> None:
        asking = client.AsyncClient(network=MagicMock(), membership=MagicMock())
        for ask in (asking.model, asking.servers, asking.context_tokens):
            with pytest.raises(ConfigError, match="model is 3"):
                await ask(cast("Any", 3))

    asyncio.run(main())


WARM = """
import sys
from pathlib import Path
sys.modules["torch"] = None  # as in the tokenizer's process
from swarm.serving.tokenizer.tokenizer_worker import load_tokenizer, warm_up
warm_up()
loaded = set(sys.modules)
assert load_tokenizer("tiny", Path(sys.argv[1])).table() is not None
print([name for name in set(sys.modules) - loaded if name.startswith(("transformers", "tokenizers", "torch"))])
"""


def test_warm_up_leaves_nothing_to_import_for_the_first_answer(llama_dir: Path, tmp_path: Path) -> None:
    model = shutil.copytree(llama_dir, tmp_path / "model")
    command = [sys.executable, "-c", WARM, model]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout == "[]\n"


@pytest.mark.parametrize("prompt", [5, 1.5, b"ab", ["a"], [1.5], {"role": "user"}, torch.tensor([1])])
def test_request_with_an_invalid_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ConfigError, match="a prompt is text or token ids, and not"):
        Prompt(prompt=prompt)


@pytest.mark.parametrize("messages", ["hi", ["hi"], 5, b"hi"])
def test_request_with_invalid_messages_is_refused(messages: Any) -> None:
    with pytest.raises(ConfigError, match="messages are a list of dicts, and not"):
        Prompt(prompt=None, messages=messages)
    with pytest.raises(ConfigError, match="tools are a list of dicts, and not"):
        Prompt(prompt="x", tools=messages)


def test_message_without_a_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="message 1 has no role"):
        Prompt(prompt=None, messages=[{"role": "user", "content": "hi"}, {"rolle": "user", "content": "hi"}])


@pytest.mark.parametrize("prompt", ["", "x", [], (1, 2), [np.int64(3)]])
def test_request_with_text_or_token_ids_is_valid(prompt: Any) -> None:
    assert Prompt(prompt=prompt).prompt is prompt


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2.5),
        ("max_tokens", "9"),
        ("max_tokens", True),
        ("temperature", "hot"),
        ("top_p", "x"),
        ("top_k", 1.5),
        ("seed", "x"),
        ("num_logprobs", 0.5),
        ("stop", 5),
        ("stop", [5]),
        ("grammar", 'start: "yes"'),
        ("json_schema", "{}"),
        ("sampling", {"temperature": 0.5}),
    ],
)
def test_generate_refuses_a_value_of_another_type_at_once(name: str, value: Any) -> None:
    asked = client.AsyncClient(network=MagicMock(), membership=MagicMock())
    with pytest.raises(ConfigError, match=f"{name} is {re.escape(repr(value))}: use"):
        asked.generate(model="tiny", prompt="hi", **{name: value})


def test_generate_refuses_an_invalid_model_name_at_once() -> None:
    asked = client.AsyncClient(network=MagicMock(), membership=MagicMock())
    with pytest.raises(ConfigError, match="model is None"):
        asked.generate(model=cast("Any", None), prompt="hi")


@pytest.mark.parametrize("num_logprobs", [-1, 21])
def test_generate_refuses_too_many_likeliest_tokens_at_once(num_logprobs: int) -> None:
    asked = client.AsyncClient(network=MagicMock(), membership=MagicMock())
    with pytest.raises(ConfigError, match="use 0 to 20"):
        asked.generate(model="tiny", prompt="hi", num_logprobs=num_logprobs)


def test_single_sampling_fields_take_precedence_over_the_sampling_argument() -> None:
    class Asked(client.AsyncClient):
        def answer(self, request: Any) -> Any:
            return request

    asked = Asked(network=MagicMock(), membership=MagicMock())
    kept = client.SamplingParams(temperature=0.9, top_p=0.5, seed=3)
    request: Any = asked.generate(model="tiny", prompt="hi", sampling=kept, temperature=0.2, stop="x")
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0.2, 0.5, 3)
    assert request.sampling.stop == ("x",)


def test_unknown_keyword_of_generate_is_named_with_the_nearest_known_one() -> None:
    asked = client.AsyncClient(network=MagicMock(), membership=MagicMock())
    for given, told in (
        ({"temprature": 0.2}, r"generate\(\) has no keyword 'temprature': did you mean 'temperature'\?"),
        ({"max_token": 3}, r"generate\(\) has no keyword 'max_token': did you mean 'max_tokens'\?"),
        ({"qqq": 3}, r"generate\(\) has no keyword 'qqq': it takes model, prompt, .*, temperature, "),
    ):
        with pytest.raises(TypeError, match=told):
            asked.generate(model="tiny", prompt="hi", **cast("Any", given))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"temperature": "x"}, "temperature is 'x'; use a number"),
        ({"temperature": 3}, "temperature is 3; use 0 to 2"),
        ({"top_k": 1.5}, "top_k is 1.5; use a whole number"),
        ({"top_k": 2**40}, "top_k is 1099511627776; use 0 for no limit, or a number up to 1048576"),
        ({"stop": 7}, "stop is 7; use a string"),
        ({"num_logprobs": 21}, "num_logprobs is 21; use 0 to 20"),
        ({"timeout_s": 0}, "timeout_s is 0; use a number of seconds above 0"),
        ({"timeout_s": math.nan}, "timeout_s is nan; use a number of seconds above 0"),
        ({"json_schema": "{}"}, "json_schema is '{}'; use the schema as a dict"),
    ],
)
def test_invalid_sampling_parameters_are_refused_when_they_are_created(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        client.SamplingParams(**given)
    assert f"{refused.value.message}; {refused.value.remedy}".startswith(told)


def test_generate_without_a_prompt_or_messages_is_refused_at_once() -> None:
    asked = client.AsyncClient(network=MagicMock(), membership=MagicMock())
    message = {"role": "user", "content": "hi"}
    for given, told in (
        ({}, "either a prompt or messages"),
        ({"prompt": "hi", "messages": [message]}, "either a prompt or messages"),
        ({"messages": []}, "there are no messages"),
    ):
        with pytest.raises(ConfigError, match=told):
            asked.generate(model="tiny", **given)


def test_text_is_refused_when_its_tokens_are_outside_the_vocabulary(llama_dir: Path, tmp_path: Path) -> None:
    kit = kit_of(open_model(llama_dir).small_files())

    async def scenario() -> None:
        (a,), (z,) = [await kit.encode(text) for text in "az"]
        small = replace(kit, shape=replace(kit.shape, vocab_size=max(a, z)))
        fewer, more = ("a", "z") if a < z else ("z", "a")
        assert await encode(small, Prompt(prompt=fewer)) == [min(a, z)]
        with pytest.raises(ConfigError, match="gives tokens for this text that the model does not know"):
            await encode(small, Prompt(prompt=more))

    asyncio.run(scenario())


def test_tokenizers_of_answers_that_failed_make_room_for_other_models(boxes: Any, llama_dir: Path) -> None:
    """Such an answer is garbage that refers to itself, which Python may find only after minutes."""

    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as box:
            cache = box.client._assets
            answer = aiter(box.generate(50))
            await anext(answer)
            for peer_id in box.servers:
                box.internet.crash(peer_id)
            with pytest.raises(SessionError):
                [token async for token in answer]
            del answer
            cache._assets.clear()
            with patch("swarm.client.assets_cache.MAX_PROCESSES", 1), cache._room():
                assert not cache._opened

    virtual_time.run(scenario())


def test_no_more_than_some_models_have_a_tokenizer_at_once_however_many_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Assets:
        pass

    async def opened(cache: AssetsCache, *_: object) -> Assets:
        await asyncio.sleep(0)
        assets = Assets()
        cache._opened.add(assets)
        return assets

    async def main() -> None:
        cache: Any = AssetsCache(None, None, None)
        servers = {"server": SimpleNamespace(revision="r")}

        def get(number: int) -> Any:
            return cache.get(f"model {number}", servers, None, own_files={})

        used = [await get(number) for number in range(MAX_PROCESSES - 1)]
        last = asyncio.create_task(get(MAX_PROCESSES - 1))
        await asyncio.sleep(0)
        with pytest.raises(PeerRefused, match=f"tokenizers of {MAX_PROCESSES} models are in use") as refused:
            await get(MAX_PROCESSES)
        assert refused.value.retry_after_s > 0
        assert await last is await get(MAX_PROCESSES - 1)
        del used[0]  # the cache has dropped it, and no answer uses it any more
        await get(MAX_PROCESSES)

    monkeypatch.setattr(AssetsCache, "_open", opened)
    asyncio.run(main())
