"""Tests how a member counts the bytes of the reports that it sends, and which peers it asks where they are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from support.round_scripts import COORDINATOR, DIGEST, FIRST, ME, OUTCOME, RUN, STEP, ready, setup
from support.training_swarm import placed_votes
from swarm.network.interface import no_failpoints
from swarm.testing import virtual_time
from swarm.training.member.current_step import CurrentStep
from swarm.training.member.peer_calls import MAX_LOOKING_AT, PeerQueries, TakenReports, cast_vote, send_report
from swarm.training.member.progress_reports import RoundLog
from swarm.training.round.round_events import Ask, CastVote, Lost, Sign, Voted
from swarm.training.run.methods import Methods
from swarm.training.state.certificate import RunSignatures
from swarm_protocol.commit_messages import Lock, Outcome
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Group

NOW = 1_750_000_000.0


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
        step: Any = SimpleNamespace(context=context, log=RoundLog())
        asked = Ask(peer=COORDINATOR, ready=ready())
        sending = asyncio.create_task(send_report(step, cast(Any, None), cast(Any, None), asked))
        await asyncio.sleep(1.0)
        sending.cancel()
        await asyncio.wait({sending})
        assert step.log.bytes_sent == len(ready().to_bytes())

    virtual_time.run(main())


def test_vote_that_does_not_arrive_is_lost_for_its_own_attempt() -> None:
    class Cut:
        peer_id = ME

        async def call(self, *_: object, **__: object) -> bytes:
            raise PeerUnreachable("no route", peer_id=COORDINATOR)

    async def main() -> None:
        context = SimpleNamespace(
            failpoints=no_failpoints,
            network=Cut(),
            methods=Methods("run"),
            signatures=SimpleNamespace(sign_vote=lambda vote: vote),
        )
        fed, vote = list[Any](), replace(FIRST.vote(OUTCOME, "prepare"), attempt=3)
        async with asyncio.TaskGroup() as background:
            step = SimpleNamespace(context=context, feed=fed.append, background=background, log=RoundLog())
            await cast_vote(cast(Any, step), CastVote(vote=vote, peers=(COORDINATOR,)))
        assert fed == [Voted(peer=ME, vote=vote), Lost(peer=COORDINATOR, reason="no route", attempt=3)]

    virtual_time.run(main())


def test_coordinator_has_the_origin_of_the_group_that_it_signs() -> None:
    """In a run's first round the votes of the origin's members count. With those of the new group, the coordinator
    would make a lock that nobody takes."""
    author = RunSignatures(identity=Identity(b"a" * 32), network_id="test", run=RUN)
    first = author.sign_group(first_of_round(author.identity.peer_id), NOW)
    outcome = Outcome(origin_digest=first.digest, part_digests=(), state_digest=bytes(32))
    votes = placed_votes(first.vote(outcome, "prepare"), [author], first.group.peer_ids)
    lock = Lock(attempt=0, group_digest=first.digest, outcome=outcome, votes=votes)
    resuming = replace(first.group, attempt=1, lock=lock, origin=first.data)
    fed = list[Any]()

    async def main() -> None:
        context = SimpleNamespace(failpoints=no_failpoints, network=SimpleNamespace(now=lambda: NOW), signatures=author)
        step = SimpleNamespace(context=context, setup=setup(), feed=fed.append, log=RoundLog())
        groups = SimpleNamespace(add=lambda _: None)
        reports = TakenReports(cast(Any, step), cast(Any, None), cast(Any, groups))
        await reports.sign(Sign(group=resuming, left_out={}))

    virtual_time.run(main())
    assert fed[0].signed.origin.group == first.group


def first_of_round(*peers: str) -> Group:
    members = tuple(Contribution(peer_id=peer) for peer in peers)
    return Group(run=RUN, step=STEP, attempt=0, state_digest=DIGEST, members=members, reduce_s=1.0, vote_s=1.0)


def test_members_are_asked_where_they_are_while_strangers_hold_all_places() -> None:
    asked = list[str]()

    async def never_answers(peer: str, _request: object) -> None:
        asked.append(peer)
        await asyncio.Event().wait()

    async def main() -> None:
        state = SimpleNamespace(setup=SimpleNamespace(roster=("me", "member"), step=1), attempt=0)
        context = SimpleNamespace(network=SimpleNamespace(peer_id="me"), run="run", standing=never_answers)
        none: Any = None
        step = CurrentStep(
            context=cast(Any, context),
            state=cast(Any, state),
            intervals=none,
            convictions=none,
            background=none,
            on_abort=none,
        )
        queries = PeerQueries(step)
        strangers = [f"stranger {index}" for index in range(MAX_LOOKING_AT)]
        async with asyncio.TaskGroup() as group:
            step.open(group)
            for peer in (*strangers, "one more", "member", "member", "me"):
                queries.look_at(peer)
            await asyncio.sleep(1.0)
            assert asked == [*strangers, "member"]
            step.end_tasks()

    virtual_time.run(main())
