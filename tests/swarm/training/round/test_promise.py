"""Tests that a member's promise outlives its process: it votes once for a step, and finishes the step for which it
voted."""

from __future__ import annotations

import asyncio
import hashlib
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support.round_scripts import FIRST, ME, OFFER, OUTCOME, PEERS, locked, ready, setup, vote_of
from support.training_swarm import Swarm, SyntheticInner, assert_equal_steps, config, interval_cost
from swarm.testing import virtual_time
from swarm.training.member.current_step import MAX_EVENTS
from swarm.training.member.round_driver import DISK_S
from swarm.training.round import state_machine as machine
from swarm.training.round.promise import Promise, PromiseFile
from swarm.training.round.round_events import Ask, Reported, Sighted, Sign
from swarm.training.round.round_state import OwnPrepareVote, RoundSetup, RoundState
from swarm.training.trainer_events import MemberConvicted, OuterStep, RoundAborted
from swarm_protocol.commit_messages import Vote
from swarm_protocol.errors import ConfigError, IntegrityError
from swarm_protocol.training_messages import Ready

pytestmark = pytest.mark.usefixtures("only_errors_logged")

PARTS = (b"first part", b"second part")
VOTED = replace(OUTCOME, part_digests=tuple(hashlib.sha256(part).digest() for part in PARTS))
LOCK = replace(locked(FIRST), attempt=2, outcome=VOTED)
OWN_PREPARE_VOTE = OwnPrepareVote(vote=vote_of(ME, FIRST, VOTED).vote, origin=b"origin")
PROMISE = Promise(
    report=ready(3, lock=LOCK, origin=b"origin"), first_attempt=1, own_prepare_vote=OWN_PREPARE_VOTE, parts=PARTS
)


def test_promise_file_returns_the_promise_that_was_written_last(tmp_path: Path) -> None:
    file = PromiseFile(tmp_path / "votes")
    assert file.read() is None
    file.write(Promise(report=ready(1)))
    file.write(PROMISE)
    assert PromiseFile(tmp_path / "votes").read() == PROMISE
    later = Promise(report=ready(4), first_attempt=4)
    file.write(later)
    assert file.read() == later
    assert file.has(replace(later, report=replace(later.report, accused=(ME,))))
    assert not file.has(PROMISE)
    assert not file.has(replace(later, own_prepare_vote=OWN_PREPARE_VOTE))
    assert [path.name for path in (tmp_path / "votes").iterdir()] == ["promise.bin"], (
        "the parts of a vote must be deleted with it"
    )


def test_promise_file_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    one, other = (PromiseFile(tmp_path / "votes") for _ in range(2))
    with one.locked(), pytest.raises(ConfigError, match="another process"), other.locked():
        pass
    with other.locked():
        other.write(PROMISE)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be locked"), PromiseFile(tmp_path / "file").locked():
        pass


@pytest.mark.parametrize("cut", [0, 10, 40, -1])
def test_promise_file_is_refused_when_it_is_damaged(tmp_path: Path, cut: int) -> None:
    PromiseFile(tmp_path).write(PROMISE)
    path = tmp_path / "promise.bin"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(IntegrityError, match="cannot be read") as caught:
        PromiseFile(tmp_path).read()
    assert "vote twice" in caught.value.remedy


def test_promise_file_of_another_version_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "promise.bin"
    report_alone = bytes(8) + ready(1).to_bytes()  # as protocol 4 wrote it, without the length before the report
    path.write_bytes(hashlib.sha256(report_alone).digest() + report_alone)
    with pytest.raises(IntegrityError, match="another version of Swarm wrote what this member has voted for") as caught:
        PromiseFile(tmp_path).read()
    assert "continue with that version" in caught.value.remedy


def test_promise_is_kept_without_its_parts_when_they_are_damaged(tmp_path: Path) -> None:
    PromiseFile(tmp_path).write(PROMISE)
    (path,) = tmp_path.glob("parts-*.bin")
    for data in (path.read_bytes()[:-1], b"", b"\xff" * 100):
        path.write_bytes(data)
        assert PromiseFile(tmp_path).read() == replace(PROMISE, parts=())
        PromiseFile(tmp_path).write(PROMISE)
        assert PromiseFile(tmp_path).read() == PROMISE


def test_parts_that_a_killed_process_wrote_half_are_deleted_at_the_next_vote(tmp_path: Path) -> None:
    (tmp_path / f".parts-{'0' * 32}.bin.partial").write_bytes(PARTS[0])
    PromiseFile(tmp_path).write(PROMISE)
    assert sorted(path.name[:6] for path in tmp_path.iterdir()) == ["parts-", "promis"]


def test_promise_that_cannot_be_written_raises_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "votes").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="vote cannot be written"):
        PromiseFile(tmp_path / "votes").write(PROMISE)


def test_promise_that_cannot_be_flushed_leaves_the_one_before_with_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PromiseFile(tmp_path).write(PROMISE)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError("the disk has failed")))
    with pytest.raises(ConfigError, match="cannot be written"):
        PromiseFile(tmp_path).write(Promise(report=ready(4), first_attempt=4))
    assert PromiseFile(tmp_path).read() == PROMISE


def begun(promise: Promise | None, start: RoundSetup | None = None) -> RoundState:
    return machine.begin(start or setup(), accused={}, promise=promise)


def test_restarted_member_continues_after_the_promised_attempt_with_its_vote() -> None:
    state = begun(PROMISE)
    assert state.attempt == 4
    assert (state.lock, state.lock_origin, state.own_prepare_vote) == (LOCK, b"origin", OWN_PREPARE_VOTE)
    # so it reports its vote, or lets its own group resume it
    _, actions = machine.step(state, OFFER, 0.0)
    assert all(isinstance(each, Ask | Sign) for each in actions)
    assert {each.ready.lock for each in actions if isinstance(each, Ask)} <= {LOCK}


@pytest.mark.parametrize(
    ("start", "attempt", "abstains"),
    [
        (setup(state_digest=b"x" * 32, step=6), 0, True),
        (setup(state_digest=b"x" * 32, first_attempt=0), 0, True),
        (setup(state_digest=b"x" * 32, first_attempt=2), 4, False),
        (setup(state_digest=b"x" * 32, step=8), 0, False),
        (setup(first_attempt=5), 5, False),
        (setup(state_digest=b"x" * 32, step=6, min_group=1), 0, False),
    ],
    ids=["a step before", "before the members were admitted", "after it", "a step later", "decided", "alone"],
)
def test_member_abstains_from_a_step_only_when_its_promise_was_made_at_a_later_state(
    start: RoundSetup, attempt: int, abstains: bool
) -> None:
    state = begun(PROMISE, start)
    assert (state.attempt, state.abstains, state.lock) == (attempt, abstains, None)
    state, actions = machine.step(state, OFFER, 0.0)
    assert not (actions and abstains)
    assert machine.begin(start, accused={}).abstains is False


def test_abstaining_member_leads_no_group() -> None:
    state = begun(PROMISE, setup(step=6, state_digest=b"x" * 32))
    for peer in PEERS:
        if peer != ME:
            report = replace(ready(), step=6, state_digest=b"x" * 32)
            state, actions = machine.step(replace(state, coordinator=ME), Reported(peer=peer, ready=report), 9.0)
            assert not any(isinstance(each, Sign) for each in actions)


def test_member_writes_its_promise_to_disk_before_it_sends_anything_about_it(tmp_path: Path) -> None:
    """The member's file must hold each report and vote, and the lock behind a commit vote, before they are sent."""
    sent: list[tuple[str, bool]] = []

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=3)) as swarm:
            for name in ("m0", "m1", "m2"):
                file = PromiseFile(tmp_path / name)
                member = await swarm.join(name, promises=file)
                honest = member.network.call

                async def call(
                    peer_id: str,
                    method: str,
                    request: bytes,
                    *,
                    honest: object = honest,
                    file: object = file,
                    **bounds: object,
                ) -> bytes:
                    kind = method.split("/", maxsplit=1)[0]
                    if kind in {"train.ready", "train.vote"}:
                        kept = file.read()  # type: ignore[attr-defined]
                        sent.append(_is_kept(kept, request, is_vote=kind == "train.vote"))
                    return await honest(peer_id, method, request, **bounds)  # type: ignore[operator]

                member.network.call = call  # type: ignore[method-assign, assignment]
            await swarm.finish()

    virtual_time.run(main())
    assert {kind for kind, _ in sent} == {"report", "prepare", "commit"}
    assert all(is_kept for _, is_kept in sent)


class FullDisk(PromiseFile):
    """A disk that takes promises only while `has_room`."""

    has_room = True

    def write(self, promise: Promise) -> None:
        if not self.has_room:
            raise ConfigError("the member's vote cannot be written", remedy="free space there")
        super().write(promise)


@pytest.mark.parametrize("has_room_again", [True, False])
def test_member_whose_disk_is_full_says_so_and_nothing_else_until_it_has_room_or_leaves(
    tmp_path: Path, has_room_again: bool
) -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=13)) as swarm:
            disk = FullDisk(tmp_path / "m2")
            for name in ("m0", "m1"):
                await swarm.join(name, promises=PromiseFile(tmp_path / name))
            member = await swarm.join("m2", promises=disk)
            while not member.of(OuterStep):
                await asyncio.sleep(0.01)
            disk.has_room, kept = False, disk.read()
            while len(swarm.members["m0"].of(OuterStep)) < 3:
                await asyncio.sleep(0.01)
            await asyncio.sleep(2 * DISK_S)
            (told,) = member.of(RoundAborted)
            assert told.reason == "the member's vote cannot be written: free space there"
            assert member.trainer.waiting is not None
            assert member.trainer.waiting.is_for_disk
            assert disk.read() == kept
            driver = member.trainer._steps.service.driver
            assert driver is not None
            for _ in range(2 * MAX_EVENTS):
                driver.feed(Sighted(peer=swarm.members["m0"].peer_id, attempt=0))
            assert driver.events.qsize() == MAX_EVENTS
            if has_room_again:
                disk.has_room = True
            else:
                member.trainer.stop()
            members = await swarm.finish(timeout_s=100.0)
            assert_equal_steps(members if has_room_again else members[:2], 13)
            assert not any(each.of(MemberConvicted) for each in members)
            assert (len(member.of(OuterStep)) > 3) == has_room_again

    virtual_time.run(main(), compute_s=interval_cost)


def _is_kept(kept: Promise | None, request: bytes, *, is_vote: bool) -> tuple[str, bool]:
    """Return the kind of a request, and whether the promise `kept` covers it."""
    if not is_vote:
        return "report", kept is not None and kept.report.attempt == Ready.from_bytes(request).attempt
    vote = Vote.from_bytes(request)
    if kept is None or kept.own_prepare_vote is None:
        return vote.kind, False
    lock = kept.report.lock
    if vote.kind == "commit":
        return vote.kind, lock is not None and (lock.attempt, lock.outcome) == (vote.attempt, vote.outcome)
    return vote.kind, kept.own_prepare_vote.vote.outcome == vote.outcome


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "forgotten"])
def test_restarted_members_finish_votes_that_nobody_counted_before_all_were_killed(tmp_path: Path, keeps: bool) -> None:
    """Each vote might have been counted by a member that is gone. Without promises the restarted members commit another
    state, which is why promises are kept."""
    run = config(min_group=2, outer_steps=2)

    def store(name: str) -> PromiseFile | None:
        return PromiseFile(tmp_path / name) if keeps else None

    async def main() -> None:
        decided: set[str] = set()
        async with Swarm(run) as before:
            for name in ("m0", "m1", "m2"):
                member = await before.join(name, promises=store(name))
                honest = member.network.call

                async def lose_votes(
                    peer_id: str, method: str, request: bytes, *, honest: object = honest, **bounds: object
                ) -> bytes:
                    if method.startswith("train.vote") and before.members["m0"].of(OuterStep):
                        vote = Vote.from_bytes(request)
                        if vote.kind == "commit":
                            decided.add(vote.outcome.state_digest.hex())
                            return b""
                    return await honest(peer_id, method, request, **bounds)  # type: ignore[operator]

                member.network.call = lose_votes  # type: ignore[method-assign, assignment]
            while not decided:
                await asyncio.sleep(0.01)
            trainers = {name: member.trainer for name, member in before.members.items()}
            held = {name: (each.state, each.certificate) for name, each in trainers.items()}
        assert len(decided) == 1
        async with Swarm(run) as after:
            for name, (state, certificate) in held.items():
                # their next intervals would give other contributions
                inner = SyntheticInner(corrupt=lambda x_N: x_N + 0.01 * torch.ones_like(x_N))
                await after.join(name, inner=inner, state=state, certificate=certificate, promises=store(name))
            members = await after.finish()
            assert ({member.digest for member in members} == decided) == keeps

    virtual_time.run(main())


def test_member_waits_for_the_state_it_voted_from_and_reports_so_when_it_lost_that_state(tmp_path: Path) -> None:
    async def main() -> None:
        run = config(min_group=2, outer_steps=6)
        async with Swarm(run) as swarm:
            for name in ("m0", "m1", "m2"):
                await swarm.join(name, promises=PromiseFile(tmp_path / name))
            while not swarm.members["m0"].of(OuterStep):
                await asyncio.sleep(0.01)
            former = swarm.members["m2"].trainer.state, swarm.members["m2"].trainer.certificate
            while len(swarm.members["m0"].of(OuterStep)) < 3:
                await asyncio.sleep(0.01)
            held = {name: (each.trainer.state, each.trainer.certificate) for name, each in swarm.members.items()}
        assert former[0] is not None
        assert former[0].outer_step < 3
        async with Swarm(run) as again:
            # two are back without their checkpoints: alone they would begin a new run
            early = [await again.join(name, promises=PromiseFile(tmp_path / name)) for name in ("m0", "m1")]
            await asyncio.sleep(100.0)
            assert not any(member.of(OuterStep) for member in early)
            assert "it waits for a member that has it" in early[0].of(RoundAborted)[0].reason
            # a state in between is not the one from which they voted
            await again.join("old backup", state=former[0], certificate=former[1])
            await asyncio.sleep(100.0)
            assert {each.trainer.state.outer_step for each in early if each.trainer.state} == {former[0].outer_step}
            assert not any(member.of(OuterStep) for member in early)
            state, certificate = held["m2"]
            await again.join("m2", state=state, certificate=certificate, promises=PromiseFile(tmp_path / "m2"))
            members = await again.finish()
            assert {member.trainer.state.outer_step for member in members if member.trainer.state} == {6}
            assert all(event.step > 3 for member in members for event in member.of(OuterStep))

    virtual_time.run(main(), compute_s=lambda work: 1.0 if getattr(work, "__name__", "") == "_stretch" else 0.0)
