"""A scripted client of a swarm, and a gateway over it on a real port, for tests of HTTP alone.

`test_gateway_swarm.py` uses the same routes with the real client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from support.leaks import no_leaks
from swarm.client import OtherRevision
from swarm.client.request import GenerationRequest, Prompt
from swarm.serving.sampling.sampling import OWN_DEFAULTS
from swarm_node.gateway.app import GatewayOptions, create_app
from swarm_node.http.server import listen, serving
from torch import Tensor


@dataclass(frozen=True)
class ScriptedLikely:
    data: bytes
    logprob: float


@dataclass(frozen=True)
class ScriptedToken:
    text: str
    finish_reason: str | None = None
    data: bytes = b""
    logprob: float | None = None
    top: Sequence[ScriptedLikely] = ()
    is_prompt: bool = False

    @property
    def is_drawn(self) -> bool:
        return not self.is_prompt


class Hang:
    """Marks where the script stops for ever."""


@dataclass(frozen=True)
class ScriptedModel:
    name: str = "tiny"
    num_blocks: int = 4
    missing: Sequence[tuple[int, int]] = ()
    lost: Sequence[tuple[int, int]] = ()
    age_s: float = 12.34
    revision: str = "5c819ed1" * 4
    others: Sequence[OtherRevision] = ()
    publisher: str = ""
    manifest: str = ""
    standing: str = "unpublished"

    @property
    def unreachable(self) -> Sequence[tuple[int, int]]:
        return [*self.missing, *self.lost]


class ScriptedGeneration:
    """Yields the script's tokens.

    An exception in the script is raised, and the result of an awaitable is awaited first.
    """

    num_prompt_tokens = 3

    def __init__(self, client: ScriptedClient, script: Sequence[object]) -> None:
        self._tokens = self._run(client, script)
        self._sampling = client.asked[-1].drawn_by(client.own)
        self.yielded = 0

    def __aiter__(self) -> ScriptedGeneration:
        return self

    async def __anext__(self) -> ScriptedToken:
        return await self._tokens.__anext__()

    async def aclose(self) -> None:
        await self._tokens.aclose()

    def trace(self) -> dict[str, object]:
        sampling = {name: getattr(self._sampling, name) for name in OWN_DEFAULTS}
        return {"tokens": self.yielded, "sampling": sampling, "num_reused_tokens": 2, "replays": []}

    async def _run(self, client: ScriptedClient, script: Sequence[object]) -> AsyncIterator[ScriptedToken]:
        client.num_open += 1
        try:
            for step in script:
                match step:
                    case Hang():
                        client.reached.set()
                        await asyncio.Event().wait()
                    case asyncio.Event():
                        await step.wait()
                    case Exception():
                        raise step
                    case ScriptedToken():
                        self.yielded += 1
                        yield step
        finally:
            client.num_open -= 1
            client.num_finished += 1


@dataclass
class ScriptedClient:
    script: Sequence[object] = (ScriptedToken("hel"), ScriptedToken("lo"), ScriptedToken("!", "stop"))
    served: Sequence[ScriptedModel] = (ScriptedModel(),)
    scripts: Sequence[Sequence[object]] = ()
    """For each generation in turn, instead of `script`."""
    own: Mapping[str, float] = field(default_factory=dict)
    """The model's own sampling options."""

    num_open: int = 0
    num_finished: int = 0
    asked: list[GenerationRequest] = field(default_factory=list)
    tokenized: list[Prompt] = field(default_factory=list)
    num_listed: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def models(self) -> Sequence[ScriptedModel]:
        self.num_listed += 1
        return self.served

    async def model(self, name: str) -> ScriptedModel | None:
        return next((model for model in self.served if model.name == name), None)

    def answer(self, request: GenerationRequest) -> ScriptedGeneration:
        self.asked.append(request)
        script = self.scripts[len(self.asked) - 1] if self.scripts else self.script
        return ScriptedGeneration(self, script)

    async def tokenize(self, text: Prompt, *, model: str) -> list[int]:
        """Return a token for each byte; a message is its content."""
        self.tokenized.append(text)
        if text.prompt is None:
            return list("".join(str(message["content"]) for message in text.messages).encode(errors="replace"))
        return list(text.prompt.encode(errors="replace") if isinstance(text.prompt, str) else text.prompt)

    async def decode(self, token_ids: Sequence[int], *, model: str) -> str:
        return bytes(token_id % 256 for token_id in token_ids).decode(errors="replace")

    async def context_tokens(self, model: str) -> int:
        return 256

    async def pooled(self, text: Sequence[int], *, model: str) -> Tensor:
        return torch.tensor([float(len(text)), 0.5])


Conversation = Callable[[AsyncOpenAI], Awaitable[None]]


def openai_client(url: str, *, timeout_s: float) -> AsyncOpenAI:
    """Return OpenAI's client for the gateway at `url`. It skips https certificates, which take 15 ms to read."""
    http_client = DefaultAsyncHttpxClient(verify=False)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s, http_client=http_client)


def converse(
    client: ScriptedClient,
    conversation: Conversation,
    options: GatewayOptions | None = None,
    *,
    max_connections: int = 100,
    proxies: Sequence[str] = (),
    within_s: float = 30,
) -> None:
    """Run `conversation(openai)` against a gateway over `client`, and check that nothing is left afterwards."""

    async def main() -> None:
        with no_leaks():
            app = create_app(client, options)
            async with (
                asyncio.timeout(within_s),
                serving(app, listen("127.0.0.1", 0), max_connections=max_connections, proxies=proxies) as url,
                openai_client(url, timeout_s=60) as openai,
            ):
                await conversation(openai)

    asyncio.run(main())
    assert client.num_open == 0
