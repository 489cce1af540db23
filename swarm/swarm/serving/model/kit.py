"""What a client needs of a model: its tokenizer, its shape and its end tokens, from files that a server gave.

The files are a peer's: only known names are written, into a directory of our own; no code in them is run, no other
file that they name is opened, and no list is made as long as they say. `read_kit` blocks and belongs off the loop, and
so do `encode` and `encode_chat`, for a tokenizer's patterns and a chat template may take as long as they like.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, IntegrityError, PeerError, PeerUnreachable, SwarmError
from swarm_protocol.serving_messages import FILES_METHOD, FilesRequest, FilesResponse
from transformers import AutoConfig, AutoTokenizer

from swarm.network.interface import Network
from swarm.serving.model.files import SMALL_FILES
from swarm.serving.model.shape import ModelShape, context_tokens
from swarm.serving.model.token_bytes import token_bytes

FILES_TIMEOUT_S = 60.0
"""A large tokenizer over a slow link."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKit:
    shape: ModelShape
    context_tokens: int
    end_ids: frozenset[int]
    tokenizer: Any

    def encode(self, prompt: str) -> list[int]:
        """With what the tokenizer puts before a text, if anything."""
        return [int(token_id) for token_id in self.tokenizer(prompt)["input_ids"]]

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """By the model's chat template; without one, as lines `role: content`, ending in `assistant:`.

        Raises ConfigError if the template refuses these messages, or has no place for tools.
        """
        if tools and "tools" not in str(self.tokenizer.chat_template or ""):
            raise ConfigError(f"the chat template of {self.shape.name} takes no tools", remedy="leave them out")
        if not self.tokenizer.chat_template:
            lines = [f"{message.get('role', 'user')}: {message.get('content', '')}" for message in messages]
            return self.encode("\n".join([*lines, "assistant:"]))
        try:
            encoded = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # the template is the model's, and raises what it likes
            raise ConfigError(
                f"the model's chat template refuses these messages: {error}",
                remedy="send roles and an order that the model knows, such as user and assistant in turn",
            ) from error
        return [int(token_id) for token_id in encoded]

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes; those of half a character too, where the tokenizer writes bytes."""
        return token_bytes(self.tokenizer, token_id)


async def fetch_files(network: Network, model: str, revision: str, peer_ids: Sequence[str]) -> dict[str, bytes]:
    """The model's small files from the first server that gives them. Raises the last server's PeerError."""
    failure: PeerError = PeerUnreachable(f"nobody gave the files of {model}", remedy="try again in a moment")
    for peer_id in peer_ids:
        request = FilesRequest(model=model).to_bytes()
        try:
            answer = await network.call(peer_id, f"{FILES_METHOD}/{model}", request, timeout_s=FILES_TIMEOUT_S)
            response = FilesResponse.from_bytes(answer)
        except PeerError as error:
            failure = error
            continue
        except SwarmError as error:
            # its own trouble, whatever it calls it: another server may have none
            failure = PeerError(error.message, peer_id=peer_id)
            continue
        if response.revision == revision:
            return {name: payload for name, payload in response.files.items() if name in SMALL_FILES}
    raise failure


def read_kit(model: str, revision: str, files: Mapping[str, bytes], directory: Path) -> ModelKit:
    """Write `files` to the empty `directory` and load them. Raises IntegrityError if they make no sense."""
    try:
        for name, payload in files.items():
            assert name in SMALL_FILES
            (directory / name).write_bytes(_without_paths(payload) if name == "tokenizer_config.json" else payload)
        _check_depth(json.loads(files.get("config.json", b"{}")))
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        shape = ModelShape(
            name=model,
            revision=revision,
            num_blocks=int(config.num_hidden_layers),
            hidden_size=int(config.hidden_size),
            vocab_size=int(config.vocab_size),
        )
        tokenizer("a")  # the first text may change a tokenizer's settings, which must not happen in two threads
        return ModelKit(
            shape=shape,
            context_tokens=context_tokens(config),
            end_ids=_end_ids(files, config, tokenizer),
            tokenizer=tokenizer,
        )
    except Exception as error:  # whatever a library makes of a stranger's files
        raise IntegrityError(
            f"the files of {model} cannot be used: {' '.join(str(error).split())[:200]}",
            remedy="its servers may be broken; use another model",
        ) from error


def warm_up() -> None:
    """Load what the first tokenizer of a process would wait for, with one that is made up. Blocks for a second."""
    words = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    files = {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": json.dumps(words).encode(),
        "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
    }
    with TemporaryDirectory(prefix="swarm-warm-up-") as folder:
        read_kit("warm-up", "none", files, Path(folder))


def _without_paths(settings: bytes) -> bytes:
    """Tokenizer settings without the files that they name, which transformers would read wherever they are."""
    kept = {key: value for key, value in json.loads(settings).items() if not key.endswith(("_file", "_files"))}
    return json.dumps(kept).encode()


def _check_depth(settings: Mapping[str, Any]) -> None:
    """Raises ValueError for a number of layers beyond any model: transformers makes lists of that length."""
    for key, value in settings.items():
        if isinstance(value, dict):
            _check_depth(value)
        elif "layer" in key and isinstance(value, int | float) and value > limits.MAX_BLOCKS:
            raise ValueError(f"{key} is {value}, more than {limits.MAX_BLOCKS}")


def _end_ids(files: Mapping[str, bytes], config: Any, tokenizer: Any) -> frozenset[int]:
    """From the generation config, else the config, else the tokenizer: as transformers' generate decides."""
    generation = json.loads(files.get("generation_config.json", b"{}"))
    ends = generation.get("eos_token_id", getattr(config, "eos_token_id", None))
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(int(end) for end in (ends if isinstance(ends, list) else [ends]))
