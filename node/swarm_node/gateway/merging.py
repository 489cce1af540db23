"""Several generations as one sequence of (index, token), in the order in which the tokens come.

Each runs in a task of its own; what they are ahead of the reader is bounded. A failure of one ends all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from swarm_node.gateway import http_limits
from swarm_node.gateway.backend import Generation, Token

Step = tuple[int, Token]
_Queue = asyncio.Queue[Step | Exception | None]


@asynccontextmanager
async def merged(generations: Sequence[Generation], *, num_per_prompt: int) -> AsyncIterator[AsyncIterator[Step]]:
    """`num_per_prompt` neighbours answer the same prompt: the first begins, the others follow with its first token.

    So these find the prompt in the servers' caches instead of all computing it at once.
    """
    if len(generations) == 1:
        async with aclosing(_alone(generations[0])) as steps:
            yield steps
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
            async with aclosing(_taken(queue, len(generations))) as steps:
                yield steps
        finally:
            for task in tasks:
                task.cancel()


async def _alone(generation: Generation) -> AsyncGenerator[Step, None]:
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


async def _taken(queue: _Queue, num_running: int) -> AsyncGenerator[Step, None]:
    while num_running:
        step = await queue.get()
        if isinstance(step, Exception):
            raise step
        if step is None:
            num_running -= 1
        else:
            yield step
