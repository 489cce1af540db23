"""What drafts gain over distances: tokens a second with and without them, for texts that repeat themselves or do not.

    make bench                                             # or alone:
    .venv/bin/python -m pytest tests/bench/test_bench_drafts.py -m bench -s

A 44M Llama over three servers in processes of their own, each behind a proxy that delays what comes and goes by
DELAY_S; a client in this process, with and without drafts by turns; figures are medians. The model has random weights,
so what it says repeats nothing; a bias that leaves it few tokens makes it repeat itself (greedy), or draw among them so
that drafts are often found and mostly wrong.

A second test has the model follow a JSON schema, with tokens of several letters. Its values are random.

A third test asks how much real texts repeat, without a model: files of Python's library, as if they were answers.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.bench_model import MODEL, use_drafts, write_model
from bench.local_transformers import prompt_ids
from bench.report import Report
from support.free_ports import free_port
from support.serving_fleet import serving_fleet
from support.wan_proxy import MBIT_BYTES, Connection, WanProxy
from swarm.client import AsyncClient
from swarm.serving.server.session_sampler import Drafter
from swarm_protocol.limits import MAX_DRAFTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

NUM_ROUNDS = 3
TEXT_CHARS = 6000
VOCAB = 16_000
DRAFT_COSTS = (0.0, 0.05, 0.15)
NUM_TOKENS = 128
BATCH = 8
DELAY_S = 0.025
SPANS = ((0, 4), (4, 8), (8, 12))
LINE = Connection(
    name="far", down_bytes_per_s=100 * MBIT_BYTES, up_bytes_per_s=100 * MBIT_BYTES, latency_s=DELAY_S, jitter_s=0.0
)
TEXTS: dict[str, dict[str, Any]] = {
    "repeats nothing": {"temperature": 1.0, "seed": 3},
    "repeats by chance": {"temperature": 1.0, "seed": 3, "logit_bias": dict.fromkeys(range(97, 101), 100.0)},
    "repeats itself": {"logit_bias": dict.fromkeys(range(97, 101), 100.0)},
}
WORD = {"type": "string", "maxLength": 12}
FIELDS = {
    "title": WORD,
    "category": {"enum": ["invoice", "order", "complaint", "question"]},
    "priority": {"type": "integer", "minimum": 1, "maximum": 5},
    "customer_name": WORD,
    "street_address": WORD,
    "city": WORD,
    "country_code": {"enum": ["de", "fr", "it", "us"]},
    "quantity": {"type": "integer", "minimum": 0, "maximum": 999},
    "unit_price": {"type": "integer", "minimum": 0, "maximum": 99999},
    "is_paid": {"type": "boolean"},
    "delivery_date": {"type": "string", "format": "date"},
    "next_action": {"enum": ["wait", "answer", "forward", "close"]},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
FORMS: dict[str, dict[str, Any]] = {
    "follows a JSON schema": {"temperature": 1.0, "seed": 3, "json_schema": SCHEMA, "stop_token_ids": [0]}
}


async def tokens_per_s(client: AsyncClient, index: int, options: dict[str, Any]) -> tuple[float, list[int]]:
    """Return the speed after the first token, and the tokens."""
    prompt, found, since = bytes(prompt_ids(index, 32)).decode(), list[int](), 0.0
    async for token in client.generate(model=MODEL, prompt=prompt, max_tokens=NUM_TOKENS, **options):
        since = since or time.perf_counter()
        found.append(token.token_id)
    return (len(found) - 1) / (time.perf_counter() - since), found


async def answers_per_s(client: AsyncClient, index: int, options: dict[str, Any], batch: int) -> tuple[float, Any]:
    """Return the tokens a second of `batch` answers at once, or the speed of one after its first token."""
    if batch == 1:
        return await tokens_per_s(client, index, options)
    since = time.perf_counter()
    answers = await asyncio.gather(*(tokens_per_s(client, 100 * index + each, options) for each in range(batch)))
    return batch * NUM_TOKENS / (time.perf_counter() - since), [tokens for _, tokens in answers]


@pytest.mark.parametrize(
    ("spans", "batch"),
    [(SPANS, 1), (((0, 12),), 1), (SPANS, BATCH)],
    ids=["three servers", "one server", "three servers, many answers"],
)
def test_drafts_over_a_distance(tmp_path: Path, spans: tuple[tuple[int, int], ...], batch: int) -> None:
    report = compared(write_model(tmp_path / MODEL), TEXTS, spans, batch)
    if batch == 1:
        assert float(report.rows["repeats itself"]["ratio"]) >= 2.0


@pytest.mark.parametrize(("spans", "batch"), [(SPANS, 1), (((0, 12),), 1)], ids=["three servers", "one server"])
def test_drafts_with_a_schema_over_a_distance(tmp_path: Path, spans: tuple[tuple[int, int], ...], batch: int) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained_tokenizer(python_files()[0]))
    report = compared(write_model(tmp_path / MODEL, tokenizer), FORMS, spans, batch)
    assert float(report.rows["follows a JSON schema"]["ratio"]) >= 1.3


def compared(model: Path, texts: dict[str, dict[str, Any]], spans: tuple[tuple[int, int], ...], batch: int) -> Report:
    """Return the speeds with and without drafts, whose answers must be equal."""
    seen: dict[str, dict[bool, list[float]]] = {text: defaultdict(list) for text in texts}

    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = await stack.enter_async_context(serving_fleet(model.parent, model, (), "--threads", "1"))
            nodes = []
            for start, end in spans:
                port = free_port()
                proxy = await stack.enter_async_context(WanProxy(target=("127.0.0.1", port), connection=LINE))
                host, announced = proxy.address
                line = ("--listen", f"/ip4/127.0.0.1/tcp/{port}", "--announce", f"/ip4/{host}/tcp/{announced}")
                nodes.append(await servers.add(start, end, *line))
            await servers.until_serving(*nodes)
            for round_ in range(NUM_ROUNDS):
                for text, options in texts.items():
                    answers = []
                    for drafts in (False, True) if round_ % 2 else (True, False):
                        use_drafts(servers.client, drafts=drafts)
                        speed, tokens = await answers_per_s(servers.client, round_, options, batch)
                        seen[text][drafts].append(speed)
                        answers.append(tokens)
                    assert answers[0] == answers[1], "drafts change no token"

    asyncio.run(main())
    report = Report(
        f"drafts: a 44M Llama, servers: {len(spans)}, answers at once: {batch}, {DELAY_S * 1000:g} ms each way "
        f"({NUM_ROUNDS} rounds)"
    )
    for text, speeds in seen.items():
        without, with_drafts = (statistics.median(speeds[drafts]) for drafts in (False, True))
        ratios = [on / off for off, on in zip(speeds[False], speeds[True], strict=True)]
        report.row(text, without=without, with_drafts=with_drafts, ratio=statistics.median(ratios))
    report.show()
    return report


def python_files() -> tuple[list[str], list[str]]:
    """Return the library's longer files in two halves: for the tokenizer, and as texts."""
    library = Path(sysconfig.get_path("stdlib"))
    packages = ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest", "xml")
    found = [*library.glob("*.py"), *(path for name in packages for path in (library / name).rglob("*.py"))]
    texts = [text for path in sorted(found) if len(text := path.read_text(errors="replace")) >= 2 * TEXT_CHARS]
    return texts[::2], texts[1::2]


def trained_tokenizer(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def gain(prompt: Sequence[int], answer: Sequence[int], draft_cost: float) -> float:
    """Return how many times as fast an answer comes with drafts, each of which makes a pass longer by that share."""
    drafter = Drafter()
    drafter.begin(np.array(prompt))
    drafter.drew(answer[:1], 0.0)
    position, now = 1, 0.0
    while position < len(answer):
        drafts = drafter.guess(drafter.room(MAX_DRAFTS))
        drafter.sends(drafts, now)
        right = 0
        while right < len(drafts) and answer[position + right : position + right + 1] == [drafts[right]]:
            right += 1
        now += 1.0 + draft_cost * len(drafts)
        drafter.drew(answer[position : position + right + 1], now)
        position += right + 1
    return (len(answer) - 1) / now


def test_drafts_of_real_texts() -> None:
    for_tokenizer, texts = python_files()
    tokenizer = trained_tokenizer(for_tokenizer)
    pairs: dict[str, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for text in texts:
        first, second = text[:TEXT_CHARS], text[TEXT_CHARS : 2 * TEXT_CHARS]
        name = Counter(re.findall(r"\b[a-z_]{5,}\b", first)).most_common(1)[0][0]
        edited = re.sub(rf"\b{name}\b", f"renamed_{name}", first)
        for kind, answer in (("the file's next part", second), ("the same part, one name changed", edited)):
            pairs[kind].append((tokenizer.encode(first).ids, tokenizer.encode(answer).ids))
    report = Report(f"drafts: {len(texts)} files of Python's library, of which a part is the prompt")
    for kind, found in pairs.items():
        for cost in DRAFT_COSTS:
            gains = sorted(gain(prompt, answer, cost) for prompt, answer in found)
            figures = {"median": statistics.median(gains), "least": gains[0], "most": gains[-1]}
            report.row(f"{kind}, {cost:.0%} a draft", **figures)
            assert gains[0] >= 0.97, "drafts that do not pay pause"
    report.show()
    medians = {name: float(row["median"]) for name, row in report.rows.items()}
    assert medians["the file's next part, 0% a draft"] >= 1.2
    assert medians["the same part, one name changed, 0% a draft"] >= 4.0
