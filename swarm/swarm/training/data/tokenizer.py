"""Converts text to tokens: its bytes, or those of a fast Hugging Face tokenizer from a directory, a file or the hub.

`TokenizerFiles` describes a tokenizer without loading it. Loading takes seconds, so the worker process does it. No
tokenizer runs code of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from swarm_protocol.errors import ConfigError, one_line

from swarm.training.run.run_tables import BYTE_VOCABULARY, END_OF_TEXT

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "config.json")


class CorpusTokenizer(Protocol):
    """Every token is below `vocab_size`. A document begins with the tokens `start_of_text`, if any, and ends with
    `end_of_text`, unless that is None."""

    vocab_size: int
    start_of_text: tuple[int, ...]
    end_of_text: int | None

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the tokens of each text, without special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer's directory or single file (None for bytes), and a key of its contents."""

    path: Path | None
    key: str

    @classmethod
    def find(cls, name: str, path: Path | None, revision: str = "") -> TokenizerFiles:
        """Find a run's tokenizer `name` at `revision`. `path` is the member's own directory or file for "local".

        Raises ConfigError.
        """
        if name == "bytes":
            return cls(path=None, key="bytes")
        place = own_tokenizer(path) if name == "local" else _from_hub(name, revision)
        if place.name == TOKENIZER_FILE and place.is_file():
            # the files beside it say which token ends a document
            place = place.parent
        return cls(path=place, key=_digest(place))

    def load(self) -> CorpusTokenizer:
        """Load the tokenizer. Raises ConfigError if training cannot use it."""
        return ByteTokenizer() if self.path is None else FastTokenizer(self.path)


class ByteTokenizer:
    """The tokenizer whose tokens are bytes; implements `CorpusTokenizer`."""

    vocab_size = BYTE_VOCABULARY
    start_of_text: tuple[int, ...] = ()
    end_of_text: int | None = END_OF_TEXT

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]


class FastTokenizer:
    """Implements `CorpusTokenizer` with transformers' classes. The tokenizers library chooses the number of threads.

    A document begins with the special tokens that the tokenizer puts before every text, since prompts of the trained
    model begin with them, too. It ends with the tokenizer's eos token, or else with that of the model's config in the
    same directory, as in an exported byte-level run. Without either, no token ends a document. One token that does both
    is only at its end.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

        try:
            tokenizer: Any = (
                PreTrainedTokenizerFast(tokenizer_file=str(path))
                if path.is_file()
                else AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
            )
        except Exception as error:  # transformers raises many kinds, some from Rust
            raise ConfigError(
                f"{path} holds no tokenizer that can be read: {one_line(error)}",
                remedy="name the tokenizer.json of a model, or its directory",
            ) from error
        if not tokenizer.is_fast:
            raise ConfigError(f"the tokenizer in {path} is not a fast one", remedy="use one with a tokenizer.json")
        backend = tokenizer.backend_tokenizer
        # a tokenizer.json has the length to which its last user cut or padded texts
        backend.no_truncation()
        backend.no_padding()
        self._encode = backend.encode_batch_fast
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        named = tokenizer.eos_token_id
        self.end_of_text: int | None = _end_in_config(path, self.vocab_size) if named is None else named
        start = _start_of_text(backend)
        self.start_of_text: tuple[int, ...] = () if start == (self.end_of_text,) else start

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [np.asarray(each.ids, np.int64) for each in self._encode(list(texts), add_special_tokens=False)]


def _start_of_text(backend: Any) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer of the tokenizers library puts before a text."""
    text, alone = (backend.encode("a", add_special_tokens=each).ids for each in (True, False))
    starts = (at for at in range(len(text)) if text[at : at + len(alone)] == alone)
    return tuple(text[: next(starts, 0)])


def own_tokenizer(path: Path | None) -> Path:
    """Return `path`, which a member must give for the tokenizer "local". Raises ConfigError if it is None."""
    if path is None:
        raise ConfigError("the run's tokenizer is each member's own", remedy="name its path: --tokenizer PATH")
    return path


def _from_hub(name: str, revision: str) -> Path:
    from swarm.training.data.hub import bring_tokenizer  # noqa: PLC0415 - workers need no hub, and start faster

    return bring_tokenizer(name, TOKENIZER_FILES, revision)


def tokenizer_files(path: Path) -> dict[str, Path]:
    """Return the files that make up the tokenizer at `path`, a directory or a file, by their names in a directory."""
    if path.is_file():
        return {TOKENIZER_FILE: path}
    found = {each.name: each for pattern in TOKENIZER_FILES for each in path.glob(pattern) if each.is_file()}
    return dict(sorted(found.items()))


def _end_in_config(path: Path, vocab_size: int) -> int | None:
    """Return the first eos token in a model's config.json, if the tokenizer has it."""
    try:
        named = json.loads((path / "config.json").read_bytes()).get("eos_token_id")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    first = named[0] if isinstance(named, list) and named else named
    return first if type(first) is int and 0 <= first < vocab_size else None


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        files = tokenizer_files(path)
        for name, file in files.items():
            data = file.read_bytes()
            digest.update(repr((name, len(data))).encode() + data)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}", remedy="restore the file") from error
    if not files:
        raise ConfigError(f"{path} holds no tokenizer", remedy="name the directory with its tokenizer.json and config")
    return digest.hexdigest()


def check_vocabulary(tokens: int, model: int) -> None:
    """Raises ConfigError if a model with `model` tokens (0: unknown) lacks some of the tokenizer's."""
    if 0 < model < tokens:
        raise ConfigError(
            f"the tokenizer has {tokens} tokens and the model {model}", remedy=f"set [model] vocab_size to {tokens}"
        )
