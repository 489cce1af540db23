"""Runs a request's generations over the SDK: admission, the caller's tokens, traces and counters around them."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

from starlette.types import Scope
from swarm.client.request import DEFAULT_MAX_TOKENS, Request
from swarm.client.request import Question as Prompt

from swarm_node.gateway.access import ALLOWANCE
from swarm_node.gateway.backend import Backend, Generation
from swarm_node.gateway.choice import Choice
from swarm_node.gateway.merging import Step, merged
from swarm_node.gateway.metrics import Metrics, RequestTimes
from swarm_node.gateway.models import Models
from swarm_node.gateway.rate_limit import Allowance
from swarm_node.gateway.request_admission import Gate
from swarm_node.gateway.request_schema import SamplingRequest
from swarm_node.gateway.request_traces import Trace, TraceStore
from swarm_node.gateway.responses import Shape, Usage
from swarm_node.gateway.streaming import Answer, Running
from swarm_node.metrics.otel_traces import NO_TRACES, Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request as both endpoints come to it: `n` choices for each of `prompts`. `max_tokens` None: as many as are
    usual and fit. The tools of these names may be called."""

    request: SamplingRequest
    prompts: Sequence[Prompt]
    max_tokens: int | None
    num_logprobs: int | None
    tools: Sequence[str] = ()

    @property
    def num_choices(self) -> int:
        return self.request.n * len(self.prompts)


class Answerer:
    """Answers questions. State: the running answers' gate and the newest traces."""

    def __init__(
        self, client: Backend, models: Models, metrics: Metrics, *, traces: Traces = NO_TRACES, max_requests: int
    ) -> None:
        self.gate = Gate(max_requests)
        self.traces = TraceStore()
        self._client = client
        self._models = models
        self._metrics = metrics
        self._traces = traces

    def answer(self, shape: Shape, question: Question) -> Answer:
        @asynccontextmanager
        async def begin(scope: Scope) -> AsyncIterator[Running]:
            with self.gate.slots(question.num_choices):
                await self._models.check_served(question.request.model)
                async with self._run(shape.id, question, scope.get(ALLOWANCE)) as running:
                    yield running

        return Answer(shape, begin, stream=question.request.stream, include_usage=question.request.include_usage)

    @asynccontextmanager
    async def _run(self, trace_id: str, question: Question, allowance: Allowance | None) -> AsyncIterator[Running]:
        """Leaving the context frees all chains, and charges what was used."""
        max_tokens = (question.max_tokens or DEFAULT_MAX_TOKENS) * question.num_choices
        reserved = allowance.reserve(max_tokens) if allowance else 0
        num_per_prompt = question.request.n
        choices = [Choice(question.tools) for _ in range(question.num_choices)]
        generations: list[Generation] = []
        began_at = time.time()

        def usage() -> Usage:
            return _usage(generations[::num_per_prompt], choices)

        try:
            async with AsyncExitStack() as stack:
                times = stack.enter_context(self._metrics.request())
                for generation in self._generations(question):
                    generations.append(generation)
                    stack.push_async_callback(generation.aclose)
                self.traces.begin(trace_id, lambda: _trace(generations))
                steps = await stack.enter_async_context(merged(generations, num_per_prompt=num_per_prompt))
                timed = await stack.enter_async_context(aclosing(self._timed(steps, times)))
                yield Running(steps=timed, choices=choices, usage=usage)
        finally:
            self.traces.finish(trace_id)
            used = usage()
            done = [generation.trace() for generation in generations]
            self._metrics.used(used, done)
            self._traces.request(
                trace_id,
                question.request.model,
                began_at=began_at,
                ended_at=time.time(),
                choices=done,
                error=sys.exception(),
            )
            if allowance:
                allowance.settle(reserved, used.prompt_tokens + used.completion_tokens)

    def _generations(self, question: Question) -> Iterator[Generation]:
        asked = question.request
        for prompt in question.prompts:
            for sampling in asked.samplings():
                request = Request(
                    model=asked.model,
                    question=prompt,
                    max_tokens=question.max_tokens,
                    sampling=sampling,
                    num_logprobs=question.num_logprobs,
                    stream=True,
                )
                yield self._client.answer(request)

    async def _timed(self, steps: AsyncIterator[Step], times: RequestTimes) -> AsyncGenerator[Step, None]:
        async for index, token in steps:
            times.token(index)
            yield index, token
            if token.finish_reason:
                self._metrics.success.labels(token.finish_reason).inc()


def _usage(of_prompts: Sequence[Generation], choices: Sequence[Choice]) -> Usage:
    """Each prompt is counted once, however many choices answer it."""
    return Usage(
        prompt_tokens=sum(generation.num_prompt_tokens for generation in of_prompts),
        completion_tokens=sum(choice.num_tokens for choice in choices),
        cached_tokens=sum(int(generation.trace().get("num_reused_tokens", 0)) for generation in of_prompts),
    )


def _trace(generations: Sequence[Generation]) -> Trace:
    if len(generations) == 1:
        return generations[0].trace()
    return {"choices": [generation.trace() for generation in generations]}
