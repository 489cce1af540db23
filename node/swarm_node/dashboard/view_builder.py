"""All views of one look: some milliseconds of work with a thousand nodes, for a thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarm_protocol.records import ServeRecord

from swarm_node.dashboard.memo import Made
from swarm_node.dashboard.model_views import model_detail, server_view
from swarm_node.dashboard.node_views import counted, first_token_s, node_view, node_views, num_volunteers
from swarm_node.dashboard.run_views import RunFacts, run_view
from swarm_node.dashboard.views import ModelDetail, NodeView, Overview, RunView, ServerView
from swarm_node.network_snapshot import NetworkSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What does not change: which network this is, and how to join it."""

    network_id: str
    version: str
    join_command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The views of one look, by peer id, model and run id. `overview` is without what the history adds."""

    overview: Overview
    nodes: Mapping[str, NodeView]
    models: Mapping[str, ModelDetail]
    runs: Mapping[str, RunView]


class Drafts:
    """What the picture before was made of, so that the next one makes only what is new. Of whoever makes pictures."""

    def __init__(self) -> None:
        self.nodes = Made(node_view)
        self.servers: dict[str, Made[ServeRecord, ServerView]] = {}

    def keep(self, models: Iterable[str]) -> None:
        """Of these models' servers, and of no others."""
        self.servers = {model: self.servers.get(model) or Made(server_view) for model in models}


def picture(look: NetworkSnapshot, facts: tuple[RunFacts, ...], place: Place, drafts: Drafts) -> Picture:
    nodes = node_views(look.nodes, look.at, drafts.nodes)
    names = {peer_id: node.name for peer_id, node in nodes.items()}
    drafts.keep(look.models)
    found = {
        model: model_detail(model, listed, names, look.rtts_ms, drafts.servers[model])
        for model, listed in look.models.items()
    }
    models = {model: detail for model, detail in sorted(found.items()) if detail is not None}
    runs = {each.run: run_view(each, look.at) for each in sorted(facts, key=lambda each: each.run)}
    by_state, by_reachability = counted(nodes.values())
    p50_s, p95_s = first_token_s(look.nodes.records)
    speeds = [detail.model.tokens_per_s for detail in models.values() if detail.model.tokens_per_s is not None]
    training_speeds = [run.tokens_per_s for run in runs.values() if run.tokens_per_s is not None]
    overview = Overview(
        at=look.at,
        stale=None,
        network_id=place.network_id,
        version=place.version,
        num_nodes=by_state["alive"],
        num_volunteers=num_volunteers(nodes.values()),
        nodes_by_state=by_state,
        nodes_by_reachability=by_reachability,
        models=tuple(detail.model for detail in models.values()),
        runs=tuple(runs.values()),
        tokens_per_s=sum(speeds) if speeds else None,
        training_tokens_per_s=sum(training_speeds) if training_speeds else None,
        first_token_p50_s=p50_s,
        first_token_p95_s=p95_s,
        joins_24h=0,
        leaves_24h=0,
        happenings=(),
        join_command=place.join_command,
    )
    return Picture(overview=overview, nodes=nodes, models=models, runs=runs)


def numbers(made: Picture) -> dict[str, tuple[str, float | None]]:
    """What is kept over time: by the name of its series the unit and the value."""
    overview = made.overview
    values: dict[str, tuple[str, float | None]] = {
        "nodes": ("nodes", float(overview.num_nodes)),
        "tokens_per_s": ("tokens/s", overview.tokens_per_s),
        "training_tokens_per_s": ("tokens/s", overview.training_tokens_per_s),
        "first_token_p50_s": ("s", overview.first_token_p50_s),
        "first_token_p95_s": ("s", overview.first_token_p95_s),
    }
    for model in overview.models:
        values[f"tokens_per_s/{model.name}"] = ("tokens/s", model.tokens_per_s)
        values[f"replicas/{model.name}"] = ("servers", float(model.weakest_replicas))
    for run in overview.runs:
        values[f"training_tokens_per_s/{run.run}"] = ("tokens/s", run.tokens_per_s)
        values[f"members/{run.run}"] = ("members", float(run.num_members))
    return values
