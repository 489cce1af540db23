"""The process that holds one model's tokenizer and chat template, which are untrusted input.

It answers one request after another, as JSON, until its pipe ends. It limits its memory before it reads the first
untrusted byte, and its CPU time for each request, so that a request ends even after its caller gave up. It runs no code
from the files, opens no other file that they name, and allocates no list of a size that they claim. Only the limits
bound everything else that transformers, the tokenizers library and jinja do with the files.
`swarm.serving.tokenizer.model_assets` is the parent's side.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import select
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jinja2.meta import find_undeclared_variables
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, IntegrityError, SwarmError, one_line
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend
from transformers.utils.chat_template_utils import _compile_jinja_template

from swarm.child_process import OUT_OF_MEMORY
from swarm.heap import uncollected
from swarm.serving.model.shape import SMALL_FILES, check_counts, context_tokens
from swarm.serving.sampling.sampling import checked_end_ids, written_options
from swarm.serving.tokenizer.token_table import (
    MAX_TABLE_BYTES,
    MAX_TABLE_TOKENS,
    SPACE,
    TokenTable,
    byte_level_bytes,
    fallback_byte,
    table_of,
    token_bytes,
)
from swarm.temporary_folder import temporary_folder

MAX_OPEN_FILES = 64

MAX_PROMPT_TOKENS = 2 * limits.MAX_SESSION_TOKENS
"""Maximum tokens of a prompt: more fit no model, and their ids would fill the pipe."""

NUM_COMPARED = 256
"""Number of tokens by whose text the table and the tokenizer are compared."""

Message = Mapping[str, Any]

_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
"""Names of transformers' own parameters, which cannot be template variables."""
_HINTS = frozenset({"reasoning_effort", "verbosity"})
"""Values that OpenAI's clients send for any model. A template need not use them."""

_FALLBACK = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]

_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def main(fd: int, memory_bytes: int) -> None:
    """Serve the connection `fd` until it ends."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError), Connection(fd) as parent:
        try:
            threading.Thread(target=_end_with_parent, args=(fd,), daemon=True).start()
            with uncollected():
                warm_up()
            _limit(memory_bytes)
            answers = TokenizerAnswers()
            while True:
                request = json.loads(parent.recv_bytes())
                _limit_processor(request["within_s"])
                os.chdir(request["folder"])
                parent.send_bytes(json.dumps(answers.answer(request)).encode())
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


class TokenizerAnswers:
    """Answers requests. The first one must load the files."""

    def __init__(self) -> None:
        self._loaded: LoadedTokenizer

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request, with the error if it fails. Raises MemoryError."""
        try:
            return {"answer": self._answer(request)}
        except SwarmError as error:
            field = error.field if isinstance(error, ConfigError) else ""
            return {"error": error.code, "message": error.message, "remedy": error.remedy, "field": field}
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic of the tokenizers library is not an Exception
            return {
                "error": ConfigError.code,
                "message": f"the tokenizer of {request['model']} cannot process this: {one_line(error)}",
                "remedy": "use another text or another model",
                "field": "prompt",
            }

    def _answer(self, request: dict[str, Any]) -> Any:
        match request["do"]:
            case "load":
                self._loaded = load_tokenizer(request["model"], Path(request["folder"]))
                table = self._loaded.table()
                return {**self._loaded.about, "table": table and table.to_json()}
            case "encode":
                return self._loaded.encode(request["prompt"])
            case "encode_chat":
                return self._loaded.encode_chat(request["messages"], request["tools"], request["template_kwargs"])
            case "decode":
                return [self._loaded.decode(token_ids) for token_ids in request["sequences"]]
            case "token_bytes":
                return [self._loaded.token_bytes(token_id).decode("latin-1") for token_id in request["token_ids"]]


def _end_with_parent(fd: int) -> None:
    """End this process with its parent, even during a request. While the GIL is held, only the CPU limit ends it."""
    parent = select.poll()
    parent.register(fd, 0)  # reports only that the other end is closed
    parent.poll()
    os._exit(1)


def _limit(memory_bytes: int) -> None:
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, limits.MAX_MODEL_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(OSError, ValueError):  # some systems lack a limit; the parent also watches the memory
            resource.setrlimit(what, (most, most))


def _limit_processor(within_s: float) -> None:
    """Let SIGXCPU end the process some time after the parent has given up."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most_s = int(used.ru_utime + used.ru_stime + within_s) + 2
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A loaded tokenizer. `about` has the values of the config that a client needs, unchecked."""

    model: str
    about: Mapping[str, Any]
    tokenizer: Any

    def encode(self, prompt: str) -> list[int]:
        """Encode a text, with the special tokens that the tokenizer adds, if any."""
        return self._bounded(self.tokenizer(prompt)["input_ids"])

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Message], template_kwargs: Message) -> list[int]:
        """Encode with the model's chat template, or, without one, as lines `role: content` with `assistant:` at the
        end.

        Raises ConfigError if the template refuses these messages, or does not use tools or a name in `template_kwargs`.
        It may leave unused only names in `_HINTS`.
        """
        with _refusing(f"the chat template of {self.model} cannot be used", "send a prompt, or use another model"):
            names = self._template_names(tools)
        for name in template_kwargs:
            is_used = name in names or name in _HINTS
            if not is_used or (name in _RESERVED and name != "add_generation_prompt"):
                message = f"the chat template of {self.model} does not use {name}"
                raise ConfigError(message, remedy="leave it out", field="template_kwargs")
        if tools and "tools" not in names:
            template = "the chat template" if self.tokenizer.chat_template else "without a chat template, the tokenizer"
            message = f"{template} of {self.model} does not support tools"
            raise ConfigError(message, remedy="leave them out", field="tools")
        if not self.tokenizer.chat_template:
            lines = [f"{message.get('role', 'user')}: {message.get('content', '')}" for message in messages]
            return self.encode("\n".join([*lines, "assistant:"]))
        remedy = "send roles and an order that the model knows, such as user and assistant in turn"
        with _refusing("the model's chat template refuses these messages", remedy):
            encoded = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=True,
                return_dict=False,
                **{"add_generation_prompt": True, **template_kwargs},
            )
        return self._bounded(encoded)

    def _template_names(self, tools: Sequence[Message]) -> Collection[str]:
        """Return the variables that the chat template looks up. Words in its text do not count."""
        if not self.tokenizer.chat_template:
            return ()
        template = self.tokenizer.get_chat_template(tools=list(tools) or None)
        return find_undeclared_variables(_compile_jinja_template(template).environment.parse(template))

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's own bytes, which may be a part of a character."""
        return token_bytes(self.tokenizer, token_id)

    def table(self) -> TokenTable | None:
        """Make the table; None for a tokenizer whose decoder a table cannot replace."""
        # a subclass may decode in another way
        is_plain = getattr(type(self.tokenizer), "_decode", None) is TokenizersBackend._decode
        if not (is_plain and type(self.tokenizer).decode is PreTrainedTokenizerBase.decode):
            return None
        parts = _decoder_parts(self.tokenizer.backend_tokenizer.decoder)
        num_tokens = 1 + max(self.tokenizer.backend_tokenizer.get_vocab().values(), default=-1)
        if parts is None or num_tokens > MAX_TABLE_TOKENS:
            return None
        table = _make_table(self.tokenizer.backend_tokenizer, parts, num_tokens)
        sample = range(0, num_tokens, max(1, num_tokens // NUM_COMPARED))
        sequences = [list(sample), *([token_id] for token_id in sample)]
        if len(table.data) > MAX_TABLE_BYTES or any(table.decode(ids) != self.decode(ids) for ids in sequences):
            return None
        return table

    def _bounded(self, token_ids: Sequence[int]) -> list[int]:
        if len(token_ids) > MAX_PROMPT_TOKENS:
            raise ConfigError(
                f"the tokenizer of {self.model} makes {len(token_ids)} tokens of this prompt",
                remedy=f"shorten the prompt: no model takes over {limits.MAX_SESSION_TOKENS}",
                field="prompt",
            )
        return [int(token_id) for token_id in token_ids]


@contextmanager
def _refusing(message: str, remedy: str) -> Iterator[None]:
    """Raise ConfigError with `message` for an error inside the context: a model's template may raise anything."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ConfigError(f"{message}: {one_line(error)}", remedy=remedy, field="prompt") from error


def load_tokenizer(model: str, directory: Path) -> LoadedTokenizer:
    """Load the tokenizer and config from SMALL_FILES of `model` in `directory`. Raises IntegrityError if they are
    invalid."""
    try:
        files = {path.name: path.read_bytes() for path in directory.iterdir() if path.name in SMALL_FILES}
        if "tokenizer_config.json" in files:
            (directory / "tokenizer_config.json").write_bytes(_without_paths(files["tokenizer_config.json"]))
        check_counts(json.loads(files.get("config.json", b"{}")))
        generation = json.loads(files.get("generation_config.json", b"{}"))
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        tokenizer("a")  # a tokenizer that fails even here is refused
        about = {
            "num_blocks": int(config.num_hidden_layers),
            "hidden_size": int(config.hidden_size),
            "vocab_size": int(config.vocab_size),
            "context_tokens": context_tokens(config),
            "end_ids": _end_ids(generation, config, tokenizer),
            "sampling": written_options(generation),
            "has_chat_template": bool(tokenizer.chat_template),
        }
        return LoadedTokenizer(model=model, about=about, tokenizer=tokenizer)
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # libraries raise anything here; a panic of Rust is not an Exception
        raise IntegrityError(
            f"the files of {model} cannot be used: {one_line(error)}",
            remedy="its servers may be broken; use another model",
        ) from error


def warm_up() -> None:
    """Load a made-up tokenizer, so that the first real one does not wait for imports."""
    words = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    files = {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": json.dumps(words).encode(),
        "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
    }
    with temporary_folder("warm-up") as folder:
        for name, payload in files.items():
            (folder / name).write_bytes(payload)
        load_tokenizer("warm-up", folder).table()


def _without_paths(settings: bytes) -> bytes:
    """Return the tokenizer settings without the file names in them. transformers would read these files wherever they
    are."""
    kept = {key: value for key, value in json.loads(settings).items() if not key.endswith(("_file", "_files"))}
    return json.dumps(kept).encode()


def _end_ids(generation: Mapping[str, Any], config: Any, tokenizer: Any) -> list[int]:
    """Return the end tokens of the generation config, else the config, else the tokenizer, as transformers' generate
    chooses them. Raises ValueError."""
    ends = generation.get("eos_token_id", getattr(config, "eos_token_id", None))
    if ends is None:
        ends = tokenizer.eos_token_id
    return checked_end_ids(ends, "eos_token_id")


def _decoder_parts(decoder: Any) -> str | None:
    """Return the kind of decoder if a table can replace it, else None."""
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    if [part.get("type") for part in parts] == ["ByteLevel"]:
        return "bytes"
    if parts == _FALLBACK:
        return "fallback"
    return "stripped" if parts == [*_FALLBACK, _STRIP] else None


def _make_table(backend: Any, parts: str, num_tokens: int) -> TokenTable:
    written = [backend.id_to_token(token_id) or "" for token_id in range(num_tokens)]
    special_texts = {added.content for added in backend.get_added_tokens_decoder().values() if added.special}
    special = [token_id for token_id, text in enumerate(written) if text in special_texts]
    if parts == "bytes":
        return table_of([byte_level_bytes(text) or text.encode() for text in written], special, None)
    single = {token_id: byte for token_id, text in enumerate(written) if (byte := fallback_byte(text))}
    pieces = [single.get(token_id) or text.replace(SPACE, " ").encode() for token_id, text in enumerate(written)]
    return table_of(pieces, special, single, strips_first=parts == "stripped")
