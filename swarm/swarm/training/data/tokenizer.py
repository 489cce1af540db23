"""Text to tokens: bytes as they are, or a fast Hugging Face tokenizer from a directory or the hub.

`TokenizerFiles` is what can be said of a tokenizer without loading it, which takes seconds; the worker loads it. No
tokenizer runs code of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from swarm_protocol.errors import ConfigError

from swarm.training.byte_text import BYTE_VOCABULARY, END_OF_TEXT

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "config.json")


class Tokenizer(Protocol):
    """Every token is below `vocab_size`; `end_of_text` is the one between two documents."""

    vocab_size: int
    end_of_text: int

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """For each text its tokens, none added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer's directory, None for bytes, and a digest of its files' contents."""

    directory: Path | None
    key: str

    @classmethod
    def find(cls, name: str, directory: Path | None) -> TokenizerFiles:
        """`name` is as in the run, `directory` the member's own for "local". Raises ConfigError."""
        if name == "bytes":
            return cls(directory=None, key="bytes")
        place = directory if name == "local" else _from_hub(name)
        if place is None:
            raise ConfigError("the run's tokenizer is each member's own", remedy="name its directory: --tokenizer DIR")
        return cls(directory=place, key=_digest(place))

    def load(self) -> Tokenizer:
        """Raises ConfigError if the files make no tokenizer that training can use."""
        return ByteTokenizer() if self.directory is None else FastTokenizer(self.directory)


class ByteTokenizer:
    """Implements `Tokenizer`."""

    vocab_size = BYTE_VOCABULARY
    end_of_text = END_OF_TEXT

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]


class FastTokenizer:
    """Implements `Tokenizer`, with transformers' own classes. Several threads, as the tokenizers library chooses."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers raises many kinds, some from Rust
            told = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{directory} holds no tokenizer that can be read: {told}",
                remedy="name a directory with the tokenizer.json of a model",
            ) from error
        if not tokenizer.is_fast:
            raise ConfigError(f"the tokenizer in {directory} is not a fast one", remedy="use one with a tokenizer.json")
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer in {directory} has no end-of-text token to part documents with",
                remedy="set eos_token in its tokenizer_config.json",
            )
        self._encode = tokenizer.backend_tokenizer.encode_batch_fast
        self.end_of_text: int = tokenizer.eos_token_id
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [np.asarray(each.ids, np.int64) for each in self._encode(list(texts), add_special_tokens=False)]


def _from_hub(name: str) -> Path:
    from swarm.training.data.hub import bring_tokenizer  # noqa: PLC0415 - workers have the files, and start fast

    return bring_tokenizer(name, TOKENIZER_FILES)


def tokenizer_files(directory: Path) -> list[Path]:
    """Those in `directory` that make up a tokenizer, by name."""
    return sorted({path for pattern in TOKENIZER_FILES for path in directory.glob(pattern) if path.is_file()})


def _digest(directory: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        files = tokenizer_files(directory)
        for path in files:
            data = path.read_bytes()
            digest.update(repr((path.name, len(data))).encode() + data)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}", remedy="restore the file") from error
    if not files:
        raise ConfigError(
            f"{directory} holds no tokenizer", remedy="name the directory with its tokenizer.json and config"
        )
    return digest.hexdigest()


def check_vocabulary(tokens: int, model: int) -> None:
    """Raises ConfigError if a model with `model` tokens (0: unknown) lacks some of the tokenizer's."""
    if 0 < model < tokens:
        raise ConfigError(
            f"the tokenizer has {tokens} tokens and the model {model}", remedy=f"use a [model] vocab_size of {tokens}"
        )
