"""What a run is: every setting that its replicas must share, checked when it is made.

Values only. `run_file` reads, signs and writes them; `model` builds what `RunConfig.model` describes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any

from swarm_protocol import limits

from swarm.training.data.source import BYTE_VOCABULARY, END_OF_TEXT
from swarm.training.round.vote import Succession
from swarm.training.run.settings import (
    ImpossibleRun,
    ImpossibleValues,
    SettingChecks,
    are_peers,
    is_digest,
    is_hub_id,
    is_revision,
    refuse_unknown_keys,
    table_of,
    with_floats,
)
from swarm.training.run.start_config import StartConfig
from swarm.trust.aggregators import Aggregator, aggregator_names, get_aggregator, parameter_names, parameters_of

CODECS = ("fp32", "fp16", "bf16", "int8", "int4", "e3m0")
"""Those of `swarm_compression`, which is not asked because it brings torch: a run is also read where nobody trains."""

DEFAULT_AGGREGATOR = "centered_clip"
"""A member that lies moves it little, and it costs nothing where nobody does: `tests/bench/test_bench_lying_run.py`."""

MAX_FRAGMENTS = 64
"""More than most models have layers; a fragment of a few layers is already small."""
MAX_INTERVAL_S = 86400.0
MAX_MAJORITY_S = 7 * 86400.0
"""A week: whoever wants to wait longer decides by hand, with `swarm-node run resume`."""

DEFAULT_MODEL: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "llama",
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
    }
)
"""A byte-level Llama of 1.1M parameters that two CPU cores train in a minute."""

LATER_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "majority_after_s": 60.0,
        "validation_interval": 10,
        "fallback": "",
        "start.checkpoint": "",
        "start.revision": "",
        "start.digest": "",
        "data.revision": "",
        "data.tokenizer_revision": "",
    }
)
"""Settings that were added after runs had been signed, such as "data.split", each with the value that a signed file
without it means. A run with that value keeps the id that it had before the setting existed; an entry here never
changes."""

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
_COLUMN = re.compile(r"[\w.-]{1,64}", re.ASCII)
_NAME_RULE = "1 to 64 of a-z, 0-9, '.', '_' and '-', with a letter or digit at both ends"


SOURCES = ("python-stdlib", "files", "hub")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is trained on, and as which tokens. `digest` pins the tokens, so that a replica with other data is refused;
    empty: whatever is there. `revision` and `tokenizer_revision` pin what comes from the hub by its commits; empty: the
    newest ones.

    `source` is the standard library's source, each member's own `files` (text, JSON lines, parquet or arrow), or the
    data set `hub_id` of the Hugging Face hub, of which the configuration `hub_config` (if there are several), `split`
    and the column `text_key` are used. `tokenizer` is "bytes", a tokenizer on the hub as OWNER/NAME, or "local": each
    member names the directory of its own copy.
    """

    source: str = "python-stdlib"
    hub_id: str = ""
    hub_config: str = ""
    split: str = "train"
    text_key: str = "text"
    revision: str = ""
    tokenizer: str = "bytes"
    tokenizer_revision: str = ""
    digest: str = ""
    window_tokens: int = 128

    def __post_init__(self) -> None:
        checks = SettingChecks("data")
        checks.require(self.source in SOURCES, "source", self.source, f"use one of {', '.join(SOURCES)}")
        fits = is_hub_id(self.hub_id) if self.source == "hub" else self.hub_id == ""
        checks.require(fits, "hub_id", self.hub_id, 'use OWNER/NAME with source = "hub", and leave it out otherwise')
        is_config = isinstance(self.hub_config, str) and _COLUMN.fullmatch(self.hub_config) is not None
        checks.require(
            self.hub_config == "" or (is_config and self.source == "hub"),
            "hub_config",
            self.hub_config,
            "use 1 to 64 letters, digits, '_', '-' and '.' with source = \"hub\", and leave it out otherwise",
        )
        for key, value in (("split", self.split), ("text_key", self.text_key)):
            is_word = isinstance(value, str) and _COLUMN.fullmatch(value) is not None
            checks.require(is_word, key, value, "use 1 to 64 letters, digits, '_', '-' and '.'")
        is_tokenizer = self.tokenizer in ("bytes", "local") or is_hub_id(self.tokenizer)
        checks.require(is_tokenizer, "tokenizer", self.tokenizer, 'use "bytes", "local", or OWNER/NAME')
        on_hub = {"revision": self.source == "hub", "tokenizer_revision": is_hub_id(self.tokenizer)}
        for key, can_have in on_hub.items():
            value = getattr(self, key)
            fits = value == "" or (can_have and is_revision(value))
            checks.require(fits, key, value, "use a branch, tag or commit of what is on the hub, or leave it out")
        is_pin = self.digest == "" or is_digest(self.digest)
        checks.require(is_pin, "digest", self.digest, "use the 64 hexadecimal digits of the corpus, or leave it out")
        checks.whole("window_tokens", self.window_tokens, 1, 1 << 20)
        checks.finish()


INNER_OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("constant", "linear", "cosine")
OUTER_OPTIMIZERS = ("nesterov", "average")


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    """One replica's optimizer. "muon" moves the hidden layers' matrices by Muon and the rest by AdamW.

    The learning rate rises over `warmup_steps` of the replica's own steps; then `schedule` makes of it what the run's
    progress asks for, down to `final_ratio` of it in the run's last step ("constant": it stays).

    The defaults suit the default model: in 10 outer steps four replicas bring its validation loss from 5.5 to 2.5
    (`tests/bench/test_bench_default_run.py`).
    """

    optimizer: str = "adamw"
    batch_windows: int = 4
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    schedule: str = "constant"
    final_ratio: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    muon_momentum: float = 0.95
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        checks = SettingChecks("inner")
        checks.require(
            self.optimizer in INNER_OPTIMIZERS, "optimizer", self.optimizer, f"use {' or '.join(INNER_OPTIMIZERS)}"
        )
        checks.require(self.schedule in SCHEDULES, "schedule", self.schedule, f"use one of {', '.join(SCHEDULES)}")
        checks.number("final_ratio", self.final_ratio, 0.0, 1.0)
        checks.number("muon_momentum", self.muon_momentum, 0.0, 0.9999)
        checks.whole("batch_windows", self.batch_windows, 1, 1 << 16)
        checks.number("learning_rate", self.learning_rate, 1e-9, 1.0)
        checks.whole("warmup_steps", self.warmup_steps, 0, 1 << 20)
        checks.number("weight_decay", self.weight_decay, 0.0, 1.0)
        checks.number("beta1", self.beta1, 0.0, 0.9999)
        checks.number("beta2", self.beta2, 0.0, 0.99999)
        checks.number("clip_norm", self.clip_norm, 1e-6, 1e6)
        checks.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """What is made of the group's mean pseudo-gradient (see `outer`): Nesterov, or "average", which takes it as it is
    and leaves the other settings unused.

    The momentum is for tens of outer steps. DiLoCo's own is 0.9, for hundreds.
    """

    optimizer: str = "nesterov"
    learning_rate: float = 0.7
    momentum: float = 0.6

    def __post_init__(self) -> None:
        checks = SettingChecks("outer")
        checks.require(
            self.optimizer in OUTER_OPTIMIZERS, "optimizer", self.optimizer, f"use {' or '.join(OUTER_OPTIMIZERS)}"
        )
        checks.number("learning_rate", self.learning_rate, 1e-9, 10.0)
        checks.number("momentum", self.momentum, 0.0, 0.9999)
        checks.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A run. `model` is a Hugging Face config: `model_type` and that type's keys. `start` says which weights it begins
    with.

    An interval ends after `interval_steps` inner steps, or `interval_s` seconds where that is not 0, so that a slow
    member brings what it can. Each outer step moves one of `fragments` parts of the model, in turn: a fragment's own
    interval is so many times longer. With `overlap_steps`, members take that many steps of the next interval while the
    round runs, and then take in its result, of which `mixing` says how much of their own weights they keep (Streaming
    DiLoCo's H / P, tau and alpha, arXiv 2501.18512). With `error_feedback`, what the codec loses of a contribution is
    added to the next one.

    A round waits for `min_group` members, then for more, up to `max_group`: `quorum_grace_s`, or for a share of the
    interval's duration where that is longer (`coordinator.grace_after`). It needs two thirds of the
    members of the state before, and after `majority_after_s` seconds without these a majority (see `vote.Succession`).
    `admission` names the only peers that may contribute; empty: anyone may.

    `aggregation` holds the parameters of `aggregator`; those that are not given get their defaults. Where fewer members
    contribute to a round than these need, its aggregator is `fallback` with its default parameters; without one,
    `min_group` must be as many as they need.

    Raises ValueError that names every impossible value with its remedy. That the model can be built is checked by
    `model.check_model`.
    """

    name: str
    seed: int = 0
    outer_steps: int = 40
    interval_steps: int = 20
    interval_s: float = 0.0
    fragments: int = 1
    overlap_steps: int = 0
    mixing: float = 0.0
    codec: str = "int8"
    error_feedback: bool = False
    aggregator: str = DEFAULT_AGGREGATOR
    fallback: str = DEFAULT_AGGREGATOR
    admission: tuple[str, ...] = ()
    min_group: int = 2
    max_group: int = 16
    quorum_grace_s: float = 2.0
    majority_after_s: float = 60.0
    validation_interval: int = 10
    model: Mapping[str, Any] = field(default_factory=lambda: DEFAULT_MODEL)
    start: StartConfig = field(default_factory=StartConfig)
    data: DataConfig = field(default_factory=DataConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    aggregation: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = SettingChecks("")
        is_name = isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None
        checks.require(is_name, "name", self.name, f"use a name such as my-run: {_NAME_RULE}")
        checks.whole("seed", self.seed, 0, (1 << 63) - 1)
        checks.whole("outer_steps", self.outer_steps, 1, 10_000_000)
        checks.whole("interval_steps", self.interval_steps, 1, 100_000)
        checks.number("interval_s", self.interval_s, 0.0, MAX_INTERVAL_S)
        checks.whole("fragments", self.fragments, 1, MAX_FRAGMENTS)
        checks.whole("overlap_steps", self.overlap_steps, 0, 100_000)
        checks.number("mixing", self.mixing, 0.0, 0.9999)
        checks.require(
            isinstance(self.error_feedback, bool), "error_feedback", self.error_feedback, "use true or false"
        )
        checks.require(
            are_peers(self.admission), "admission", self.admission, "use a list of distinct peer ids, or leave it out"
        )
        checks.require(self.codec in CODECS, "codec", self.codec, f"use one of {', '.join(CODECS)}")
        known = aggregator_names()
        checks.require(self.aggregator in known, "aggregator", self.aggregator, f"use one of {', '.join(known)}")
        checks.require(
            self.fallback in ("", *known), "fallback", self.fallback, f'use one of {", ".join(known)}, or "" for none'
        )
        checks.require(
            isinstance(self.aggregation, Mapping),
            "aggregation",
            self.aggregation,
            "write its keys below a line [aggregation]",
        )
        checks.whole("min_group", self.min_group, 1, limits.MAX_GROUP_MEMBERS)
        checks.whole("max_group", self.max_group, 1, limits.MAX_GROUP_MEMBERS)
        checks.number("quorum_grace_s", self.quorum_grace_s, 0.0, 600.0)
        checks.number("majority_after_s", self.majority_after_s, 0.0, MAX_MAJORITY_S)
        checks.whole("validation_interval", self.validation_interval, 0, 10_000_000)
        checks.require(isinstance(self.model, Mapping), "model", self.model, "write its keys below a line [model]")
        self._check_together(checks)
        checks.finish()
        aggregator = self.make_aggregator()
        object.__setattr__(self, "admission", tuple(sorted(self.admission)))
        object.__setattr__(self, "aggregation", MappingProxyType(parameters_of(aggregator)))
        object.__setattr__(self, "model", MappingProxyType(dict(self.model)))

    @property
    def succession(self) -> Succession:
        return Succession(min_group=self.min_group, majority_after_s=self.majority_after_s)

    @property
    def samples_per_interval(self) -> int:
        """How many samples one member's full interval uses."""
        return self.interval_steps * self.inner.batch_windows

    def make_aggregator(self) -> Aggregator:
        return get_aggregator(self.aggregator, self.aggregation)

    def aggregator_for(self, num_contributors: int) -> Aggregator:
        """That of a round to which so many members contribute."""
        aggregator = self.make_aggregator()
        falls_back = self.fallback and num_contributors < aggregator.fewest_members()
        return get_aggregator(self.fallback, {}) if falls_back else aggregator

    def _check_together(self, checks: SettingChecks) -> None:
        """Of the values that can be, those that cannot be beside each other."""
        if checks.passed("min_group", "max_group"):
            remedy = f"use at least min_group, {self.min_group}"
            checks.require(self.min_group <= self.max_group, "max_group", self.max_group, remedy)
        if checks.passed("overlap_steps", "interval_steps"):
            remedy = f"use less than interval_steps, {self.interval_steps}"
            checks.require(self.overlap_steps < self.interval_steps, "overlap_steps", self.overlap_steps, remedy)
        if self.admission and checks.passed("admission", "min_group"):
            remedy = f"name at least min_group, {self.min_group}"
            checks.require(len(self.admission) >= self.min_group, "admission", self.admission, remedy)
        if checks.passed("aggregator", "fallback", "aggregation", "min_group"):
            self._check_aggregator(checks)

    def _check_aggregator(self, checks: SettingChecks) -> None:
        try:
            fewest = self.make_aggregator().fewest_members()
        except ValueError as error:
            checks.refuse("aggregation", f"aggregation: {error}")
            return
        needs = f"{self.aggregator} with these parameters needs at least {fewest} members"
        remedy = f"{needs}, or a fallback such as {DEFAULT_AGGREGATOR}"
        checks.require(bool(self.fallback) or self.min_group >= fewest, "min_group", self.min_group, remedy)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, as they stand in a run file. `from_mapping` gives an equal config back."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        plain["model"] = dict(self.model)
        plain["admission"] = list(self.admission)
        plain["aggregation"] = dict(self.aggregation)
        for table in _TABLES:
            plain[table] = asdict(plain[table])
        return plain

    def identifying_mapping(self) -> dict[str, Any]:
        """What a run's id is made of: `to_mapping` without the later settings that say nothing new."""
        mapping = self.to_mapping()
        for setting, implied in LATER_SETTINGS.items():
            table, _, key = setting.rpartition(".")
            values = mapping[table] if table else mapping
            if values[key] == implied:
                del values[key]
            if table and not values:
                del mapping[table]
        return mapping

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> RunConfig:
        """Raises ConfigError that names all impossible values, or an unknown key, with what to use instead."""
        refuse_unknown_keys(mapping, {each.name for each in fields(cls)}, "the run")
        values = with_floats(cls, mapping)
        values.setdefault("name", "")
        _check_aggregation_keys(values)
        problems = list[str]()
        for key, table in _TABLES.items():
            try:
                values[key] = table_of(table, key, mapping.get(key, {}))
            except ImpossibleValues as error:
                problems += error.problems
                values[key] = table()
        try:
            config = cls(**values)
        except ImpossibleValues as error:
            problems[:0] = error.problems
        if problems:
            raise ImpossibleRun(problems)
        return config


_TABLES: Mapping[str, type[Any]] = MappingProxyType(
    {"start": StartConfig, "data": DataConfig, "inner": InnerConfig, "outer": OuterConfig}
)


def _check_aggregation_keys(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key that the chosen aggregator does not have. Other mistakes are RunConfig's to name."""
    name, given = values.get("aggregator", DEFAULT_AGGREGATOR), values.get("aggregation", {})
    if name in aggregator_names() and isinstance(given, Mapping):
        refuse_unknown_keys(given, parameter_names(name), f"[aggregation], which is {name}'s,")
