"""Members that lie: the others name them, go on without them, and end with one state."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from swarm.network.memory import MemoryNetwork
from swarm.testing import virtual_time
from swarm.training.certificate import Notary
from swarm.training.events import OuterStep, RoundAborted
from swarm.training.inner import IntervalResult
from swarm.training.methods import Methods
from swarm.training.round_events import Signed
from swarm.training.seat import Seat
from swarm.training.trainer import Trainer
from swarm_protocol.errors import IntegrityError, PeerViolation, RoundError, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Certificate, Contribution, Group, Outcome, Ready, Vote
from training_swarm import Member, SpoiledCodec, Swarm, SyntheticInner, assert_equal_steps, config

NUM_STEPS = 3


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="swarm")


def assert_honest_go_on(members: list[Member], liar: Member | None = None) -> None:
    """They finish with one state, and once the liar is known, without it."""
    assert_equal_steps(members, NUM_STEPS)
    if liar is not None:
        assert liar.peer_id not in members[0].of(OuterStep)[-1].group
        reasons = [event.reason for member in members for event in member.of(RoundAborted)]
        assert any(liar.peer_id[-6:] in reason for reason in reasons), reasons


async def run_with_liar(kind: type[Trainer], *, inner: SyntheticInner | None = None) -> tuple[list[Member], Member]:
    async with Swarm(config(min_group=3, outer_steps=NUM_STEPS)) as swarm:
        for index in range(3):
            await swarm.join(f"m{index}")
        liar = await swarm.join("liar", kind=kind, inner=inner)
        return await swarm.finish("m0", "m1", "m2"), liar


NAN = torch.tensor([math.nan]).numpy().tobytes()


@pytest.mark.parametrize(
    "spoil",
    [lambda data: NAN + data[4:], lambda data: data[:-1], lambda data: data + b"x"],
    ids=["nan", "short", "long"],
)
def test_sender_of_bad_slices_and_results_is_named_and_left_out(spoil: Callable[[bytes], bytes]) -> None:
    class Liar(Trainer):
        async def _take_seat(self) -> Seat:
            return replace(await super()._take_seat(), codec=SpoiledCodec(spoil))

    async def main() -> None:
        members, liar = await run_with_liar(Liar)
        assert_honest_go_on(members, liar)
        for member in members:
            assert all(torch.isfinite(member.trainer.state.theta_N)) if member.trainer.state else False

    virtual_time.run(main())


class Greedy(SyntheticInner):
    def train(self, *arguments: object, **options: object) -> IntervalResult:
        result = super().train(*arguments, **options)  # type: ignore[arg-type]
        return replace(result, num_tokens=10**9)


def test_claim_of_a_huge_weight_gets_no_weight() -> None:
    async def main() -> None:
        members, liar = await run_with_liar(Trainer, inner=Greedy())
        assert_equal_steps(members, NUM_STEPS)
        for member in members:
            assert all(event.num_tokens <= 4 * 40 for event in member.of(OuterStep))
            assert all(liar.peer_id not in event.group for event in member.of(OuterStep))

    virtual_time.run(main())


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoFacedNotary(Notary):
    """Signs a second group for the same attempt and hands it to a victim, on a stream of its own."""

    network: MemoryNetwork
    second: list[Signed]

    def sign_group(self, group: Group, now: float) -> Signed:
        other = Notary.sign_group(self, replace(group, vote_s=group.vote_s / 2), now)
        self.second.append(other)
        asyncio.get_running_loop().create_task(self._show(other), name="second face")
        return Notary.sign_group(self, group, now)

    async def _show(self, signed: Signed) -> None:
        victim = next(peer for peer in signed.group.peer_ids if peer != self.identity.peer_id)
        try:
            async with self.network.stream(victim, Methods(self.run).reduce, timeout_s=1.0) as stream:
                await asyncio.sleep(0.02)
                await stream.send(signed.data)
                await stream.receive()
        except SwarmError:
            pass


def test_coordinator_that_signs_two_groups_is_named_by_who_sees_both() -> None:
    class TwoFaced(Trainer):
        second: list[Signed]

        async def _take_seat(self) -> Seat:
            seat = await super()._take_seat()
            self.second = []
            assert isinstance(seat.network, MemoryNetwork)
            notary = TwoFacedNotary(
                identity=seat.notary.identity,
                network_id="test",
                run=seat.run,
                network=seat.network,
                second=self.second,
            )
            return replace(seat, notary=notary)

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=6)) as swarm:
            for index in range(3):
                await swarm.join(f"m{index}", inner=SyntheticInner(num_values=200_000))
            liar = await swarm.join("liar", kind=TwoFaced, inner=SyntheticInner(num_values=200_000))
            members = await swarm.finish("m0", "m1", "m2")
            assert_equal_steps(members, 6)
            assert isinstance(liar.trainer, TwoFaced)
            assert liar.trainer.second, "it coordinated at least once"
            reasons = [event.reason for member in members for event in member.of(RoundAborted)]
            assert any(f"{liar.peer_id[-6:]} signed two groups" in reason for reason in reasons), reasons
            await asyncio.sleep(2.0)

    virtual_time.run(main(), compute_s=lambda _: 0.01)


async def swarm_at_work(swarm: Swarm) -> tuple[Member, Notary, MemoryNetwork]:
    """A member in its second step, and a stranger with a network and a notary of its own."""
    for index in range(2):
        await swarm.join(f"m{index}")
    member = swarm.members["m0"]
    while not member.of(OuterStep):
        await asyncio.sleep(0.01)
    identity = Identity(b"e" * 32)
    network = swarm.internet.network(identity)
    return member, Notary(identity=identity, network_id="test", run=swarm.run.run_id), network


def _slow(function: object) -> float:
    return 1.0 if getattr(function, "__name__", "") == "_train" else 0.0


def test_forged_groups_and_votes_are_refused_and_change_nothing() -> None:
    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            member, stranger, network = await swarm_at_work(swarm)
            now = network.now()
            names = Methods(swarm.run.run_id)
            genuine = member.trainer._notary.check_certificate(member.trainer.certificate, now)
            group = replace(genuine.origin, step=2)
            outcome = Outcome(origin_digest=bytes(32), part_digests=(), state_digest=bytes(32))
            vote = Vote(run=swarm.run.run_id, step=2, attempt=0, group_digest=bytes(32), outcome=outcome)
            # signed by the stranger, who is in no group
            with pytest.raises(PeerViolation, match="without one of us"):
                await exchange(network, member.peer_id, names.reduce, stranger.sign_group(group, now).data)
            # a broken signature
            broken = stranger.sign_vote(vote, now)
            with pytest.raises((IntegrityError, PeerViolation)):
                await network.call(member.peer_id, names.vote, broken[:-1] + bytes([broken[-1] ^ 1]), timeout_s=1.0)
            # somebody else's vote
            other = Notary(identity=Identity(b"o" * 32), network_id="test", run=swarm.run.run_id)
            with pytest.raises(PeerViolation, match="from its voter"):
                await network.call(member.peer_id, names.vote, other.sign_vote(vote, now), timeout_s=1.0)
            # its own vote is well formed, and counts for nothing
            await network.call(member.peer_id, names.vote, stranger.sign_vote(vote, now), timeout_s=1.0)
            members = await swarm.finish("m0", "m1")
            await network.close()
            assert_equal_steps(members, NUM_STEPS)
            assert not any(each.of(RoundAborted) for each in members)

    virtual_time.run(main(), compute_s=_slow)


@pytest.mark.parametrize(("num_signers", "step"), [(1, NUM_STEPS), (2, NUM_STEPS + 1)], ids=["alone", "beyond the run"])
def test_certificate_that_the_runs_own_terms_rule_out_overtakes_nobody(num_signers: int, step: int) -> None:
    """Or one identity alone could certify a state of its own, as far ahead as it likes, and all would take it."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            member, stranger, network = await swarm_at_work(swarm)
            now, run = network.now(), swarm.run.run_id
            signers = [stranger, Notary(identity=Identity(b"o" * 32), network_id="test", run=run)][:num_signers]
            peers = sorted(each.identity.peer_id for each in signers)
            group = Group(
                run=run,
                step=step,
                attempt=0,
                state_digest=bytes(32),
                members=tuple(Contribution(peer_id=peer, num_tokens=1, num_samples=1) for peer in peers),
                part_values=(1,) * num_signers,
                reduce_s=1.0,
                vote_s=1.0,
            )
            signed = stranger.sign_group(group, now)
            outcome = Outcome(
                origin_digest=signed.digest, part_digests=(bytes(32),) * num_signers, state_digest=bytes(32)
            )
            vote = Vote(run=run, step=step, attempt=0, group_digest=signed.digest, outcome=outcome)
            votes = tuple(each.sign_vote(vote, now) for each in signers)
            forged = Certificate(group=signed.data, votes=votes).to_bytes()
            with pytest.raises(PeerViolation, match="does not allow"):
                member.trainer._notary.check_certificate(forged, now)
            await swarm.finish("m0", "m1")
            await network.close()

    virtual_time.run(main(), compute_s=_slow)


async def exchange(network: MemoryNetwork, peer: str, method: str, message: bytes) -> None:
    async with network.stream(peer, method, timeout_s=1.0) as stream:
        await stream.send(message)
        await stream.receive()


def test_parts_for_another_round_are_refused() -> None:
    """A member replays the signed group of a committed step, and one for a step that nobody is at yet."""

    async def main() -> None:
        async with Swarm(config(min_group=2, outer_steps=NUM_STEPS)) as swarm:
            member, _, network = await swarm_at_work(swarm)
            fellow = swarm.members["m1"]
            notary, now = fellow.trainer._notary, network.now()
            proof = notary.check_certificate(member.trainer.certificate, now)
            names = Methods(swarm.run.run_id)
            for group in (proof.origin, replace(proof.origin, step=9)):
                data = notary.sign_group(group, now).data
                with pytest.raises(RoundError, match="not at step"):
                    await exchange(fellow.network, member.peer_id, names.reduce, data)
            members = await swarm.finish("m0", "m1")
            await network.close()
            assert_equal_steps(members, NUM_STEPS)
            assert not any(each.of(RoundAborted) for each in members)

    virtual_time.run(main(), compute_s=_slow)


def test_made_up_vote_for_an_outcome_without_parts_delays_but_decides_nothing() -> None:
    """Its next group resumes the outcome, finds no parts, and leaves out who claims to have voted for it."""

    class Liar(Trainer):
        async def _take_seat(self) -> Seat:
            seat = await super()._take_seat()
            return replace(seat, network=LyingNetwork(seat))  # type: ignore[arg-type]

    async def main() -> None:
        members, liar = await run_with_liar(Liar)
        assert_equal_steps(members, NUM_STEPS)
        reasons = [event.reason for member in members for event in member.of(RoundAborted)]
        assert any("cannot be had" in reason or "another state" in reason for reason in reasons), reasons
        assert any(liar.peer_id not in event.group for event in members[0].of(OuterStep))

    virtual_time.run(main())


class LyingNetwork:
    """Adds a made-up ballot to each report of its owner."""

    def __init__(self, seat: Seat) -> None:
        self._real = seat.network
        self._seat = seat

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    async def call(self, peer_id: str, method: str, request: bytes, *, timeout_s: float) -> bytes:
        if method == self._seat.methods.ready and self._seat.replica.proof is not None:
            ready = Ready.from_bytes(request)
            honest = self._seat.replica.proof.origin
            group = replace(honest, step=ready.step, attempt=ready.attempt, state_digest=ready.state_digest)
            signed = self._seat.notary.sign_group(group, self._real.now())
            voted = Outcome(
                origin_digest=signed.digest,
                part_digests=(bytes(32),) * len(group.part_values),
                state_digest=bytes(32),
            )
            request = replace(ready, voted=voted, voted_origin=signed.data, voted_attempt=ready.attempt).to_bytes()
        return await self._real.call(peer_id, method, request, timeout_s=timeout_s)
