"""The work that a node without a given task takes, and the work that it postpones, with the reason."""

from __future__ import annotations

import asyncio
import io
import json
import math
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from support.node_settings import resolve
from support.tiny_models import FAMILIES, write_model
from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.network.memory.memory_network import MemoryInternet
from swarm.network.traffic import Traffic
from swarm.serving.model.model_files import hub_revision, open_model
from swarm.testing import virtual_time
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_copy import serve_run
from swarm.training.run.run_cost import LOGIT_VALUES, PARAMETER_BYTES
from swarm.training.run.run_file import sign_run
from swarm.training.run.run_model import check_model
from swarm.training.run.run_tables import DataConfig, InnerConfig, StartConfig
from swarm_node.events.emitter import Emitter
from swarm_node.lending.lending import Lending
from swarm_node.lending.traffic_count import LinkUse, MonthlyTraffic
from swarm_node.node import Node, StartupSteps
from swarm_node.roles import volunteer
from swarm_node.roles.helper import MAX_POSTPONED, HelperRole, ModelNeed, RunNeed
from swarm_node.settings.config import Config, Value
from swarm_node.settings.parsers import HubId
from swarm_node.shutdown import Shutdown
from swarm_node.storage.home import Home
from swarm_protocol.errors import ConfigError, SessionError
from swarm_protocol.identity import Identity
from swarm_protocol.manifest_messages import open_manifest
from swarm_protocol.records import NodeRecord, TrainerRecord

from protocol import manifest_examples

COMMIT = "c0ffee" * 6 + "c0ff"
RUN = RunConfig(name="open", min_group=1)
Scene = Callable[[Node, Network, Membership], Awaitable[None]]


def need(*sources: str, revision: str = hub_revision(COMMIT, "bfloat16")) -> ModelNeed:
    return ModelNeed(name="tiny", revision=revision, sources=sources, manifest=b"", holders=(), num_helpers=0, why="")


def test_model_comes_from_the_hub_and_in_the_dtype_that_match_its_revision(tmp_path: Path) -> None:
    wrong = ("someone/other@" + COMMIT, "someone/tiny@main", "no-hub", "/etc/tiny", "someone/tiny")
    found = volunteer._origin(need(*wrong, f"someone/tiny@{COMMIT}"), tmp_path / "none", None)
    assert found == (HubId("someone/tiny", COMMIT), "bfloat16")
    for branch in ("main", "c0ffee"):
        moving = need(f"someone/tiny@{branch}", revision=hub_revision(branch, "bfloat16"))
        for nothing in (need(*wrong), moving):
            with pytest.raises(ConfigError, match="from their own directories"):
                volunteer._origin(nothing, tmp_path / "none", None)


def test_model_that_this_node_has_trained_is_served_from_its_home(tmp_path: Path) -> None:
    place = write_model(tmp_path / "tiny", FAMILIES["llama"]())
    revision = open_model(place).revision("float16")
    assert volunteer._origin(need(revision=revision), place, None) == (place, "float16")
    with pytest.raises(ConfigError, match="from their own directories"):
        volunteer._origin(need(), place, None)


def test_published_model_comes_from_a_hub_under_any_name_in_the_dtype_of_its_servers(tmp_path: Path) -> None:
    """Its files are checked against the manifest while they are loaded."""
    published = open_manifest(manifest_examples.SIGNED)
    wanted = need("/etc/tiny", f"someone/other@{COMMIT}", revision=published.revision("int4"))
    found = volunteer._origin(wanted, tmp_path / "none", published)
    assert found == (HubId("someone/other", COMMIT), "int4")
    with pytest.raises(ConfigError, match="from their own directories"):
        volunteer._origin(need(f"someone/other@{COMMIT}", revision="0" * 32), tmp_path / "none", published)


def in_a_network(test: Scene, tmp_path: Path, config: Config) -> None:
    """Run `test` with a node, and with the network and membership of another, in virtual time."""

    async def scene() -> None:
        internet = MemoryInternet()
        async with AsyncExitStack() as stack:
            mine, other = internet.network(), internet.network()
            membership, others = [await stack.enter_async_context(Membership(each)) for each in (mine, other)]
            emitter = Emitter(json=True, out=io.StringIO(), err=io.StringIO())
            node = Node(
                config=config,
                home=Home(tmp_path),
                identity=Identity.generate(),
                emitter=emitter,
                shutdown=Shutdown(),
                hardware=MagicMock(device="cpu", free_memory_bytes=1 << 40, read_memory=lambda: (1 << 32, 1 << 40)),
                network=mine,
                membership=membership,
                steps=StartupSteps(emitter, 9),
                lending=Lending((), 0, MonthlyTraffic(tmp_path / "traffic.json", 0.0)),
                link_use=LinkUse(Traffic(), 0.0),
            )
            await test(node, other, others)
        await internet.close()

    virtual_time.run(scene())


@pytest.fixture
def told(tmp_path: Path) -> Config:
    return resolve({"home": str(tmp_path)}, env={})


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (replace(RUN, max_group=2, cluster_size=1), "it is full with 2 trainers"),
        (replace(RUN, admission=(Identity(bytes(32)).peer_id,)), "admits only the peers in its setting admission"),
        (replace(RUN, invitations="required"), "takes only nodes with an invitation"),
        (replace(RUN, data=DataConfig(source="files")), "trains on each member's own data"),
        (replace(RUN, data=DataConfig(tokenizer="local")), "run.s tokenizer is each member.s own"),
        (replace(RUN, data=DataConfig(source="hub", hub_id="a/b")), "downloaded from a hub"),
        (replace(RUN, data=DataConfig(tokenizer="a/b")), "downloaded from a hub"),
        (replace(RUN, start=StartConfig(checkpoint="a/b", digest="ab" * 32)), "its start checkpoint must be loaded"),
        (replace(RUN, model={**RUN.model, "hidden_size": 1 << 14, "intermediate_size": 1 << 14}), "of memory"),
        (replace(RUN, inner=InnerConfig(batch_windows=1 << 16)), "of memory"),
    ],
    ids=[
        "full",
        "closed",
        "by invitation",
        "files",
        "tokenizer",
        "hub data",
        "hub tokenizer",
        "checkpoint",
        "huge",
        "huge steps",
    ],
)
def test_unsuitable_run_is_postponed_with_the_reason(run: RunConfig, reason: str, told: Config, tmp_path: Path) -> None:
    async def scene(node: Node, other: Network, others: Membership) -> None:
        signed = sign_run(run, Identity(bytes(32)), issued_at=1)
        others.announce(TrainerRecord(run=signed.run_id, outer_step=0, state="training"))
        await serve_run(other, signed)
        with pytest.raises(ConfigError, match=reason):
            await volunteer.prepare_work(node, RunNeed(name=signed.run_id, num_helpers=2, why=""))

    in_a_network(scene, tmp_path, told)


def test_memory_for_a_run_is_that_of_the_replicas_that_one_device_computes_at_a_time() -> None:
    run = replace(RUN, inner=InnerConfig(batch_windows=64))

    def activations(**settings: Value) -> int:
        return volunteer._memory_bytes(run, resolve(settings)) - PARAMETER_BYTES * check_model(run)

    whole = activations()
    assert activations(micro_batch="16") == whole // 4
    assert activations(devices="cuda:0,cuda:1,cuda:2,cuda:3") == whole // 4
    assert activations(devices="cpu,cpu,cpu,cpu") == whole, "processes on one machine share its memory"
    logits = 4 * 64 * run.data.window_tokens * LOGIT_VALUES * run.model["vocab_size"]
    assert logits < activations(checkpoint_activations=True) < whole


def test_first_member_without_the_checkpoint_of_its_run_is_refused_before_it_prepares(
    told: Config, tmp_path: Path
) -> None:
    run = sign_run(replace(RUN, start=StartConfig(checkpoint="local")), Identity(bytes(32)), issued_at=1)

    async def scene(node: Node, _other: Network, others: Membership) -> None:
        with pytest.raises(ConfigError, match="each member has its own copy"):
            await volunteer._check_start(node, run)
        others.announce(TrainerRecord(run=run.run_id, outer_step=0, state="training"))
        await volunteer._check_start(node, run)

    in_a_network(scene, tmp_path, told)


@pytest.mark.parametrize(
    ("failure", "told_as"),
    [(SessionError("it broke"), "it broke"), (TypeError("it broke"), "unexpected TypeError: it broke")],
)
def test_node_without_work_waits_takes_new_work_and_avoids_work_that_failed(
    failure: Exception, told_as: str, told: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of a stranger's run may raise any error."""
    done: list[str] = []

    async def prepared(_node: Node, what: RunNeed) -> volunteer.Work:
        async def work() -> None:
            done.append(what.name)
            if what.name == "bad":
                raise failure

        return work

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the traceback of an unexpected error goes

    async def scene(node: Node, other: Network, others: Membership) -> None:
        monkeypatch.setattr(volunteer, "prepare_work", prepared)
        helping = asyncio.create_task(HelperRole(told).run(node))
        await asyncio.sleep(12)
        others.announce(_named_node())
        for run in ("bad", "good"):
            others.announce(TrainerRecord(run=run, outer_step=0, state="training"))
        await asyncio.sleep(60)
        assert done == ["bad", "good"], "each must run once"
        await asyncio.sleep(300)
        assert done == ["bad", "good", "bad"]
        node.shutdown.request("Ctrl-C")
        await helping
        events = [json.loads(line) for line in node.emitter._out.getvalue().splitlines()]  # type: ignore[attr-defined]
        assert [event["event"] for event in events[:5]] == ["waiting", "step", "warning", "step", "waiting"]
        steps = [(event["number"], event["of"]) for event in events if event["event"] == "step"]
        first = HelperRole.num_steps
        assert steps == [(1, first), (2, first + 1), (3, first + 2)], "work that was given up leaves steps out"
        assert events[0]["reason"].startswith("nobody serves a model or trains a run")
        assert events[1]["detail"] == "run bad has only 1 member"
        assert events[4]["reason"] == f"bad: {told_as}; good: it is finished here"

    in_a_network(scene, tmp_path, told)


@pytest.mark.parametrize(
    ("limit", "take", "is_told"), [("600MiB", "any", True), ("600MiB", "runs", False), ("1GiB", "any", False)]
)
def test_node_whose_limit_leaves_no_memory_for_a_model_says_what_would_do(
    tmp_path: Path, limit: str, take: str, is_told: bool
) -> None:
    async def scene(node: Node, _other: Network, _others: Membership) -> None:
        node.shutdown.request("Ctrl-C")
        await HelperRole(node.config).run(node)
        events = [json.loads(line) for line in node.emitter._out.getvalue().splitlines()]  # type: ignore[attr-defined]
        told = [(event["message"], event["remedy"]) for event in events if event["event"] == "warning"]
        assert told == is_told * [
            (
                "this node can serve no model: of 600 MiB of memory the node itself takes 560 MiB and needs 107 MiB "
                "to work: none is left for a model",
                "allow 667 MiB with --max-memory, and what the model takes",
            )
        ]

    in_a_network(scene, tmp_path, resolve({"home": str(tmp_path), "max_memory": limit, "take": take}, env={}))


def _named_node() -> NodeRecord:
    return NodeRecord(
        name="other",
        version="1",
        addrs=(),
        device="cpu",
        memory_bytes=1,
        free_memory_bytes=1,
        reachability="public",
        started_at=1.0,
        role="volunteer",
    )


def test_made_up_work_is_remembered_in_bounds_and_reported_with_one_short_line() -> None:
    out = io.StringIO()
    node = MagicMock(emitter=Emitter(json=True, out=out, err=io.StringIO()))
    helper = HelperRole(MagicMock())

    async def main() -> None:
        for number in range(2 * MAX_POSTPONED):
            helper._postpone(f"made-up-{number}", "nobody gives its file", 300.0)
        helper._report_waiting(node)
        helper._postpone("done", "it is finished here", math.inf)
        helper._report_waiting(node)
        helper._report_waiting(node)

    asyncio.run(main())
    assert len(helper._postponed) == MAX_POSTPONED
    reason, news = (json.loads(line)["reason"] for line in out.getvalue().splitlines())
    assert news == "done: it is finished here", "what was reported before must not be reported again"
    assert f"made-up-{2 * MAX_POSTPONED - 1}: nobody gives its file" in reason
    assert reason.endswith(f"; and {MAX_POSTPONED - 3} more")
    assert len(reason) < 200


def test_run_with_a_local_tokenizer_is_refused_before_training_where_none_is_named() -> None:
    """Prepared tokens on the machine do not help, since the finished model is written with its tokenizer."""
    config = replace(RUN, data=DataConfig(tokenizer="local"))
    with pytest.raises(ConfigError, match="tokenizer is each member's own"):
        volunteer.check_run(config, resolve({}))
