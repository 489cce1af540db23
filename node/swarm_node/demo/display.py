"""Shows the demo: progress for people, events for programs, and at the end the figures and the next commands.

On a terminal the progress is a live panel, elsewhere lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from swarm_protocol.identity import short_id

from swarm_node.demo.nodes import DemoState, EventFields
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import sparkline

KILLED = "[bold red]⟦kill -9 {}⟧[/]"


class LineDisplay:
    """Shows one line for each stage, and for each outer step that all nodes have committed."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def stage(self, title: str) -> None:
        """Show that a stage begins."""
        self._say(f"== {title}")

    def update(self, state: DemoState) -> None:
        """Show what the nodes have reported. Only a panel does this."""

    def step(self, state: DemoState, step: int) -> None:
        """Show an outer step that all nodes have committed. Only a display without a panel does this."""
        loss = f"{state.losses[step]:.3f}" if step in state.losses else "–"
        self._say(
            f"   outer step {step}/{state.outer_steps}: loss {loss}, {state.tokens_per_s:,.0f} tokens/s, "
            f"{state.bytes_per_param():.2f} bytes/parameter, state {_agreement(state, step)}"
        )

    def note(self, text: str) -> None:
        self._say(f"   {text}")

    def token(self, text: str) -> None:
        """Show a piece of the answer."""
        self._console.out(text, end="", highlight=False)

    def killed(self, name: str) -> None:
        """Show that a node was killed during the answer."""
        self._console.print(KILLED.format(name), end="", highlight=False)

    def close(self) -> None:
        """Restore the terminal."""

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class LiveDisplay(LineDisplay):
    """Shows a panel at the bottom of a terminal while nodes work, and none while the answer is printed.

    When a stage ends, the panel stays on the screen, unless it had no outer step to show.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None
        self._state: DemoState | None = None

    def stage(self, title: str) -> None:
        self.close()
        self._console.print(Text.assemble(("▸ ", "bold cyan"), (title, "bold")))

    def update(self, state: DemoState) -> None:
        if not state.trainers:
            return
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self._state = state
        self._live.update(panel(state))

    def step(self, state: DemoState, step: int) -> None: ...

    def note(self, text: str) -> None:
        self._console.print(f"  {text}", highlight=False, markup=False)

    def token(self, text: str) -> None:
        self.close()
        super().token(text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._state is not None and self._state.outer_step:
                self._console.print(panel(self._state))


def make_display(console: Console) -> LineDisplay:
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


def panel(state: DemoState) -> RenderableType:
    """Render the loss curve and totals above a table of the nodes."""
    curve = state.loss_curve()
    loss = f"{curve[-1]:.3f}" if curve else "–"
    progress = Text.assemble(
        ("outer step ", "dim"), f"{state.outer_step}/{state.outer_steps}   ",
        ("loss ", "dim"), (loss, "bold"), f"  {sparkline(curve)}   ",
        ("speed ", "dim"), f"{state.tokens_per_s:,.0f} tokens/s" if state.tokens_per_s else "–",
    )  # fmt: skip
    exchange = Text.assemble(
        ("sent ", "dim"), f"{state.bytes_per_param():.2f} bytes/parameter   " if state.bytes_sent else "–   ",
        ("state ", "dim"), _agreement(state, state.outer_step),
    )  # fmt: skip
    return Group(progress, exchange, _node_table(state))


def _node_table(state: DemoState) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("node", "peer", "state", "step", "tokens/s", "digest", "blocks"):
        table.add_column(title, justify="right" if title in {"step", "tokens/s"} else "left")
    for node in state.trainers:
        digest = state.digests.get(node.outer_step, {}).get(node.name, "")
        blocks = f"{node.span[0]} to {node.span[1]}" if node.span else ""
        speed = f"{node.tokens_per_s:,.0f}" if node.tokens_per_s else ""
        step = str(node.outer_step) if node.outer_step else ""
        table.add_row(node.name, short_id(node.peer_id), node.state, step, speed, digest[:12], blocks)
    return table


def _agreement(state: DemoState, step: int) -> str:
    digests = list(state.digests.get(step, {}).values())
    if not digests:
        return "–"
    equal = len(set(digests)) == 1
    return f"{digests[0][:12]} {'equal on' if equal else 'DIFFERS among'} {len(digests)} of {state.num_nodes} nodes"


NUM_STAGES = 5
ANSWER_STAGE = 4
"""The first stage in which the terminal shows the answer."""


class Reporter:
    """Reports to the display and as events. The demo's task owns it and calls `node_said` for each event of a node."""

    def __init__(self, state: DemoState, display: LineDisplay, emitter: Emitter) -> None:
        self.display = display
        self._state = state
        self._emitter = emitter
        self._num_stages = 0
        self._num_reported_steps = 0

    def stage(self, title: str) -> None:
        self._num_stages += 1
        self.display.stage(f"[{self._num_stages}/{NUM_STAGES}] {title}")
        self._emitter.emit("stage", number=self._num_stages, of=NUM_STAGES, title=title)

    def node_said(self, _name: str, _event: EventFields) -> None:
        state = self._state
        if self._num_stages < ANSWER_STAGE:
            self.display.update(state)
        while state.all_at(self._num_reported_steps + 1):
            self._num_reported_steps += 1
            if self._num_stages < ANSWER_STAGE:
                self.display.step(state, self._num_reported_steps)
            self._emitter.emit(
                "progress",
                outer_step=self._num_reported_steps,
                of=state.outer_steps,
                loss=state.losses.get(self._num_reported_steps),
                tokens_per_s=state.tokens_per_s,
                bytes_per_param=state.bytes_per_param(),
                digests_equal=state.digests_equal(),
            )

    def token(self, text: str) -> None:
        self.display.token(text)
        self._emitter.emit("token", text=text)

    def killed(self, name: str, peer_id: str) -> None:
        self.display.killed(name)
        self._emitter.emit("killed", name=name, peer_id=peer_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """The result of a demo.

    `loss_*` are the validation losses before the first and after the last outer step. `completion` lacks the prompt.
    `failover_ms` is the longest time between two tokens after a node was killed, as the client saw it. `tokens_per_s`
    is the training speed of all nodes together. `tokens_identical` means that `completion` equals the answer of one
    undisturbed process with the whole checkpoint.
    """

    nodes: int
    outer_steps: int
    parameters: int
    loss_first: float
    loss_last: float
    digests_equal: bool
    digest: str
    bytes_per_param_per_step: float
    tokens_per_s: float
    failover_ms: float
    killed: str
    tokens: int
    tokens_identical: bool
    prompt: str
    completion: str
    seconds: float
    checkpoint: str


def show_summary(console: Console, summary: DemoSummary) -> None:
    """Print the figures, one per line."""
    same = "identical to" if summary.tokens_identical else "DIFFERENT from"
    lines = {
        "validation loss": f"{summary.loss_first:.3f} → {summary.loss_last:.3f} in {summary.outer_steps} outer steps",
        "replicas": f"{'bit-identical' if summary.digests_equal else 'DIFFERENT'} on {summary.nodes} nodes, "
        f"state {summary.digest[:16]}",
        "traffic": f"{summary.bytes_per_param_per_step:.2f} bytes a parameter, member and outer step "
        f"({summary.parameters:,} parameters)",
        "speed": f"{summary.tokens_per_s:,.0f} tokens/s, all nodes together",
        "failover": f"{summary.killed} killed in mid-answer: {summary.failover_ms:.0f} ms pause",
        "tokens": f"{summary.tokens}, {same} an undisturbed run",
        "time": f"{summary.seconds:.0f} s",
    }
    console.print()
    for title, text in lines.items():
        console.print(f"  [dim]{title:<16}[/] {text}", highlight=False, soft_wrap=True)


def show_next(console: Console, summary: DemoSummary, kept: Path | None) -> None:
    """Print the next commands to try."""
    model = summary.checkpoint if kept else "DIR"
    where = f"The trained model, a Hugging Face directory: {model}"
    console.print(
        f"\n{where if kept else 'To keep the trained model: swarm-node demo --keep DIR'}\n"
        "Your own swarm:\n"
        "  swarm-node seed --home ~/seed                            # prints its address ADDR\n"
        f"  swarm-node join --home ~/node --peers ADDR --model {model}\n"
        "  swarm-node gateway --home ~/gateway --peers ADDR         # for any OpenAI client: http://127.0.0.1:8000/v1",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
