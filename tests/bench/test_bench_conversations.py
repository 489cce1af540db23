"""Conversations with two servers for each half of a model: how much of their prompts servers still have.

    make bench                                             # or alone:
    .venv/bin/python -m pytest tests/bench/test_bench_conversations.py -m bench -s

Six people ask, read and ask again, at the same time. One client remembers which servers have a conversation, and one
does not; they take turns, with conversations of their own.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from bench.bench_model import MODEL, NUM_BLOCKS, write_model
from bench.local_transformers import prompt_ids
from bench.report import Report
from support.serving_fleet import serving_fleet
from swarm.client import AsyncClient
from swarm.serving.session.client_state import PageHolders

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

NUM_ROUNDS = 2
NUM_PEOPLE = 6
NUM_TURNS = 5
NUM_NEW_TOKENS = 150
"""Tokens of each question."""
NUM_ANSWERED = 24
MAX_PAUSE_S = 3.0
HALVES = ((0, NUM_BLOCKS // 2), (NUM_BLOCKS // 2, NUM_BLOCKS))


@dataclass
class Turns:
    """What was measured of all turns but the first ones."""

    num_tokens: int = 0
    num_cached: int = 0
    first_token_s: list[float] = field(default_factory=list)


async def converse(client: AsyncClient, seed: int, turns: Turns) -> None:
    pauses, text = random.Random(seed), ""
    for turn in range(NUM_TURNS):
        await asyncio.sleep(pauses.uniform(0, MAX_PAUSE_S))
        text += bytes(prompt_ids(100 * seed + turn, NUM_NEW_TOKENS)).decode()
        since = time.perf_counter()
        generation = client.generate(model=MODEL, prompt=text, max_tokens=NUM_ANSWERED)
        seconds = list[float]()
        async for token in generation:
            seconds.append(time.perf_counter() - since)
            text += token.text
        if turn:
            trace = generation.trace()
            turns.num_tokens += trace["num_prompt_tokens"]
            turns.num_cached += trace["num_reused_tokens"]
            turns.first_token_s.append(seconds[0])


def test_conversations_go_on_where_their_caches_are(tmp_path: Path) -> None:
    model = write_model(tmp_path / MODEL)
    remembering, forgetting = Turns(), Turns()

    async def main() -> None:
        async with serving_fleet(tmp_path, model, [*HALVES, *HALVES], "--threads", "1") as servers:
            for round_ in range(2 * NUM_ROUNDS):
                forgets = mock.patch.object(PageHolders, "cached_tokens", return_value={})
                turns = forgetting if round_ % 2 else remembering
                if round_ % 2:
                    forgets.start()
                async with asyncio.TaskGroup() as tasks:
                    for person in range(NUM_PEOPLE):
                        tasks.create_task(converse(servers.client, NUM_PEOPLE * round_ + person, turns))
                if round_ % 2:
                    forgets.stop()

    asyncio.run(main())
    report = Report(f"{NUM_PEOPLE} conversations of {NUM_TURNS} turns, two servers for each half of the model")
    shares = {}
    for name, turns in (("remembers servers", remembering), ("forgets them", forgetting)):
        shares[name] = turns.num_cached / turns.num_tokens
        report.row(name, cached_share=shares[name], first_token_s=statistics.median(turns.first_token_s))
    report.show()
    # of a turn's prompt, all but the new question can be there: 0.74 of all
    assert shares["remembers servers"] > 0.6
    assert shares["remembers servers"] > 1.2 * shares["forgets them"]
