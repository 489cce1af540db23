"""Implements the SDK for asyncio: an `AsyncClient` belongs to one event loop, and each of its generations has its own
session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from swarm_protocol.errors import PeerError, PeerViolation
from swarm_protocol.network_invitation import NetworkInvitation, given_invitation
from swarm_protocol.records import ServeRecord

from swarm.client.assets_cache import AssetsCache
from swarm.client.catalog import ChosenRevision, ModelCatalog, ModelStatus
from swarm.client.joined_network import joined_network
from swarm.client.possession_checks import FailedProof, PossessionChecks
from swarm.client.prompt_scores import KnownToken, PromptScores, echoed
from swarm.client.publishers import KnownPublishers, UsedRevisions
from swarm.client.request import (
    GenerationRequest,
    Prompt,
    TextClient,
    caches_too_small,
    check_fits,
    checked,
    encode,
    room_for,
)
from swarm.client.text_at_home import KeptModels, TextAtHome
from swarm.network.discovery.peer_names import check_peers
from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.router.routing import NeverRoom, NoChain
from swarm.serving.checking.spot_checks import DEFAULT_SHARE, SpotCheckOptions, SpotChecks
from swarm.serving.evidence.server_convictions import ServerConvictions
from swarm.serving.manifest.manifest_book import ManifestBook
from swarm.serving.session.client_state import ClientState, SessionOptions
from swarm.serving.session.generate import AnswerForm, Generation, Token, TokenSource, generate, sampler_for
from swarm.serving.session.session import Session
from swarm.serving.session.trace import Trace
from swarm.serving.tokenizer.model_assets import Message, ModelAssets, TokenizerLimits

if TYPE_CHECKING:
    from torch import Tensor

    from swarm.client.remote_blocks import ForwardOptions
    from swarm.client.tensor_calls import ForwardPass, TensorCalls
    from swarm.serving.local_ends.local_ends import LocalEnds


DEFAULT_NETWORK_ID = "swarm"

MAX_REVISIONS_TRIED = 3
"""Maximum revisions tried for one request: it takes up to ten seconds to notice that the servers of one are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The settings of a client, each with a default.

    A model is named as its servers name it, or as NAME@REVISION. The latter selects one of several revisions under one
    name, by its digest or at least the first eight characters of it. `pins` do the same for all requests, by name.
    Without a pin, a revision that was `used` before takes precedence. `publishers` are the publishers to believe: each
    MODEL=PEER_ID, or PEER_ID for every model without its own, or the KnownPublishers of an earlier process.
    `on_failed_proof` is called for each server that failed to prove that it holds a published model.

    `text_at_home` maps models to their directory or a KeptModel: the client runs both ends of these itself. Servers
    then get hidden states and never tokens, other models are not used, and calls that would send a text to servers
    raise ConfigError. The guide "Keep text at home" says what that hides, and from whom it does not.
    """

    session: SessionOptions = field(default_factory=SessionOptions)
    tokenizers: TokenizerLimits = field(default_factory=TokenizerLimits)
    pins: Mapping[str, str] = field(default_factory=dict)
    used: UsedRevisions = field(default_factory=UsedRevisions)
    publishers: KnownPublishers | Sequence[str] = ()
    on_failed_proof: Callable[[FailedProof], None] = lambda _failure: None
    text_at_home: KeptModels = field(default_factory=dict)


class AsyncClient(TextClient[Generation]):
    """A client for asyncio. `connect` joins a network; the constructor takes a network and a membership that the
    caller owns, and `aclose` closes what the client opened.

    `convictions` are the convicted servers that this process knows; without them the client keeps its own.
    """

    def __init__(
        self,
        *,
        network: Network,
        membership: Membership,
        options: ClientOptions | None = None,
        convictions: ServerConvictions | None = None,
    ) -> None:
        options = options or ClientOptions()
        self._network = network
        self._session = options.session
        self.convictions = convictions or ServerConvictions(network, membership)
        self._owns_convictions = convictions is None
        self._end_watch = self.convictions.watch(lambda ban: self._drop(ban.verdict.peer_id))
        self._state = ClientState(network, membership, self._session.checks, convicted=lambda: self.convictions.peers)
        self.health = self._state.health
        self._text_at_home = TextAtHome(network, options.text_at_home)
        self._manifests = ManifestBook(network)
        publishers = options.publishers
        self.possession = PossessionChecks(
            network,
            self._state.health,
            drop=self._drop,
            on_failure=options.on_failed_proof,
            convict=self.convictions.found,
        )
        self._known_models = ModelCatalog(
            membership,
            self._state.health,
            self._manifests,
            pins=options.pins,
            used=options.used,
            publishers=publishers if isinstance(publishers, KnownPublishers) else KnownPublishers(publishers),
            possession=self.possession,
            convictions=self.convictions,
        )
        self._assets = AssetsCache(network, self._state.health, options.tokenizers)
        self._tensor_calls: TensorCalls | None = None
        self._last: Generation | None = None

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        *,
        peers: Sequence[str] = (),
        network_id: str = "",
        pins: Mapping[str, str] | None = None,
        used: UsedRevisions | None = None,
        publishers: KnownPublishers | Sequence[str] = (),
        invite: str | NetworkInvitation | None = None,
        spot_check: float = DEFAULT_SHARE,
        text_at_home: KeptModels | None = None,
    ) -> AsyncIterator[AsyncClient]:
        """Join the network behind `peers` (multiaddrs, or names) as a client with a fresh identity.

        `invite` is an invitation to a private network, or its text: its seeds and its network are the defaults.
        `spot_check` is the share of answers that other servers recompute, 0 for none. `ClientOptions` explains the
        other arguments. Raises StartError, and ConfigError without peers or for an invalid publisher.
        """
        invitation, peers = given_invitation(invite), check_peers(peers)
        if invitation is not None:
            peers, network_id = peers or invitation.seeds, network_id or invitation.network_id
        options = ClientOptions(
            session=SessionOptions(checks=SpotCheckOptions(share=spot_check)),
            pins=pins or {},
            used=used or UsedRevisions(),
            publishers=publishers,
            text_at_home=text_at_home or {},
        )
        async with (
            joined_network(peers, network_id or DEFAULT_NETWORK_ID, invitation) as network,
            Membership(network) as membership,
            aclosing(cls(network=network, membership=membership, options=options)) as client,
        ):
            await client.warm_up()
            yield client

    async def aclose(self) -> None:
        """End the connections and the tokenizers' processes. Running and later calls raise SessionError."""
        self._state.end_sessions()
        self._assets.close()
        await self.possession.close()
        self._end_watch()
        if self._owns_convictions:
            await self.convictions.close()
        await self._manifests.close()
        await self._state.close()
        await self._text_at_home.close()

    @property
    def _catalog(self) -> ModelCatalog:
        self._state.check_open()
        return self._known_models

    def _drop(self, peer_id: str) -> None:
        error = PeerViolation("the server does not hold the files that it announces", peer_id=peer_id)
        self._state.connections.drop(peer_id, error)

    @property
    def checks(self) -> SpotChecks:
        """The spot checks of this client's answers, with the reputation of servers that follows from them."""
        return self._state.checks

    async def warm_up(self) -> None:
        """Start the tokenizer process in advance, so that the first request does not wait a second for it."""
        await self._assets.warm_up()

    async def models(self) -> tuple[ModelStatus, ...]:
        """Return the models that are served at least in part, by name. Raises PeerTimeout."""
        return tuple(self._text_at_home.completed(model) for model in await self._catalog.models())

    async def servers(self, name: str) -> Mapping[str, ServeRecord]:
        """Look up a model's servers again. Return the records of those of the revision in use, by peer id. Raises
        PeerTimeout."""
        return await self._catalog.newest_servers(name)

    async def model(self, name: str) -> ModelStatus | None:
        """Return the status of one model, or None if nobody serves it.

        Raises PeerTimeout, and ConfigError for a prefix that several revisions share.
        """
        found = await self._catalog.status(name)
        return None if found is None else self._text_at_home.completed(found)

    def answer(self, request: GenerationRequest) -> Generation:
        """Answer a request as `generate` does."""
        tokens = partial(self._tokens, request)
        self._last = Generation(tokens, request.model, stream=request.stream, timeout_s=request.timeout_s)
        return self._last

    async def tokenize(self, text: str | Sequence[Message] | Prompt, *, model: str) -> list[int]:
        """Return the token ids of a text, or of messages by the model's chat template. Raises as `generate`."""
        if not isinstance(text, Prompt):
            text = Prompt(prompt=text) if isinstance(text, str) else Prompt(prompt=None, messages=text)
        return await encode(await self._assets_of(model), text)

    async def context_tokens(self, model: str) -> int:
        """Return the maximum number of tokens of a prompt and its answer together. Raises as `generate`."""
        return (await self._assets_of(model)).context_tokens

    async def has_chat_template(self, model: str) -> bool:
        """Return whether the model has a chat template; without one, messages become plain lines. Raises as
        `generate`."""
        return (await self._assets_of(model)).has_chat_template

    async def default_sampling(self, model: str) -> Mapping[str, float]:
        """Return the model's own values of sampling options that `generate` leaves out. Raises as `generate`."""
        return (await self._assets_of(model)).sampling

    async def decode(self, token_ids: Sequence[int], *, model: str) -> str:
        """Return the text of tokens, without special ones. Raises as `generate`."""
        assets = await self._assets_of(model)
        return await assets.decode(checked(assets, token_ids, field="tokens"))

    async def embed(self, text: str | Sequence[int] | Tensor, *, model: str) -> Tensor:
        """Return the input embeddings of a text or of token ids: float32 [T, H], or [B, T, H] for a tensor [B, T].

        Raises as `forward`.
        """
        self._text_at_home.refuse("an embedding")
        ids = await self.tokenize(text, model=model) if isinstance(text, str) else text
        return await (await self._tensors()).embed(ids, model)

    async def pooled(self, text: str | Sequence[int], *, model: str) -> Tensor:
        """Return the mean of a text's last hidden states, after the last norm, scaled to length 1: float32 [H].

        Raises as `forward`, and ConfigError for a text that is empty or over the model's context.
        """
        self._text_at_home.refuse("an embedding")
        token_ids = await self.tokenize(Prompt(prompt=text), model=model)
        check_fits(await self._assets_of(model), len(token_ids))
        return await (await self._tensors()).pooled(token_ids, model)

    async def forward(
        self, x: Tensor, *, model: str, start: int = 0, end: int | None = None, head: bool = False, codec: str = "raw"
    ) -> Tensor:
        """Run blocks `[start, end)` causally on whole sequences `x`, [B, T, H] or [T, H]. The result has the same
        shape.

        `x` has hidden states, or for the first block input embeddings or token ids ([B, T] or [T]). After the model's
        last block, the result has the hidden states after its last norm, or with `head` the logits [B, T, V]. Gradients
        flow back to `x` through the same blocks; the model is frozen. Since the backward pass uses the network too, run
        it beside this client's loop: `await asyncio.to_thread(loss.backward)`. `codec` is raw (fp32) or bf16.

        If servers die, even between the two passes, the calls only take longer, as long as other servers hold the
        blocks. Raises ConfigError for an unknown model, blocks or shape and for numbers that are not finite,
        SessionError if blocks are missing or could not be computed, and PeerError if nobody answers or the call is too
        large for the servers. The backward pass raises the same.
        """
        from swarm.client.remote_blocks import ForwardOptions  # noqa: PLC0415 - brings torch
        from swarm.client.tensor_calls import attach, check_tensor, waiting_for  # noqa: PLC0415 - brings torch

        check_tensor(x)
        wanted = ForwardOptions(start=start, end=end, head=head, codec=codec)
        ran = await self.run_forward(x.detach(), model, wanted)
        return attach(x, ran, waiting_for(asyncio.get_running_loop()))

    async def run_forward(self, x: Tensor, model: str, wanted: ForwardOptions) -> ForwardPass:
        """Run `forward` without the part of autograd, which must run in the caller's thread."""
        if wanted.start == 0:
            self._text_at_home.refuse("a pass through the model's first block")
        return await (await self._tensors()).run_forward(x, model, wanted)

    async def _tensors(self) -> TensorCalls:
        catalog = self._catalog
        if self._tensor_calls is None:
            # in a thread, since importing torch takes over a second, and the loop has streams to serve meanwhile
            await asyncio.to_thread(import_module, "swarm.client.tensor_calls")
        if self._tensor_calls is None:  # another call may have waited for the import, too
            from swarm.client.tensor_calls import TensorCalls  # noqa: PLC0415 - brings torch

            self._tensor_calls = TensorCalls(self._network, self._state.health, catalog, self._assets)
        return self._tensor_calls

    async def _assets_of(self, model: str) -> ModelAssets:
        chosen = await self._catalog.to_use(model)
        is_kept = self._text_at_home.keeps(chosen.name)
        return await self._assets_for(chosen, await self._text_at_home.ends(chosen) if is_kept else None)

    async def _assets_for(self, chosen: ChosenRevision, ends: LocalEnds | None) -> ModelAssets:
        files = ends.files if ends is not None else None
        return await self._assets.get(chosen.name, chosen.revision.servers, chosen.published, files)

    def trace(self) -> dict[str, Any]:
        """Return the trace of the generation that began last; `Generation.trace` returns that of a given one."""
        return self._last.trace() if self._last else {}

    async def _tokens(self, request: GenerationRequest, trace: Trace) -> AsyncGenerator[Token, None]:
        """Generate with the chosen revision, or with another one if its servers are gone before the first token."""
        since_s = asyncio.get_running_loop().time()
        chosen, tried = await self._catalog.to_use(request.model), set[str]()
        while True:
            tried.add(chosen.revision.digest)
            has_begun = False
            try:
                async with aclosing(self._answer(request, chosen, trace, since_s)) as tokens:
                    async for token in tokens:
                        has_begun = True
                        yield token
                return
            except (NoChain, PeerError) as error:
                if isinstance(error, NeverRoom) and not has_begun:
                    raise caches_too_small(error) from error
                if has_begun or len(tried) == MAX_REVISIONS_TRIED:
                    raise
                chosen = await self._catalog.to_use(request.model)
                if chosen.revision.digest in tried:
                    raise

    async def _answer(
        self, request: GenerationRequest, chosen: ChosenRevision, trace: Trace, since_s: float
    ) -> AsyncGenerator[Token, None]:
        trace.model, trace.revision = chosen.name, chosen.revision.digest
        self._state.health.measure(chosen.revision.servers)
        ends = await self._text_at_home.ends(chosen) if self._text_at_home.is_on else None
        assets = await self._assets_for(chosen, ends)
        sampling = trace.sampling = request.drawn_by(assets.sampling)
        prompt_ids = await encode(assets, request.prompt)
        max_tokens = room_for(assets, len(prompt_ids), request.max_tokens, min_tokens=sampling.min_tokens)
        sampler = sampler_for(assets, sampling, prompt_ids)
        scores = None
        if request.echo:
            scores = await self._scores(request, chosen, prompt_ids)
            trace.num_prompt_tokens = len(prompt_ids)
            for token in await echoed(assets, request.prompt, prompt_ids, scores, is_whole=max_tokens == 0):
                yield token
            if max_tokens == 0:
                return
        source: AbstractAsyncContextManager[TokenSource] = Session(
            self._state,
            assets.shape,
            max_tokens=len(prompt_ids) + max_tokens,
            servers=chosen.revision.servers,
            trace=trace,
            options=replace(self._session, local_spans=ends),
            sampler=sampler,
        )
        if scores and max_tokens == 1 and sampler is None and sampling.temperature == 0:
            source = nullcontext(KnownToken(scores.answer()))
        async with source as opened:
            trace.opening_ms = (asyncio.get_running_loop().time() - since_s) * 1000
            continues = request.prompt.prompt is not None
            form = AnswerForm(num_logprobs=request.num_logprobs, scores_end=request.echo, continues=continues)
            answer = generate(opened, assets, prompt_ids, sampling, max_tokens, trace, form=form)
            async with aclosing(answer) as tokens:
                async for token in tokens:
                    self._catalog.answered(chosen)
                    yield token

    async def _scores(
        self, request: GenerationRequest, chosen: ChosenRevision, prompt_ids: Sequence[int]
    ) -> PromptScores | None:
        """Return the scores of a prompt to echo, or None without log probabilities."""
        if request.num_logprobs is None:
            return None
        self._text_at_home.refuse("scores of a prompt")
        revision = chosen.revision.digest
        if revision not in request.scores:
            rows = await (await self._tensors()).score(chosen, prompt_ids, max(1, request.num_logprobs))
            request.scores[revision] = PromptScores(prompt_ids, rows, request.num_logprobs)
        scores: PromptScores = request.scores[revision]
        return scores
