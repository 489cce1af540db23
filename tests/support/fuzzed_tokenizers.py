"""A model's small files as a hostile server gives them, and what a tokenizer's process may answer once they own it."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from functools import cache
from typing import Any, cast

from support.fuzzing import Target, mutated
from swarm.serving.sampling.sampling import Sampling
from swarm.serving.tokenizer.model_assets import (
    ModelAssets,
    TokenizerLimits,
    TokenizerProcess,
    TokenizerQueue,
    assets_of,
)
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

LIMITS = TokenizerLimits(memory_bytes=2**29)
"""With all the time of a node: a process that is late is ended, and the next one imports for a second."""
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
FILES: dict[str, Any] = {
    "config.json": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "vocab_size": 8,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": 1,
    },
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 1,
                "content": "</s>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "</s>": 1, "b": 2, "ab": 3, "abab": 4},
            "merges": [["a", "b"], ["ab", "ab"]],
        },
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
        "model_max_length": 64,
    },
    "generation_config.json": {"eos_token_id": [1, 2], "do_sample": True, **SAMPLING},
}
VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 2**31, 2**63, 1e308, [], {}, [[]]),
    *("", "x", "BPE", "/etc/passwd", "a" * 3000),
)
TEMPLATES = (
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no') }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
)
"""What `test_model_assets` has besides: those that take all time or memory, after which the process is started anew."""


def altered_json(value: Any, chance: random.Random) -> Any:
    """Return `value`, made of JSON, with one thing in it replaced, left out or doubled."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return chance.choice(VALUES)
    if isinstance(value, dict):
        key = chance.choice(list(value))
        kept = {each: held for each, held in value.items() if each != key}
        match chance.randrange(4):
            case 0:
                return kept
            case 1:
                return {**kept, str(chance.choice(VALUES)): value[key]}
        return {**value, key: altered_json(value[key], chance)}
    at = chance.randrange(len(value))
    doubled = [*value, value[at]] if chance.random() < 0.3 else value
    return [*doubled[:at], altered_json(value[at], chance), *doubled[at + 1 :]]


@cache
def process() -> TokenizerProcess:
    """Return the process that loads all of them; it is started anew where one of them has ended it."""
    return TokenizerProcess("fuzzed", {}, LIMITS)


def files_from(chance: random.Random) -> dict[str, bytes]:
    files = {name: json.dumps(content).encode() for name, content in FILES.items()}
    name = chance.choice(list(files))
    match chance.randrange(4):
        case 0:
            files[name] = mutated(files[name], chance)
        case 1:
            settings = {**FILES["tokenizer_config.json"], "chat_template": chance.choice(TEMPLATES)}
            files["tokenizer_config.json"] = json.dumps(settings).encode()
        case 2:
            pass
        case _:
            files[name] = json.dumps(altered_json(FILES[name], chance)).encode()
    return files


def try_files(data: bytes) -> None:
    """Load files of which a server has changed something, and use what came of them. Raises SwarmError."""
    asked = process()
    for name, payload in files_from(random.Random(data)).items():
        (asked._held.folder / name).write_bytes(payload)
    reply = asked.ask("load")
    assets = assets_of("fuzzed", "revision", reply, cast("TokenizerQueue", None))
    check_assets(assets)
    with suppress(ConfigError):  # a template may refuse anything, and so may a tokenizer that has become another one
        asked.ask("encode", prompt="abab b")
        asked.ask("encode_chat", messages=[{"role": "user", "content": "abab"}], tools=[], template_kwargs={})


def check_assets(assets: ModelAssets) -> None:
    """Raises AssertionError if what was read is out of bounds."""
    assert all(0 <= each < assets.shape.vocab_size for each in assets.end_ids)
    assert Sampling(**assets.sampling).top_k <= limits.MAX_VOCAB
    if (table := assets.table) is not None:
        assert table.bounds[-1] == len(table.data)
        assert list(table.bounds) == sorted(table.bounds)
        assert all(0 <= each < len(table.bounds) - 1 for each in table.special)


REPLY: dict[str, Any] = {
    "num_blocks": 2,
    "hidden_size": 8,
    "vocab_size": 5,
    "context_tokens": 64,
    "end_ids": [1],
    "sampling": SAMPLING,
    "has_chat_template": True,
    "table": {
        "data": "a</s>bababab",
        "lengths": [1, 4, 1, 2, 4],
        "special": [1],
        "single": None,
        "strips_first": False,
    },
}


def try_reply(data: bytes) -> None:
    """Read what a process answers that the files have taken over. Raises IntegrityError."""
    chance, reply = random.Random(data), REPLY
    for _ in range(chance.choice((0, 1, 1, 2))):
        reply = altered_json(reply, chance)
    check_assets(assets_of("fuzzed", "revision", reply, cast("TokenizerQueue", None)))


FILES_TARGET = Target(name="files of a tokenizer", take=try_files, every=200)
REPLY_TARGET = Target(name="answer of a tokenizer's process", take=try_reply)
TARGETS = (FILES_TARGET, REPLY_TARGET)
