"""The rendered text at every size of swarm and terminal, and with hostile names."""

from __future__ import annotations

import asyncio
from datetime import datetime

import pytest
from rich.cells import cell_len
from support.dashboard_swarms import HOSTILE_NAMES
from swarm_node.dashboard.views import PathView
from swarm_node.formatting import clean, count, duration, moment, rate, size, sparkline
from swarm_node.top import rendering
from swarm_node.top.command import snapshot_text
from swarm_node.top.rendering import missing_row, replica_row, span_row
from swarm_protocol.records import PathCounts

from .conftest import swarm


@pytest.mark.parametrize("width", [1, 8, 40])
@pytest.mark.parametrize("name", [*HOSTILE_NAMES, "名前" * 40, "[bold red]markup[/]", "\x1b]0;title\x07", "a\u2028b"])
def test_clean_gives_a_line_that_fits_without_terminal_codes(name: str, width: int) -> None:
    shown = clean(name, width)
    assert cell_len(shown) <= width
    assert shown.isprintable()


def test_clean_leaves_what_is_harmless() -> None:
    assert clean("grün [x] 名", 20) == "grün [x] 名"
    assert clean("exactly", 7) == "exactly"
    assert clean("exactly.", 7) == "exactl…"


def test_rows_show_each_block_when_there_is_room() -> None:
    assert span_row(1, 3, 4, 10) == "·██·"
    assert replica_row((0, 1, 9, 12), 10) == "·19+"
    assert missing_row(((1, 3),), 4, 10) == "█··█"


def test_rows_of_a_large_model_show_the_worst_block_of_a_cell() -> None:
    assert span_row(0, 3, 8, 4) == "█▒··"
    assert replica_row((3, 1, 2, 2, 5, 0, 7, 7), 4) == "12·7"
    assert missing_row(((7, 8),), 8, 4) == "███·"
    assert replica_row((), 4) == missing_row((), 0, 4) == span_row(0, 0, 0, 4) == ""


def test_sparkline_shows_the_newest_finite_values() -> None:
    assert sparkline([3.0, 2.0, 1.0], 24) == "█▅▁"
    assert sparkline([9.0, 2.0, 2.0], 2) == "▁▁"
    assert sparkline([float("nan"), 1.0, float("inf"), 2.0], 9) == "▁█"
    assert sparkline([], 9) == sparkline([1.0], 0) == ""


def test_amounts_are_written_in_a_few_characters() -> None:
    assert [rate(each) for each in (None, 0.0, 4.13, 41.2, 999.7, 3100.0, 2.4e6)] == [
        *("–", "0 tok/s", "4.1 tok/s", "41 tok/s", "1.0k tok/s", "3.1k tok/s", "2.4M tok/s")
    ]
    assert [size(each) for each in (0, 512, 4.8e9, 250e9)] == ["0 B", "512 B", "4.47 GiB", "233 GiB"]
    assert [duration(each) for each in (-5, 0.415, 41.9, 200, 7500, 360000)] == [
        *("0 s", "415 ms", "42 s", "3 min 20 s", "2 h 5 min", "4 days")
    ]
    assert count(float("nan")) == duration(float("inf")) == duration(None) == "–"


SNAPSHOT = """\
6 volunteers among 8 nodes
reached: 6 public, 2 relay · 24 h: 2 joined, 1 left
connections, counted at each end: 21 direct, 15 punched, 7 relayed
52 tok/s answered, 3.1k tok/s trained · first token 410 ms p50, 1.4 s p95

JOIN WITH
swarm-node join --peers /dns4/seed.example.org/tcp/4001/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA

MODELS
thin       Qwen/Qwen3-8B            36 blocks, 6 servers, 52 tok/s
           ████████████████████████████████████
           One more would make it safe.

RUNS
training   stories-110m             step 118 of 300, loss 2.161
           █▄▁  5 members, 5 of 5 agree, 3.1k tok/s
           It goes.
"""


def test_overview_of_a_small_swarm_equals_the_stored_text() -> None:
    view = swarm(8).overview()
    [model], [run] = view.models, view.runs
    model = model.model_copy(update={"health": "thin", "tokens_per_s": 52.0, "words": "One more would make it safe."})
    run = run.model_copy(
        update={"loss": 2.161, "losses": (3.0, 2.5, 2.161), "tokens_per_s": 3100.0, "words": "It goes."}
    )
    speeds = {"tokens_per_s": 52.0, "training_tokens_per_s": 3100.0}
    shown = view.model_copy(update={"models": (model,), "runs": (run,), **speeds})
    assert rendering.overview(shown, 100).plain.startswith(SNAPSHOT)


def test_server_that_the_dashboard_s_gateway_cannot_reach_is_shown_as_unreachable() -> None:
    (detail,) = swarm(8).model_details.values()
    first, *others = detail.servers
    lost = detail.model_copy(update={"servers": (first.model_copy(update={"unreachable": True}), *others)})
    assert rendering.model(lost, 100).plain.count("unreachable: the gateway's requests to it failed\n") == 1


def test_run_that_trains_no_more_has_no_speed() -> None:
    view = swarm(8).overview()
    still = view.model_copy(update={"runs": (view.runs[0].model_copy(update={"tokens_per_s": None}),)})
    assert "5 members, 5 of 5 agree\n" in rendering.overview(still, 100).plain


@pytest.mark.parametrize("num_nodes", [0, 1, 8, 1000])
@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("width", [20, 40, 100, 240])
def test_whole_screen_keeps_to_its_width_and_has_no_terminal_codes(num_nodes: int, hostile: bool, width: int) -> None:
    source = swarm(num_nodes, hostile=hostile)
    lines = rendering.overview(source.overview(), width).plain.splitlines()
    del lines[lines.index("JOIN WITH") + 1]  # the command is whole: a terminal folds it
    for model in source.overview().models:
        detail = asyncio.run(source.model(model.name))
        assert detail is not None
        lines += rendering.model(detail, width).plain.splitlines()
    for found in source.nodes()[:12]:
        detail = asyncio.run(source.node(found.peer_id))
        lines += rendering.node(detail, width).plain.splitlines()
    assert [line for line in lines if not line.isprintable()] == []
    # the map has its least width, beside a name
    least = rendering.NAME_CELLS + 1 + rendering.MIN_MAP_CELLS
    assert [line for line in lines if cell_len(line) > max(width, least)] == []


def test_names_from_a_false_dashboard_have_no_terminal_codes() -> None:
    source, paths = swarm(8), {"\x1b]0;title\x07": 3}
    overview = source.overview().model_copy(update={"paths": paths})
    run = asyncio.run(source.run(overview.runs[0].run))
    node = asyncio.run(source.node(source.nodes()[0].peer_id))
    assert run is not None
    assert node is not None
    shown = [
        rendering.overview(overview, 100),
        rendering.run(run.model_copy(update={"run": run.run.model_copy(update={"run": "\x1b[2Ja\u202eb"})}), 100),
        rendering.node(node.model_copy(update={"node": node.node.model_copy(update={"paths": paths})}), 100),
    ]
    assert [line for text in shown for line in text.plain.splitlines() if not line.isprintable()] == []


def test_node_shows_the_path_from_here_and_what_it_counts_itself() -> None:
    source = swarm(8)
    path = PathView(kind="dialled back", rtt_ms=31.26, sent_bytes=3 * 2**20, received_bytes=0)
    paths = PathCounts(direct=1, punched=2).by_kind()
    detail = asyncio.run(source.node(source.nodes()[0].peer_id))
    assert detail is not None
    near = detail.model_copy(update={"node": detail.node.model_copy(update={"from_here": path, "paths": paths})})
    lines = rendering.node(near, 100).plain.splitlines()
    assert "connected to 1 direct, 2 punched" in lines
    assert "from here: dialled back, 31.3 ms, 3 MiB sent, under 1 MiB received" in lines
    apart = detail.model_copy(update={"node": detail.node.model_copy(update={"from_here": None, "paths": None})})
    lines = rendering.node(apart, 100).plain.splitlines()
    assert {"connected to –", "from here: not connected"} <= set(lines)
    itself = detail.model_copy(update={"node": detail.node.model_copy(update={"from_here": None, "is_observer": True})})
    assert "from here: this node itself" in rendering.node(itself, 100).plain.splitlines()


def test_once_prints_everything_of_a_swarm_and_that_it_is_outdated() -> None:
    source = swarm(8)
    source.shown = source.overview().model_copy(update={"stale": "no node\nanswers"})
    text = asyncio.run(snapshot_text(source, 100))
    head, *_ = text.splitlines()
    assert head == (
        "network a-swarm-of-friends · version 0.1.0 · as of 2023-11-14 22:13:20 UTC · STALE: no node�answers"
    )
    for said in ("replicas per block", "████████████····", "CONTRIBUTORS", "REFUSED OR COUNTED LESS", "JOIN WITH"):
        assert said in text


def test_time_beyond_any_calendar_is_rendered() -> None:
    assert moment(1e300) == "1970-01-01 00:00:00 UTC"


def test_state_that_no_member_holds_any_more_is_not_called_unknown() -> None:
    source = swarm(8)
    run = asyncio.run(source.run(source.overview().runs[0].run))
    assert run is not None
    assert f"\nstate {run.run.digest[:12]}: 5 of 5 agree\n" in rendering.run(run, 100).plain
    ahead = run.run.model_copy(update={"num_at_step": 0, "num_agreeing": 0})
    text = rendering.run(run.model_copy(update={"run": ahead}), 100).plain
    assert f"\nstate {run.run.digest[:12]}: members report other steps\n" in text
    gone = ahead.model_copy(update={"state": "gone"})
    text = rendering.run(run.model_copy(update={"run": gone}), 100).plain
    assert f"\nstate {run.run.digest[:12]}: no member is at this step any more\n" in text
    unknown = gone.model_copy(update={"digest": ""})
    assert "\nstate –: no digest yet\n" in rendering.run(run.model_copy(update={"run": unknown}), 100).plain


def test_waiting_run_shows_the_whole_remedy_in_any_terminal_width() -> None:
    source = swarm(8)
    run = asyncio.run(source.run(source.overview().runs[0].run))
    assert run is not None
    words = f"It waits: missing: {', '.join(['attic'] * 8)}. The run's author lets the others go on: run resume."
    waits = run.run.model_copy(update={"state": "waiting", "words": words})
    assert words in rendering.run(run.model_copy(update={"run": waits}), 40).plain


def test_run_shows_its_id_and_the_whole_id_of_its_author_in_any_terminal_width() -> None:
    source = swarm(8)
    detail = asyncio.run(source.run(source.overview().runs[0].run))
    assert detail is not None
    author = "12D3KooWKBf9qTbWd49qeLzEfXx32c6Rkp71T9bkoAQQ5EZYmoaM"
    view = detail.model_copy(update={"run": detail.run.model_copy(update={"signed_by": author})})
    for width in (40, 80, 100):
        shown = rendering.run(view, width).plain
        assert f"{detail.run.run} · " in shown
        assert f"signed by {author}\n" in shown


def test_step_shows_all_phases_in_any_terminal_width() -> None:
    source = swarm(8)
    run = asyncio.run(source.run(source.overview().runs[0].run))
    assert run is not None
    step = run.steps[-1].model_copy(update={"phases_s": {"inner": 41.0, "exchange": 2.5, "commit": 1.5}})
    text = rendering.run(run.model_copy(update={"steps": (step,)}), 40).plain
    assert "inner 41 s, exchange 2.5 s, commit 1.5 s\n" in text


def test_contributor_that_is_gone_is_at_no_step() -> None:
    source = swarm(8)
    run = asyncio.run(source.run(source.overview().runs[0].run))
    assert run is not None
    gone = run.contributors[0].model_copy(update={"state": "gone", "outer_step": 0})
    text = rendering.run(run.model_copy(update={"contributors": (gone,)}), 100).plain
    (line,) = [line for line in text.splitlines() if line.startswith("gone ")]
    assert " step –, " in line


def test_node_with_a_break_and_run_with_a_slow_link_are_marked() -> None:
    source = swarm(8)
    detail = asyncio.run(source.node(source.nodes()[0].peer_id))
    assert detail is not None
    at = datetime.now().replace(hour=22, minute=0, second=0, microsecond=0).timestamp()
    paused = detail.node.model_copy(update={"state": "alive", "pause": "budget", "lends_again_at": at})
    shown = rendering.node(detail.model_copy(update={"node": paused}), 100).plain
    assert "its monthly traffic is nearly used up: lends again at 22:00" in shown
    assert "lends again" not in rendering.node(detail, 100).plain
    breaks = source.overview().model_copy(update={"num_paused": 2, "lends_again_at": at})
    assert "2 volunteers on a break: lends again at 22:00" in rendering.overview(breaks, 100).plain
    run = asyncio.run(source.run(source.overview().runs[0].run))
    assert run is not None
    slow = run.run.model_copy(update={"slow_links": ("attic sends 7.2 times slower",)})
    assert "slow link: attic sends 7.2 times slower" in rendering.run(run.model_copy(update={"run": slow}), 100).plain


def test_overview_says_since_when_it_counts_when_that_is_less_than_a_day() -> None:
    """The overview of `top --peers`, which looks up the network itself, counts from its start; a dashboard counts for
    weeks.
    """
    view = swarm(8).overview().model_copy(update={"turnover_since": 1.7e9})
    since = datetime.fromtimestamp(1.7e9).strftime("%H:%M:%S")
    assert f"since {since}: 2 joined, 1 left" in rendering.overview(view, 200).plain
    unread = view.model_copy(update={"joins_24h": None, "leaves_24h": None})
    assert "2 joined" not in rendering.overview(unread, 200).plain
