"""The real process: what grammars allow, and what becomes of those that mean harm."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from swarm.serving.grammar import process
from swarm.serving.grammar.masks import MAX_GRAMMARS, Grammars
from swarm.serving.grammar.process import GrammarProcess, Mask
from swarm.serving.grammar.worker import GRAMMAR_BYTES
from swarm_protocol.errors import ConfigError, PeerRefused
from swarm_protocol.sampler import Grammar
from text_models import byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(directory)
    return directory / "tokenizer.json"


@contextmanager
def running(tokenizer: Path) -> Iterator[GrammarProcess]:
    grammars = GrammarProcess(tokenizer)
    try:
        yield grammars
    finally:
        grammars.close()


def allowed(mask: Mask) -> list[int]:
    return [token_id for token_id in range(256) if mask.allowed[token_id // 8] >> token_id % 8 & 1]


def written(grammars: GrammarProcess, grammar: Grammar, *, key: int = 1, seed: int = 0) -> str:
    """A text that somebody writes who takes any token that is allowed, until the end."""
    choose, tokens = random.Random(seed), list[int]()
    while len(tokens) < 2000:
        mask = grammars.mask(key, grammar, tokens)
        if not (choices := allowed(mask)):
            assert mask.may_end
            return byte_tokenizer().decode(tokens)
        tokens.append(choose.choice(choices))
    raise AssertionError("it never ends")


@pytest.mark.parametrize("seed", range(5))
def test_grammar_of_a_schema_leads_any_tokens_to_json_that_fits(tokenizer: Path, seed: int) -> None:
    with running(tokenizer) as grammars:
        found = json.loads(written(grammars, Grammar(kind="json_schema", text=json.dumps(SCHEMA)), seed=seed))
    assert set(found) == {"city", "days"}
    assert len(found["city"]) <= 5
    assert 1 <= found["days"] <= 9


def test_grammar_goes_on_as_before_after_its_process_was_killed(tokenizer: Path) -> None:
    """All of its state follows from the grammar and the tokens."""
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    with running(tokenizer) as grammars, running(tokenizer) as undisturbed:
        tokens = list(byte_tokenizer()('{"city": "Ro')["input_ids"])
        grammars.mask(1, grammar, tokens[:4])
        assert grammars._child is not None
        os.kill(grammars._child.pid, signal.SIGKILL)
        with pytest.raises(ConfigError, match="too much time or memory"):
            grammars.mask(1, grammar, tokens)
        assert grammars.mask(1, grammar, tokens) == undisturbed.mask(7, grammar, tokens)


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", "{", "EOF"),
        ("json_schema", "[]", "object"),
        ("json_schema", '{"type": "text"}', "Invalid type"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "https://example.org/schema"}', "does not fetch"),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}', "cannot be used"),
        ("lark", "start: missing", "unknown name"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
    ],
)
def test_grammar_that_cannot_be_used_is_refused_in_one_line(tokenizer: Path, kind: str, text: str, why: str) -> None:
    with running(tokenizer) as grammars:
        with pytest.raises(ConfigError, match=why) as caught:
            grammars.mask(1, Grammar(kind=kind, text=text), [])
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500
        assert grammars.mask(2, Grammar(kind="json_schema", text="{}"), []).allowed, "the others go on"


def test_grammar_that_takes_too_long_is_killed_and_others_are_followed(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has stopped stands for a grammar that never comes to an end."""
    fine = Grammar(kind="json_schema", text="{}")
    with running(tokenizer) as grammars:
        grammars.mask(1, fine, [])
        assert grammars._child is not None
        os.kill(grammars._child.pid, signal.SIGSTOP)
        monkeypatch.setattr(process, "ANSWER_S", 0.1)
        began = time.monotonic()
        with pytest.raises(ConfigError, match="too much time or memory"):
            grammars.mask(2, fine, [])
        assert time.monotonic() - began < 3
        monkeypatch.setattr(process, "ANSWER_S", 30.0)
        assert allowed(grammars.mask(1, fine, []))


@pytest.mark.parametrize(
    "text",
    [
        "start: T\nT: /(.*a.{2000}|.*b.{3000}|[^c]*x.{1200})/",
        "start: T\nT: /((((a|b){1,100}){1,100}){1,100}){1,100}/",
        'start: a\na: a a | "x" | ',
        "start: /(?i)(" + "|".join(f"x{n}.*y{n}" for n in range(3000)) + ")/",
        'start: (T "a")*\nT: /.*/ & ~/.*a.{60}b.*/ & ~/.*c.{50}d.*/',
    ],
    ids=["states", "product", "ambiguous", "long", "complements"],
)
def test_grammar_that_means_harm_stays_within_its_time_and_memory(tokenizer: Path, text: str) -> None:
    with running(tokenizer) as grammars:
        slowest, tokens = 0.0, list[int]()
        grammar = Grammar(kind="lark", text=text)
        try:
            for _ in range(150):
                began = time.monotonic()
                mask = grammars.mask(1, grammar, tokens)
                slowest = max(slowest, time.monotonic() - began)
                tokens.append(allowed(mask)[0])
        except (ConfigError, IndexError):
            pass
        assert slowest < process.ANSWER_S
        if grammars._child is not None:
            status = Path(f"/proc/{grammars._child.pid}/status").read_text()
            assert int(status.split("VmHWM:")[1].split()[0]) < 500_000, "kB"
            limits = Path(f"/proc/{grammars._child.pid}/limits").read_text()
            assert int(limits.split("Max address space")[1].split()[0]) < 2 * GRAMMAR_BYTES


def test_grammars_are_bounded_in_number_and_given_back(tokenizer: Path) -> None:
    async def main() -> None:
        grammars = Grammars(tokenizer)
        fine = Grammar(kind="json_schema", text="{}")
        states = [grammars.open(fine) for _ in range(MAX_GRAMMARS)]
        with pytest.raises(PeerRefused, match="at once") as caught:
            grammars.open(fine)
        assert caught.value.retry_after_s
        await states[0].mask([])
        states[0].close()
        states[0].close()
        assert (await grammars.open(fine).mask([])).allowed
        grammars.close()

    asyncio.run(main())


def test_grammars_of_a_model_without_a_fit_tokenizer_are_refused(tmp_path: Path) -> None:
    fine = Grammar(kind="json_schema", text="{}")
    with running(tmp_path / "tokenizer.json") as grammars:
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            grammars.mask(1, fine, [])
        (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
        with pytest.raises(ConfigError, match="cannot use grammars"):
            grammars.mask(1, fine, [])
