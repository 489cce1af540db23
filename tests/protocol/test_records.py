from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol.decoders import JOINING_TRAINER, NEIGHBOUR, NODE, SERVE, TRAINER
from swarm_protocol import limits, wire
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import peer_id_of
from swarm_protocol.proto import records_pb2
from swarm_protocol.records import (
    NodeRecord,
    PathCounts,
    Record,
    Refusal,
    RoundReport,
    ServeRecord,
    TrainerRecord,
    ValidationReport,
    child_keys,
    lookup_key,
    publish_key,
)

PEER_IDS = st.binary(min_size=32, max_size=32).map(peer_id_of)
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._:@+-]{0,40}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,20})?", fullmatch=True)
TEXTS = st.text(st.characters(categories=("L", "N", "P", "S"), exclude_characters="\u00ad"), min_size=1, max_size=32)
ADDRS = st.from_regex(r"/ip4/[0-9.]{7,15}/tcp/[0-9]{1,5}", fullmatch=True)


def numbers(high: float) -> st.SearchStrategy[float]:
    return st.floats(0.0, high)


def tuples(items: st.SearchStrategy[str], max_items: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(items, max_size=max_items, unique=True).map(tuple)


PATHS = ("direct", "dialled_back", "punched", "relayed")
COUNTS = st.fixed_dictionaries(dict.fromkeys(PATHS, st.integers(0, limits.MAX_CONNECTED)))


@st.composite
def node_records(draw: st.DrawFn) -> NodeRecord:
    memory_bytes = draw(st.integers(0, limits.MAX_MEMORY_BYTES))
    return NodeRecord(
        name=draw(TEXTS),
        version=draw(TEXTS),
        addrs=draw(tuples(ADDRS, limits.MAX_ADDRS)),
        device=draw(TEXTS),
        memory_bytes=memory_bytes,
        free_memory_bytes=draw(st.integers(0, memory_bytes)),
        reachability=draw(st.sampled_from(("public", "relay", "unknown"))),
        prefill_tokens_per_s=draw(numbers(limits.MAX_TOKENS_PER_S)),
        decode_tokens_per_s=draw(numbers(limits.MAX_TOKENS_PER_S)),
        training_tokens_per_s=draw(numbers(limits.MAX_TOKENS_PER_S)),
        started_at=draw(numbers(limits.MAX_TIME_S)),
        state=draw(st.sampled_from(("alive", "leaving"))),
        models=draw(tuples(NAMES, limits.MAX_MODELS_PER_NODE)),
        runs=draw(tuples(NAMES, limits.MAX_RUNS_PER_NODE)),
        role=draw(st.sampled_from(("seed", "gateway", "volunteer", "visitor", ""))),
        first_token_p50_s=draw(st.none() | numbers(limits.MAX_MEASURED_S)),
        first_token_p95_s=draw(st.none() | numbers(limits.MAX_MEASURED_S)),
        paths=draw(st.none() | COUNTS.map(lambda counts: PathCounts(**counts))),
        protocol_version=draw(st.integers(0, 2**31 - 1)),
    )


@st.composite
def serve_records(draw: st.DrawFn) -> ServeRecord:
    num_blocks = draw(st.integers(1, limits.MAX_BLOCKS))
    end = draw(st.integers(1, num_blocks))
    next_end = draw(st.integers(0, num_blocks))
    return ServeRecord(
        model=draw(NAMES),
        revision=draw(NAMES),
        num_blocks=num_blocks,
        start=draw(st.integers(0, end - 1)),
        end=end,
        state=draw(st.sampled_from(("joining", "serving", "draining"))),
        prefill_ms_per_token=draw(numbers(limits.MAX_BLOCK_MS)),
        decode_ms_per_block=draw(numbers(limits.MAX_BLOCK_MS)),
        free_kv_tokens=draw(st.integers(0, limits.MAX_KV_TOKENS)),
        queue_depth=draw(st.integers(0, limits.MAX_QUEUE_DEPTH)),
        rtt_ms=draw(st.dictionaries(PEER_IDS, numbers(limits.MAX_RTT_MS), max_size=limits.MAX_RTT_PEERS)),
        token_ms=draw(st.dictionaries(PEER_IDS, numbers(limits.MAX_RTT_MS), max_size=4)),
        send_ms_per_token=draw(numbers(limits.MAX_BLOCK_MS)),
        relayed=draw(st.booleans()),
        next_start=draw(st.integers(0, max(next_end - 1, 0))),
        next_end=next_end,
        tokens_per_s=draw(st.none() | numbers(limits.MAX_TOKENS_PER_S)),
        source=draw(st.just("") | NAMES),
        max_blocks=draw(st.integers(0, limits.MAX_BLOCKS)),
    )


@st.composite
def round_reports(draw: st.DrawFn) -> RoundReport:
    phases = st.sampled_from(("interval", "group", "reduce", "commit", "apply", "a-new.phase"))
    refusals = st.builds(Refusal, peer_id=PEER_IDS, reason=TEXTS)
    return RoundReport(
        outer_step=draw(st.integers(0, limits.MAX_OUTER_STEP)),
        phases_s=draw(st.dictionaries(phases, numbers(limits.MAX_MEASURED_S), max_size=limits.MAX_PHASES)),
        bytes_sent=draw(st.integers(0, limits.MAX_ROUND_BYTES)),
        refused=draw(st.lists(refusals, max_size=limits.MAX_REFUSALS, unique=True).map(tuple)),
        rates_from=draw(st.dictionaries(PEER_IDS, numbers(limits.MAX_LINK_BYTES_PER_S), max_size=4)),
    )


@st.composite
def trainer_records(draw: st.DrawFn) -> TrainerRecord:
    return TrainerRecord(
        run=draw(NAMES),
        outer_step=draw(st.integers(0, limits.MAX_OUTER_STEP)),
        digest=draw(st.sampled_from((b"", bytes(range(32))))),
        tokens_per_s=draw(numbers(limits.MAX_TOKENS_PER_S)),
        loss=draw(st.none() | st.floats(-limits.MAX_LOSS, limits.MAX_LOSS)),
        state=draw(st.sampled_from(("joining", "training", "finished", "leaving"))),
        report=draw(st.none() | round_reports()),
        num_parameters=draw(st.none() | st.integers(0, limits.MAX_PART_VALUES)),
        validation=draw(
            st.none()
            | st.builds(
                ValidationReport,
                outer_step=st.integers(0, limits.MAX_OUTER_STEP),
                loss=st.floats(-limits.MAX_LOSS, limits.MAX_LOSS),
            )
        ),
    )


@given(record=st.one_of(node_records(), serve_records(), trainer_records()))
def test_record_round_trips(record: Record) -> None:
    assert type(record).from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize("record", [NODE, SERVE, TRAINER], ids=lambda record: type(record).__name__)
def test_record_with_fields_of_a_newer_version_is_read_without_them(record: Record) -> None:
    # field 1000, length-delimited, "new"
    assert type(record).from_bytes(record.to_bytes() + b"\xc2\x3e\x03new") == record


@pytest.mark.parametrize(
    ("record", "change"),
    [
        (NODE, {"name": ""}),
        (NODE, {"name": "a\x1b[2Jb"}),
        (NODE, {"name": "a\u202eb"}),
        (NODE, {"name": "a\u200bb"}),
        (NODE, {"name": "a\nb"}),
        (NODE, {"name": "\ud800"}),
        (NODE, {"name": "a" * (limits.MAX_NODE_NAME_CHARS + 1)}),
        (NODE, {"name": None}),
        (NODE, {"version": ""}),
        (NODE, {"device": "gpu\x00"}),
        (NODE, {"addrs": ["/ip4/1.2.3.4"]}),
        (NODE, {"addrs": ("example.org:80",)}),
        (NODE, {"addrs": ("/ip4/1.2.3.4 ",)}),
        (NODE, {"addrs": ("/ip4/1.2.3.4",) * 2}),
        (NODE, {"addrs": tuple(f"/ip4/1.2.3.{last}" for last in range(limits.MAX_ADDRS + 1))}),
        (NODE, {"free_memory_bytes": NODE.memory_bytes + 1}),
        (NODE, {"memory_bytes": -1}),
        (NODE, {"memory_bytes": 2**50 + 1}),
        (NODE, {"memory_bytes": 1.5}),
        (NODE, {"reachability": "maybe"}),
        (NODE, {"state": "dead"}),
        (NODE, {"decode_tokens_per_s": math.nan}),
        (NODE, {"decode_tokens_per_s": math.inf}),
        (NODE, {"decode_tokens_per_s": -1.0}),
        (NODE, {"decode_tokens_per_s": 1e10}),
        (NODE, {"models": ("../../etc/passwd",)}),
        (NODE, {"runs": ("/absolute",)}),
        (SERVE, {"model": "a//b"}),
        (SERVE, {"model": "a/.hidden"}),
        (SERVE, {"model": "modèle"}),
        (SERVE, {"revision": ""}),
        (SERVE, {"num_blocks": 0}),
        (SERVE, {"start": 20}),
        (SERVE, {"end": 33}),
        (SERVE, {"end": True}),
        (SERVE, {"next_end": 33}),
        (SERVE, {"next_start": 4, "next_end": 4}),
        (SERVE, {"next_start": 1}),
        (SERVE, {"state": ""}),
        (SERVE, {"prefill_ms_per_token": math.nan}),
        (SERVE, {"free_kv_tokens": -1}),
        (NODE, {"pause": "holidays"}),
        (NODE, {"lends_again_at": math.inf}),
        (NODE, {"lends_again_at": -1.0}),
        (SERVE, {"send_ms_per_token": -1.0}),
        (SERVE, {"send_ms_per_token": math.nan}),
        (SERVE, {"token_ms": {"someone": 1.0}}),
        (SERVE, {"token_ms": {NEIGHBOUR: math.nan}}),
        (SERVE, {"token_ms": {peer_id_of(bytes([n] * 32)): 1.0 for n in range(limits.MAX_RTT_PEERS + 1)}}),
        (SERVE, {"rtt_ms": {"someone": 1.0}}),
        (SERVE, {"rtt_ms": {NEIGHBOUR: math.inf}}),
        (SERVE, {"rtt_ms": {peer_id_of(bytes([n] * 32)): 1.0 for n in range(limits.MAX_RTT_PEERS + 1)}}),
        (RoundReport(outer_step=1, bytes_sent=0), {"rates_from": {NEIGHBOUR: -1.0}}),
        (RoundReport(outer_step=1, bytes_sent=0), {"rates_from": {NEIGHBOUR: math.inf}}),
        (RoundReport(outer_step=1, bytes_sent=0), {"rates_from": {"someone": 1.0}}),
        (TRAINER, {"outer_step": -1}),
        (TRAINER, {"digest": b"short"}),
        (TRAINER, {"digest": "00" * 16}),
        (TRAINER, {"loss": math.nan}),
        (TRAINER, {"loss": -math.inf}),
        (TRAINER, {"tokens_per_s": "fast"}),
        (TRAINER, {"state": "idle"}),
        (NODE, {"role": "admin"}),
        (NODE, {"role": None}),
        (NODE, {"first_token_p50_s": math.nan}),
        (NODE, {"first_token_p95_s": -0.1}),
        (SERVE, {"tokens_per_s": math.inf}),
        (SERVE, {"tokens_per_s": -1.0}),
        (SERVE, {"max_blocks": -1}),
        (SERVE, {"max_blocks": limits.MAX_BLOCKS + 1}),
        (SERVE, {"source": "https://example.org/model"}),
        (SERVE, {"source": "../model@main"}),
        (SERVE, {"source": "a" * (limits.MAX_SOURCE_BYTES + 1)}),
        (TRAINER, {"num_parameters": -1}),
        (ValidationReport(outer_step=1, loss=2.0), {"outer_step": -1}),
        (ValidationReport(outer_step=1, loss=2.0), {"loss": math.nan}),
        (TRAINER, {"num_parameters": limits.MAX_PART_VALUES + 1}),
    ],
)
def test_record_with_a_bad_field_is_refused_by_name(record: Record, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(change))}|peer id|start"):
        replace(record, **change)


def test_record_from_bytes_with_a_bad_value_is_a_violation_with_its_reason() -> None:
    honest = TRAINER.to_bytes()
    lying = honest.replace(b"training", b"t\x1b[2Jing")
    assert lying != honest
    with pytest.raises(PeerViolation, match="TrainerRecord is invalid: state is none of"):
        TrainerRecord.from_bytes(lying)


@pytest.mark.parametrize(
    "change",
    [
        {"outer_step": -1},
        {"phases_s": {"re duce": 1.0}},
        {"phases_s": {"<script>": 1.0}},
        {"phases_s": {"p" * (limits.MAX_PHASE_NAME_BYTES + 1): 1.0}},
        {"phases_s": {"reduce": math.nan}},
        {"phases_s": {"reduce": -1.0}},
        {"phases_s": {"reduce": math.inf}},
        {"phases_s": {f"phase-{number}": 1.0 for number in range(limits.MAX_PHASES + 1)}},
        {"bytes_sent": -1},
        {"bytes_sent": limits.MAX_ROUND_BYTES + 1},
        {"refused": [Refusal(peer_id=NEIGHBOUR, reason="late")]},
        {"refused": (Refusal(peer_id=NEIGHBOUR, reason="late"),) * 2},
        {
            "refused": tuple(
                Refusal(peer_id=NEIGHBOUR, reason=f"reason {number}") for number in range(limits.MAX_REFUSALS + 1)
            )
        },
    ],
)
def test_round_report_with_a_bad_field_is_refused_by_name(change: dict[str, Any]) -> None:
    assert TRAINER.report is not None
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(TRAINER.report, **change)


@pytest.mark.parametrize(
    ("peer_id", "reason"),
    [
        ("someone", "late"),
        (NEIGHBOUR, ""),
        (NEIGHBOUR, "a\x1b[2Jb"),
        (NEIGHBOUR, "a\u202eb"),
        (NEIGHBOUR, "two\nlines"),
        (NEIGHBOUR, "r" * (limits.MAX_REFUSAL_CHARS + 1)),
    ],
)
def test_reported_refusal_with_unprintable_text_is_refused(peer_id: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"peer id|reason"):
        Refusal(peer_id=peer_id, reason=reason)


def test_trainer_record_with_a_bad_report_is_a_violation() -> None:
    honest = TRAINER.to_bytes()
    lying = honest.replace(b"a bad slice", b"a bad\nslice")
    assert lying != honest
    with pytest.raises(PeerViolation, match="TrainerRecord is invalid: reason is not one line"):
        TrainerRecord.from_bytes(lying)


def test_records_of_an_older_version_have_unknown_values_for_newer_fields() -> None:
    # written by hand, as a version without the newer fields sends it
    node = records_pb2.NodeRecord(
        name="old", version="0.0.1", device="cpu", reachability="unknown", state="alive", started_at=1.0
    )
    serve = records_pb2.ServeRecord(model="m", revision="r", num_blocks=4, start=0, end=4, state="serving")
    trainer = records_pb2.TrainerRecord(run="r", outer_step=3, state="training")
    old_node = NodeRecord.from_bytes(wire.encode(node))
    assert (old_node.role, old_node.first_token_p50_s, old_node.first_token_p95_s) == ("", None, None)
    assert (old_node.paths, old_node.protocol_version) == (None, 0)
    old_serve = ServeRecord.from_bytes(wire.encode(serve))
    assert (old_serve.tokens_per_s, old_serve.max_blocks) == (None, 0)
    old_trainer = TrainerRecord.from_bytes(wire.encode(trainer))
    assert (old_trainer.report, old_trainer.num_parameters) == (None, None)


def test_records_distinguish_zero_from_unknown() -> None:
    assert ServeRecord.from_bytes(replace(SERVE, tokens_per_s=0.0).to_bytes()).tokens_per_s == 0.0
    assert NodeRecord.from_bytes(replace(NODE, first_token_p50_s=0.0).to_bytes()).first_token_p50_s == 0.0
    assert NodeRecord.from_bytes(replace(NODE, paths=PathCounts()).to_bytes()).paths == PathCounts()
    assert TrainerRecord.from_bytes(replace(TRAINER, num_parameters=0).to_bytes()).num_parameters == 0
    empty = RoundReport(outer_step=0, bytes_sent=0)
    assert TrainerRecord.from_bytes(replace(TRAINER, report=empty).to_bytes()).report == empty


def test_records_with_numbers_by_name_can_be_hashed() -> None:
    report = RoundReport(outer_step=1, phases_s={"reduce": 1.0}, bytes_sent=0)
    assert hash(report) == hash(replace(report))
    record = replace(SERVE, rtt_ms={NEIGHBOUR: 1.0})
    assert asdict(record)["rtt_ms"] == {NEIGHBOUR: 1.0}
    assert hash(record) == hash(replace(record))


def test_trainer_record_distinguishes_no_loss_from_a_loss_of_zero() -> None:
    for loss in (None, 0.0):
        record = replace(JOINING_TRAINER, loss=loss)
        assert TrainerRecord.from_bytes(record.to_bytes()).loss == loss


@given(peer_id=PEER_IDS)
def test_publish_key_of_each_depth_is_below_the_one_before(peer_id: str) -> None:
    for record, root in (
        (NODE, lookup_key("nodes")),
        (SERVE, lookup_key("serve", SERVE.model)),
        (TRAINER, lookup_key("train", TRAINER.run)),
    ):
        assert publish_key(record, peer_id) == root
        for depth in range(limits.MAX_KEY_DEPTH):
            assert publish_key(record, peer_id, depth + 1) in child_keys(publish_key(record, peer_id, depth))
        assert child_keys(publish_key(record, peer_id, limits.MAX_KEY_DEPTH)) == ()


def test_keys_of_a_peer_are_those_of_the_specification() -> None:
    # of the specification's peer id: sha256 of its text, its last octal digits
    peer_id = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
    assert publish_key(NODE, peer_id) == "nodes#"
    assert publish_key(NODE, peer_id, 1) == "nodes#3"
    assert publish_key(SERVE, peer_id, 1) == "serve/meta-llama/Llama-3.1-8B#3"
    assert publish_key(TRAINER, peer_id, 1) == "train/stdlib-1f00ba44#3"
    assert child_keys("nodes#") == tuple(f"nodes#{child}" for child in range(8))


def test_children_of_a_key_share_many_peers_evenly() -> None:
    keys = [publish_key(NODE, peer_id_of(number.to_bytes(32, "big")), 1) for number in range(8000)]
    counts = [keys.count(key) for key in child_keys("nodes#")]
    assert sum(counts) == 8000
    assert all(900 < count < 1100 for count in counts)


@pytest.mark.parametrize(("kind", "name"), [("files", ""), ("nodes", "a"), ("serve", ""), ("train", "../x")])
def test_lookup_key_of_invalid_values_is_refused(kind: Any, name: str) -> None:
    with pytest.raises(ValueError, match=r"name|kind"):
        lookup_key(kind, name)
