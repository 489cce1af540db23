"""Tests members whose contributions do not follow from their intervals: validators find them, others verify the
findings, and no single member's finding bans anybody."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.training_swarm import Member, Swarm, assert_equal_steps
from support.validated_runs import (
    HONEST,
    KINDS,
    LIES,
    STATES,
    ChangedInner,
    Idle,
    Slanderer,
    rounded,
    run_of,
    run_with_liar,
    validated,
)
from swarm.evidence_folder import EvidenceFolder, files_in
from swarm.testing import virtual_time
from swarm.training.evidence.evidence import check, check_file
from swarm.training.evidence.interval_audits import replay_file
from swarm.training.evidence.wrong_interval import read_case
from swarm.training.member.run_member import RunMember
from swarm.training.state.certificate import RunSignatures
from swarm.training.trainer_events import FalselyAccused, IntervalValidated, MemberConvicted, OuterStep
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import Evidence, WrongInterval

pytestmark = pytest.mark.usefixtures("only_errors_logged")


@pytest.fixture(autouse=True)
def forgotten_states() -> Iterator[None]:
    yield
    STATES.clear()


def outsider(member: Member) -> RunSignatures:
    return RunSignatures.of_run(member.trainer._run, Identity(b"o" * 32), "test")


@pytest.mark.parametrize("lie", ["turned round", "nothing trained"])
def test_member_whose_contribution_differs_from_its_training_is_banned_by_all(lie: str) -> None:
    async def main() -> None:
        members, liar = await run_with_liar(LIES[lie])
        assert_equal_steps(members, 8)
        for member in members:
            (event,) = member.of(MemberConvicted)
            assert (event.peer_id, event.kind) == (liar.peer_id, "wrong_interval")
            assert liar.peer_id not in member.of(OuterStep)[-1].group
            (ban,) = member.trainer.bans
            verdict = check(Evidence.from_bytes(ban.data), outsider(member), member.trainer._run.config)
            assert verdict.peer_id == liar.peer_id, "the evidence must convict the liar for an outsider, too"
            assert not member.of(FalselyAccused)

    virtual_time.run(main())


def test_members_with_other_rounding_are_never_accused() -> None:
    async def main() -> None:
        members, other = await run_with_liar(rounded, outer_steps=10)
        tiers = {event.tier for member in members for event in member.of(IntervalValidated)}
        assert tiers == {"exact", "close"}
        checked = [event for member in members for event in member.of(IntervalValidated)]
        assert any(event.peer_id == other.peer_id for event in checked)
        assert all(event.distance < 0.2 for event in checked)
        assert not any(member.of(MemberConvicted) for member in members)

    virtual_time.run(main())


def test_false_accuser_convicts_nobody_and_is_named_by_members_that_verify() -> None:
    async def main() -> None:
        members, slanderer = await run_with_liar(lambda _, end_N: end_N, kind=Slanderer, outer_steps=13)
        assert_equal_steps(members, 13)
        named = [event for member in members for event in member.of(FalselyAccused)]
        assert named
        assert {event.accuser for event in named} == {slanderer.peer_id}
        for member in members:
            assert not member.of(MemberConvicted)
            # accusations count only until a member has recomputed the first interval
            steps = {event.step for event in member.of(FalselyAccused)}
            assert not steps or max(steps) <= min(steps) + 1, "the accuser was taken seriously again"
            assert len(member.of(OuterStep)[-1].group) == 5, "an accusation alone left somebody out"

    virtual_time.run(main())


def test_validator_sits_out_a_step_that_takes_no_longer() -> None:
    async def durations(rate: float) -> tuple[float, list[Member]]:
        async with Swarm(validated(validation_rate=rate, outer_steps=10)) as swarm:
            for name in HONEST:
                await swarm.join(name, inner=ChangedInner())
            members = await swarm.finish(*HONEST)
            steps = members[0].of(OuterStep)[2:]
            return statistics.mean(step.seconds for step in steps), members

    async def main() -> None:
        usual_s, _ = await durations(0.0)
        validated_s, members = await durations(0.3)
        num_validations = sum(len(member.of(IntervalValidated)) for member in members)
        assert num_validations > 6
        assert validated_s < 1.05 * usual_s
        # only the drawn validators' intervals were not trained
        num_tokens = sum(step.num_tokens for step in members[0].of(OuterStep))
        lost = 1 - num_tokens / (10 * len(HONEST) * 5 * 2 * 4)
        assert lost == pytest.approx(num_validations / (10 * len(HONEST)), abs=0.05)

    virtual_time.run(main())


def evidence_of(members: list[Member]) -> tuple[WrongInterval, Member]:
    (ban,) = members[0].trainer.bans
    return WrongInterval.from_bytes(Evidence.from_bytes(ban.data).body), members[0]


def test_findings_of_too_few_members_or_without_the_drawn_validator_convict_nobody() -> None:
    async def main() -> None:
        members, liar = await run_with_liar(LIES["noise"])
        whole, member = evidence_of(members)
        signatures, config = outsider(member), member.trainer._run.config
        first, second, *_ = whole.findings
        honest = next(each.peer_id for each in members if each.peer_id != liar.peer_id)
        for findings, peer, slices in (
            ((first,), whole.peer, whole.slices),
            ((first, first[:-1] + bytes([first[-1] ^ 1])), whole.peer, whole.slices),
            ((second, first), whole.peer, whole.slices),
            ((), whole.peer, whole.slices),
            (whole.findings, honest, whole.slices),
            (whole.findings, whole.peer, whole.slices[1:]),
            (whole.findings, whole.peer, whole.slices[::-1]),
        ):
            body = WrongInterval(certificate=whole.certificate, peer=peer, slices=slices, findings=findings)
            with pytest.raises((PeerViolation, IntegrityError)):
                check(body.evidence(), signatures, config)
        alone = WrongInterval(
            certificate=whole.certificate, peer=whole.peer, slices=whole.slices, findings=whole.findings[:1]
        )
        assert not read_case(alone.to_bytes(), signatures, config).is_enough(member.peer_id)

    virtual_time.run(main())


def test_evidence_can_be_checked_offline_by_its_findings_or_by_recomputing_the_interval(tmp_path: Path) -> None:
    async def main() -> tuple[WrongInterval, Member, str]:
        members, liar = await run_with_liar(LIES["turned round"])
        return *evidence_of(members), liar.peer_id

    evidence, member, liar = virtual_time.run(main())
    run = member.trainer._run

    def kept(evidence: WrongInterval) -> Path:
        EvidenceFolder(tmp_path, run.text, "test").keep(liar, evidence.evidence().to_bytes())
        (path,) = files_in(tmp_path)
        return path

    case = read_case(evidence.to_bytes(), outsider(member), run.config)
    state = STATES[case.proof.origin.state_digest]
    assert check_file(kept(evidence))[1].peer_id == liar
    alone = WrongInterval(
        certificate=evidence.certificate, peer=liar, slices=evidence.slices, findings=evidence.findings[:1]
    )
    with pytest.raises(IntegrityError, match="findings of only 1 of 5 members"):
        check_file(kept(alone))
    # the recomputation does not need the findings
    _, verdict = replay_file(kept(alone), state, lambda _: ChangedInner())
    assert (verdict.peer_id, verdict.kind) == (liar, "wrong_interval")
    with pytest.raises(IntegrityError, match="gives what the member sent"):
        replay_file(kept(alone), state, lambda _: ChangedInner(change=LIES["turned round"]))
    other = next(each for digest, each in STATES.items() if digest != case.proof.origin.state_digest)
    with pytest.raises(IntegrityError, match="not the state that the step began from"):
        replay_file(kept(alone), other, lambda _: ChangedInner())


def test_newcomer_bans_a_liar_by_the_findings_of_others() -> None:
    async def main() -> None:
        async with Swarm(validated(outer_steps=10)) as swarm:
            swarm.run = run_of(swarm.run.config)
            for name in HONEST:
                await swarm.join(name, inner=ChangedInner(), kind=KINDS.get(name, RunMember))
            liar = await swarm.join("liar", inner=ChangedInner(change=LIES["noise"]), kind=Idle)
            first = swarm.members["m0"]
            while not first.of(MemberConvicted):
                await asyncio.sleep(0.2)
            late = await swarm.join("late", inner=ChangedInner())
            await swarm.finish(*HONEST, "late")
            (event,) = late.of(MemberConvicted)
            assert (event.peer_id, event.kind) == (liar.peer_id, "wrong_interval")
            assert not any(each.peer_id == liar.peer_id for each in late.of(IntervalValidated))

    virtual_time.run(main())
