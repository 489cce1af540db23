"""The screen of `swarm-node top`: four tabs over a source of views, redrawn when the source has changed.

One worker waits for the source. All text goes to the widgets as `rich.text.Text`, never as markup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from swarm_protocol.errors import SwarmError
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane

from swarm_node.dashboard.views import ViewSource
from swarm_node.formatting import UNKNOWN, clean, name_cell, rate, round_trip, size
from swarm_node.interrupts import EXIT_INTERRUPTED
from swarm_node.top import rendering

TABS = ("overview", "models", "runs", "nodes")
COLUMNS: Mapping[str, Mapping[str, Callable[[Any], Text]]] = {
    "models": {
        "health": lambda model: Text(*rendering.state(model.health)),
        "model": lambda model: Text(clean(model.name, 40)),
        "blocks": lambda model: Text(str(model.num_blocks)),
        "servers": lambda model: Text(str(model.num_servers)),
        "speed": lambda model: Text(rate(model.tokens_per_s)),
    },
    "runs": {
        "state": lambda run: Text(*rendering.state(run.state)),
        "run": lambda run: Text(clean(run.name or run.run, 40)),
        "step": lambda run: Text(f"{run.outer_step} of {run.outer_steps}" if run.outer_steps else str(run.outer_step)),
        "loss": lambda run: Text(UNKNOWN if run.loss is None else f"{run.loss:.3f}"),
        "members": lambda run: Text(str(run.num_members)),
        "speed": lambda run: Text(rate(run.tokens_per_s)),
    },
    "nodes": {
        "state": lambda node: Text(*rendering.state("paused" if node.pause and node.state == "alive" else node.state)),
        "node": lambda node: Text(name_cell(node.name, 24)),
        "reached": lambda node: Text(node.reachability),
        "from here": lambda node: Text(node.from_here.kind if node.from_here else UNKNOWN),
        "round trip": lambda node: Text(round_trip(node.from_here.rtt_ms) if node.from_here else UNKNOWN),
        "device": lambda node: Text(clean(node.device, 28)),
        "memory": lambda node: Text(size(node.memory_bytes)),
        "models": lambda node: Text(clean(", ".join(node.models[:4]), 24)),
        "runs": lambda node: Text(clean(", ".join(node.runs[:4]), 24)),
        "version": lambda node: Text(clean(node.version, 16)),
    },
}
"""The columns of each tab's table, and the function that makes each cell from a view."""
KEYS = {"models": "name", "runs": "run", "nodes": "peer_id"}
DETAILS: Mapping[str, Callable[[Any, int], Text]] = {
    "models": rendering.model,
    "runs": rendering.run,
    "nodes": rendering.node,
}
HELP = """\
1 2 3 4      overview, models, runs, nodes
↑ ↓ PgUp     move; the selected row of a table has its details below
Tab          from the tabs to the table, and then to the details
d            dark or light
? q          this help; quit

█ blocks of a server   ▒ some of the cell's blocks   · none
Digits are servers per block; for a large model, a cell shows its worst block.
Numbers come from records that nodes sign, except "from here": this is what the
observing node sees. – means not known, or no connection.
Press any key to close this."""
"""Drawn as Text: as markup, the brackets would disappear."""


class HelpScreen(ModalScreen[None]):
    """The help for the keys. Any key closes it."""

    CSS = """
    HelpScreen { align: center middle; }
    HelpScreen Static { width: 84; max-width: 95%; padding: 1 2; border: round $accent; background: $surface; }
    """

    def compose(self) -> ComposeResult:
        yield Static(Text(HELP))

    def on_key(self) -> None:
        self.dismiss()


class TopApp(App[None]):
    """The live view of `source`. `clock` returns monotonic seconds."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head-text { height: 1; background: $panel; }
    .text { padding: 0 1; width: 100%; }
    DataTable { height: 40%; min-height: 4; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *((str(number), f"show('{name}')", name.capitalize()) for number, name in enumerate(TABS, 1)),
        ("d", "dark", "Dark/light"),
        ("question_mark", "help", "Help"),
        ("q", "quit", "Quit"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]

    def __init__(self, source: ViewSource, *, light: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._source = source
        self._clock = clock
        self._seen = source.overview()
        self._seen_s = clock()
        self._is_ready = self._is_interrupted = False
        self._fetched: tuple[str, str] | None = None  # the tab and the row whose details are being fetched
        # kept rather than looked up, because drawing while the screen closes also needs them
        self._texts = {name: Static(id=f"{name}-text", classes="text") for name in ("head", *TABS)}
        self._tables: dict[str, DataTable[Text]] = {
            name: DataTable(id=f"{name}-table", cursor_type="row", zebra_stripes=True) for name in COLUMNS
        }
        self.theme = "textual-light" if light else "textual-dark"

    def compose(self) -> ComposeResult:
        yield self._texts["head"]
        with TabbedContent(initial="overview") as self._tabs:
            with TabPane("Overview", id="overview"), VerticalScroll() as self._overview:
                yield self._texts["overview"]
            for name in COLUMNS:
                with TabPane(name.capitalize(), id=name):
                    yield self._tables[name]
                    with VerticalScroll():
                        yield self._texts[name]
        yield Footer()

    def on_mount(self) -> None:
        for name, titles in COLUMNS.items():
            for title in titles:
                self._tables[name].add_column(title, key=title)
        self._follow()
        self.set_interval(1.0, self._draw_head)
        self.action_show("overview")

    def action_show(self, tab: str) -> None:
        self._tabs.active = tab
        (self._tables[tab] if tab in COLUMNS else self._overview).focus()

    def action_dark(self) -> None:
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"

    def action_interrupt(self) -> None:
        self.exit(return_code=EXIT_INTERRUPTED)

    def interrupt(self) -> None:
        """Leave as at Ctrl-C, but not during the first drawing, which would then fail."""
        self._is_interrupted = True
        if self._is_ready:
            self.action_interrupt()

    def on_ready(self) -> None:
        self._is_ready = True
        if self._is_interrupted:
            self.action_interrupt()

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    @work(group="source")
    async def _follow(self) -> None:
        while True:
            self._draw()
            await self._source.wait_changed()

    def on_resize(self, _event: Resize) -> None:
        self._draw()

    def on_tabbed_content_tab_activated(self) -> None:
        self._draw()

    def on_data_table_row_highlighted(self) -> None:
        self._draw_detail()

    def _draw(self) -> None:
        """Draw the visible tab. Other tabs are drawn when they become visible."""
        view = self._source.overview()
        if view.at != self._seen.at:
            self._seen_s = self._clock()
        self._seen = view
        self._draw_head()
        tab = self._tabs.active
        if tab == "overview":
            self._texts["overview"].update(rendering.overview(view, self._width))
        else:
            views = self._source.nodes() if tab == "nodes" else getattr(view, tab)
            draw = COLUMNS[tab].values()
            _fill(self._tables[tab], {getattr(each, KEYS[tab]): [cell(each) for cell in draw] for each in views})
        self._draw_detail()

    def _draw_head(self) -> None:
        age_s = self._clock() - self._seen_s
        about = f" · {clean(self._seen.version, 24)} · "
        freshness = rendering.freshness(self._seen, age_s)
        self._texts["head"].update(Text.assemble((clean(self._seen.network_id, 32), "bold"), about, freshness))

    def _draw_detail(self) -> None:
        tab = self._tabs.active
        if tab not in COLUMNS:
            return
        chosen = _chosen(self._tables[tab])
        if (tab, chosen) != self._fetched:  # else its details are drawn soon, however often the view changes meanwhile
            self._fetch_detail(tab, chosen)

    @work(exclusive=True, group="detail")
    async def _fetch_detail(self, tab: str, chosen: str) -> None:
        """Draw the details in a worker, because they may have to be fetched. Another row's replace it."""
        self._fetched = tab, chosen
        try:
            self._texts[tab].update(await self._detail(tab, chosen) if chosen else Text(f"no {tab}", "dim"))
        finally:
            if self._fetched == (tab, chosen):
                self._fetched = None

    async def _detail(self, tab: str, chosen: str) -> Text:
        try:
            ask = {"models": self._source.model, "runs": self._source.run, "nodes": self._source.node}[tab]
            found: Any = await ask(chosen)
            return DETAILS[tab](found, self._width) if found else Text("no details are known", "dim")
        except SwarmError as error:
            return Text(clean(error.message, 300), "red")

    @property
    def _width(self) -> int:
        return max(20, self.size.width - 6)  # padding and scroll bars


def _fill(table: DataTable[Text], rows: Mapping[str, Sequence[Text]]) -> None:
    """Update only the cells that differ, so that the cursor stays and a thousand rows cost little."""
    keys = list(rows)
    if [row.value for row in table.rows] == keys:
        for key, cells in rows.items():
            for column, old, new in zip(table.columns, table.get_row(key), cells, strict=True):
                if old != new:
                    table.update_cell(key, column, new, update_width=True)
        return
    chosen = _chosen(table)
    table.clear()
    for key, cells in rows.items():
        table.add_row(*cells, key=key)
    if chosen in keys:
        table.move_cursor(row=keys.index(chosen))


def _chosen(table: DataTable[Text]) -> str:
    """Return the key of the row under the cursor, or "" for an empty table."""
    if not table.row_count:
        return ""
    return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value or ""
