"""The real grammar process: which tokens grammars allow, and what happens to hostile ones."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from llguidance import LLMatcher
from support.text_models import byte_tokenizer
from swarm.serving.grammar import grammar_masks, grammar_worker
from swarm.serving.grammar.grammar_masks import MAX_GRAMMARS, GrammarForkServer, GrammarPool, GrammarProcess, TokenMask
from swarm.serving.grammar.grammar_worker import GRAMMAR_BYTES, GrammarFollower, GrammarTokenizer
from swarm.serving.peer_shares import Sharer
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError, PeerRefused
from swarm_protocol.limits import MAX_DRAFTS
from swarm_protocol.sampler import Grammar

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


@pytest.fixture
def processes(tokenizer: Path) -> Iterator[GrammarForkServer]:
    processes = GrammarForkServer(tokenizer)
    yield processes
    processes.close()


@contextmanager
def following(processes: GrammarForkServer, kind: str, text: str) -> Iterator[GrammarProcess]:
    process = GrammarProcess(processes, Grammar(kind=kind, text=text))
    try:
        yield process
    finally:
        process.close()


def forks(processes: GrammarForkServer) -> list[psutil.Process]:
    assert processes._origin is not None
    return psutil.Process(processes._origin.pid).children()


def allowed(mask: TokenMask) -> list[int]:
    return [token_id for token_id in range(256) if mask.allowed[token_id // 8] >> token_id % 8 & 1]


def ids(text: str) -> list[int]:
    return list(byte_tokenizer()(text)["input_ids"])


def written(process: GrammarProcess, seed: int) -> str:
    """Return the text of a writer that takes random allowed tokens until the grammar ends."""
    choose, tokens = random.Random(seed), list[int]()
    while len(tokens) < 2000:
        mask = process.mask(tokens)
        if not (choices := allowed(mask)):
            assert mask.may_end
            return byte_tokenizer().decode(tokens)
        tokens.append(choose.choice(choices))
    raise AssertionError("it never ends")


@pytest.mark.parametrize("seed", range(5))
def test_grammar_of_a_schema_gives_valid_json_with_any_allowed_tokens(processes: GrammarForkServer, seed: int) -> None:
    with following(processes, "json_schema", json.dumps(SCHEMA)) as process:
        found = json.loads(written(process, seed))
    assert set(found) == {"city", "days"}
    assert len(found["city"]) <= 5
    assert 1 <= found["days"] <= 9


def test_grammar_continues_in_another_process_from_its_tokens(processes: GrammarForkServer) -> None:
    """Its whole state follows from the grammar and the tokens."""
    tokens = ids('{"city": "Ro')
    schema = json.dumps(SCHEMA)
    with following(processes, "json_schema", schema) as first, following(processes, "json_schema", schema) as second:
        for num_tokens in range(len(tokens) + 1):
            mask = first.mask(tokens[:num_tokens])
        assert second.mask(tokens) == mask


def text_of(mask: TokenMask) -> str:
    return byte_tokenizer().decode([token_id for token_id, _ in mask.drafts])


def drafted(
    process: GrammarProcess, tokens: list[int], guess: list[int] | tuple[()] = (), most: int = MAX_DRAFTS
) -> str:
    """Return the longest of five answers: on a busy machine, the time for drafts may be over before the first."""
    return max((text_of(process.mask(tokens, guess, most)) for _ in range(5)), key=len)


def test_drafts_are_what_the_grammar_forces_and_allows_of_a_guess(processes: GrammarForkServer) -> None:
    with following(processes, "json_schema", json.dumps(SCHEMA)) as process:
        assert drafted(process, [], most=4) == '{"ci'
        assert drafted(process, ids("{")) == '"city": "'
        assert drafted(process, ids('{"city": "')) == ""
        assert drafted(process, ids('{"city": "R'), ids('ome", "d')) == 'ome", "days": '
        assert drafted(process, ids('{"city": "Ro'), ids("maine")) == 'mai", "days": '
        assert drafted(process, ids('{"city": "Rom'), ids('e", "size')) == 'e", "days": '
        assert drafted(process, ids('{"city": "Rome"'), ids(', "days": 3')) == ', "days": 3}'
        assert drafted(process, ids('{"city": "Rome", "days": '), ids("x")) == ""
        last = process.mask(ids('{"city": "Rome", "days": 3}'), ids("x"), MAX_DRAFTS)
        assert last.may_end
        assert not last.drafts


@pytest.mark.parametrize("seed", range(3))
def test_drafts_leave_no_trace_in_the_masks_after_them(processes: GrammarForkServer, seed: int) -> None:
    choose, tokens, said, num_compared = random.Random(seed), list[int](), dict[bytes, TokenMask](), 0
    schema = json.dumps({"type": "array", "items": SCHEMA, "minItems": 3, "maxItems": 3})
    with following(processes, "json_schema", schema) as plain, following(processes, "json_schema", schema) as other:
        while choices := allowed(mask := plain.mask(tokens)):
            ahead = other.mask(tokens, choose.choices(ids('ab",019 {}'), k=4), choose.choice([0, 1, 3, MAX_DRAFTS]))
            assert dataclasses.replace(ahead, drafts=()) == mask
            num_compared += bytes(tokens) in said
            assert said.get(bytes(tokens), mask) == mask
            said |= {
                bytes([*tokens, *(token_id for token_id, _ in ahead.drafts[:num])]): after
                for num, (_, after) in enumerate(ahead.drafts, 1)
            }
            tokens.append(choose.choice(choices))
    assert len(json.loads(byte_tokenizer().decode(tokens))) == 3
    assert num_compared > 50, "the grammar forces most tokens"


class LimitedMatcher:
    """Fails for good once it has followed sixteen tokens, drafts included."""

    def __init__(self, *arguments: Any, **limits: Any) -> None:
        self._matcher = LLMatcher(*arguments, **limits)
        self._num_left = 16

    def consume_tokens(self, tokens: list[int]) -> bool:
        self._num_left -= len(tokens)
        return bool(self._matcher.consume_tokens(tokens))

    def is_error(self) -> bool:
        return self._num_left < 0 or self._matcher.is_error()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@pytest.fixture(scope="module")
def grammar_tokenizer(tokenizer: Path) -> GrammarTokenizer:
    return GrammarTokenizer(tokenizer.read_bytes())


@dataclass
class Following:
    """A grammar that is followed in this process."""

    follower: GrammarFollower
    is_new: bool = True

    def ask(self, tokens: list[int], most: int = 0) -> tuple[list[int], bytes]:
        """Return the drafts, and the masks."""
        grammar = {"kind": "json_schema", "grammar": json.dumps(SCHEMA)} if self.is_new else {}
        self.is_new = False
        answer = self.follower.answer(grammar | {"tokens": tokens, "guess": [], "most": most})
        stated, _, masks = answer.partition(b"\n")
        return json.loads(stated)["drafts"], masks


def test_grammar_goes_on_without_drafts_when_these_have_used_up_its_limits(
    grammar_tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_worker, "LLMatcher", LimitedMatcher)
    LimitedMatcher.grammar_from_json_schema = LLMatcher.grammar_from_json_schema  # type: ignore[attr-defined]
    tokens, counts = ids('{"city": "'), list[int]()
    limited = Following(GrammarFollower(grammar_tokenizer))
    for num in range(len(tokens) + 1):
        drafts, masks = limited.ask(tokens[max(0, num - 1) : num], 4)
        _, mask = Following(GrammarFollower(grammar_tokenizer)).ask(tokens[:num])
        assert masks.startswith(mask)
        counts.append(len(drafts))
    assert counts[:2] == [4, 4]
    assert set(counts[4:]) == {0}


def test_no_draft_is_made_when_the_time_for_drafts_is_over(
    grammar_tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_worker, "DRAFT_S", 0.0)
    drafts, _ = Following(GrammarFollower(grammar_tokenizer)).ask(ids("{"), MAX_DRAFTS)
    assert drafts == []


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", "{", "EOF"),
        ("json_schema", "[]", "object"),
        ("json_schema", '{"type": "text"}', "Invalid type"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "https://example.org/schema"}', "schema' is not in the schema, and nothing is"),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}', "only to itself"),
        ("json_schema", '{"$ref": "#"}', "no text can satisfy it"),
        ("json_schema", '{"type": "string", "pattern": "("}', "unclosed group"),
        ("lark", "start: missing", "unknown name"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
    ],
)
def test_grammar_that_cannot_be_used_is_refused_in_one_line(
    processes: GrammarForkServer, kind: str, text: str, why: str
) -> None:
    with following(processes, kind, text) as process:
        with pytest.raises(ConfigError, match=why) as caught:
            process.mask([])
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500
        with pytest.raises(PeerRefused, match="has ended"):
            process.mask([])


def test_grammar_does_not_delay_others_when_it_takes_too_long(
    processes: GrammarForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process stands for a grammar that never terminates."""
    monkeypatch.setattr(grammar_masks, "ANSWER_S", 600.0)
    with ThreadPoolExecutor(1) as thread, following(processes, "json_schema", "{}") as endless:
        endless.mask([])
        [fork] = forks(processes)
        fork.suspend()
        working = thread.submit(endless.mask, ids("["))
        with following(processes, "json_schema", "{}") as other:
            assert allowed(other.mask([]))
            assert allowed(other.mask(ids("[1")))
        assert not working.done()
        fork.kill()
        with pytest.raises(ConfigError, match="too much time or memory"):
            working.result()


def test_grammar_is_given_up_when_it_is_late(processes: GrammarForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with following(processes, "json_schema", "{}") as late:
        late.mask([])
        forks(processes)[0].suspend()
        monkeypatch.setattr(grammar_masks, "ANSWER_S", 0.05)
        monkeypatch.setattr(grammar_masks, "GRACE_S", 0.05)
        with pytest.raises(ConfigError, match="too much time or memory"):
            late.mask(ids("["))
    forks(processes)[0].kill()


def test_process_of_a_grammar_ends_by_itself_when_its_time_is_over(processes: GrammarForkServer) -> None:
    """So no process outlives a killed server by more than that, even if it is busy."""
    with processes.fork() as pipe:
        [fork] = forks(processes)
        asked = {"tokens": [], "guess": [], "most": 0}
        grammar = {"kind": "json_schema", "grammar": "{}"}
        pipe.send_bytes(json.dumps({**asked, **grammar, "within_s": 60.0}).encode())
        assert pipe.recv_bytes()
        pipe.send_bytes(json.dumps({**asked, "within_s": 1e-6}).encode())
        with pytest.raises(EOFError):
            pipe.recv_bytes()
        fork.wait(timeout=120)


HARMFUL = json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(10, 40)]})


def test_schema_of_many_patterns_is_refused_in_time(processes: GrammarForkServer) -> None:
    """Without the bound, one such schema holds up all grammars of a server for 4 s."""
    with (
        following(processes, "json_schema", HARMFUL) as harmful,
        pytest.raises(ConfigError, match="too much time or memory"),
    ):
        harmful.mask([])


def test_grammar_whose_process_was_killed_is_refused_and_the_next_has_a_new_one(processes: GrammarForkServer) -> None:
    with following(processes, "json_schema", "{}") as lost:
        lost.mask([])
        forks(processes)[0].kill()
        with pytest.raises(ConfigError, match="too much time or memory"):
            lost.mask(ids("["))
    assert processes._origin is not None
    processes._origin.kill()
    with following(processes, "json_schema", "{}") as unlucky, pytest.raises(PeerRefused, match="process for grammars"):
        unlucky.mask([])
    with following(processes, "json_schema", "{}") as next_one:
        assert allowed(next_one.mask([]))


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
def test_hostile_grammar_stays_within_its_time_and_memory(processes: GrammarForkServer, text: str) -> None:
    slowest, tokens, held = 0.0, list[int](), 0
    with following(processes, "lark", text) as harmful:
        try:
            for _ in range(150):
                began = time.monotonic()
                mask = harmful.mask(tokens, tokens[-1:] * MAX_DRAFTS, MAX_DRAFTS)
                slowest = max(slowest, time.monotonic() - began)
                tokens.append(allowed(mask)[0])
                [fork] = forks(processes)
                held = max(held, fork.memory_info().rss)
        except (ConfigError, IndexError):
            pass
    assert slowest < grammar_masks.ANSWER_S
    assert held < 4 * GRAMMAR_BYTES


def test_process_of_a_grammar_has_little_memory_beside_the_tokenizer(processes: GrammarForkServer) -> None:
    with following(processes, "json_schema", "{}") as fine:
        fine.mask([])
        [fork] = forks(processes)
        limits = Path(f"/proc/{fork.pid}/limits").read_text()
        assert int(limits.split("Max address space")[1].split()[0]) <= fork.memory_info().vms + GRAMMAR_BYTES


FINE = Grammar(kind="json_schema", text="{}")


@dataclass(eq=False)
class Sequence:
    """A sequence of `client` with a grammar, which is freed when others need its place."""

    grammars: GrammarPool
    client: str
    is_idle: bool = False
    num_pages: int = 1

    def __post_init__(self) -> None:
        self.sharer = Sharer(self.client, self.client)
        self.since_s = self.idle_since_s = asyncio.get_running_loop().time()
        self.is_evicted = False
        self.grammar = self.grammars.open(FINE, self)

    def evict(self, *, lacks_room: bool) -> None:
        assert not lacks_room, "an answer must not end by `length` for it"
        self.is_evicted = True
        self.grammar.close()


def test_grammars_are_bounded_in_number_and_freed_when_closed(tokenizer: Path) -> None:
    async def main() -> None:
        grammars = GrammarPool(tokenizer)
        states = [Sequence(grammars, "a").grammar for _ in range(MAX_GRAMMARS)]
        with pytest.raises(PeerRefused, match="sessions with grammars") as caught:
            Sequence(grammars, "a")
        assert caught.value.retry_after_s
        await asyncio.gather(*(state.mask([]) for state in states[:3]))
        first, *others = forks(grammars._processes)
        assert len(others) == 2
        states[0].close()
        states[0].close()
        assert (await Sequence(grammars, "a").grammar.mask([])).allowed
        grammars.close()
        states[1].close()
        for fork in (first, *others):
            fork.wait(timeout=120)

    asyncio.run(main())


def test_peer_gets_half_of_the_grammars_when_another_wants_one(tokenizer: Path) -> None:
    async def main() -> None:
        grammars = GrammarPool(tokenizer)
        states = [Sequence(grammars, "greedy").grammar for _ in range(MAX_GRAMMARS)]
        with pytest.raises(PeerRefused, match="sessions with grammars"):
            Sequence(grammars, "modest")
        states.pop().close()
        share = f"{MAX_GRAMMARS - 1} sessions with grammars already use the share"
        with pytest.raises(PeerRefused, match=share) as refused:
            Sequence(grammars, "greedy")
        assert not refused.value.lacks_room, "an answer must not end by `length` for it"
        Sequence(grammars, "modest")
        grammars.close()

    asyncio.run(main())


def test_sessions_with_grammars_make_room_for_another_peer(tokenizer: Path) -> None:
    async def main() -> None:
        grammars = GrammarPool(tokenizer)
        silent = [Sequence(grammars, "greedy", is_idle=True) for _ in range(2)]
        busy = [Sequence(grammars, "greedy") for _ in range(MAX_GRAMMARS - 2)]

        async def refused_for(seconds: int) -> None:
            for _ in range(seconds):
                with pytest.raises(PeerRefused, match="sessions with grammars"):
                    Sequence(grammars, "modest")
                await asyncio.sleep(1)

        await refused_for(10)
        for _ in silent:
            Sequence(grammars, "modest")
        assert all(each.is_evicted for each in silent)
        await refused_for(50)
        for _ in range(MAX_GRAMMARS // 2 - 2):
            Sequence(grammars, "modest")
        assert [each.is_evicted for each in busy] == [True] * 14 + [False] * 16
        with pytest.raises(PeerRefused, match="already has 32 sessions with grammars"):
            Sequence(grammars, "modest")
        with pytest.raises(PeerRefused, match="already has 32"):
            Sequence(grammars, "another")  # nobody has more than half now
        grammars.close()

    virtual_time.run(main())


def test_closed_grammar_keeps_its_place_until_its_last_mask_is_done(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client that opens and closes sessions in a loop could have the server compute without bound."""
    go_on = threading.Event()

    async def main() -> None:
        grammars = GrammarPool(tokenizer)
        states = [Sequence(grammars, "a").grammar for _ in range(MAX_GRAMMARS)]
        masks = [state.mask([]) for state in states]
        for state in states:
            state.close()
        with pytest.raises(PeerRefused, match="sessions with grammars"):
            Sequence(grammars, "a")
        go_on.set()
        await asyncio.gather(*masks)
        assert all(state._process._has_ended for state in states)
        Sequence(grammars, "a")
        grammars.close()

    monkeypatch.setattr(GrammarProcess, "mask", lambda *_: go_on.wait(60))
    asyncio.run(main())


def test_grammar_is_refused_when_the_model_has_no_suitable_tokenizer(tmp_path: Path) -> None:
    processes = GrammarForkServer(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        processes.fork()
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    with pytest.raises(ConfigError, match="cannot use grammars"):
        processes.fork()
