"""Views that the collector makes of runs: real trainers on a simulated internet, and members that announce anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
from support.dashboard_world import World, node_record, trainer_record, world
from support.lying_owners import owner_that, times_minus_ten
from support.training_swarm import AUTHOR, Swarm, SyntheticInner, config, identity_of
from swarm.network.interface import Network
from swarm.network.link_diagnosis import SlowLink
from swarm.network.memory import memory_network
from swarm.testing import virtual_time
from swarm.training.member.run_member import RunMember
from swarm.training.outside.observer import CommittedStep
from swarm.training.outside.resume import deliver, sign_survey, survey
from swarm.training.run.methods import Methods
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import SignedRun, sign_mapping, to_mapping
from swarm.training.trainer_events import HeldOutMeasured, OtherHistory, OuterStep
from swarm_node.dashboard.history.recorder import StepFact
from swarm_node.dashboard.run_follower import RETRY_FILE_S, FollowedRun, OpenStep
from swarm_node.dashboard.run_views import RunEnd, RunFacts, downsampled, end_of, run_view
from swarm_node.dashboard.views import RunDetail, StepView
from swarm_node.network_snapshot import Listed
from swarm_protocol import limits
from swarm_protocol.errors import PeerTimeout
from swarm_protocol.records import Refusal, RoundReport


def fetching(run: SignedRun, asked: list[str]) -> Callable:  # type: ignore[type-arg]
    async def fetch(_network: Network, peer_id: str, run_id: str) -> SignedRun:
        assert run_id == run.run_id
        asked.append(peer_id)
        if len(asked) == 1:
            raise PeerTimeout("no answer", peer_id=peer_id)
        return run

    return fetch


async def detail_of(found: World, run: str) -> RunDetail:
    detail = await found.collector.run(run)
    assert detail is not None
    return detail


@pytest.mark.timeout(700)
def test_run_is_followed_from_its_file_to_its_end() -> None:
    async def main() -> None:
        async with Swarm(config(outer_steps=4, min_group=2, validation_interval=2)) as swarm:
            asked: list[str] = []
            async with world(fetching(swarm.run, asked), swarm.internet) as found:
                for name in ("a", "b"):
                    member = await swarm.join(name, inner=SyntheticInner(virtual_step_s=1.5))
                    member.trainer._membership.announce(node_record(name))
                await asyncio.sleep(12)
                run = swarm.run.run_id
                [view] = found.collector.overview().runs
                assert (view.run, view.name, view.signed_by) == (run, "test", swarm.run.peer_id)
                assert (view.state, view.outer_steps, view.num_members) == ("training", 4, 2)
                assert view.words.startswith("Training: outer step ")
                assert len(asked) == 2, "only the member after the one that did not answer may be asked"
                await swarm.finish()
                await asyncio.sleep(6)
                events = {event.step: event for event in swarm.members["a"].of(OuterStep)}
                detail = await detail_of(found, run)
                assert [step.outer_step for step in detail.steps][-2:] == [3, 4]
                for step in detail.steps:
                    event = events[step.outer_step]
                    assert (step.digest, step.num_members) == (event.digest, len(event.group))
                    assert step.loss == pytest.approx(event.loss)
                measured = detail.steps[-2]
                assert measured.phases_s["reduce"] > 0
                assert measured.phases_s["interval"] == pytest.approx(5 * 1.5)
                assert measured.bytes_per_parameter is not None
                assert 0.5 < measured.bytes_per_parameter < 8
                assert measured.seconds is not None
                assert detail.num_parameters == 3000
                validated = {event.step: event.loss for event in swarm.members["a"].of(HeldOutMeasured)}
                told = {step.outer_step: step.validation_loss for step in detail.steps if step.validation_loss}
                assert told == {each: validated[each] for each in told}
                assert 4 in told
                assert detail.run.state == "finished"
                assert detail.run.words == "Finished: outer step 4 of 4 is committed."
                assert detail.run.losses == tuple(step.loss for step in detail.steps)
                assert detail.run.digest == events[4].digest
                assert {each.name for each in detail.contributors} == {"a", "b"}
                scores = [each.held_out_score for each in detail.contributors if each.held_out_score is not None]
                assert scores, "the members' records show them"
                assert min(scores) > 0
                assert all(each.rounds == len(detail.steps) and each.tokens > 0 for each in detail.contributors)
                node = await found.collector.node(swarm.members["a"].peer_id)
                assert node is not None
                assert node.rounds == len(detail.steps)
                assert node.training[0].tokens > 0
                assert ["Finished" in each.words for each in found.history.told if each.kind == "run"] == [True]

    virtual_time.run(main(), real_timeout_s=600)


@pytest.mark.timeout(700)
def test_run_is_finished_when_its_members_left_before_they_were_asked_for_the_proof() -> None:
    async def main() -> None:
        async with (
            Swarm(config(outer_steps=4, min_group=2)) as swarm,
            world(fetching(swarm.run, []), swarm.internet) as found,
        ):
            for name in ("a", "b", "c"):
                member = await swarm.join(name, inner=SyntheticInner(virtual_step_s=1.5))
                member.trainer._membership.announce(node_record(name))
            members = await swarm.finish()
            digest = members[0].digest
            for member in members:
                await member.trainer.close()
            await swarm._stack.aclose()  # they announce that they leave
            for member in members:
                await member.network.close()
            run = swarm.run.run_id
            await asyncio.sleep(5)
            first = (await detail_of(found, run)).run
            await asyncio.sleep(2 * limits.RECORD_LIFETIME_S)
            detail = await detail_of(found, run)
            assert detail.steps[-1].outer_step == 3, "otherwise the test shows nothing"
            for view in (first, detail.run):
                assert (view.state, view.outer_step, view.digest) == ("finished", 4, digest)
                assert view.words == (
                    "Finished: 3 members say that outer step 4 of 4 is committed; "
                    "this dashboard has seen the proof of step 3."
                )
            assert detail.run.num_members == 0

    virtual_time.run(main(), real_timeout_s=600)


def test_closed_run_is_shown_without_strangers_that_claim_to_train_it() -> None:
    """They announce that the run is finished, and outnumber its members."""
    admitted = tuple(sorted(identity_of(name).peer_id for name in ("a", "b")))

    async def main() -> None:
        async with (
            Swarm(config(outer_steps=100, min_group=2, admission=admitted)) as swarm,
            world(fetching(swarm.run, []), swarm.internet) as found,
        ):
            run = swarm.run.run_id
            for name in ("a", "b"):
                member = await swarm.join(name, inner=SyntheticInner(virtual_step_s=1.5))
                member.trainer._membership.announce(node_record(name))
            for name in ("alder", "birch", "cedar"):
                await found.join(name, replace(trainer_record(100, state="finished"), run=run))
            await asyncio.sleep(60)
            detail = await detail_of(found, run)
            assert (detail.run.state, detail.run.num_members) == ("training", 2)
            assert {each.peer_id for each in detail.contributors} == set(admitted)

    virtual_time.run(main(), real_timeout_s=600)


def test_run_without_a_file_is_shown_as_its_members_announce_it() -> None:
    async def main() -> None:
        async with world() as found:
            await found.join("alder", trainer_record(7, num_parameters=1000))
            await found.join("birch", trainer_record(7))
            await found.join("cedar", trainer_record(7, digest=b"x" * 32))
            await found.join("liar", trainer_record(2**40, tokens_per_s=1e9))
            await asyncio.sleep(6)
            detail = await detail_of(found, "story")
            assert (detail.run.name, detail.run.outer_steps, detail.run.loss) == (None, None, None)
            assert (detail.run.outer_step, detail.run.digest) == (7, bytes(32).hex())
            assert (detail.run.num_agreeing, detail.run.num_at_step, detail.run.num_members) == (2, 3, 4)
            assert (detail.num_parameters, detail.steps) == (1000, ())
            assert await found.collector.run("nobody's") is None

    virtual_time.run(main())


def test_steps_found_together_share_the_time_equally_and_phases_are_in_order() -> None:
    async def main() -> None:
        async with world() as found:
            runs = found.collector._runs
            seen = FollowedRun(
                run_id="story", history=runs._history, trainers=Listed(records={}, ages_s={}), seen_at=0.0
            )
            phases_s = dict.fromkeys(("apply", "new", "group"), 1.0)
            seen.open_steps[3] = OpenStep(reports={"a": RoundReport(outer_step=3, phases_s=phases_s, bytes_sent=1)})
            seen.take_steps([committed(1)], runs._network.now())
            await asyncio.sleep(6)
            later = [committed(number) for number in (2, 3, 4)]
            seen.take_steps(later, runs._network.now())
            assert [each.seconds for each in seen.steps] == [None, *[pytest.approx(2.0)] * 3]
            assert list(seen.steps[2].phases_s) == ["group", "apply", "new"]

    virtual_time.run(main())


def committed(number: int) -> CommittedStep:
    return CommittedStep(outer_step=number, loss=2.0, digest="00" * 32, group=("a",), num_trainers=1, num_tokens=10)


def test_run_that_everybody_leaves_stays_and_says_so() -> None:
    async def main() -> None:
        async with world() as found:
            await found.join("alder", trainer_record(3))
            await asyncio.sleep(6)
            await found.leave("alder")
            await asyncio.sleep(130)
            detail = await detail_of(found, "story")
            assert detail.run.state == "gone"
            assert detail.run.words.startswith("Nobody trains this run any more")

    virtual_time.run(main())


def test_run_that_only_the_history_knows_is_shown_and_says_so() -> None:
    """The dashboard was restarted: the run has ended, and no member is left."""
    at = 1_700_000_000.0  # 2023-11-14 22:13:20

    async def main() -> None:
        async with world() as found:
            for number in (1, 2):
                view = step(number, at + number)
                found.history.record(StepFact(run="story", group=("ann", "bob"), step=view))
            await found.looks()
            detail = await detail_of(found, "story")
            assert (detail.run.state, detail.run.outer_step, detail.run.remembered) == ("gone", 2, at + 2)
            assert detail.run.words == (
                "Not seen since 2023-11-14 22:13 UTC. The history has its steps up to outer step 2."
            )
            assert [(each.outer_step, each.num_members) for each in detail.steps] == [(1, 2), (2, 2)]
            assert detail.run.losses == tuple(each.loss for each in detail.steps)
            told = [(each.peer_id, each.state, each.tokens) for each in detail.contributors]
            assert told == [("ann", "gone", 20), ("bob", "gone", 20)]
            assert await found.collector.run("another") is None
            found.history.record(StepFact(run="later", group=("ann",), step=step(1, at + 9)))
        async with world(history=found.history) as restarted:
            await restarted.looks(3)
            assert [view.run for view in restarted.collector.overview().runs] == ["later", "story"]
            assert restarted.collector.overview().runs[1] == detail.run
            await restarted.join("alder", trainer_record(3))
            await restarted.looks(3)
            states = {view.run: view.state for view in restarted.collector.overview().runs}
            assert states["story"] != states["later"] == "gone"

    virtual_time.run(main())


def test_dashboard_goes_on_when_a_run_in_its_history_cannot_be_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "swarm_node.dashboard.collector.remembered_view", Mock(side_effect=ValueError("a step of another version"))
    )

    async def main() -> None:
        async with world() as found:
            found.history.record(StepFact(run="story", group=("ann",), step=step(1, 1_700_000_000.0)))
            await found.looks(2)
            peer_id = await found.join("alder", trainer_record(3))
            await found.looks(2)
            assert [view.peer_id for view in found.collector.nodes()] == [peer_id]

    virtual_time.run(main())
    assert "failed to read its history" in caplog.text


def test_finished_run_that_only_the_history_knows_has_its_name_and_says_that_it_is_finished() -> None:
    story = RunConfig(name="story", outer_steps=2)
    run = sign_mapping(story, to_mapping(story), AUTHOR, 1)

    async def main() -> None:
        async with world() as found:
            for number in (1, 2):
                view = step(number, 1_700_000_000.0)
                found.history.record(StepFact(run=run.run_id, group=("ann",), step=view, file=run.text))
            view = (await detail_of(found, run.run_id)).run
            assert (view.name, view.signed_by, view.outer_steps) == ("story", AUTHOR.peer_id, 2)
            assert view.state == "finished"
            assert view.words.startswith(
                "Finished: outer step 2 of 2 is committed. Not seen since 2023-11-14 22:13 UTC"
            )

    virtual_time.run(main())


def test_refusal_by_members_is_shown_once() -> None:
    async def main() -> None:
        async with world() as found:
            bad = await found.join("bad", trainer_record(7))
            refusal = Refusal(peer_id=bad, reason="its slice is not finite")
            report = RoundReport(outer_step=7, phases_s={"reduce": 2.0}, bytes_sent=500, refused=(refusal,))
            by = await found.join("alder", trainer_record(7, report=report))
            await asyncio.sleep(40)
            detail = await detail_of(found, "story")
            [told] = detail.refusals
            assert (told.name, told.by_peer_id, told.reason) == ("bad", by, "its slice is not finite")
            assert found.history.told_refusals == [told]

    virtual_time.run(main())


def test_banned_member_is_shown_with_the_reason_once_its_evidence_was_checked_here() -> None:
    async def main() -> None:
        settings = config(outer_steps=12, min_group=2, ban_steps=30)
        async with Swarm(settings) as swarm, world(fetching(swarm.run, ["earlier"]), swarm.internet) as found:
            liar = owner_that(times_minus_ten)
            for name in ("a", "b", "c", "liar"):
                inner = SyntheticInner(num_values=6000, virtual_step_s=1.5)
                member = await swarm.join(name, inner=inner, kind=liar if name == "liar" else RunMember)
                member.trainer._membership.announce(node_record(name))
            async with asyncio.timeout(120):
                while found.collector.overview().runs == () or not (await detail_of(found, swarm.run.run_id)).bans:
                    await asyncio.sleep(1)
            (ban,) = (await detail_of(found, swarm.run.run_id)).bans
            assert (ban.peer_id, ban.name, ban.kind) == (identity_of("liar").peer_id, "liar", "wrong_reduction")
            assert ban.reason.startswith("it signed a wrong result of part")
            assert ban.until == ban.outer_step + 30

    virtual_time.run(main())


def test_run_shows_endorsements_and_probation_and_trusts_no_record_for_them() -> None:
    async def main() -> None:
        settings = config(outer_steps=100, min_group=2, probation_steps=50)
        async with Swarm(settings) as swarm, world(fetching(swarm.run, ["earlier"]), swarm.internet) as found:
            run = swarm.run.run_id
            for name in ("a", "b"):
                await swarm.join(name, inner=SyntheticInner(virtual_step_s=1.5))
            liar = replace(trainer_record(90), run=run, endorsed_step=80)
            await found.join("liar", liar)
            await until(lambda: found.collector.overview().runs != ())
            assert (await detail_of(found, run)).run.endorsed_step in (None, 0)
            await until(lambda: found.collector.overview().runs[0].num_trainers is not None)
            view = found.collector.overview().runs[0]
            assert (view.endorsed_step, view.num_on_probation, view.num_trainers) == (0, 0, 2)
            await swarm.join("late", inner=SyntheticInner(virtual_step_s=1.5))
            await until(lambda: found.collector.overview().runs[0].num_trainers == 3)
            assert found.collector.overview().runs[0].num_on_probation == 1
            step = await endorse(swarm)
            await until(lambda: found.collector.overview().runs[0].endorsed_step != 0)
            assert 0 < step < 80
            assert (await detail_of(found, run)).run.endorsed_step == step

    virtual_time.run(main(), real_timeout_s=200)


def test_members_are_asked_for_a_file_again_after_a_pause_even_when_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        asked: list[float] = []

        async def fetch(_network: Network, peer_id: str, _run_id: str) -> SignedRun:
            asked.append(asyncio.get_running_loop().time())
            raise PeerTimeout("no answer", peer_id=peer_id)

        async with world(fetch) as found:
            await found.join("a", trainer_record())
            await until(lambda: bool(asked))
            monkeypatch.setattr(memory_network, "EPOCH_S", memory_network.EPOCH_S - 3600)
            await asyncio.sleep(4 * RETRY_FILE_S)
            assert len(asked) >= 3

    virtual_time.run(main())


def test_run_with_silent_members_is_warned_of_once_whatever_their_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        asked: list[str] = []

        async def fetch(_network: Network, peer_id: str, _run_id: str) -> SignedRun:
            asked.append(peer_id)
            raise PeerTimeout(f"no answer to question {len(asked)}", peer_id=peer_id)

        async with world(fetch) as found:
            await found.join("a", trainer_record())
            await asyncio.sleep(4 * RETRY_FILE_S)
            assert len(asked) >= 3

    virtual_time.run(main())
    assert len([each for each in caplog.messages if "cannot see where the run story is" in each]) == 1


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not is_so():
            await asyncio.sleep(1)


async def endorse(swarm: Swarm) -> int:
    """Endorse the newest state as the run's author, and return its outer step."""
    network = swarm.internet.network(identity_of("author"))
    members = [member.peer_id for member in swarm.members.values()]
    found = await survey(network, swarm.run, members)
    data = sign_survey(swarm.run, found, AUTHOR, network_id="test", now=network.now())
    taken = await deliver(network, Methods(swarm.run.run_id).endorse, data, members)
    assert "" in taken.values()
    await network.close()
    return found.proof.outer_step


# --- pure ---------------------------------------------------------------------------------------------------------


def step(number: int, at: float = 0.0) -> StepView:
    return StepView(
        outer_step=number,
        at=at,
        loss=2.0,
        digest="00" * 32,
        num_members=1,
        num_tokens=10,
        seconds=None,
        phases_s={},
        bytes_per_parameter=None,
    )


def signed(outer_steps: int) -> SignedRun:
    config = RunConfig(name="story", outer_steps=outer_steps, min_group=2)
    return SignedRun(config=config, peer_id="author", issued_at=1, signature=b"")


def test_run_says_that_members_follow_another_history() -> None:
    other = OtherHistory(step=3, peers=("12D3KooWone", "12D3KooWtwo"))
    words = run_view(replace(facts(), other_history=other), 100.0, {"12D3KooWone": "attic"}).words
    assert words.startswith(run_view(facts(), 100.0).words)
    assert "But another state of outer step 3 is shown by attic, …3KooWtwo: the run was begun twice" in words
    assert "swarm-node run resume" in words


def test_members_agree_after_a_round_that_only_admitted_members() -> None:
    later = b"later".ljust(32)
    records = {name: trainer_record(5, digest=later) for name in ("first", "second")}
    known = replace(facts(step(5)), trainers=Listed(records=records, ages_s={}))
    assert run_view(known, 0.0).num_agreeing == 0
    assert run_view(replace(known, digests={later.hex()}), 0.0).num_agreeing == 2


def test_run_names_its_slow_links_by_the_names_of_its_members() -> None:
    slow = SlowLink(kind="link", sender="12D3KooWone", receiver="12D3KooWtwo", slowdown=7.24)
    found = run_view(replace(facts(), slow_links=(slow,)), 100.0, {"12D3KooWone": "attic"})
    assert found.slow_links == ("attic sends 7.2 times slower than usual to …3KooWtwo in this run",)
    assert run_view(facts(), 100.0).slow_links == ()


def facts(*steps: StepView, states: tuple[str, ...] = ("training",)) -> RunFacts:
    records = {f"peer {index}": trainer_record(state=state) for index, state in enumerate(states)}
    return RunFacts(
        run="story",
        file=signed(100),
        trainers=Listed(records=records, ages_s={}),
        steps=steps,
    )


def test_run_without_a_committed_step_says_so() -> None:
    fresh = {name: trainer_record(0, digest=b"") for name in ("first", "second")}
    view = run_view(replace(facts(), trainers=Listed(records=fresh, ages_s={})), 0.0)
    assert view.words == "Training: no outer step is committed yet, 2 members."
    assert run_view(facts(step(99), states=("training", "training")), 0.0).words == (
        "Training: outer step 99 of 100 is committed, 2 members."
    )


def test_run_with_too_few_members_waits() -> None:
    assert run_view(facts(step(99), states=("finished",)), 0.0).state == "training", "the last step has no proof yet"
    assert run_view(facts(step(100), states=("finished",)), 0.0).state == "finished"
    view = run_view(facts(states=("training", "joining")), 0.0)
    assert (view.state, view.tokens_per_s) == ("waiting", None)
    assert view.words == "Waiting: 1 of the 2 members that a step needs is there, 1 joining."
    assert view.projected_end is None


def test_run_without_enough_members_of_its_last_step_names_the_missing_ones_and_the_remedy() -> None:
    left = replace(facts(step(9), states=("training", "training")), roster=[f"peer {index}" for index in range(5)])
    view = run_view(left, 0.0, {"peer 2": "attic"})
    assert view.state == "waiting"
    assert view.words == (
        "Waiting: 2 of the 3 members of the last step that the next one needs are there; missing: attic, …peer 3, "
        "…peer 4. If they are gone for good, the run's author can let the others go on: "
        "swarm-node run resume FILE --peers ADDR."
    )
    back = replace(facts(step(9), states=("training",) * 3), roster=left.roster)
    assert run_view(back, 0.0).state == "training", "a majority goes on"


def test_end_of_a_run_is_decided_by_most_of_its_last_group_and_no_stranger() -> None:
    file = signed(4)
    done = trainer_record(4, state="finished")
    here = {"a": done, "b": done, "c": trainer_record(3)}
    assert end_of(file, ("a", "b", "c"), here) == RunEnd(outer_step=4, digest=bytes(32).hex(), num_members=2)
    assert end_of(file, ("a", "b", "c", "d"), here) is None, "half are not most"
    assert end_of(file, ("c", "d", "e"), here) is None
    assert end_of(file, (), here) is not None
    assert end_of(file, ("a", "b"), {"a": done, "b": trainer_record(4, state="finished", digest=b"x" * 32)}) is None
    assert end_of(file, ("a",), {"a": trainer_record(2**40, state="finished")}) is None


def test_projected_end_is_at_the_pace_of_the_newest_steps() -> None:
    known = facts(step(10, 1000.0), step(20, 1100.0), states=("training", "training"))
    assert run_view(known, 1100.0).projected_end == 1100.0 + 80 * 10
    assert run_view(facts(step(10, 1000.0), states=("training", "training")), 1100.0).projected_end is None


def test_downsampled_keeps_first_and_last() -> None:
    steps = [step(number) for number in range(1, 1001)]
    kept = downsampled(steps)
    assert (len(kept), kept[0].outer_step, kept[-1].outer_step) == (500, 1, 1000)
    assert len({each.outer_step for each in kept}) == 500
    assert downsampled(steps[:3]) == tuple(steps[:3])


def test_downsampled_prefers_validated_steps() -> None:
    steps = [step(number) for number in range(1, 10_001)]
    steps = [each.model_copy(update={"validation_loss": 1.0}) if not each.outer_step % 10 else each for each in steps]
    kept = downsampled(steps)
    assert (len(kept), kept[0].outer_step, kept[-1].outer_step) == (500, 1, 10_000)
    assert [each.outer_step for each in kept] == sorted({each.outer_step for each in kept})
    assert sum(each.validation_loss is not None for each in kept) == 499
