"""Answers one request from its running generations: at once, or token by token as server-sent events.

The generations live entirely inside `GenerationResponse.__call__`. A client's disconnect, a stalled reader, a deadline
and a shutdown therefore all end in the same place, which closes the generations and frees their chains. The status is
decided when the first token is there: an earlier failure is a plain error response, a later one an error event.

`Answerer` adds admission, the caller's token rate, traces and counters to the generations. `merged` combines several
generations into one stream of tokens.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from openai.types import CompletionUsage
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from swarm.client import AsyncClient, Generation, Token
from swarm.client.request import GenerationRequest, left_out
from swarm.ended_tasks import end_tasks

from swarm_node.gateway import http_limits
from swarm_node.gateway.admission import RATE_LIMITER
from swarm_node.gateway.answer_slots import AnswerSlots
from swarm_node.gateway.api_errors import from_exception
from swarm_node.gateway.chat_schema import ChatRequest
from swarm_node.gateway.choice import Choice, Delta
from swarm_node.gateway.completion_schema import CompletionRequest
from swarm_node.gateway.metrics import Metrics, RequestTimes, Trace, TraceStore
from swarm_node.gateway.responses import ChatBuilder, CompletionBuilder, as_json, json_response, usage_of
from swarm_node.gateway.responses_events import ResponsesBuilder
from swarm_node.gateway.served_models import Models
from swarm_node.http.event_stream import EventStream, event, wait_disconnected
from swarm_node.http.rate_limit import RateLimiter
from swarm_node.metrics.otel_traces import NO_TRACES, Traces

ID_HEADERS = ("x-swarm-trace", "x-request-id")
"""The headers with a request's id. OpenAI's clients show the second one, also in their errors."""
CLIENT_GONE = 499
"""nginx's status for a client that closed the connection."""

T = TypeVar("T")

IndexedToken = tuple[int, Token]
"""The index of a choice, and one of its tokens."""
ParsedRequest = CompletionRequest | ChatRequest
ResponseBuilder = CompletionBuilder | ChatBuilder | ResponsesBuilder


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    """A request that is being answered: its tokens as they arrive, what it has used so far, and its trace so far."""

    tokens: AsyncIterator[IndexedToken]
    choices: Sequence[Choice]
    usage: Callable[[], CompletionUsage]
    trace: Callable[[], Trace]


class GenerationResponse(Response):
    def __init__(self, answerer: Answerer, builder: ResponseBuilder, request: ParsedRequest) -> None:
        super().__init__()
        self._answerer = answerer
        self._builder = builder
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client disconnects first."""
        await until_gone(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace_id = self._builder.head.id
        events = EventStream(send, dict.fromkeys(ID_HEADERS, trace_id))
        begun = self._answerer.running(trace_id, self._request, scope[RATE_LIMITER])
        try:
            async with asyncio.timeout(http_limits.GENERATION_TIMEOUT_S), begun as running:
                if self._request.stream:
                    await self._send_events(running, events)
                    return
                response = json_response(await self._collect(running))
        except Exception as error:
            failure = from_exception(error, scope["path"], self._request.field_names)
            failure.note(scope)
            if events.started:
                await events.end(_encoded(self._builder.failed(failure)))
                return
            response = failure.response()
        response.headers.update(dict.fromkeys(ID_HEADERS, trace_id))
        await response(scope, receive, send)

    async def _collect(self, running: RunningRequest) -> BaseModel:
        deltas: list[list[Delta]] = [[] for _ in running.choices]
        async for index, token in running.tokens:
            deltas[index] += running.choices[index].push(token)
        finished = [choice.finished(parts) for choice, parts in zip(running.choices, deltas, strict=True)]
        self._builder.begin(running.trace())
        return self._builder.whole(finished, running.usage())

    async def _send_events(self, running: RunningRequest, events: EventStream) -> None:
        async for index, token in running.tokens:
            choice = running.choices[index]
            objects: list[BaseModel] = []
            if choice.num_tokens == 0:
                self._builder.begin(running.trace())
                objects += self._builder.first(index)
            for delta in choice.push(token):
                objects += self._builder.next(index, delta)
            if token.finish_reason:
                objects += self._builder.last(index, choice.finish_reason)
            if objects:
                await events.send(_encoded(objects))
        await events.end(_encoded(self._builder.ended(running.usage())) + self._builder.last_event)


def _encoded(objects: Sequence[BaseModel]) -> bytes:
    """Encode each object as an event. One with a type, as those of the Responses API are, has it as its name."""
    return b"".join(event(as_json(each), getattr(each, "type", "")) for each in objects)


async def until_gone(receive: Receive, answering: Coroutine[Any, Any, T]) -> T | Response:
    """Return what `answering` returns. If the client disconnects first, cancel `answering` and return a response
    without a body."""
    task, gone = asyncio.create_task(answering), asyncio.create_task(wait_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        gone.result()  # re-raise an error of receive()
        return Response(status_code=CLIENT_GONE)
    finally:
        gone.cancel()
        await end_tasks(task)


class Answerer:
    """Answers requests over one SDK client. It keeps the slots of running answers and the newest traces."""

    def __init__(
        self, client: AsyncClient, models: Models, metrics: Metrics, *, traces: Traces = NO_TRACES, max_requests: int
    ) -> None:
        self.slots = AnswerSlots(max_requests)
        self.traces = TraceStore()
        self._client = client
        self._models = models
        self._metrics = metrics
        self._traces = traces

    @asynccontextmanager
    async def running(
        self, trace_id: str, request: ParsedRequest, limiter: RateLimiter
    ) -> AsyncIterator[RunningRequest]:
        """Start the generations of `request`. Leaving the context closes them and charges the tokens used to the
        caller's rate."""
        with self.slots.take(request.num_choices, request.model, limiter):
            await self._models.check_served(request.model)
            async with self._run(trace_id, request, limiter) as running:
                yield running

    @asynccontextmanager
    async def _run(self, trace_id: str, request: ParsedRequest, limiter: RateLimiter) -> AsyncIterator[RunningRequest]:
        max_tokens = http_limits.RESERVED_TOKENS if request.num_new_tokens is None else request.num_new_tokens
        reserved = limiter.reserve(max_tokens * request.num_choices)
        choices = [Choice(request.tool_names, request.echo) for _ in range(request.num_choices)]
        generations: list[Generation] = []
        began_at = time.time()

        def usage() -> CompletionUsage:
            return _usage(generations[:: request.n], choices)

        def pay(num_drawn: int) -> None:
            nonlocal reserved
            if num_drawn > reserved:
                reserved += limiter.take_tokens(1)

        try:
            async with AsyncExitStack() as stack:
                times = stack.enter_context(RequestTimes(self._metrics))
                for generation in self._generations(request):
                    generations.append(generation)
                    stack.push_async_callback(generation.aclose)
                trace = partial(_trace, generations)
                self.traces.begin(trace_id, trace)
                tokens = await stack.enter_async_context(merged(generations, num_per_prompt=request.n))
                timed = await stack.enter_async_context(aclosing(self._timed(tokens, times, pay)))
                yield RunningRequest(tokens=timed, choices=choices, usage=usage, trace=trace)
        finally:
            self.traces.finish(trace_id)
            used = usage()
            done = [generation.trace() for generation in generations]
            self._metrics.used(used, done)
            self._traces.request(
                trace_id,
                request.model,
                began_at=began_at,
                ended_at=time.time(),
                choices=done,
                error=sys.exception(),
            )
            limiter.settle(reserved, used.total_tokens)

    def _generations(self, request: ParsedRequest) -> Iterator[Generation]:
        for prompt in request.prompts:
            scores = dict[str, Any]()
            for sampling in request.samplings():
                asked = GenerationRequest(
                    model=request.model,
                    prompt=prompt,
                    max_tokens=request.num_new_tokens,
                    sampling=sampling,
                    num_logprobs=request.num_logprobs,
                    stream=True,
                    echo=request.echo,
                    left_out=left_out(request),
                    scores=scores,
                )
                yield self._client.answer(asked)

    async def _timed(
        self, tokens: AsyncIterator[IndexedToken], times: RequestTimes, pay: Callable[[int], None]
    ) -> AsyncGenerator[IndexedToken, None]:
        num_drawn = 0
        async for index, token in tokens:
            if token.is_drawn:
                times.token(index)
                num_drawn += 1
                pay(num_drawn)
            yield index, token
            if token.finish_reason:
                self._metrics.success.labels(token.finish_reason).inc()


def _usage(of_prompts: Sequence[Generation], choices: Sequence[Choice]) -> CompletionUsage:
    """Return the usage. A prompt is counted once, however many choices answer it."""
    return usage_of(
        prompt_tokens=sum(generation.num_prompt_tokens for generation in of_prompts),
        completion_tokens=sum(choice.num_tokens for choice in choices),
        cached_tokens=sum(int(generation.trace().get("num_reused_tokens", 0)) for generation in of_prompts),
    )


def _trace(generations: Sequence[Generation]) -> Trace:
    if len(generations) == 1:
        return generations[0].trace()
    return {"choices": [generation.trace() for generation in generations]}


_Queue = asyncio.Queue[IndexedToken | Exception | None]


@asynccontextmanager
async def merged(
    generations: Sequence[Generation], *, num_per_prompt: int
) -> AsyncIterator[AsyncIterator[IndexedToken]]:
    """Run each generation in a task of its own, and yield one stream of their tokens.

    A failure of one generation ends all. A bounded queue limits how far they run ahead of the reader. Each run of
    `num_per_prompt` consecutive generations answers the same prompt. The first of these starts at once, the others when
    its first token is there, so that they find the prompt in the servers' caches instead of computing it again.
    """
    if len(generations) == 1:
        async with aclosing(_indexed(generations[0])) as tokens:
            yield tokens
        return
    queue: _Queue = asyncio.Queue(http_limits.MAX_QUEUED_TOKENS)
    begun = [asyncio.Event() for _ in generations]
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, generation in enumerate(generations):
            first = index - index % num_per_prompt
            leader = begun[first] if first != index else None
            tasks.append(group.create_task(_pump(index, generation, queue, leader, begun[index])))
        try:
            async with aclosing(_taken(queue, len(generations))) as tokens:
                yield tokens
        finally:
            for task in tasks:
                task.cancel()


async def _indexed(generation: Generation) -> AsyncGenerator[IndexedToken, None]:
    async for token in generation:
        yield 0, token


async def _pump(
    index: int, generation: Generation, queue: _Queue, leader: asyncio.Event | None, begun: asyncio.Event
) -> None:
    if leader:
        await leader.wait()
    try:
        async for token in generation:
            begun.set()
            await queue.put((index, token))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
    finally:
        begun.set()


async def _taken(queue: _Queue, num_running: int) -> AsyncGenerator[IndexedToken, None]:
    while num_running:
        step = await queue.get()
        if isinstance(step, Exception):
            raise step
        if step is None:
            num_running -= 1
        else:
            yield step
