"""Renders the dashboard's views as text: the overview, and one model, run or node.

Pure functions of views and a width in cells. Colours only repeat what words say. A map of blocks may have fewer cells
than the model has blocks: a cell then stands for several blocks and shows the worst.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import TypeVar

from rich.text import Text
from swarm_protocol.version import version_text

from swarm_node.dashboard.views import (
    BanView,
    ChangeEvent,
    ContributorView,
    ModelDetail,
    ModelView,
    NodeDetail,
    NodeView,
    Overview,
    RefusalView,
    RunDetail,
    RunView,
    ServerView,
    StepView,
)
from swarm_node.formatting import (
    PAUSES,
    UNKNOWN,
    calendar,
    clean,
    count,
    duration,
    lends_again,
    moment,
    name_cell,
    path_counts,
    plural,
    rate,
    round_trip,
    size,
    sparkline,
    whole_mebibytes,
)

FULL, PART, NONE = "█", "▒", "·"


def cell_spans(num_blocks: int, width: int) -> list[tuple[int, int]]:
    """Return the blocks `[start, end)` of each of at most `width` cells. No cell is empty."""
    cells = max(0, min(num_blocks, width))
    return [(num_blocks * cell // cells, num_blocks * (cell + 1) // cells) for cell in range(cells)]


def span_row(start: int, end: int, num_blocks: int, width: int) -> str:
    """Return a map of a server's blocks `[start, end)`: a full cell is served completely, a grey one in part."""
    row = ""
    for first, last in cell_spans(num_blocks, width):
        covered = min(end, last) - max(start, first)
        row += NONE if covered <= 0 else FULL if covered == last - first else PART
    return row


def replica_row(replicas: Sequence[int], width: int) -> str:
    """Return how many servers the worst block of each cell has: a digit, `+` for more than nine, `·` for none."""
    worst = [min(replicas[start:end]) for start, end in cell_spans(len(replicas), width)]
    return "".join(NONE if number <= 0 else str(number) if number < 10 else "+" for number in worst)


def missing_row(missing: Sequence[tuple[int, int]], num_blocks: int, width: int) -> str:
    """Return a map of a model's blocks if only the gaps are known: full where each block has a server."""
    return "".join(
        NONE if any(start < cell[1] and cell[0] < end for start, end in missing) else FULL
        for cell in cell_spans(num_blocks, width)
    )


STYLES = {
    "whole": "green", "thin": "yellow", "incomplete": "red",
    "training": "green", "finished": "green", "waiting": "yellow", "gone": "red",
    "serving": "green", "alive": "green", "joining": "yellow", "draining": "yellow", "leaving": "yellow",
    "paused": "yellow",
}  # fmt: skip
NAME_CELLS = 24
STATE_CELLS = 11
MAP_CELLS = 64
MIN_MAP_CELLS = 8
LATE_S = 15.0
"""A source that has not changed for this many seconds has lost its network, or its dashboard is unreachable."""
MAX_LINES = 200
"""Maximum number of servers or members in one detail view."""

V = TypeVar("V")


def _text(lines: Callable[[V, int], Iterator[Text]]) -> Callable[[V, int], Text]:
    """Turn a function that yields lines for a width into one that returns a single text. Lines that may not fold are
    truncated."""

    @wraps(lines)
    def joined(view: V, width: int) -> Text:
        found = list(lines(view, width))
        for line in found:
            if line.overflow != "fold":
                line.truncate(max(1, width), overflow="ellipsis")
        return Text("\n").join(found)

    return joined


def state(word: str) -> tuple[str, str]:
    return f"{word:<{STATE_CELLS}}", STYLES.get(word, "")


@_text
def overview(view: Overview, width: int) -> Iterator[Text]:
    """Render the overview."""
    nodes = f"{plural(view.num_volunteers, 'volunteer')} among {plural(view.num_nodes, 'node')}"
    if num_leaving := view.nodes_by_state.get("leaving", 0):
        nodes += f"; {num_leaving} more {'is' if num_leaving == 1 else 'are'} leaving"
    yield Text(nodes)
    reached = f"reached: {path_counts(view.nodes_by_reachability)}"
    period = "24 h" if view.turnover_since is None else f"since {_clock(view.turnover_since)}"
    turnover = "" if view.joins_24h is None else f" · {period}: {view.joins_24h} joined, {view.leaves_24h} left"
    yield Text(f"{reached}{turnover}", "dim")
    if sum(view.paths.values()):
        yield Text(f"connections, counted at each end: {path_counts(view.paths)}", "dim")
    if view.num_paused:
        rest = f"{plural(view.num_paused, 'volunteer')} on a break: {lends_again(view.lends_again_at, time.time())}"
        yield Text(rest, "yellow")
    first_token = f"{duration(view.first_token_p50_s)} p50, {duration(view.first_token_p95_s)} p95"
    speeds = f"{rate(view.tokens_per_s)} answered, {rate(view.training_tokens_per_s)} trained"
    yield Text(f"{speeds} · first token {first_token}")
    # above everything that grows, so that it is visible on any terminal; a long one is folded
    yield _title("JOIN WITH")
    yield Text(clean(view.join_command, 1000), overflow="fold")
    models = (line for model in view.models for line in _model_lines(model, width))
    yield from _section("MODELS", models, empty="no model is served")
    runs = (line for run in view.runs for line in _run_lines(run, width))
    yield from _section("RUNS", runs, empty="no run is trained")
    newest = (_happening_line(happening, width) for happening in view.happenings)
    yield from _section("NEWEST", newest, empty="nothing has changed yet")


def _section(title: str, lines: Iterable[Text], *, empty: str = "") -> Iterator[Text]:
    """Yield a section. If it has no lines, it says what is `empty`, or is left out."""
    found = list(lines) or ([Text(empty, "dim")] if empty else [])
    if found:
        yield _title(title)
    yield from found


def _happening_line(happening: ChangeEvent, width: int) -> Text:
    head = f"{_clock(happening.at)} {happening.kind:<6}"
    return Text.assemble((head, "dim"), clean(happening.words, max(1, width - len(head))))


def _model_lines(model: ModelView, width: int) -> Iterator[Text]:
    facts = f"{plural(model.num_blocks, 'block')}, {plural(model.num_servers, 'server')}, {rate(model.tokens_per_s)}"
    yield Text.assemble(state(model.health), _name(model.name), " ", facts)
    cells = _map_cells(width, STATE_CELLS)
    yield Text.assemble(" " * STATE_CELLS, missing_row(model.missing, model.num_blocks, cells))
    yield Text(" " * STATE_CELLS + clean(model.words, max(1, width - STATE_CELLS)), "dim")


def _run_lines(run: RunView, width: int) -> Iterator[Text]:
    step = f"step {run.outer_step}" + (f" of {run.outer_steps}" if run.outer_steps else "")
    loss = UNKNOWN if run.loss is None else f"{run.loss:.3f}"
    yield Text.assemble(state(run.state), _name(run.name or run.run), f" {step}, loss {loss}")
    speed = "" if run.tokens_per_s is None else f", {rate(run.tokens_per_s)}"
    facts = f"{plural(run.num_members, 'member')}, {_agreement(run)}{speed}"
    bars = sparkline(run.losses, max(0, width - STATE_CELLS - 2 - len(facts)))
    yield Text.assemble(" " * STATE_CELLS, (bars, "cyan"), "  " if bars else "", facts)
    yield Text(" " * STATE_CELLS + clean(run.words, max(1, width - STATE_CELLS)), "dim")


def _agreement(run: RunView) -> str:
    """Return how many members are at the newest committed step, and how many of them hold the same state."""
    if not run.num_at_step:
        known = "members report other steps" if run.state == "training" else "no member is at this step any more"
        return known if run.digest else "no digest yet"
    agree = f"{run.num_agreeing} of {run.num_at_step}"
    return f"{agree} agree" if run.num_agreeing == run.num_at_step else f"only {agree} AGREE"


@_text
def model(view: ModelDetail, width: int) -> Iterator[Text]:
    """Render the map of blocks and servers, the replicas per block, and the chains in use."""
    shown, blocks = view.model, view.model.num_blocks
    yield Text.assemble(state(shown.health), clean(shown.name, width), " · ", clean(shown.words, width))
    cells = _map_cells(width, NAME_CELLS + 1)
    pad = NAME_CELLS + 1
    yield Text.assemble(("replicas per block".ljust(pad), "dim"), replica_row(view.replicas, cells))
    for server in view.servers[:MAX_LINES]:
        yield Text.assemble(_name(server.name), " ", (span_row(server.start, server.end, blocks, cells), "cyan"))
        yield Text.assemble(" " * pad, _server_facts(server))
    yield from _left_out(len(view.servers), "servers")
    if shown.weakest_block is not None:
        weakest = f"weakest: block {shown.weakest_block}, {plural(shown.weakest_replicas, 'server')}"
        yield Text(weakest, STYLES.get(shown.health, ""))
    for other in shown.other_revisions:
        whole = "whole" if other.is_whole else "incomplete"
        servers = f"{plural(other.num_servers, 'server')}, {whole}"
        yield Text(f"also under this name: revision {clean(other.revision, 64)}, {servers}", "yellow")
    for chain in view.chains:
        hops = " → ".join(f"{name_cell(span.name, NAME_CELLS)} {span.start}:{span.end}" for span in chain.spans)
        assumed = f" ({chain.assumed_ms:.0f} ms assumed)" if chain.assumed_ms else ""
        yield Text(f"chain {chain.ms_per_token:.0f} ms per token{assumed}: {hops}")


def _server_facts(server: ServerView) -> Text:
    moving = "" if server.next_start is None else f", moves to {server.next_start}:{server.next_end}"
    if server.convicted is not None:
        return Text(f"convicted and not used: {clean(server.convicted, 200)}", "red")
    if server.unreachable:
        return Text("unreachable: the gateway's requests to it failed", "red")
    return Text.assemble(
        (server.state, STYLES.get(server.state, "")),
        f" {server.start}:{server.end}, {server.queue_depth} waiting, {server.decode_ms_per_block:.1f} ms per block, "
        f"{rate(server.tokens_per_s)}, {'relayed' if server.relayed else 'direct'}{moving}",
    )


@_text
def run(view: RunDetail, width: int) -> Iterator[Text]:
    """Render the loss, the newest steps, the members, and what was refused."""
    shown = view.run
    yield Text.assemble(state(shown.state), clean(shown.name or shown.run, width))
    # for a waiting run, this ends with what lets it continue
    yield Text(clean(shown.words, 1000), overflow="fold")
    signed = clean(shown.signed_by or UNKNOWN, 60)
    about = f"{clean(shown.run, 80)} · {count(view.num_parameters)} parameters · signed by {signed}"
    yield Text(about, overflow="fold")  # both ids are copied from here
    losses = [step.loss for step in view.steps] or list(shown.losses)
    yield Text.assemble(("loss ", "dim"), (sparkline(losses, max(1, width - 5)), "cyan"))
    if shown.projected_end is not None:
        yield Text(f"expected to end at {moment(shown.projected_end)}")
    yield Text(f"state {clean(shown.digest[:12], 12) or UNKNOWN}: {_agreement(shown)}")
    for line in shown.slow_links:
        yield Text(f"slow link: {clean(line, width)}", "yellow")
    yield _title("STEPS")
    yield from map(_step_line, reversed(view.steps[-8:]))
    yield _title("CONTRIBUTORS")
    yield from map(_contributor_line, view.contributors[:MAX_LINES])
    yield from _left_out(len(view.contributors), "contributors")
    yield from _section("BANNED", (_refusal_line(each, width) for each in view.bans[:20]))
    yield from _section("REFUSED OR COUNTED LESS", (_refusal_line(each, width) for each in view.refusals[:20]))


def _step_line(step: StepView) -> Text:
    phases = ", ".join(f"{clean(name, 12)} {duration(took)}" for name, took in step.phases_s.items())
    facts = f"step {step.outer_step}: loss {step.loss:.3f}, {plural(step.num_members, 'member')}, {phases}"
    return Text(facts.removesuffix(", "), overflow="fold")


def _contributor_line(member: ContributorView) -> Text:
    at_step = UNKNOWN if member.state == "gone" else member.outer_step
    score = "" if member.held_out_score is None else f", held-out {member.held_out_score:+.3f} nats"
    facts = f"step {at_step}, {count(member.tokens)} tokens seen, {rate(member.tokens_per_s)}{score}"
    return Text.assemble(state(member.state), _name(member.name), " ", facts)


def _refusal_line(refused: BanView | RefusalView, width: int) -> Text:
    when, style = f"step {refused.outer_step}", "yellow"
    if isinstance(refused, BanView):
        when += ", for good" if refused.until is None else f", until step {refused.until}"
        style = "red"
    return Text(f"{when}: {name_cell(refused.name, NAME_CELLS)}: {clean(refused.reason, width)}", style)


@_text
def node(view: NodeDetail, width: int) -> Iterator[Text]:
    """Render one node and its work."""
    shown = view.node
    yield Text.assemble(state(shown.state), clean(shown.name, width))
    yield Text(clean(shown.peer_id, width), "dim")
    memory = f"{size(shown.free_memory_bytes)} of {size(shown.memory_bytes)} free"
    version = version_text(clean(shown.version, 20), shown.protocol_version)
    yield Text(f"{clean(shown.device, width)}, {memory}, version {version}")
    yield Text(
        f"through one block: {rate(shown.prefill_tokens_per_s)} prefill, {rate(shown.decode_tokens_per_s)} decode, "
        f"{rate(shown.training_tokens_per_s)} training; reached: {shown.reachability}"
    )
    yield Text(f"connected to {UNKNOWN if shown.paths is None else path_counts(shown.paths)}")
    yield Text(f"from here: {_from_here(shown)}")
    if shown.pause and shown.state == "alive":
        yield Text(f"{PAUSES[shown.pause]}: {lends_again(shown.lends_again_at, time.time())}", "yellow")
    uptime = UNKNOWN if view.uptime_share is None else f"{view.uptime_share:.0%}"
    yield Text(
        f"present {uptime} of the time; trained {count(view.tokens_trained)} tokens in {view.rounds} rounds seen"
    )
    for server in view.serving[:MAX_LINES]:
        yield Text.assemble("serves ", _name(server.model), " ", _server_facts(server))
    for each in view.training[:MAX_LINES]:
        facts = f"step {each.outer_step}, {rate(each.tokens_per_s)}"
        yield Text.assemble("trains ", _name(each.run), " ", facts)


def _from_here(node: NodeView) -> str:
    path = node.from_here
    if path is None:
        return "this node itself" if node.is_observer else "not connected"
    moved = f"{whole_mebibytes(path.sent_bytes)} sent, {whole_mebibytes(path.received_bytes)} received"
    return f"{path.kind}, {round_trip(path.rtt_ms)}, {moved}"


def freshness(view: Overview, age_s: float) -> tuple[str, str]:
    """Return the age of the view as text, and a style. `age_s` counts the seconds since its last change here."""
    ago = f"last update {duration(round(age_s))} ago"
    if view.stale:
        return f"{clean(view.stale, 120)} · {ago}", "bold red"
    if age_s > LATE_S:
        return f"no news · {ago}", "bold yellow"
    return f"updated {duration(round(age_s))} ago", "dim"


def _title(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _name(text: str) -> str:
    """Return the name padded to a column."""
    shown = name_cell(text, NAME_CELLS)
    return shown + " " * (NAME_CELLS - Text(shown).cell_len)


def _map_cells(width: int, used: int) -> int:
    return max(MIN_MAP_CELLS, min(MAP_CELLS, width - used))


def _left_out(number: int, what: str) -> Iterator[Text]:
    if number > MAX_LINES:
        yield Text(f"and {number - MAX_LINES:,} more {what}", "dim")


def _clock(at: float) -> str:
    """Return the local time of day. A time that no calendar has is shown as that of 1970."""
    return f"{calendar(at, None) or calendar(0, None):%H:%M:%S}"
