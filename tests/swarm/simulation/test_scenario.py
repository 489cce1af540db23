"""Tests of the values of a scenario file, and of the line that names a wrong one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path as FilePath

import pytest
from swarm.simulation.scenario import Path, Region, read_scenario, read_trace
from swarm_protocol.errors import ConfigError

SERVER = '[[classes]]\nrole = "serve"\n'


def read(text: str, trace: str = "") -> object:
    return read_scenario(tomllib.loads(text), trace)


def test_empty_scenario_has_only_defaults() -> None:
    scenario = read_scenario({})
    assert (scenario.nodes, scenario.churn.model, scenario.model, scenario.training) == (1000, "none", None, None)


def test_scenarios_of_the_guide_are_valid() -> None:
    guide = (FilePath(__file__).parents[3] / "docs" / "guides" / "simulate.md").read_text()
    examples = re.findall(r"```toml\n(.*?)```", guide, flags=re.DOTALL)
    first, larger = (read_scenario(tomllib.loads(example)) for example in examples)
    assert (first.name, larger.name) == ("a first look", "an evening")
    assert {kind.role for kind in larger.classes} == {"serve", "train", "gateway", "idle"}


def test_scenario_holds_what_its_file_says() -> None:
    scenario = read_scenario(
        tomllib.loads(
            'nodes = 50\nminutes = 1\n[[regions]]\nname = "a"\n[[regions]]\nname = "b"\nlatency_ms = 5\n'
            '[[paths]]\nbetween = ["a", "b"]\nlatency_ms = 70\n[model]\nblocks = 4\n' + SERVER
        )
    )
    assert scenario.nodes == 50
    assert scenario.minutes == 1.0
    assert scenario.regions == (Region(name="a"), Region(name="b", latency_ms=5.0))
    assert scenario.paths == (Path(between=("a", "b"), latency_ms=70.0),)
    assert scenario.model is not None
    assert scenario.model.blocks == 4


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("node = 5", "the scenario has the unknown key 'node'", "did you mean nodes?"),
        ("sessions = []", "unknown key 'sessions'", "did you mean regions?"),
        ("nodes = 1", "nodes of the scenario is 1", "use a whole number from 2 to 100,000"),
        ("nodes = 2.5", "nodes of the scenario is 2.5", "a whole number"),
        ("nodes = true", "nodes of the scenario is True", "a whole number"),
        ("minutes = nan", "minutes of the scenario is nan", "use a number above 0 and at most 43,200"),
        ('name = "a\\nb"', "name of the scenario is", "a line of text"),
        ("churn = 3", "[churn] is not a table", "write [churn] on a line"),
        ('[churn]\nmodel = "half"', "model of [churn] is 'half'", "use one of none, half-life"),
        ("[churn]\nhalflife = 3", "[churn] has the unknown key 'halflife'", "did you mean half_life_minutes?"),
        ("[churn]\nreplace = 1", "replace of [churn] is 1", "use true or false"),
        ('[churn]\nmodel = "trace"', "trace and model", "give both or neither"),
        ("[regions]\nshare = 1", "regions is not a list", "write [[regions]] above each"),
        ("[[regions]]\nshare = 0", "share of [[regions]] number 1 is 0", "use a number above 0 and at most 1,000,000"),
        ("[[regions]]\n[[regions]]\n", "two regions are called 'anywhere'", "its own name"),
        ('[[paths]]\nbetween = ["anywhere", "x"]', "unknown region 'x'", "use one of anywhere"),
        ('[[paths]]\nbetween = "anywhere"', "between of [[paths]] number 1", "the names of two regions"),
        (
            '[[paths]]\nbetween = ["anywhere", "anywhere"]',
            "a path leads from 'anywhere' to itself",
            "latency_ms of the region",
        ),
        (
            '[[regions]]\n[[regions]]\nname = "b"\n[[paths]]\nbetween = ["anywhere", "b"]\n'
            '[[paths]]\nbetween = ["b", "anywhere"]\nlatency_ms = 9',
            "two paths are between 'b' and 'anywhere'",
            "give one",
        ),
        ("[churn]\nhalf_life_minutes = 5", "half_life_minutes of [churn] does nothing", 'write model = "half-life"'),
        ('[churn]\nmodel = "half-life"\nshape = 1', "shape of [churn] does nothing", 'write model = "weibull"'),
        (
            '[training]\ninterval_minutes = 1e-9\n[[classes]]\nrole = "train"\n',
            "interval_minutes of [training] is 1e-09",
            "use a number from 0.1 to 1,440",
        ),
        (SERVER, "[model] and classes", "give both or neither"),
        ('[plan]\nvary = "x"', "a [plan] needs a class that serves or trains", 'role = "serve" or "train"'),
        (
            '[plan]\nvary = "x"\n[model]\n' + SERVER,
            "varies 'x', which neither serves nor trains",
            "use one of volunteer",
        ),
        (
            '[plan]\nvary = "volunteer"\n[model]\n[churn]\nmodel = "trace"\ntrace = "t"\n' + SERVER,
            "which a trace decides",
            "give one of the two",
        ),
        ('[[classes]]\nrole = "gateway"', "without a [model]", "say which model"),
        (
            '[training]\nmembers = 256\ncluster_size = 17\n[[classes]]\nrole = "train"\n',
            "members times cluster_size of [training] is 4352",
            "at most 4096 in all",
        ),
    ],
)
def test_scenario_with_a_mistake_is_refused_by_its_key(text: str, message: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert message in caught.value.message
    assert remedy in caught.value.remedy


def test_trace_gives_the_sessions_and_their_number() -> None:
    scenario = read_scenario(
        tomllib.loads('[churn]\nmodel = "trace"\ntrace = "t.csv"'), "# join, leave\n-5,60\n\n30,90.5 # late\n"
    )
    assert scenario.sessions == ((-5.0, 60.0), (30.0, 90.5))
    assert scenario.nodes == 2


@pytest.mark.parametrize("text", ["1,2", "1;2\n3,4", "5,4\n1,2", "nan,4\n1,2", "-9,-1\n1,2"])
def test_trace_with_a_mistake_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_trace(text)
