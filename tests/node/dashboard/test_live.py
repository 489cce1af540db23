"""Live events are encoded once, a slow reader gets the newest, streams are bounded in number and end with their
readers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.types import Message
from support.dashboard_source import ExampleSource
from support.dashboard_swarms import example_source
from swarm.testing import virtual_time
from swarm_node.dashboard import live as live_module
from swarm_node.dashboard.app import create_dashboard
from swarm_node.dashboard.views import Overview

NOW = 1_750_000_000.0


class Visitor:
    """An ASGI client of the event stream. With `reading` False it reads no more, so sending to it waits."""

    def __init__(self, app: Any, address: str = "203.0.113.9") -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False
        self.reading = asyncio.Event()
        self.reading.set()
        self._asked = False
        self._left = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "GET",
            "path": "/api/v1/events",
            "raw_path": b"/api/v1/events",
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [],
            "client": (address, 1),
            "server": ("swarm.test", 80),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body", False)

    def leave(self) -> None:
        self._left.set()
        self.reading.set()

    @property
    def events(self) -> list[tuple[str, Any]]:
        found = []
        for block in self.body.decode().split("\n\n")[:-1]:
            kind, data = block.split("\n")
            found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return found

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def scene(test: Callable[[ExampleSource, Any], Any]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            source = example_source(30)
            await test(source, create_dashboard(source))

        virtual_time.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@contextmanager
def bounds(**values: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(live_module, name, value)
        yield


async def over(*visitors: Visitor) -> None:
    for visitor in visitors:
        visitor.leave()
    await asyncio.wait([visitor.task for visitor in visitors], timeout=10)
    assert all(visitor.task.done() for visitor in visitors)


@scene
async def test_stream_has_the_form_that_the_api_describes(source: ExampleSource, app: Any) -> None:
    visitor = Visitor(app)
    await asyncio.sleep(live_module.HEARTBEAT_S + 1)
    await over(visitor)
    described = app.openapi()
    content = described["paths"]["/api/v1/events"]["get"]["responses"]["200"]["content"]
    assert list(content) == [visitor.headers["content-type"].split(";")[0]]
    items = [each["properties"] for each in content["text/event-stream"]["itemSchema"]["oneOf"]]
    schemas = {each["event"]["const"]: each["data"]["contentSchema"] for each in items}
    assert set(schemas) == set(visitor.kinds()) == {"overview", "heartbeat"}
    assert schemas["overview"] == {"$ref": "#/components/schemas/Overview"}
    assert visitor.events[0][1]["network_id"] == source.overview().network_id
    for kind, data in visitor.events:
        schema = described["components"]["schemas"]["Overview"] if kind == "overview" else schemas[kind]
        assert set(schema["required"]) <= set(data) <= set(schema["properties"])


@scene
async def test_stream_begins_with_the_current_views_and_continues_with_every_change(
    source: ExampleSource, app: Any
) -> None:
    visitor = Visitor(app)
    await asyncio.sleep(0.5)
    assert visitor.status == 200
    assert visitor.headers["content-type"].startswith("text/event-stream")
    assert visitor.headers["cache-control"] == "no-store"
    assert visitor.headers["x-accel-buffering"] == "no", "nginx would keep the events"
    [(kind, data)] = visitor.events
    assert (kind, Overview(**data)) == ("overview", source.overview())
    for number in (31, 32):
        source.change(num_nodes=number)
        await asyncio.sleep(2)
    assert [data["num_nodes"] for _, data in visitor.events[1:]] == [31, 32]
    await over(visitor)


@scene
async def test_stream_has_sixty_events_a_minute_when_lookups_vary_in_length(source: ExampleSource, app: Any) -> None:
    visitors = [Visitor(app) for _ in range(3)]
    await asyncio.sleep(0.5)
    for number in range(60):
        late_s = (0.05, 0.8, 0.4)[number % 3]
        await asyncio.sleep(late_s)
        source.change(num_nodes=number)
        await asyncio.sleep(1 - late_s)
    await asyncio.sleep(1.5)
    for visitor in visitors:
        assert [data["num_nodes"] for _, data in visitor.events[1:]] == list(range(60))
    await over(*visitors)


@scene
async def test_heartbeat_comes_while_nothing_happens(source: ExampleSource, app: Any) -> None:
    visitor = Visitor(app)
    await asyncio.sleep(35)
    assert visitor.kinds() == ["overview", "heartbeat", "heartbeat", "heartbeat"]
    assert visitor.events[-1][1]["at"] > NOW - 1e9
    await over(visitor)


@scene
async def test_slow_reader_gets_the_newest_and_costs_nothing(source: ExampleSource, app: Any) -> None:
    slow, quick = Visitor(app), Visitor(app)
    await asyncio.sleep(0.5)
    slow.reading.clear()
    for number in range(100, 160):
        source.change(num_nodes=number)
        await asyncio.sleep(2)
    assert len(quick.events) == 61
    slow.reading.set()
    await asyncio.sleep(3)
    # the event that was in flight when it stopped reading, and then the newest
    assert [data["num_nodes"] for _, data in slow.events[1:]] == [100, 159]
    await over(slow, quick)


@scene
async def test_each_event_is_encoded_once_for_all(source: ExampleSource, app: Any) -> None:
    encoded: list[str] = []
    event = live_module.event

    def count(data: str, kind: str = "") -> bytes:
        encoded.append(kind)
        return event(data, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_module, "event", count)
        visitors = [Visitor(app) for _ in range(20)]
        await asyncio.sleep(0.5)
        source.change()
        await asyncio.sleep(2)
        assert encoded.count("overview") == 2
        assert all(visitor.kinds() == ["overview"] * 2 for visitor in visitors)
        await over(*visitors)


@scene
async def test_a_thousand_streams_opened_and_forgotten(source: ExampleSource, app: Any) -> None:
    crowd = [Visitor(app, address=f"198.51.{index // 50}.7") for index in range(1000)]
    await asyncio.sleep(2)
    live = app.state.live
    taken = [visitor for visitor in crowd if visitor.status == 200]
    refused = [visitor for visitor in crowd if visitor.status != 200]
    assert len(taken) == live.num_streams == live_module.MAX_STREAMS
    assert {visitor.status for visitor in refused} == {503}
    assert "live streams of this dashboard are taken" in json.loads(refused[0].body)["error"]["message"]
    assert int(refused[0].headers["retry-after"]) > 0
    for visitor in taken:
        visitor.reading.clear()  # no client reads, and none closes
    for _ in range(5):
        source.change()
        await asyncio.sleep(2)
    await over(*crowd)
    assert (live.num_streams, len(live._streams)) == (0, 0)
    late = Visitor(app)
    await asyncio.sleep(0.5)
    assert late.status == 200
    await over(late)


@scene
async def test_one_address_cannot_take_all_streams(source: ExampleSource, app: Any) -> None:
    with bounds(MAX_STREAMS_EACH=3):
        many = [Visitor(app) for _ in range(5)]
        other = Visitor(app, address="198.51.100.1")
        await asyncio.sleep(1)
        assert sorted(visitor.status for visitor in many) == [200, 200, 200, 429, 429]
        assert other.status == 200
        await over(*many, other)


@scene
async def test_stream_ends_by_itself_when_it_is_old(source: ExampleSource, app: Any) -> None:
    visitor = Visitor(app)
    await asyncio.sleep(live_module.MAX_STREAM_S - 5)
    assert not visitor.ended
    await asyncio.sleep(10)
    assert visitor.ended
    assert app.state.live.num_streams == 0


@scene
async def test_closing_ends_all_streams_and_opens_none(source: ExampleSource, app: Any) -> None:
    visitors = [Visitor(app) for _ in range(3)]
    await asyncio.sleep(0.5)
    app.state.live.close()
    await asyncio.wait([visitor.task for visitor in visitors], timeout=2)
    assert all(visitor.ended for visitor in visitors)
    late = Visitor(app)
    await asyncio.sleep(0.5)
    assert late.status == 503


@scene
async def test_cancelled_stream_frees_its_place(source: ExampleSource, app: Any) -> None:
    visitor = Visitor(app)
    await asyncio.sleep(0.5)
    visitor.task.cancel()
    await asyncio.wait([visitor.task], timeout=2)
    assert app.state.live.num_streams == 0
