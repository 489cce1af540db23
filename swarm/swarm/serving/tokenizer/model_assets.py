"""Loads what a client needs of a model, its tokenizer, shape and end tokens, from a server's files.

The files are untrusted. A process with limits (`swarm.serving.tokenizer.tokenizer_worker`) reads them, and its answers
are checked here. After it was killed, the next request starts a new one. A stream of tokens is decoded with a table,
which is only data. Assets belong to an event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import PriorityQueue
from typing import Any
from weakref import finalize

from swarm_protocol import limits
from swarm_protocol.checks import check_int
from swarm_protocol.errors import ConfigError, IntegrityError, PeerError, SessionError, SwarmError
from swarm_protocol.serving_messages import FILES_METHOD, FilesRequest, FilesResponse

from swarm.child_process import ChildFailure, ChildProcess
from swarm.network.interface import Network
from swarm.serving.model.shape import SMALL_FILES, ModelShape
from swarm.serving.sampling.sampling import checked_end_ids, checked_options
from swarm.serving.tokenizer.token_table import TokenTable, table_from_json
from swarm.temporary_folder import make_folder

FILES_TIMEOUT_S = 180.0
"""Time for a large tokenizer over a slow link."""

TURN_S = 90.0
"""Time limit of a request, which waits for those before it: for one that is killed at its limits, and the start of the
next process."""


Message = Mapping[str, Any]
NOTHING: Message = {}

MAX_ANSWER_BYTES = 48 * 2**20
"""Twice the size in JSON of the longest prompt's token ids and the largest table."""

ENVIRONMENT = {
    "HOME": "/nonexistent",
    "HF_HOME": "/nonexistent",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # one thread: then CPU time equals a prompt's time, and memory is not divided into arenas
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "RUST_BACKTRACE": "0",
}
_FIELDS = frozenset({"prompt", "tools", "template_kwargs"})
"""Fields of a request that the process may name as the cause of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerLimits:
    """Limits of a model's tokenizer process. 262,000 tokens with as many merges load in 4 s and 0.5 GiB; a prompt of
    two million characters takes another 0.5 GiB."""

    memory_bytes: int = 3 * 2**29
    load_s: float = 60.0
    call_s: float = 20.0


def start_child(limits: TokenizerLimits) -> ChildProcess:
    """Start a process, still without a tokenizer. It is ready after a second."""
    return ChildProcess(
        "swarm.serving.tokenizer.tokenizer_worker",
        environment=ENVIRONMENT,
        memory_bytes=limits.memory_bytes,
        without=["torch"],  # transformers would import it, and take three times as long
    )


class TokenizerProcess:
    """Asks a process about the `files` of `model`, one process at a time. `ready` may be the first one."""

    def __init__(
        self, model: str, files: Mapping[str, bytes], limits: TokenizerLimits, ready: ChildProcess | None = None
    ) -> None:
        self._model = model
        self._limits = limits
        self._held = _OwnedProcess(ready)
        self._end = finalize(self, self._held.end)
        for name, payload in files.items():
            assert name in SMALL_FILES
            (self._held.folder / name).write_bytes(payload)

    def ask(self, what: str, **values: Any) -> Any:
        """Return the worker's answer to a request. Raises ConfigError, and IntegrityError for invalid files.

        A process that takes too long or too much memory is killed. The next request starts a new one.
        """
        child = self._held.child
        try:
            if child is None or what == "load":
                child = child or self._held.start(self._limits)
                loaded = self._answer(child, "load", {}, self._limits.load_s)
                if what == "load":
                    return loaded
            return self._answer(child, what, values, self._limits.call_s)
        except ChildFailure as failure:
            self._held.forget()
            if what == "load":
                raise IntegrityError(
                    f"the files of {self._model} cannot be used: their tokenizer {failure}",
                    remedy="its servers may be broken; use another model",
                ) from None
            raise ConfigError(
                f"the tokenizer of {self._model} {failure}", remedy="shorten the prompt or use another model"
            ) from None

    def close(self) -> None:
        """Kill the process, even during a request. A second call does nothing."""
        self._end()

    def _answer(self, child: ChildProcess, what: str, values: Mapping[str, Any], within_s: float) -> Any:
        request = {"do": what, "model": self._model, "folder": str(self._held.folder), "within_s": within_s, **values}
        try:
            asked = json.dumps(request, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            message = "the text is not valid Unicode: it has half of a surrogate pair"
            raise ConfigError(message, remedy="leave that out", field="prompt") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the request cannot be written as JSON: {error}", remedy="use plain values") from None
        return read_reply(self._model, json.loads(child.ask(asked, within_s=within_s, max_bytes=MAX_ANSWER_BYTES)))


def read_reply(model: str, reply: Any) -> Any:
    """Return the answer in a reply of the process, or raise the ConfigError or IntegrityError in it."""
    match reply:
        case {"answer": answer}:
            return answer
        case {"error": ConfigError.code, "message": str(message), "remedy": str(remedy), "field": str(field)}:
            raise ConfigError(message, remedy=remedy, field=field if field in _FIELDS else "")
        case {"error": IntegrityError.code, "message": str(message), "remedy": str(remedy)}:
            raise IntegrityError(message, remedy=remedy)
    raise IntegrityError(f"the tokenizer process of {model} gave an invalid answer")


class _OwnedProcess:
    """The process and the folder of a tokenizer. A finalizer frees them if `close` was not called."""

    def __init__(self, child: ChildProcess | None) -> None:
        self.child = child
        self.folder = make_folder("tokenizer")
        self._lock = threading.Lock()
        self._has_ended = False

    def start(self, limits: TokenizerLimits) -> ChildProcess:
        """Start the child. Raises SessionError after `end`."""
        with self._lock:
            self._check()
            self.child = start_child(limits)
            return self.child

    def forget(self) -> None:
        """Forget the child, which has died. Raises SessionError after `end`."""
        with self._lock:
            self._check()
            self.child = None

    def _check(self) -> None:
        if self._has_ended:
            raise _closed()

    def end(self) -> None:
        with self._lock:
            self._has_ended = True
            if self.child is not None:
                self.child.kill()
            shutil.rmtree(self.folder, ignore_errors=True)


def _closed() -> SessionError:
    return SessionError("the client has been closed", remedy="ask before it is closed")


class TokenizerQueue:
    """Asks a process one request after another, from one thread, so that waiting requests block no other thread. The
    smallest goes first: the longest texts take seconds each, and one caller may send dozens of them at once."""

    def __init__(self, model: str, process: TokenizerProcess) -> None:
        self._model = model
        self._process = process
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-tokenizer")
        self._waiting = PriorityQueue[tuple[int, int, Future[Any], Callable[[], Any]]]()
        self._numbers = itertools.count()
        self._is_closed = False

    async def ask(self, what: str, **values: Any) -> Any:
        if self._is_closed:
            raise _closed()
        answer = Future[Any]()
        asking = partial(self._process.ask, what, **values)
        self._waiting.put((len(str(values)), next(self._numbers), answer, asking))
        asyncio.get_running_loop().run_in_executor(self._thread, self._answer_smallest)
        try:
            async with asyncio.timeout(TURN_S):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise SessionError(
                f"the tokenizer of {self._model} is busy with other requests", remedy="ask again in a moment"
            ) from None

    def _answer_smallest(self) -> None:
        """Answer one of the waiting requests, unless its caller has left. Runs once for each request."""
        _, _, answer, asking = self._waiting.get()
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(asking())
            except BaseException as error:
                answer.set_exception(error)

    def close(self) -> None:
        self._is_closed = True
        self._process.close()
        self._thread.shutdown(wait=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class ModelAssets:
    """A model's shape, context length, end tokens and default sampling options, and access to its tokenizer's process.
    With a `table`, texts are decoded from the tokens' bytes; otherwise the process decodes."""

    shape: ModelShape
    context_tokens: int
    end_ids: frozenset[int]
    sampling: Mapping[str, float]
    table: TokenTable | None
    has_chat_template: bool
    queue: TokenizerQueue

    async def encode(self, prompt: str) -> list[int]:
        """Encode a text, with the special tokens that the tokenizer adds, if any.

        Raises ConfigError, as do all methods that ask the process.
        """
        return self._ids(await self.queue.ask("encode", prompt=prompt))

    async def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), template_kwargs: Message = NOTHING
    ) -> list[int]:
        """Encode with the model's chat template, or, without one, as lines `role: content` with `assistant:` at the
        end.

        Raises ConfigError if the template refuses these messages, or does not use tools or a name in `template_kwargs`.
        """
        asked = {
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools],
            "template_kwargs": dict(template_kwargs),
        }
        return self._ids(await self.queue.ask("encode_chat", **asked))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Decode without special tokens."""
        (text,) = await self.decode_all([token_ids])
        return text

    async def decode_all(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        if self.table is not None:
            return [self.table.decode(token_ids) for token_ids in sequences]
        texts = await self.queue.ask("decode", sequences=[[int(i) for i in token_ids] for token_ids in sequences])
        return self._texts(texts, len(sequences))

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return each token's own bytes, which may be a part of a character."""
        if self.table is not None:
            return [self.table.token_bytes(token_id) for token_id in token_ids]
        reply = await self.queue.ask("token_bytes", token_ids=[int(token_id) for token_id in token_ids])
        return [text.encode("latin-1") for text in self._texts(reply, len(token_ids))]

    def close(self) -> None:
        """End the process; no request is possible afterwards. A second call does nothing."""
        self.queue.close()

    def _ids(self, reply: Any) -> list[int]:
        if not (isinstance(reply, list) and all(type(token_id) is int for token_id in reply)):
            raise IntegrityError(f"the tokenizer of {self.shape.name} does not answer with token ids")
        return reply

    def _texts(self, reply: Any, num: int) -> list[str]:
        if not (isinstance(reply, list) and len(reply) == num and all(isinstance(text, str) for text in reply)):
            raise IntegrityError(f"the tokenizer of {self.shape.name} does not answer with texts")
        return reply


async def open_assets(model: str, revision: str, process: TokenizerProcess) -> ModelAssets:
    """Load the tokenizer of `process`. If that fails, `process` is closed. Raises IntegrityError for invalid files."""
    queue = TokenizerQueue(model, process)
    try:
        return assets_of(model, revision, await queue.ask("load"), queue)
    except BaseException:
        queue.close()
        raise


def assets_of(model: str, revision: str, reply: Any, queue: TokenizerQueue) -> ModelAssets:
    """Return the assets in the process's answer to `load`, which is as untrusted as the files. Raises IntegrityError if
    it is invalid."""
    try:
        return ModelAssets(
            shape=ModelShape(
                name=model,
                revision=revision,
                num_blocks=reply["num_blocks"],
                hidden_size=reply["hidden_size"],
                vocab_size=reply["vocab_size"],
            ),
            context_tokens=check_int(reply["context_tokens"], "context_tokens", low=1, high=limits.MAX_SESSION_TOKENS),
            # some models name end tokens beyond their vocabulary, which never occur
            end_ids=frozenset(
                each for each in checked_end_ids(reply["end_ids"], "eos_token_id") if 0 <= each < reply["vocab_size"]
            ),
            sampling=checked_options(reply["sampling"]),
            table=None if reply["table"] is None else table_from_json(reply["table"]),
            has_chat_template=reply["has_chat_template"] is True,
            queue=queue,
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IntegrityError(
            f"the files of {model} cannot be used: {error}", remedy="its servers may be broken; use another model"
        ) from error


async def fetch_files(network: Network, model: str, revision: str, peer_id: str) -> dict[str, bytes]:
    """Return the model's small files from a server. Raises PeerError."""
    request = FilesRequest(model=model).to_bytes()
    try:
        answer = await network.call(peer_id, f"{FILES_METHOD}/{model}", request, timeout_s=FILES_TIMEOUT_S)
        response = FilesResponse.from_bytes(answer)
    except PeerError:
        raise
    except SwarmError as error:
        # any error is this server's own: another server may have none
        raise PeerError(error.message, peer_id=peer_id) from error
    if response.revision != revision:
        raise PeerError(f"the server has another revision of {model}", peer_id=peer_id)
    return {name: payload for name, payload in response.files.items() if name in SMALL_FILES}
