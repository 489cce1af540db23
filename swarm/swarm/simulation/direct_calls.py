"""Runs calls of the simulated record DHT side by side without a task for each, and goes on with a call when its answer
comes.

A task is woken in a turn of the event loop of its own, and takes further ones to begin and to tell of its end. A call
here waits for an `Answer`, another future, or a turn of the loop, and neither uses `asyncio.timeout` nor asks for its
task. State belongs to the one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from swarm_protocol.failure_messages import decode_failure

from swarm.network.interface import NotServed

T = TypeVar("T")


class Answer(asyncio.Future[bytes]):
    """The answer to a call. It wakes a task as any future does, and goes on with the `waiter` at once. Implements
    `simulated_host.CallReply`."""

    waiter: DirectCall[Any] | None = None

    def resolve_at(self, arrives_s: float, response: bytes) -> None:
        self.get_loop().call_at(arrives_s, self.resolve, response)

    def reject_at(self, arrives_s: float, failure: bytes, peer_id: str) -> None:
        error = decode_failure(failure, peer_id) if failure else NotServed(peer_id)
        self.get_loop().call_at(arrives_s, self.reject, error)

    def time_out(self, until_s: float) -> None:
        if until_s < math.inf:  # else the caller's own deadline ends its waiting
            self.get_loop().call_at(until_s, self.reject, TimeoutError())

    def on_cancel(self, cancel: Callable[[], object]) -> None:
        self.add_done_callback(lambda answer: answer.cancelled() and cancel())

    def resolve(self, response: bytes) -> None:
        if not self.done():
            self.set_result(response)
            if self.waiter is not None:
                self.waiter.go_on()

    def reject(self, error: Exception) -> None:
        if not self.done():
            self.set_exception(error)
            if self.waiter is not None:
                self.waiter.go_on()


class DirectCall(Generic[T]):
    """One call of a group."""

    __slots__ = ("_call", "_group", "_is_to_end", "_num_cancelled", "_result", "_waits_for")
    _result: T

    def __init__(self, call: Coroutine[Any, Any, T], group: DirectCalls) -> None:
        self._call = call
        self._group = group
        self._waits_for: asyncio.Future[Any] | None = None
        self._num_cancelled = 0
        self._is_to_end = False

    def cancel(self) -> None:
        """Raise CancelledError in the call, as `asyncio.Task.cancel` does: not at once, but in a turn of the loop."""
        self._num_cancelled += 1
        waits_for = self._waits_for
        if waits_for is None or not waits_for.cancel():
            self._is_to_end = True  # it goes on soon by itself
        elif isinstance(waits_for, Answer):
            asyncio.get_running_loop().call_soon(self.go_on)

    def cancelling(self) -> int:
        return self._num_cancelled

    def result(self) -> T:
        """Return what the call has returned. Valid once the group has ended without an exception."""
        return self._result

    def go_on(self, _future: asyncio.Future[Any] | None = None) -> None:
        """Run the call until it waits or ends."""
        self._waits_for = None
        try:
            if self._is_to_end:
                self._is_to_end = False
                waits_for = self._call.throw(asyncio.CancelledError())
            else:
                waits_for = self._call.send(None)
        except StopIteration as end:
            self._result = end.value
            self._group.ended(self)
        except asyncio.CancelledError:
            self._group.ended(self)
        except Exception as error:
            self._group.failed(self, error)
        else:
            self._wait_for(waits_for)

    def _wait_for(self, future: Any) -> None:
        if future is None:
            asyncio.get_running_loop().call_soon(self.go_on)
            return
        future._asyncio_future_blocking = False  # as tasks do: the future has been taken notice of
        self._waits_for = future
        if isinstance(future, Answer):
            future.waiter = self
        else:
            future.add_done_callback(self.go_on)


class DirectCalls:
    """A group of calls, which ends when they all have. Implements `searches.CallGroup`. If one raises, the others
    are cancelled, and the group raises what the first one did."""

    __slots__ = ("_all_ended", "_error", "_running")

    def __init__(self) -> None:
        self._running: set[DirectCall[Any]] = set()
        self._all_ended: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def create_task(self, call: Coroutine[Any, Any, T], /) -> DirectCall[T]:
        """Begin a call in the loop's next turn."""
        running = DirectCall(call, self)
        self._running.add(running)
        asyncio.get_running_loop().call_soon(running.go_on)
        return running

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        cancelled: asyncio.CancelledError | None = None
        if error is not None:
            self._cancel()
        while self._running:
            self._all_ended = asyncio.get_running_loop().create_future()
            try:
                await self._all_ended
            except asyncio.CancelledError as cancellation:
                cancelled = cancellation
                self._cancel()
        if cancelled is not None:
            raise cancelled
        if self._error is not None and error is None:
            raise self._error

    def ended(self, call: DirectCall[Any]) -> None:
        """Note that `call` has ended."""
        self._running.remove(call)
        if not self._running and self._all_ended is not None and not self._all_ended.done():
            self._all_ended.set_result(None)

    def failed(self, call: DirectCall[Any], error: Exception) -> None:
        """Note that `call` has raised."""
        if self._error is None:
            self._error = error
        self.ended(call)
        self._cancel()

    def _cancel(self) -> None:
        for call in self._running:
            call.cancel()
