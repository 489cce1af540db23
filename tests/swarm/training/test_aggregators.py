"""Tests a run with one liar among five members: it converges with a robust aggregator, and does not with the mean."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support.round_scripts import PEERS
from support.training_swarm import Member, SpoiledCodec, Swarm, SyntheticInner, assert_equal_steps, config
from swarm.testing import virtual_time
from swarm.training.member.run_member import RunMember
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_cost import warnings_of
from swarm.training.run.signed_run import LATER_SETTINGS, from_mapping, identifying_mapping, to_mapping
from swarm.training.state.run_context import RunContext
from swarm.training.trainer_events import OuterStep, RoundAborted
from swarm.trust.mixing import Bucketing, NearestNeighbours
from swarm.trust.standard_aggregators import DEFAULT_AGGREGATOR
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import short_id
from torch import Tensor

pytestmark = pytest.mark.usefixtures("only_errors_logged")

NUM_STEPS = 5
ATTACKS = {"huge": 1e4, "sign-flipped": -30.0}
"""The factor by which the liar multiplies its pseudo-gradient. The result is well formed."""
NAN = torch.tensor([math.nan]).numpy().tobytes()
ROBUST = ("median", "trimmed_mean", "geometric_median", "centered_clip", "multi_krum")


@dataclass
class Attacker(SyntheticInner):
    attack: float = 1.0
    num_attacks: int = field(default=0, init=False)

    def load(self, theta_N: Tensor) -> None:
        super().load(theta_N)
        self.start_N = theta_N.clone()

    def take_in(self, where: slice, theta_F: Tensor, mixing: float) -> None:
        super().take_in(where, theta_F, mixing)
        self.start_N = self.theta_N.clone()

    def flat(self, where: slice = slice(None)) -> Tensor:
        self.num_attacks += 1
        return (self.start_N + self.attack * (self.theta_N - self.start_N))[where]


async def run_with_attacker(aggregator: str, attack: float, num_steps: int = NUM_STEPS) -> list[Member]:
    attacker = Attacker(attack=attack)
    run = config(min_group=5, outer_steps=num_steps, aggregator=aggregator)
    async with Swarm(run) as swarm:
        for index in range(4):
            await swarm.join(f"m{index}")
        await swarm.join("attacker", inner=attacker)
        members = await swarm.finish()
    assert attacker.num_attacks >= num_steps
    assert all(len(event.group) == 5 for member in members for event in member.of(OuterStep)), "a member was left out"
    assert not any(member.of(RoundAborted) for member in members)
    return members


def losses(members: list[Member]) -> tuple[float, float]:
    """Return the losses of the first and of the last committed state."""
    state = members[0].trainer.state
    assert state is not None
    honest = SyntheticInner(num_values=state.theta_N.numel())
    return honest.held_out_loss(torch.zeros_like(state.theta_N)), honest.held_out_loss(state.theta_N)


@pytest.mark.parametrize(("aggregator", "attack"), [("median", "huge"), *((each, "sign-flipped") for each in ROBUST)])
def test_run_converges_with_a_robust_aggregator_when_one_member_lies(aggregator: str, attack: str) -> None:
    async def main() -> None:
        members = await run_with_attacker(aggregator, ATTACKS[attack])
        assert_equal_steps(members, NUM_STEPS)
        before, after = losses(members)
        assert after < 0.15 * before

    virtual_time.run(main())


def test_run_converges_more_slowly_with_clipped_norms_when_one_member_lies() -> None:
    async def main() -> None:
        members = await run_with_attacker("norm_clipped_mean", ATTACKS["sign-flipped"])
        assert_equal_steps(members, NUM_STEPS)
        before, after = losses(members)
        assert after < 0.5 * before

    virtual_time.run(main())


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_run_diverges_with_the_mean_when_one_member_lies(attack: float) -> None:
    async def main() -> None:
        members = await run_with_attacker("mean", attack, num_steps=2)
        assert_equal_steps(members, 2)
        before, after = losses(members)
        assert after > 10 * before

    virtual_time.run(main())


def test_run_converges_with_centered_clip_as_with_the_mean_when_nobody_lies() -> None:
    async def main() -> None:
        after = {name: losses(await run_with_attacker(name, 1.0, 3))[1] for name in ("mean", "centered_clip")}
        assert after["centered_clip"] < 1.5 * after["mean"]

    virtual_time.run(main())


def test_run_uses_its_fallback_when_too_few_members_are_left_for_its_aggregator() -> None:
    """Multi-Krum needs all five members, and one of them is lost."""

    async def main() -> None:
        run = config(min_group=2, outer_steps=6, aggregator="multi_krum", fallback="centered_clip")
        attacker = Attacker(attack=ATTACKS["sign-flipped"])
        async with Swarm(run) as swarm:
            for index in range(4):
                await swarm.join(f"m{index}")
            await swarm.join("attacker", inner=attacker)
            while not swarm.members["m0"].of(OuterStep):
                await asyncio.sleep(0.1)
            swarm.kill("m3")
            members = await swarm.finish()
        assert_equal_steps(members, 6)
        groups = [len(event.group) for event in members[0].of(OuterStep)]
        assert (groups[0], groups[-1]) == (5, 4)
        before, after = losses(members)
        assert after < 0.15 * before

    virtual_time.run(main())


def test_run_takes_its_steps_without_a_refused_contribution() -> None:
    """Multi-Krum needs all five members, and the part owners refuse the slices of one of them."""

    class Refused(RunMember):
        async def _open_context(self) -> RunContext:
            return replace(await super()._open_context(), codec=SpoiledCodec(lambda data: NAN + data[len(NAN) :]))

    async def main() -> None:
        run = config(min_group=2, outer_steps=3, aggregator="multi_krum", fallback="centered_clip")
        honest = [f"m{index}" for index in range(4)]
        async with Swarm(run) as swarm:
            for name in honest:
                await swarm.join(name)
            refused = await swarm.join("refused", kind=Refused)
            members = await swarm.finish(*honest)
        assert_equal_steps(members, 3)
        assert set(members[0].of(OuterStep)[-1].group) == {each.peer_id for each in members}
        reasons = [event.reason for member in members for event in member.of(RoundAborted)]
        assert any(short_id(refused.peer_id) in reason for reason in reasons), reasons

    virtual_time.run(main())


# --- the aggregator in the run's config ---


def test_default_aggregator_is_robust() -> None:
    assert RunConfig(name="run").aggregator in ROBUST
    assert RunConfig(name="run").fallback in ROBUST


@pytest.mark.parametrize(("num_contributors", "name"), [(5, "multi_krum"), (4, "median"), (1, "median")])
def test_aggregator_of_a_round_follows_from_the_number_of_contributors(num_contributors: int, name: str) -> None:
    run = RunConfig(name="run", aggregator="multi_krum", fallback="median")
    assert run.aggregator_for(num_contributors).name == name


@pytest.mark.parametrize(("fallback", "in_cluster"), [("median", "median"), ("", DEFAULT_AGGREGATOR)])
def test_small_cluster_of_a_run_without_a_fallback_uses_the_default_aggregator(fallback: str, in_cluster: str) -> None:
    run = RunConfig(name="run", aggregator="multi_krum", fallback=fallback, min_group=5)
    assert run.aggregator_for(4).name == (fallback or "multi_krum")
    assert [run.aggregator_for(number, in_cluster=True).name for number in (5, 4)] == ["multi_krum", in_cluster]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, []),
        ({"min_group": 1, "max_group": 1}, []),
        ({"min_group": 3, "max_group": 3}, ["allows no more"]),
        ({"min_group": 3, "admission": PEERS[:3]}, ["lists no more"]),
        ({"min_group": 3, "admission": PEERS}, []),
        ({"min_group": 3, "majority_after_s": 0.0}, ["a third of its members"]),
        ({"min_group": 1, "majority_after_s": 0.0}, []),
        ({"aggregator": "mean"}, ["one lying member can ruin the run"]),
        ({"aggregator": "mean", "min_group": 1}, []),
        ({"aggregator": "median", "fallback": "mean"}, ["in a small round one lying member"]),
        ({"pre_aggregation": "none"}, ["colluding liars do more"]),
        ({"pre_aggregation": "bucketing"}, []),
        ({"min_group": 5, "aggregator": "multi_krum"}, []),
        ({"min_group": 5, "aggregator": "multi_krum", "fallback": ""}, ["needs 5 contributions"]),
    ],
)
def test_warnings_name_settings_that_cannot_lose_a_member_or_protect_nothing(
    settings: dict[str, Any], words: list[str]
) -> None:
    found = warnings_of(RunConfig(name="run", **settings))
    assert len(found) == len(words)
    for (message, remedy), expected in zip(found, words, strict=True):
        assert expected in message
        assert remedy


def test_run_mixes_nearest_neighbours_by_default_unless_it_was_signed_before() -> None:
    run = RunConfig(name="run")
    assert run.aggregator_for(10).mixing == NearestNeighbours(liar_share=0.34, reach=1.2)
    assert run.aggregator_for(3, in_cluster=True).mixing == NearestNeighbours()
    assert LATER_SETTINGS["pre_aggregation"] == "none"
    assert "pre_aggregation" not in identifying_mapping(RunConfig(name="run", pre_aggregation="none"))
    assert RunConfig(name="run", pre_aggregation="none").aggregator_for(10).mixing is None


def test_mixing_has_the_settings_of_the_run() -> None:
    near = RunConfig(name="run", liar_share=0.2, neighbour_reach=1.0, aggregator="multi_krum", fallback="median")
    assert near.aggregator_for(10).mixing == NearestNeighbours(liar_share=0.2, reach=1.0)
    assert near.aggregator_for(3).mixing == near.aggregator_for(10).mixing
    dealt = RunConfig(name="run", liar_share=0.2, pre_aggregation="bucketing")
    assert dealt.aggregator_for(10).mixing == Bucketing(liar_share=0.2)
    assert RunConfig(name="run", aggregator="mean").aggregator_for(10).mixing is None


def test_from_mapping_gives_the_aggregator_with_the_runs_parameters() -> None:
    run = from_mapping({"name": "run", "aggregator": "trimmed_mean", "aggregation": {"trim": 0.3}})
    assert to_mapping(run)["aggregation"] == {"trim": 0.3}
    assert from_mapping(to_mapping(run)) == run
    with pytest.raises(TypeError):
        run.aggregation["trim"] = 0.1  # type: ignore[index]


def test_mapping_holds_all_parameters_of_the_aggregator_when_none_is_given() -> None:
    run = from_mapping({"name": "run", "aggregator": "centered_clip", "aggregation": {"radius": 2}})
    assert to_mapping(run)["aggregation"] == {"radius": 2.0, "iterations": 50}
    assert type(run.aggregation["radius"]) is float


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"aggregator": "average"}, 'aggregator = "average": use one of mean, '),
        ({"aggregator": ["mean"]}, "use one of mean, "),
        ({"aggregator": "trimmed_mean", "aggregation": {"trims": 0.1}}, "unknown key 'trims': did you mean 'trim'"),
        ({"aggregator": "mean", "aggregation": {"trim": 0.1}}, "of mean has an unknown key 'trim'"),
        (
            {"aggregator": "mean", "aggregation": {"radius": 2.0, "iterations": 50}},
            "keys: 'radius', 'iterations': remove",
        ),
        ({"pre_aggregation": "buckets"}, 'pre_aggregation = "buckets": use one of none, bucketing, nearest_neighbours'),
        ({"liar_share": 0.5}, "liar_share = 0.5: use a number from 0 to 0.49"),
        ({"neighbour_reach": 0.5}, "neighbour_reach = 0.5: use a number from 1 to 100"),
        ({"member_momentum": 1.0}, "member_momentum = 1.0: use a number from 0 to 0.99"),
        ({"fallback": "average"}, 'fallback = "average": use one of mean, '),
        ({"aggregator": "trimmed_mean", "aggregation": {"trim": 0.5}}, "trim = 0.5: use a number from 0 to 0.49"),
        ({"aggregation": {"radius": "wide"}}, 'radius = "wide": use a number from 0.01 to 100'),
        ({"aggregator": "trimmed_mean", "aggregation": 0.1}, "write its keys below a line"),
        (
            {"aggregator": "multi_krum", "min_group": 4, "fallback": ""},
            "min_group = 4: multi_krum .* needs at least 5 members, or a fallback",
        ),
        (
            {"aggregator": "multi_krum", "min_group": 8, "aggregation": {"liars": 3}, "fallback": ""},
            "min_group = 8: multi_krum .* needs at least 9 members",
        ),
    ],
)
def test_from_mapping_refuses_an_impossible_aggregation_with_a_clear_message(
    mapping: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping({"name": "run", **mapping})
