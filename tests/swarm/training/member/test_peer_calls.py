"""Tests how a member counts the bytes of the reports that it sends, and which peers it asks where they are."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from support.round_scripts import COORDINATOR, ready
from swarm.network.interface import no_failpoints
from swarm.testing import virtual_time
from swarm.training.member.peer_calls import MAX_LOOKING_AT, PeerQueries, ReportCalls
from swarm.training.round.round_events import Ask
from swarm.training.run.methods import Methods


def test_report_counts_as_sent_when_the_end_of_the_attempt_cancels_it() -> None:
    class Silent:
        def now(self) -> float:
            return 0.0

        async def call(self, *_: object, **__: object) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> None:
        context = SimpleNamespace(
            failpoints=no_failpoints,
            network=Silent(),
            methods=Methods("run"),
            signatures=SimpleNamespace(sign_report=lambda report: report),
        )
        calls = ReportCalls(cast(Any, context), cast(Any, None), cast(Any, None), feed=lambda _: None)
        sending = asyncio.create_task(calls.send(Ask(peer=COORDINATOR, ready=ready())))
        await asyncio.sleep(1.0)
        sending.cancel()
        await asyncio.wait({sending})
        assert calls.bytes_sent == len(ready().to_bytes())

    virtual_time.run(main())


def test_members_are_asked_where_they_are_while_strangers_hold_all_places() -> None:
    asked = list[str]()

    async def never_answers(peer: str, _request: object) -> None:
        asked.append(peer)
        await asyncio.Event().wait()

    async def main() -> None:
        state = SimpleNamespace(setup=SimpleNamespace(roster=("me", "member"), step=1), attempt=0)
        context = SimpleNamespace(network=SimpleNamespace(peer_id="me"), run="run", standing=never_answers)
        tasks = list[asyncio.Task[None]]()
        queries = PeerQueries(
            cast(Any, context),
            lambda: cast(Any, state),
            on_named=lambda _: None,
            feed=lambda _: None,
            spawn=lambda work, name: tasks.append(asyncio.create_task(work, name=name)),
            on_certificate=lambda _: None,
        )
        strangers = [f"stranger {index}" for index in range(MAX_LOOKING_AT)]
        for peer in (*strangers, "one more", "member", "member", "me"):
            queries.look_at(peer)
        await asyncio.sleep(1.0)
        assert asked == [*strangers, "member"]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    virtual_time.run(main())
