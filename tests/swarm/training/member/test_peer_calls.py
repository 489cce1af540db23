"""What a member counts of the reports that it sends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from support.round_scripts import COORDINATOR, ready
from swarm.network.interface import no_failpoints
from swarm.testing import virtual_time
from swarm.training.member.peer_calls import ReportCalls
from swarm.training.round.round_events import Ask
from swarm.training.run.methods import Methods


def test_report_that_the_end_of_the_attempt_cuts_off_was_sent() -> None:
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
