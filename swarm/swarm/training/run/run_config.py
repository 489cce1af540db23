"""Defines what a run is: every setting that its replicas share, each declared once with its limits and explanation.

To add a setting, declare a field here, with `implied` (see `settings.setting`); run files, templates and checks follow.
Values only. `signed_run` turns them into the plain values of a file and back; `run_file` reads, signs and writes runs;
`run_model` builds what `RunConfig.model` describes, and checks that it can be built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from swarm_protocol import limits

from swarm.training.run.run_tables import DEFAULT_MODEL, MODULE_TYPE, DataConfig, InnerConfig, OuterConfig, StartConfig
from swarm.training.run.settings import (
    SettingChecks,
    are_peers,
    check_fields,
    choice,
    describe,
    flag,
    free_table,
    matching,
    number,
    setting,
    whole,
)
from swarm.training.standing.entrance import Entrance, Probation
from swarm.training.standing.held_out_scores import HeldOutRule
from swarm.trust.aggregator import Aggregator
from swarm.trust.mixing import DEFAULT_LIAR_SHARE, DEFAULT_MIXING, MOST_LIARS, NO_MIXING, get_mixing, mixing_names
from swarm.trust.standard_aggregators import DEFAULT_AGGREGATOR, Mean, aggregator_names, get_aggregator, parameters_of

CODECS = ("fp32", "fp16", "bf16", "int8", "int4", "e3m0")
"""The codecs of `swarm_compression`, which cannot be imported here: it brings torch, and nodes without it read runs."""

MAX_INVITERS = 16
_NAME_RULE = "1 to 64 characters of a-z, 0-9, '.', '_' and '-', with a letter or digit at both ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A run. `model` is a Hugging Face config: `model_type` and that type's keys.

    With several `fragments`, each fragment's own interval is that many times longer. `fragments`, `overlap_steps` and
    `mixing` are Streaming DiLoCo's H / P, tau and alpha (arXiv 2501.18512). A round needs two thirds of the members of
    the previous state; after `majority_after_s` seconds, a majority is enough (see `quorum.Succession`). `aggregation`
    holds the parameters of `aggregator`; those that are not given get their defaults. Without a `fallback`, `min_group`
    must be at least the number of members that the aggregator needs.

    Raises ValueError, which names every impossible value with its remedy.
    """

    name: str = field(
        metadata=describe(
            "First part of the run's id. The rest is a digest of all settings, the signer and the time of signing.",
            matching(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?"),
            f"use a name such as my-run: {_NAME_RULE}",
        )
    )
    seed: int = whole(0, (0, (1 << 63) - 1), "Random seed of the initial weights and of the order of the samples.")
    outer_steps: int = whole(
        40, (1, 10_000_000), "Number of outer steps of the run; in each, the members' contributions are aggregated."
    )
    interval_steps: int = whole(20, (1, 100_000), "Inner steps of each member between two outer steps.")
    interval_s: float = number(
        0.0, (0.0, 86400.0), "Maximum seconds of an interval; slow members then contribute what they have. 0: no limit."
    )
    # more fragments than most models have layers; a fragment of a few layers is already small
    fragments: int = whole(
        1,
        (1, 64),
        "Number of fragments of the model; each outer step updates one, in turn (Streaming DiLoCo). 1: the whole "
        "model.",
    )
    overlap_steps: int = whole(
        0, (0, 100_000), "Inner steps that members take during a round; 0: they wait for its end."
    )
    mixing: float = number(
        0.0, (0.0, 0.9999), "Share of its own weights that a member keeps when it applies a result; for overlap_steps."
    )
    codec: str = choice("int8", CODECS, f"Encoding of the contributions: {', '.join(CODECS)}.")
    error_feedback: bool = flag(False, "Add the codec's rounding error of each contribution to the next one.")
    aggregator: str = choice(
        DEFAULT_AGGREGATOR, aggregator_names(), f"Aggregation of the contributions: {', '.join(aggregator_names())}."
    )
    fallback: str = setting(
        DEFAULT_AGGREGATOR,
        "Aggregator for rounds with too few contributions for the one above; it uses its default parameters. "
        "Empty: none; min_group must then suffice for the aggregator.",
        lambda value: value in ("", *aggregator_names()),
        f'use one of {", ".join(aggregator_names())}, or "" for none',
        implied="",
    )
    pre_aggregation: str = choice(
        DEFAULT_MIXING,
        mixing_names(),
        "Mixing of contributions before aggregation, for members with different data: nearest_neighbours replaces "
        "each contribution by the mean of the nearest ones, bucketing by the mean of a random bucket. Not used with "
        "the aggregator mean.",
        implied=NO_MIXING,
    )
    liar_share: float = number(
        DEFAULT_LIAR_SHARE,
        (0.0, MOST_LIARS),
        "Largest share of a round's work that may come from lying members. It determines the mixing, together with "
        "the group's size. Votes tolerate less than a third of lying members.",
        implied=DEFAULT_LIAR_SHARE,
    )
    neighbour_reach: float = number(
        1.2,
        (1.0, 100.0),
        "nearest_neighbours takes the nearest 1 - liar_share of the contributions, and also those at most this many "
        "times as far away as the farthest of these. 1: no others.",
        implied=1.2,
    )
    member_momentum: float = number(
        0.0,
        (0.0, 0.99),
        "Momentum of the moving average of pseudo-gradients that each member contributes; less noise makes lies "
        "easier to detect. 0: no average. With an outer momentum, lower both.",
        implied=0.0,
    )
    admission: tuple[str, ...] = setting(
        (),
        'Peer ids that may contribute; empty: anyone may (unless invitations = "required").',
        are_peers,
        "use a list of distinct peer ids, or leave it out",
    )
    validation_rate: float = number(
        0.0,
        (0.0, 0.5),
        "Share of the members' intervals that another member, drawn from the step's outcome, recomputes. Members "
        "that sent a different result are banned. 0: none. Not to be confused with validation_interval, the held-out "
        "loss.",
        implied=0.0,
    )
    validation_tolerance: float = number(
        0.5,
        (0.0, 2.0),
        "Maximum distance between a contribution and its recomputation: norm of the difference, relative to the norm "
        "of the recomputation. Devices round differently.",
        implied=0.5,
    )
    ban_steps: int = whole(
        0,
        (0, 10_000_000),
        "Outer steps for which a member that evidence convicts of lying is banned; 0: permanently.",
        implied=0,
    )
    probation_steps: int = whole(
        4,
        (0, limits.MAX_PROBATION_STEPS),
        "Outer steps that a node joining a running run must contribute to before its probation ends. Until then its "
        "work has a lower weight and its votes do not count. Never more than the run's outer steps when the node "
        "joins, so a run's first members have no probation. Not used with admission. 0: no probation.",
        implied=0,
    )
    newcomer_share: float = number(
        0.25,
        (0.01, 0.5),
        "Maximum share of a step's weight, and of max_group, for all members on probation together.",
        implied=0.25,
    )
    absence_steps: int = whole(
        100,
        (0, limits.MAX_ABSENCE_STEPS),
        "Outer steps for which a full member may be absent without a new probation; never more than it has "
        "contributed to. 0: a member that misses a step is on probation again.",
        implied=0,
    )
    invitations: str = choice(
        "welcome",
        ("welcome", "required", "none"),
        "Effect of invitations by the author or inviters, and of vouches by members. welcome: nodes with one have "
        "entry_steps in place of probation_steps. required: only nodes with one, and those in admission, may "
        "contribute. none: no effect. With admission, other nodes can enter only with required.",
        implied="none",
    )
    inviters: tuple[str, ...] = setting(
        (),
        "Peer ids that may issue invitations, besides the author.",
        lambda value: are_peers(value) and len(value) <= MAX_INVITERS,
        f"use a list of at most {MAX_INVITERS} distinct peer ids, or leave it out",
        implied=[],
    )
    entry_steps: int = whole(
        0,
        (0, limits.MAX_PROBATION_STEPS),
        "Outer steps of probation for nodes that enter by an invitation or by vouches; at most probation_steps.",
        implied=0,
    )
    vouchers: int = whole(
        0,
        (0, limits.MAX_VOUCHERS),
        "Members that must vouch for a newcomer; each must be a full member that has contributed to probation_steps "
        "outer steps. If the newcomer is later convicted, its vouchers are on probation again. 0: no vouching.",
        implied=0,
    )
    vouch_budget: int = whole(
        1, (1, 64), "Maximum newcomers that a member may vouch for within vouch_steps outer steps.", implied=1
    )
    vouch_steps: int = whole(100, (1, 10_000_000), "Number of outer steps that vouch_budget applies to.", implied=100)
    held_out_scores: int = whole(
        2,
        (0, limits.MAX_SCORED),
        "Contributions per outer step, drawn from its outcome, for which all other members measure the effect on the "
        "held-out loss. The members' scores follow from these measurements. 0: none.",
        implied=0,
    )
    discount_low_scores: bool = flag(
        True,
        "Divide the weight of members by ten if their score is at most a tenth of the median score. false: scores are "
        "only shown.",
        implied=False,
    )
    min_group: int = whole(2, (1, limits.MAX_GROUP_MEMBERS), "Minimum members of a round.")
    max_group: int = whole(16, (1, limits.MAX_GROUP_MEMBERS), "Maximum members of a round.")
    cluster_size: int = whole(
        8,
        (1, limits.MAX_GROUP_MEMBERS),
        "Trainers per cluster, for more trainers than max_group: each member of a round contributes the work of its "
        "cluster, its own included. Up to max_group * cluster_size can train. 1: no clusters.",
        implied=1,
    )
    quorum_grace_s: float = number(
        2.0,
        (0.0, 600.0),
        "Minimum seconds that a round waits for more members once min_group are present. It waits for a quarter of "
        "the interval's duration if that is longer, up to 30 s. 0: no wait.",
    )
    # at most a week: an author who wants to wait longer decides by hand, with `swarm-node run resume`
    majority_after_s: float = number(
        60.0,
        (0.0, 7 * 86400.0),
        "Seconds that a round waits for two thirds of the last step's members. After that, a majority of them is "
        "enough, but does not protect against lying members. 0: always two thirds.",
        implied=60.0,
    )
    validation_interval: int = whole(
        10,
        (0, 10_000_000),
        "Outer steps between two measurements of the loss on held-out data; 0: only before the first and after the "
        "last step. Not to be confused with validation_rate, the recomputation of intervals.",
        implied=10,
    )
    model: Mapping[str, Any] = free_table(
        "model",
        DEFAULT_MODEL,
        "A Hugging Face config: model_type, and any of that type's keys. By default a byte-level Llama of 1.1 million "
        "parameters.",
    )
    start: StartConfig = field(
        default_factory=StartConfig,
        metadata=describe("The initial weights. To continue training a checkpoint: run init --start CHECKPOINT."),
    )
    data: DataConfig = field(default_factory=DataConfig, metadata=describe("The training data."))
    inner: InnerConfig = field(default_factory=InnerConfig, metadata=describe("The optimizer of each member."))
    outer: OuterConfig = field(
        default_factory=OuterConfig,
        metadata=describe("The outer optimizer, which applies the aggregated pseudo-gradient."),
    )
    aggregation: Mapping[str, float] = free_table(
        "aggregation", {}, "Parameters of the aggregator, if it has any; omitted ones have their defaults."
    )

    def __post_init__(self) -> None:
        checks = check_fields(self, "")
        self._check_together(checks)
        checks.finish()
        object.__setattr__(self, "admission", tuple(sorted(self.admission)))
        object.__setattr__(self, "inviters", tuple(sorted(self.inviters)))
        object.__setattr__(self, "aggregation", MappingProxyType(parameters_of(self.make_aggregator())))
        object.__setattr__(self, "model", MappingProxyType(dict(self.model)))

    @property
    def probation(self) -> Probation:
        """The rule for newcomers. A run with a list of admitted peers has no probation."""
        return Probation(
            steps=0 if self.admission else self.probation_steps,
            share=self.newcomer_share,
            absence_steps=self.absence_steps,
        )

    @property
    def entrance(self) -> Entrance:
        """The rule for invitations and vouches, which a closed list of peers does not honour."""
        is_required = self.invitations == "required"
        return Entrance(
            welcomes=is_required or (self.invitations == "welcome" and not self.admission),
            required=is_required,
            listed=self.admission,
            steps=self.entry_steps,
            vouchers=self.vouchers,
            vouch_budget=self.vouch_budget,
            vouch_steps=self.vouch_steps,
            vouch_credits=max(1, self.probation_steps),
        )

    @property
    def only_named(self) -> tuple[str, ...]:
        """The closed list of peers that may contribute; empty if there is none."""
        return () if self.invitations == "required" else self.admission

    @property
    def held_out_rule(self) -> HeldOutRule:
        """The rule for scores on held-out data. A module run has no scores, since its held-out data is not known."""
        num_drawn = 0 if self.trains_module else self.held_out_scores
        return HeldOutRule(num_drawn=num_drawn, discounts=self.discount_low_scores and num_drawn > 0)

    @property
    def trains_module(self) -> bool:
        """Return whether members train a module of the author's own, which the run's file does not describe."""
        return self.model.get("model_type") == MODULE_TYPE

    @property
    def samples_per_interval(self) -> int:
        """The number of samples that one member's full interval uses."""
        return self.interval_steps * self.inner.batch_windows

    @property
    def max_trainers(self) -> int:
        """The maximum number of trainers at one time: the members of a round and their followers."""
        return self.max_group * self.cluster_size

    def make_aggregator(self) -> Aggregator:
        return self._aggregator(self.aggregator, self.aggregation)

    def aggregator_for(self, num_contributors: int, *, in_cluster: bool = False) -> Aggregator:
        """Return the aggregator of a round, or of a cluster, with this number of contributors: the fallback with its
        default parameters if they are too few. A cluster does not wait for more, so in a run without a fallback it uses
        the default aggregator."""
        aggregator = self.make_aggregator()
        fallback = self.fallback or (DEFAULT_AGGREGATOR if in_cluster else "")
        if not fallback or num_contributors >= aggregator.fewest_members():
            return aggregator
        return self._aggregator(fallback, {})

    def _aggregator(self, name: str, parameters: Mapping[str, float]) -> Aggregator:
        mixing = get_mixing(self.pre_aggregation, liar_share=self.liar_share, reach=self.neighbour_reach)
        return get_aggregator(name, parameters, None if name == Mean.name else mixing)

    def _check_together(self, checks: SettingChecks) -> None:
        """Check combinations of values, each of which is possible by itself."""
        if checks.passed("min_group", "max_group"):
            checks.require("max_group", self.min_group <= self.max_group, f"use at least min_group, {self.min_group}")
        if checks.passed("max_group", "cluster_size"):
            most = limits.MAX_TRAINERS // self.max_group
            remedy = f"use at most {most}: max_group * cluster_size may be at most {limits.MAX_TRAINERS}"
            checks.require("cluster_size", self.cluster_size <= most, remedy)
        if checks.passed("overlap_steps", "interval_steps"):
            remedy = f"use less than interval_steps, {self.interval_steps}"
            checks.require("overlap_steps", self.overlap_steps < self.interval_steps, remedy)
        if checks.passed("validation_rate", "model") and self.validation_rate:
            self._check_validation(checks)
        if self.vouchers and checks.passed("vouchers", "absence_steps", "probation_steps", "invitations"):
            self._check_vouching(checks)
        if self.only_named and checks.passed("admission", "min_group"):
            remedy = f"name at least min_group, {self.min_group}"
            checks.require("admission", len(self.admission) >= self.min_group, remedy)
        if checks.passed("aggregator", "fallback", "aggregation", "pre_aggregation", "min_group"):
            self._check_aggregator(checks)

    def _check_vouching(self, checks: SettingChecks) -> None:
        least = max(1, self.probation_steps)
        reason = f"members vouch once {least} of their contributions are remembered"
        checks.require("absence_steps", self.absence_steps >= least, f"use at least {least}, or vouchers = 0: {reason}")
        checks.require("vouchers", self.entrance.welcomes, 'use 0, or set invitations = "required"')

    def _check_validation(self, checks: SettingChecks) -> None:
        """Check that intervals depend only on state, lease and settings; others cannot be recomputed."""
        kept = {"fragments": 1, "overlap_steps": 0, "mixing": 0.0, "error_feedback": False, "member_momentum": 0.0}
        for key, value in kept.items():
            remedy = f"use {str(value).lower()}, or validation_rate = 0: such intervals cannot be recomputed"
            checks.require(key, getattr(self, key) == value, remedy)
        remedy = "set [inner] fresh_moments = true: intervals that keep moments cannot be recomputed"
        checks.require("validation_rate", self.inner.fresh_moments, remedy)
        remedy = "use 0: intervals of an author's own module cannot be recomputed"
        checks.require("validation_rate", not self.trains_module, remedy)

    def _check_aggregator(self, checks: SettingChecks) -> None:
        try:
            fewest = self.make_aggregator().fewest_members()
        except ValueError as error:
            checks.refuse("aggregation", f"aggregation: {error}")
            return
        needs = f"{self.aggregator} with these parameters needs at least {fewest} members"
        remedy = f"{needs}, or a fallback such as {DEFAULT_AGGREGATOR}"
        checks.require("min_group", bool(self.fallback) or self.min_group >= fewest, remedy)
