"""Tiny models of several families, and a whole swarm of servers around one client on a simulated internet."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from swarm.client import AsyncClient, Generation
from swarm.network.membership import Membership
from swarm.network.memory import MemoryInternet, MemoryNetwork
from swarm.serving.loading import LoadedSpan, load
from swarm.serving.model_kit import ModelKit
from swarm.serving.server import SpanServer
from swarm.serving.server_options import ServerOptions
from swarm.serving.session import SessionOptions
from swarm.testing.faults import Fault, FaultScript
from swarm_protocol.records import NodeRecord
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

NUM_BLOCKS = 6
VOCAB = 256
NUM_TOKENS = 16
PROMPT = "def add(a, b):\n    return"

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama-tied": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=8, use_sliding_window=True, sliding_window=8, max_window_layers=3),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=8),
    "mixtral": lambda: MixtralConfig(**_SHAPE, num_local_experts=4),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=NUM_BLOCKS,
        n_head=4,
        n_positions=256,
        scale_attn_by_inverse_layer_idx=True,
        bos_token_id=0,
        eos_token_id=1,
    ),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that characters of several bytes arrive in pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def write_model(directory: Path, config: Any, seed: int = 0) -> Path:
    """Random weights large enough for greedy tokens to differ, in several shards."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.tie_weights()
    model.save_pretrained(directory, max_shard_size="40KB")
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model_dirs("llama")`: a directory with a tiny model of that family, written once."""
    written: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in written:
            written[family] = write_model(tmp_path_factory.mktemp(family), FAMILIES[family]())
        return written[family]

    return get


@pytest.fixture(scope="session")
def llama_dir(model_dirs: Callable[[str], Path]) -> Path:
    return model_dirs("llama")


@functools.cache
def _local_tokens(directory: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return tuple(int(token) for token in out[0, len(prompt) :])


def local_tokens(directory: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers generates greedily, alone on one machine."""
    return list(_local_tokens(directory, tuple(prompt), num_tokens))


@functools.cache
def _load_once(directory: Path, start: int, end: int, max_step_tokens: int, kv_bytes: int) -> LoadedSpan:
    return load(directory, start, end, ServerOptions(max_step_tokens=max_step_tokens, kv_bytes=kv_bytes))


def cached_load(directory: Path, start: int, end: int, options: ServerOptions) -> LoadedSpan:
    """`load` for hundreds of servers: their spans share weights, which nothing changes."""
    return _load_once(directory, start, end, options.max_step_tokens, options.kv_bytes)


@dataclass
class Box:
    """Servers and a client that know each other. `servers` by peer id, in the order of their spans."""

    internet: MemoryInternet
    directory: Path
    stack: AsyncExitStack
    network: MemoryNetwork
    membership: Membership
    client: AsyncClient
    servers: dict[str, SpanServer] = field(default_factory=dict)
    who: dict[str, str] = field(default_factory=dict)

    async def add(
        self, start: int, end: int, options: ServerOptions | None = None, *, name: str = "tiny", who: str = ""
    ) -> SpanServer:
        """A server; `who` is what it is called in a fault script."""
        network = self.internet.network()
        self.who[who or f"s{len(self.servers)}"] = network.peer_id
        membership = await self.stack.enter_async_context(Membership(network))
        membership.announce(node_record())
        server = SpanServer(network, membership, self.directory, name=name, start=start, end=end, options=options)
        await server.start()
        self.stack.push_async_callback(server.close)
        self.servers[network.peer_id] = server
        return server

    async def known(self, num_servers: int, name: str = "tiny") -> None:
        """Wait until the client sees that many servers."""
        async with asyncio.timeout(60):
            while len(await self.membership.servers(name)) < num_servers:
                await asyncio.sleep(0.1)

    def generate(self, num_tokens: int = NUM_TOKENS, **options: Any) -> Generation:
        return self.client.generate(**{"model": "tiny", "prompt": PROMPT, "max_tokens": num_tokens, **options})

    async def tokens(self, num_tokens: int = NUM_TOKENS, **options: Any) -> list[int]:
        return [token.token_id async for token in self.generate(num_tokens, **options)]

    async def kit(self) -> ModelKit:
        """What the client has made of the servers' files."""
        return await self.client._kit("tiny", await self.client._servers("tiny"))

    def expected(self, num_tokens: int = NUM_TOKENS) -> list[int]:
        """What one machine alone answers to PROMPT."""
        return local_tokens(self.directory, byte_tokenizer()(PROMPT)["input_ids"], num_tokens)

    async def all_freed(self) -> None:
        """Wait until no server holds a session or a reserved token any more."""
        async with asyncio.timeout(10):
            while any(server.sessions for server in self.servers.values()):
                await asyncio.sleep(0.01)
        for server in self.servers.values():
            assert server.record.free_kv_tokens == server.max_kv_tokens


def node_record() -> NodeRecord:
    return NodeRecord(
        name="box",
        version="0",
        addrs=(),
        device="cpu",
        memory_bytes=1,
        free_memory_bytes=1,
        reachability="public",
        started_at=0.0,
    )


@asynccontextmanager
async def box(
    directory: Path,
    spans: Sequence[tuple[int, int]],
    *,
    session: SessionOptions | None = None,
    faults: Sequence[Fault] = (),
    detection_s: float = 0.0,
    options: ServerOptions | None = None,
) -> AsyncIterator[Box]:
    """Servers s0, s1, … of `spans` and a client that sees them all. Every one of `faults` must have struck by the end.

    A dead server is noticed after `detection_s`, at once by default, as when a kernel resets its connections.
    """
    internet = MemoryInternet(detection_s=detection_s)
    script = FaultScript(faults, kill=lambda who: internet.crash(swarm.who[who]))
    async with AsyncExitStack() as stack:
        stack.enter_context(patch("swarm.serving.server.load", cached_load))
        network = internet.network()
        membership = await stack.enter_async_context(Membership(network))
        client = AsyncClient(network=network, membership=membership, session=session)
        swarm = Box(internet, directory, stack, network, membership, client)
        for index, (start, end) in enumerate(spans):
            hook = script.hook(f"s{index}")
            await swarm.add(start, end, dataclasses.replace(options or ServerOptions(), faults=hook))
        await swarm.known(len(spans))
        yield swarm
        script.assert_all_fired()


@pytest.fixture(scope="session")
def boxes() -> Any:
    """`async with boxes(directory, [(0, 3), (3, 6)]) as box:`"""
    return box


@pytest.fixture(scope="session", name="local_tokens")
def local_tokens_fixture() -> Any:
    """`local_tokens(directory, prompt_ids, num_tokens)`: what transformers generates greedily, on one machine."""
    return local_tokens


@pytest.fixture(scope="session")
def write_tiny() -> Any:
    """`write_tiny(directory, family, seed=0)`: another model of a family."""

    def write(directory: Path, family: str, seed: int = 0) -> Path:
        return write_model(directory, FAMILIES[family](), seed)

    return write


@pytest.fixture(scope="session")
def make_node_record() -> Callable[[], NodeRecord]:
    return node_record


@pytest.fixture(scope="session")
def tokenize() -> Callable[[str], list[int]]:
    """Token ids of a prompt, as the tiny models' tokenizer gives them."""
    tokenizer = byte_tokenizer()
    return lambda prompt: [int(token) for token in tokenizer(prompt)["input_ids"]]
