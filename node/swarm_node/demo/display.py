"""Shows the demo while it runs: a live panel on a terminal, counted lines anywhere else."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swarm_node.demo.demo_plan import Plan
from swarm_node.demo.demo_state import Board

BARS = "▁▂▃▄▅▆▇█"
KILLED = "[bold red]⟦kill -9 {}⟧[/]"


class Display(Protocol):
    """What the stages tell people."""

    def stage(self, title: str) -> None:
        """A new stage begins."""

    def update(self, board: Board) -> None:
        """The nodes have said something."""

    def note(self, text: str) -> None:
        """One line."""

    def token(self, text: str) -> None:
        """A piece of the answer."""

    def killed(self, name: str) -> None:
        """That node is gone, in the middle of the answer."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def make_display(console: Console, plan: Plan) -> Display:
    return LiveDisplay(console, plan) if console.is_terminal else LineDisplay(console, plan)


class LineDisplay:
    """A line for each stage and each outer step that all nodes have committed."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._plan = plan
        self._last_step = 0

    def stage(self, title: str) -> None:
        self._say(f"== {title}")

    def update(self, board: Board) -> None:
        step = self._last_step + 1
        while board.all_at(step):
            self._say(_step_line(board, self._plan, step))
            self._last_step, step = step, step + 1

    def note(self, text: str) -> None:
        self._say(f"   {text}")

    def token(self, text: str) -> None:
        self._console.out(text, end="", highlight=False)

    def killed(self, name: str) -> None:
        self._console.print(KILLED.format(name), end="", highlight=False)

    def close(self) -> None:
        """Nothing to put back."""

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class LiveDisplay:
    """The panel stays at the bottom while nodes work, and is gone while the answer is written.

    It is left behind when a stage ends, unless it had no outer step to show yet.
    """

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._plan = plan
        self._live: Live | None = None
        self._board: Board | None = None

    def stage(self, title: str) -> None:
        self.close()
        self._console.print(Text.assemble(("▸ ", "bold cyan"), (title, "bold")))

    def update(self, board: Board) -> None:
        if not board.trainers:
            return
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self._board = board
        self._live.update(panel(board, self._plan))

    def note(self, text: str) -> None:
        self._console.print(f"  {text}", highlight=False, markup=False)

    def token(self, text: str) -> None:
        self.close()
        self._console.out(text, end="", highlight=False)

    def killed(self, name: str) -> None:
        self._console.print(KILLED.format(name), end="", highlight=False)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._board is not None and self._board.outer_step:
                self._console.print(panel(self._board, self._plan))


def panel(board: Board, plan: Plan) -> RenderableType:
    """Loss curve and totals above a table of the nodes."""
    curve = board.loss_curve()
    loss = f"{curve[-1]:.3f}" if curve else "–"
    progress = Text.assemble(
        ("outer step ", "dim"), f"{board.outer_step}/{plan.outer_steps}   ",
        ("loss ", "dim"), (loss, "bold"), f"  {sparkline(curve)}   ",
        ("speed ", "dim"), f"{board.tokens_per_s:,.0f} tokens/s" if board.tokens_per_s else "–",
    )  # fmt: skip
    exchange = Text.assemble(
        ("sent ", "dim"), f"{board.bytes_per_param():.2f} bytes/parameter   " if board.bytes_sent else "–   ",
        ("state ", "dim"), _agreement(board, board.outer_step),
    )  # fmt: skip
    return Group(progress, exchange, _node_table(board))


def _node_table(board: Board) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("node", "peer", "state", "step", "tokens/s", "digest", "blocks"):
        table.add_column(title, justify="right" if title in {"step", "tokens/s"} else "left")
    for node in board.trainers:
        digest = board.digests.get(node.outer_step, {}).get(node.name, "")
        blocks = f"{node.span[0]} to {node.span[1]}" if node.span else ""
        speed = f"{node.tokens_per_s:,.0f}" if node.tokens_per_s else ""
        step = str(node.outer_step) if node.outer_step else ""
        table.add_row(node.name, node.peer_id[-8:], node.state, step, speed, digest[:12], blocks)
    return table


def sparkline(values: list[float], width: int = 24) -> str:
    """The newest `width` values as bars, the lowest being the shortest."""
    values = values[-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def _agreement(board: Board, step: int) -> str:
    digests = list(board.digests.get(step, {}).values())
    if not digests:
        return "–"
    equal = len(set(digests)) == 1
    return f"{digests[0][:12]} {'equal on' if equal else 'DIFFERS among'} {len(digests)} of {board.num_nodes} nodes"


def _step_line(board: Board, plan: Plan, step: int) -> str:
    loss = f"{board.losses[step]:.3f}" if step in board.losses else "–"
    return (
        f"   outer step {step}/{plan.outer_steps}: loss {loss}, {board.tokens_per_s:,.0f} tokens/s, "
        f"{board.bytes_per_param():.2f} bytes/parameter, state {_agreement(board, step)}"
    )
