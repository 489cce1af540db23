"""The live screen under Textual's pilot: its keys, its tables, and its mark for outdated views."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.dashboard_source import ExampleSource
from swarm_node.events.emitter import Emitter
from swarm_node.settings.config import Config
from swarm_node.top import command
from swarm_node.top.app import COLUMNS, HelpScreen, TopApp
from swarm_node.top.rendering import LATE_S
from swarm_protocol.errors import PeerTimeout
from textual.pilot import Pilot
from textual.widgets import DataTable, Static, TabbedContent
from textual.worker import WorkerCancelled

from .conftest import swarm

Drive = Callable[[TopApp, Pilot[None]], Awaitable[None]]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def driven(
    source: Any, drive: Drive, *, size: tuple[int, int] = (100, 40), clock: Clock | None = None, code: int = 0
) -> None:
    async def run() -> None:
        app = TopApp(source, clock=clock or Clock())
        async with app.run_test(size=size) as pilot:
            await settled(app, pilot)
            await drive(app, pilot)
        assert (app.return_code or 0) == code

    asyncio.run(run())


async def settled(app: TopApp, pilot: Pilot[None]) -> None:
    """Wait until everything requested is drawn; the worker that waits for the source goes on."""
    await pilot.pause()
    for worker in [worker for worker in app.workers if worker.group == "detail" and not worker.is_finished]:
        with suppress(WorkerCancelled):  # a newer one draws in its place
            await worker.wait()
    await pilot.pause()


async def press(app: TopApp, pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await settled(app, pilot)


def text_of(app: TopApp, name: str) -> str:
    """Return the plain text of the head, or of a tab's text or detail."""
    return str(app.screen_stack[0].query_one(f"#{name}-text", Static).content)


def table(app: TopApp, name: str) -> DataTable[Any]:
    return app.query_one(f"#{name}-table", DataTable)


def test_overview_is_shown_first_and_changes_with_its_source() -> None:
    source = swarm(8)

    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        assert "6 volunteers among 8 nodes\n" in text_of(app, "overview")
        assert text_of(app, "head") == "a-swarm-of-friends · 0.1.0 · updated 0 s ago"
        source.change(num_nodes=9, joins_24h=77, nodes_by_state={"alive": 9, "leaving": 1})
        await settled(app, pilot)
        assert "among 9 nodes; 1 more is leaving" in text_of(app, "overview")
        assert "77 joined" in text_of(app, "overview")

    driven(source, drive)


def test_tabs_and_key_descriptions_are_on_the_screen() -> None:
    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        lines = ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]
        assert lines[0].startswith(" a-swarm-of-friends · 0.1.0 · updated 0 s ago")
        assert lines[1].split() == ["Overview", "Models", "Runs", "Nodes"]
        assert "q Quit" in lines[-1]
        assert "? Help" in lines[-1]

    driven(swarm(8), drive)


def test_a_usual_terminal_shows_the_whole_command_to_join() -> None:
    source = swarm(12)

    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        lines = ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]
        assert source.overview().join_command.replace(" ", "") in "".join(lines).replace(" ", "")
        assert not any(line.strip() == "tok/s" for line in lines), "no other line is folded"

    driven(source, drive, size=(80, 24))


def test_keys_choose_tabs_and_rows_their_details() -> None:
    source = swarm(8)

    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "2")
        assert "replicas per block" in text_of(app, "models")
        await press(app, pilot, "3")
        assert "CONTRIBUTORS" in text_of(app, "runs")
        await press(app, pilot, "4")
        assert table(app, "nodes").row_count == 8
        second = source.nodes()[1]
        await press(app, pilot, "down")
        assert second.peer_id in text_of(app, "nodes")
        await press(app, pilot, "1")
        assert app.query_one(TabbedContent).active == "overview"

    driven(source, drive)


def test_details_that_take_longer_than_the_next_view_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    source, answers = swarm(8), asyncio.Event()
    fetch, asked = source.node, list[str]()

    async def slow(peer_id: str) -> Any:
        asked.append(peer_id)
        await answers.wait()
        return await fetch(peer_id)

    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("4")
        for _ in range(3):
            source.change()
            await pilot.pause()
        first = source.nodes()[0].peer_id
        assert asked == [first]
        answers.set()
        await settled(app, pilot)
        assert first in text_of(app, "nodes")

    monkeypatch.setattr(source, "node", slow)
    driven(source, drive)


def test_chosen_row_stays_when_nodes_come_and_go() -> None:
    source = swarm(8)

    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "4", "down", "down")
        chosen = source.nodes()[2]
        gone = source.nodes()[0].peer_id
        del source.node_details[gone]
        source.change()
        await settled(app, pilot)
        assert table(app, "nodes").row_count == 7
        assert table(app, "nodes").cursor_row == 1
        assert chosen.peer_id in text_of(app, "nodes")

    driven(source, drive)


def test_thousand_nodes_are_shown_and_changed_in_place() -> None:
    source = swarm(1000, hostile=True)

    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "4")
        nodes = table(app, "nodes")
        assert nodes.row_count == 1000
        rows = list(nodes.rows.values())
        peer = source.nodes()[700].peer_id
        detail = source.node_details[peer]
        source.node_details[peer] = detail.model_copy(
            update={"node": detail.node.model_copy(update={"state": "leaving"})}
        )
        source.change()
        await settled(app, pilot)
        assert str(nodes.get_row(peer)[0]).strip() == "leaving"
        assert list(nodes.rows.values()) == rows, "no row may be made anew"

    driven(source, drive)


def test_hostile_names_are_text_and_never_markup() -> None:
    source = swarm(8)
    model = source.overview().models[0].model_copy(update={"name": "[bold red]x[/] [@click=app.quit]y[/]"})
    source.change(models=(model,), network_id="[reverse]net", stale="[/nothing open]")

    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        assert "[bold red]x[/]" in text_of(app, "overview")
        assert text_of(app, "head").startswith("[reverse]net · ")
        assert "[/nothing open]" in text_of(app, "head")
        await press(app, pilot, "2")
        assert str(table(app, "models").get_row_at(0)[1]).startswith("[bold red]x[/] [@click")
        assert "no details are known" in text_of(app, "models")

    driven(source, drive)


def test_outdated_views_are_marked_with_their_age() -> None:
    source, clock = swarm(8), Clock()

    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        clock.now_s = LATE_S + 10
        app._draw_head()
        assert text_of(app, "head").endswith("no news · last update 25 s ago")
        at = source.overview().at
        source.change(at=at, stale="connection lost: refused")
        await settled(app, pilot)
        assert text_of(app, "head").endswith("connection lost: refused · last update 25 s ago")
        source.change(stale=None)
        await settled(app, pilot)
        assert text_of(app, "head").endswith("updated 0 s ago")

    driven(source, drive, clock=clock)


def test_help_opens_once_and_any_key_closes_it() -> None:
    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "question_mark")
        assert isinstance(app.screen, HelpScreen)
        await press(app, pilot, "x")
        assert not isinstance(app.screen, HelpScreen)
        await press(app, pilot, "question_mark")
        app._draw_head()  # as every second, with the help in front

    driven(swarm(8), drive)


def test_d_switches_between_dark_and_light() -> None:
    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        before = app.current_theme.dark
        await press(app, pilot, "d")
        assert app.current_theme.dark is not before
        await press(app, pilot, "d")
        assert app.current_theme.dark is before

    driven(swarm(1), drive)


@pytest.mark.parametrize("size", [(20, 6), (240, 70)])
def test_every_tab_is_drawn_at_any_size_and_after_a_resize(size: tuple[int, int]) -> None:
    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.resize_terminal(*size)
        for key in "1234":
            await press(app, pilot, key)
        await pilot.resize_terminal(100, 30)
        await settled(app, pilot)
        assert table(app, "nodes").row_count == 30

    driven(swarm(30, hostile=True), drive)


def test_empty_swarm_has_words_in_every_tab() -> None:
    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        assert "no model is served" in text_of(app, "overview")
        for key, name in zip("234", COLUMNS, strict=True):
            await press(app, pilot, key)
            assert text_of(app, name) == f"no {name}"

    driven(swarm(0), drive)


def test_unavailable_detail_says_why_and_the_screen_goes_on() -> None:
    class Silent(ExampleSource):
        async def run(self, run_id: str) -> Any:
            raise PeerTimeout("the dashboard\nis silent")

    example = swarm(8)
    silent = Silent(example.shown, run_details=example.run_details)

    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "3")
        assert text_of(app, "runs") == "the dashboard�is silent"

    driven(silent, drive)


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("ctrl+c", 130)])
def test_q_and_ctrl_c_end_it(key: str, code: int) -> None:
    async def drive(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press(key)
        await pilot.pause()
        assert not app.is_running

    driven(swarm(1), drive, code=code)


def test_interrupt_waits_for_the_first_drawing() -> None:
    async def main() -> TopApp:
        app = TopApp(swarm(1))
        app.interrupt()
        await app.run_async(headless=True)
        return app

    assert asyncio.run(main()).return_code == 130


@pytest.mark.parametrize("moment", ["while textual is imported", "while the screen is begun"])
def test_ctrl_c_before_the_screen_has_the_terminal_ends_it_without_a_broken_screen(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    interrupted: list[str] = []

    class Screen:
        def __init__(self, *_: object, **__: object) -> None:
            if moment == "while textual is imported":
                signal.raise_signal(signal.SIGINT)

        return_code = 130

        def interrupt(self) -> None:
            interrupted.append(moment)

        async def run_async(self) -> None:
            began.append(moment)
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[ExampleSource]:
        yield swarm(1)

    monkeypatch.setattr("swarm_node.top.app.TopApp", Screen)
    monkeypatch.setattr(command, "_remote", opened)
    config = Config(home=Path("/nowhere"), name="test", url="http://127.0.0.1:1")
    show = command._show(config, Emitter(json=False), is_live=True)
    if moment == "while the screen is begun":
        assert asyncio.run(show) == 130
        assert (began, interrupted) == ([moment], [moment])
    else:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(show)
        assert (began, interrupted) == ([], [])


def test_ctrl_c_after_the_screen_has_closed_cancels_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[str] = []

    class Screen:
        return_code = 0

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def interrupt(self) -> None:
            pytest.fail("the screen is closed")

        async def run_async(self) -> None:
            pass

    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[ExampleSource]:
        yield swarm(1)
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("leaving")
            raise

    monkeypatch.setattr("swarm_node.top.app.TopApp", Screen)
    monkeypatch.setattr(command, "_remote", opened)
    config = Config(home=Path("/nowhere"), name="test", url="http://127.0.0.1:1")
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(command._show(config, Emitter(json=False), is_live=True))
    assert cancelled == ["leaving"]
