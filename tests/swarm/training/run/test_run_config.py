"""Tests which settings a run may have, and the messages about impossible ones."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.training.run.run_config import CODECS, RunConfig
from swarm.training.run.run_cost import warnings_of
from swarm.training.run.run_tables import DEFAULT_MODEL, DataConfig, InnerConfig, OuterConfig
from swarm.training.run.signed_run import from_mapping, to_mapping
from swarm_compression import codec_names
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity


def test_run_config_accepts_its_defaults() -> None:
    run = RunConfig(name="a-run")
    assert run.samples_per_interval == run.interval_steps * run.inner.batch_windows
    assert dict(run.model) == dict(DEFAULT_MODEL)


def test_runs_accept_every_codec() -> None:
    assert codec_names() == CODECS


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a b", "a/b", "..", "a" * 65, "ä", 7])
def test_run_config_refuses_an_impossible_name(name: Any) -> None:
    with pytest.raises(ValueError, match="name = "):
        RunConfig(name=name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("seed", 1 << 63),
        ("seed", 1.0),
        ("outer_steps", 0),
        ("outer_steps", True),
        ("interval_steps", 0),
        ("codec", "int9"),
        ("codec", 8),
        ("min_group", 0),
        ("max_group", 257),
        ("quorum_grace_s", -0.1),
        ("quorum_grace_s", float("nan")),
        ("quorum_grace_s", float("inf")),
        ("quorum_grace_s", "2"),
        ("model", 3),
    ],
)
def test_run_config_refuses_an_impossible_value_and_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} = .*: "):
        replace(RunConfig(name="run"), **{key: value})


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        (DataConfig, "source", "the-internet"),
        (DataConfig, "digest", "abc"),
        (DataConfig, "digest", 5),
        (DataConfig, "window_tokens", 0),
        (InnerConfig, "batch_windows", 0),
        (InnerConfig, "learning_rate", 0.0),
        (InnerConfig, "learning_rate", 2),
        (InnerConfig, "warmup_steps", -1),
        (InnerConfig, "weight_decay", -1.0),
        (InnerConfig, "beta1", 1.0),
        (InnerConfig, "beta2", 1.0),
        (InnerConfig, "clip_norm", 0),
        (OuterConfig, "learning_rate", float("nan")),
        (OuterConfig, "momentum", 1.0),
    ],
)
def test_table_refuses_an_impossible_value_and_names_its_key(table: type, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"\w+\.{key} = .*: "):
        table(**{key: value})


def test_run_config_refuses_a_min_group_above_max_group() -> None:
    with pytest.raises(ValueError, match="max_group = 2: use at least min_group, 3"):
        RunConfig(name="run", min_group=3, max_group=2)


def test_from_mapping_names_all_impossible_values() -> None:
    mapping = {"name": "run", "seed": -1, "inner": {"beta1": 2}, "outer": {"momentum": -1}}
    with pytest.raises(ConfigError) as caught:
        from_mapping(mapping)
    assert all(key in str(caught.value) for key in ("seed", "inner.beta1", "outer.momentum"))


@pytest.mark.parametrize(
    ("mapping", "suggestion"),
    [
        ({"interval_step": 3}, "'interval_steps'"),
        ({"inner": {"learningrate": 1}}, "'learning_rate'"),
        ({"data": {"windowtokens": 1}}, "'window_tokens'"),
        ({"interval_step": 3, "zzz": 1, "outer_step": 3}, "'interval_steps', 'outer_steps'"),
    ],
)
def test_from_mapping_suggests_the_nearest_key_for_an_unknown_one(mapping: dict[str, Any], suggestion: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {suggestion}"):
        from_mapping({"name": "run", **mapping})


def test_from_mapping_refuses_a_key_that_resembles_no_other() -> None:
    with pytest.raises(ConfigError, match="unknown key 'zzz'"):
        from_mapping({"name": "run", "zzz": 1})


def test_from_mapping_refuses_a_value_in_place_of_a_table() -> None:
    with pytest.raises(ConfigError, match="inner must be a table"):
        from_mapping({"name": "run", "inner": 3})


def test_from_mapping_refuses_a_run_without_a_name() -> None:
    with pytest.raises(ConfigError, match='name = ""'):
        from_mapping({})


def test_from_mapping_turns_a_whole_number_into_a_fraction_when_the_key_needs_one() -> None:
    run = from_mapping({"name": "run", "quorum_grace_s": 3, "outer": {"learning_rate": 1}})
    assert type(run.quorum_grace_s) is float
    assert type(run.outer.learning_rate) is float


def test_from_mapping_of_to_mapping_gives_the_same_run() -> None:
    run = RunConfig(name="run", seed=3, model={"model_type": "gpt2", "n_layer": 2}, outer=OuterConfig(momentum=0.5))
    assert from_mapping(to_mapping(run)) == run


def test_run_config_model_cannot_be_changed() -> None:
    keys = {"model_type": "llama"}
    run = RunConfig(name="run", model=keys)
    keys["model_type"] = "gpt2"
    assert run.model["model_type"] == "llama"
    with pytest.raises(TypeError):
        run.model["model_type"] = "gpt2"  # type: ignore[index]


any_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(mapping=st.dictionaries(st.sampled_from(sorted(to_mapping(RunConfig(name="run")))), any_value))
def test_from_mapping_of_any_values_gives_a_run_or_raises_config_error(mapping: dict[str, Any]) -> None:
    try:
        run = from_mapping(mapping)
    except ConfigError:
        return
    assert run.name


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"interval_s": -1.0}, "interval_s"),
        ({"fragments": 0}, "fragments"),
        ({"fragments": 65}, "fragments"),
        ({"interval_steps": 4, "overlap_steps": 4}, "overlap_steps"),
        ({"mixing": 1.0}, "mixing"),
        ({"error_feedback": 1}, "error_feedback"),
        ({"admission": ["me"]}, "admission"),
        ({"admission": [Identity(b"a" * 32).peer_id]}, "admission"),
        ({"admission": [Identity(b"a" * 32).peer_id] * 2}, "admission"),
        ({"data": {"source": "the web"}}, "data.source"),
        ({"data": {"source": "hub"}}, "data.hub_id"),
        ({"data": {"hub_id": "owner/name"}}, "data.hub_id"),
        ({"data": {"source": "hub", "hub_id": "../name"}}, "data.hub_id"),
        ({"data": {"source": "hub", "hub_id": "owner/name", "hub_config": "../a"}}, "data.hub_config"),
        ({"data": {"hub_config": "wikitext-2"}}, "data.hub_config"),
        ({"data": {"split": "train[:1]"}}, "data.split"),
        ({"data": {"tokenizer": "../tokenizer"}}, "data.tokenizer"),
        ({"inner": {"optimizer": "sgd"}}, "inner.optimizer"),
        ({"inner": {"schedule": "step"}}, "inner.schedule"),
        ({"inner": {"final_ratio": 1.5}}, "inner.final_ratio"),
        ({"outer": {"optimizer": "adam"}}, "outer.optimizer"),
    ],
)
def test_from_mapping_names_the_impossible_value(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(named)} = "):
        from_mapping({"name": "test", **changes})


def test_from_mapping_ignores_the_order_of_admitted_peers() -> None:
    peers = [Identity(bytes([byte]) * 32).peer_id for byte in range(3)]
    one = from_mapping({"name": "test", "admission": peers})
    assert one == from_mapping({"name": "test", "admission": peers[::-1]})
    assert from_mapping(to_mapping(one)) == one


FRESH = InnerConfig(fresh_moments=True)


def test_validation_requires_intervals_that_can_be_computed_again() -> None:
    assert RunConfig(name="run", validation_rate=0.05, inner=FRESH).validation_rate == 0.05
    for settings, named in (
        ({"inner": InnerConfig()}, "fresh_moments = true"),
        ({"fragments": 2}, "fragments"),
        ({"overlap_steps": 3}, "overlap_steps"),
        ({"mixing": 0.5}, "mixing"),
        ({"error_feedback": True}, "error_feedback"),
        ({"member_momentum": 0.5}, "member_momentum"),
        ({"model": {"model_type": "module", "num_values": 3, "digest": "0" * 64}}, "an author's own module"),
        ({"validation_rate": 0.6}, "validation_rate"),
    ):
        with pytest.raises(ValueError, match=named):
            RunConfig(**{"name": "run", "validation_rate": 0.05, "inner": FRESH, **settings})  # type: ignore[arg-type]


def test_warnings_name_contributions_that_validation_does_not_cover() -> None:
    told = [message for message, _ in warnings_of(RunConfig(name="run", validation_rate=0.05, inner=FRESH))]
    assert any("followers are not validated" in message for message in told)
    assert any("the data is not pinned" in message for message in told)
    pinned = replace(RunConfig(name="run").data, digest="0" * 64)
    assert warnings_of(RunConfig(name="run", validation_rate=0.05, inner=FRESH, cluster_size=1, data=pinned)) == []
