"""The needs of a network, computed from its records, the thinnest first."""

from __future__ import annotations

from collections.abc import Mapping

from swarm_node.network_snapshot import Listed, NetworkSnapshot
from swarm_node.roles.helper import ModelNeed, RunNeed, needs
from swarm_protocol.records import ServeRecord, TrainerRecord

SOURCE = "someone/tiny@c0ffee"


def server(start: int, end: int, **more: object) -> ServeRecord:
    fields = {"revision": "r", "num_blocks": 4, "state": "serving", "source": SOURCE, **more}
    return ServeRecord(
        model="tiny",
        start=start,
        end=end,
        prefill_ms_per_token=1.0,
        decode_ms_per_block=1.0,
        free_kv_tokens=1,
        **fields,  # type: ignore[arg-type]
    )


def trainer(state: str = "training") -> TrainerRecord:
    return TrainerRecord(run="story", outer_step=1, state=state)  # type: ignore[arg-type]


def look(
    models: Mapping[str, Mapping[str, ServeRecord]], runs: Mapping[str, Mapping[str, TrainerRecord]] | None = None
) -> NetworkSnapshot:
    return NetworkSnapshot(
        at=0.0,
        nodes=Listed(records={}, ages_s={}),
        models={name: Listed(records=each, ages_s={}) for name, each in models.items()},
        runs={name: Listed(records=each, ages_s={}) for name, each in (runs or {}).items()},
    )


def test_needs_rank_a_model_with_a_gap_before_a_run_of_one_and_that_before_two_servers() -> None:
    whole = {"a": server(0, 4), "b": server(0, 4)}
    found = needs(
        look({"gap": {"a": server(0, 3)}, "thin": {"a": server(0, 4)}, "whole": whole}, {"story": {"a": trainer()}}),
        "me",
    )
    assert [(need.name, need.num_helpers) for need in found] == [("gap", 0), ("thin", 1), ("story", 1), ("whole", 2)]
    assert [need.why for need in found] == [
        "1 of the 4 blocks of gap has no server",
        "4 of the 4 blocks of thin have only 1 server",
        "run story has only 1 member",
        "4 of the 4 blocks of whole have only 2 servers",
    ]


def test_needs_count_only_nodes_that_stay_and_never_this_one() -> None:
    servers = {"a": server(0, 2), "b": server(2, 4, state="draining"), "me": server(2, 4)}
    [need] = needs(look({"tiny": servers}, {"done": {"a": trainer("finished"), "b": trainer("leaving")}}), "me")
    assert (need.name, need.num_helpers) == ("tiny", 0)
    assert needs(look({"tiny": {"me": server(0, 4)}}, {"mine": {"me": trainer()}}), "me") == []


def test_need_for_a_model_has_the_revision_and_sources_of_most_servers() -> None:
    servers = {
        "a": server(0, 4),
        "b": server(0, 2),
        "c": server(0, 4, source="other/tiny@1"),
        "d": server(0, 4, revision="forged", source="evil/tiny@2"),
        "e": server(0, 4, source=""),
    }
    [need] = needs(look({"tiny": servers}), "me")
    assert isinstance(need, ModelNeed)
    assert need.revision == "r"
    assert need.sources == (SOURCE, "other/tiny@1")
    assert need.num_helpers == 3


def test_need_for_a_run_counts_nodes_that_are_joining() -> None:
    [need] = needs(look({}, {"story": {"a": trainer("joining"), "b": trainer(), "c": trainer("leaving")}}), "me")
    assert isinstance(need, RunNeed)
    assert need.num_helpers == 2
