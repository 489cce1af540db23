"""Real and hostile tokenizers in real processes: what is answered, what is stopped, and that nothing is left."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from support.leaks import no_leaks
from support.text_models import byte_tokenizer
from swarm.serving.model.model_files import open_model
from swarm.serving.tokenizer import tokenizer_worker
from swarm.serving.tokenizer.model_assets import (
    ModelAssets,
    TokenizerLimits,
    TokenizerProcess,
    TokenizerQueue,
    open_assets,
)
from swarm_protocol.errors import ConfigError, IntegrityError, SessionError

Files = Mapping[str, bytes]
LIMITS = TokenizerLimits(memory_bytes=2**29)
LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}" + 2 * "{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def files(llama_dir: Path) -> Files:
    return open_model(llama_dir).small_files()


def children() -> list[psutil.Process]:
    name = tokenizer_worker.__name__
    return [child for child in psutil.Process().children() if any(name in part for part in child.cmdline())]


def with_tokenizer(files: Files, **parts: Any) -> Files:
    """Write a tokenizer.json with other `parts`."""
    return {**files, "tokenizer.json": json.dumps({**json.loads(files["tokenizer.json"]), **parts}).encode()}


def kit_of(files: Files, limits: TokenizerLimits = LIMITS) -> ModelAssets:
    return asyncio.run(open_assets("tiny", "r", TokenizerProcess("tiny", files, limits)))


def growing(letter: str, times: int) -> Any:
    """Return a normalizer that repeatedly makes ten of one letter."""
    replacements = [{"type": "Replace", "pattern": {"String": letter}, "content": letter * 10}] * times
    return {"type": "Sequence", "normalizers": replacements}


def test_tokenizer_process_answers_as_transformers_and_leaves_nothing(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    text = "def añadir(a): 中 <x>"
    expected = [int(token_id) for token_id in byte_tokenizer()(text)["input_ids"]]
    with no_leaks():
        kit = kit_of({**files, "chat_template.jinja": b"{{ messages[0].content }}{{ word }}"})
        (child,) = children()
        assert "secret" not in child.environ().values()
        assert not list(Path(child.cwd()).glob("*.safetensors"))
        assert Path(child.cwd()).name.startswith("swarm-tokenizer-")
        assert child.num_fds() <= 5

        async def scenario() -> None:
            assert await kit.encode(text) == expected
            assert await kit.decode(expected) == text
            chat = await kit.encode_chat([{"role": "user", "content": "def añadir"}], (), {"word": "(a): 中 <x>"})
            assert chat == expected
            for asked in (kit.encode("\ud800"), kit.encode_chat([{"role": "user", "content": "\ud800"}])):
                with pytest.raises(ConfigError, match="the text is not valid Unicode: it has half of a surrogate pair"):
                    await asked
            assert b"".join(await kit.token_bytes(expected)) == text.encode()
            without_table = replace(kit, table=None)
            assert await without_table.decode_all([expected, expected[:3]]) == [text, text[:3]]
            assert b"".join(await without_table.token_bytes(expected)) == text.encode()

        asyncio.run(scenario())
        kit.close()
        kit.close()
        assert not Path(child.cwd() if child.is_running() else "/nonexistent").exists()


def test_chat_without_tools_may_use_the_names_of_the_ordinary_template_of_several(files: Files) -> None:
    templates = [
        {"name": "default", "template": "{{ messages[0].content }}{{ word }}"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    settings = json.dumps({**json.loads(files["tokenizer_config.json"]), "chat_template": templates})
    others = {name: data for name, data in files.items() if name != "chat_template.jinja"}
    kit = kit_of({**others, "tokenizer_config.json": settings.encode()})

    async def scenario() -> None:
        assert await kit.encode_chat(MESSAGES, (), {"word": " you"}) == await kit.encode("hi you")
        assert await kit.encode_chat(MESSAGES, [{"name": "look"}]) == await kit.encode("look")
        kit.close()

    asyncio.run(scenario())


def test_tokenizer_that_needs_too_much_memory_to_load_is_refused(files: Files) -> None:
    """These 777 bytes would cost a gateway 3.6 GB and 50 s in its own process."""
    explosive = with_tokenizer(files, normalizer=growing("a", 10))
    with no_leaks(), pytest.raises(IntegrityError, match=r"exceeded its limits: it needed over 0\.5 GiB") as caught:
        kit_of(explosive)
    assert "\n" not in str(caught.value)


def test_tokenizer_that_takes_too_long_to_load_is_refused(files: Files) -> None:
    slow = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    first = {"type": "Replace", "pattern": {"String": "a"}, "content": SLOW_TEXT}
    endless = with_tokenizer(files, normalizer=first, pre_tokenizer=slow)
    with no_leaks(), pytest.raises(IntegrityError, match="exceeded its limits: it took over 2 s"):
        kit_of(endless, replace(LIMITS, load_s=2.0))


SLOW_TEXT = ("a" * 17 + "c") * 10_000
"""Each run of letters is looked at in 100,000 ways by `(a+)+b`, and more would be a panic of the library."""


CHATS = {
    "loop": LOOP,
    "large": "{{ 'a' * 10**(9 + messages|length) }}",  # jinja computes constants when it compiles
    "deep": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}
"""What the chat template does at this message."""


@pytest.mark.parametrize(
    ("call_s", "cases"),
    [
        (1.0, [("prompt", SLOW_TEXT, "exceeded its limits: it took over 1 s"), ("chat", "loop", "it took over 1 s")]),
        (
            30.0,
            [
                ("prompt", "a" * 60, "cannot process this"),
                ("prompt", "b", r"exceeded its limits: it needed over 0\.5 GiB"),
                ("chat", "large", r"exceeded its limits: it needed over 0\.5 GiB"),
                ("chat", "deep", "refuses these messages"),
            ],
        ),
    ],
    ids=["time", "memory and sense"],
)
def test_request_that_exceeds_the_limits_is_refused_and_the_next_one_answered(
    files: Files, call_s: float, cases: list[tuple[str, str, str]]
) -> None:
    slow = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    whole = json.loads(files["tokenizer.json"])["pre_tokenizer"]
    splits = {"type": "Sequence", "pretokenizers": [slow, whole]}
    template = "".join(
        f"{{% if messages[0].content == '{content}' %}}{what}{{% endif %}}" for content, what in CHATS.items()
    )
    hostile = {
        **with_tokenizer(files, pre_tokenizer=splits, normalizer=growing("b", 10)),
        "chat_template.jinja": template.encode(),
    }

    async def scenario() -> None:
        process = TokenizerProcess("tiny", hostile, replace(LIMITS, call_s=call_s))
        kit = await open_assets("tiny", "r", process)
        try:
            for kind, text, told in cases:
                messages = [{"role": "user", "content": text}]
                with pytest.raises(ConfigError, match=told) as caught:
                    await (kit.encode_chat(messages) if kind == "chat" else kit.encode(text))
                assert "\n" not in str(caught.value)
                assert await kit.encode("x") == byte_tokenizer()("x")["input_ids"]
        finally:
            kit.close()

    with no_leaks():
        asyncio.run(scenario())


def test_other_models_and_streams_are_served_while_a_template_loops(files: Files) -> None:
    async def scenario() -> None:
        looping = {**files, "chat_template.jinja": LOOP.encode()}
        slow = await open_assets("slow", "r", TokenizerProcess("slow", looping, replace(LIMITS, call_s=600.0)))
        other = await open_assets("other", "r", TokenizerProcess("other", files, LIMITS))
        # more than the default executor has threads
        asked = [asyncio.create_task(slow.encode_chat(MESSAGES)) for _ in range(40)]
        try:
            async with asyncio.timeout(60):
                while not any(child.cpu_times().user > 0 and child.status() == "running" for child in children()):
                    await asyncio.sleep(0.01)
            assert await other.encode("x") == byte_tokenizer()("x")["input_ids"]
            assert await slow.decode(byte_tokenizer()("xy")["input_ids"]) == "xy"
            assert not any(task.done() for task in asked)
        finally:
            slow.close()
            other.close()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(each, SessionError) and "closed" in str(each) for each in ended)

    with no_leaks():
        asyncio.run(scenario())


def test_short_requests_go_before_long_ones_that_wait() -> None:
    began, may_end, asked = threading.Event(), threading.Event(), list[int]()

    class SlowProcess:
        def ask(self, _what: str, *, prompt: str) -> list[int]:
            asked.append(len(prompt))
            began.set()
            may_end.wait(30)
            return []

        def close(self) -> None:
            may_end.set()

    async def scenario() -> None:
        queue = TokenizerQueue("tiny", cast(TokenizerProcess, SlowProcess()))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(queue.ask("encode", prompt="xxx"))
            await asyncio.to_thread(began.wait, 30)
            for length in (9000, 10_000, 2, 5):
                tasks.create_task(queue.ask("encode", prompt=length * "x"))
            left = tasks.create_task(queue.ask("encode", prompt="x"))
            await asyncio.sleep(0)  # all wait from here on
            left.cancel()
            await asyncio.wait((left,))
            may_end.set()
        queue.close()

    with no_leaks():
        asyncio.run(scenario())
    assert asked == [3, 2, 5, 9000, 10_000]


PARENT = """
import asyncio, sys
from pathlib import Path
from swarm.serving.model.shape import SMALL_FILES
from swarm.serving.tokenizer.model_assets import open_assets
from swarm.serving.tokenizer.model_assets import TokenizerLimits, TokenizerProcess

async def main():
    files = {name: path.read_bytes() for name in SMALL_FILES if (path := Path(sys.argv[1], name)).is_file()}
    limits = TokenizerLimits(memory_bytes=2**29, call_s=1.0)
    files["chat_template.jinja"] = sys.argv[2].encode()
    kit = await open_assets("tiny", "r", TokenizerProcess("tiny", files, limits))
    print("ready", flush=True)
    await kit.encode_chat([{"role": "user", "content": "hi"}])
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def parent(llama_dir: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", PARENT, str(llama_dir), request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("parent", ["", "{{ 7 ** (10 ** 9) }}"], indirect=True, ids=["idle", "holds the interpreter"])
def test_tokenizer_process_ends_when_its_parent_is_killed(parent: subprocess.Popen[bytes]) -> None:
    """At once, or at its time limit if the template holds the interpreter's lock."""
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    child.wait(timeout=120)


@pytest.mark.parametrize("parent", [LOOP], indirect=True)
def test_busy_tokenizer_process_ends_with_its_parent_long_before_its_limit(parent: subprocess.Popen[bytes]) -> None:
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    (child,) = psutil.Process(parent.pid).children()
    began_s = sum(child.cpu_times()[:2])
    while sum(child.cpu_times()[:2]) < began_s + 0.1:
        time.sleep(0.01)
    parent.kill()
    used_s = began_s
    with suppress(psutil.NoSuchProcess):
        while child.is_running():
            used_s = sum(child.cpu_times()[:2])
            time.sleep(0.005)
    assert used_s - began_s < 0.7, "seconds of processor time; the limit is 3"
