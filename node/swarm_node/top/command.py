"""`swarm-node top`: reads views from a dashboard's API or from the network itself, and shows them live or once."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from swarm.ended_tasks import end_tasks
from swarm.temporary_folder import temporary_folder

from swarm_node import diagnostics, interrupts
from swarm_node.commands.command_options import Flags, say_joining
from swarm_node.dashboard.views import ViewSource
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import clean, moment
from swarm_node.settings.config import Config, UsageError
from swarm_node.top import rendering

LIGHT_BACKGROUNDS = ("7", "15")
PIPE_COLUMNS = 100
FIRST_S = 10.0
"""Seconds to wait for a first view of the nodes. Records usually arrive within two seconds of the connection."""
FILES_S = 5.0
"""Seconds to wait for the files of runs if they are shown once. A file says how many members a step needs."""
MAX_DETAILS = 8
"""Maximum number of models and of runs shown in detail. The overview has all of them."""


def run(flags: Flags) -> int:
    """Show the network live, or once without a terminal. Raises ConfigError, StartError or PeerError."""
    config = flags.member()
    if bool(config.url) == bool(config.peers):
        raise UsageError(
            "--url and --peers are both given" if config.url else "no swarm is named",
            remedy="give the address of a dashboard with --url, or the address of any node with --peers",
        )
    is_live = not (flags.options["once"] or flags.json) and sys.stdin.isatty() and sys.stdout.isatty()
    logging.getLogger().addHandler(logging.NullHandler())  # a warning would disturb the screen
    emitter = Emitter(json=flags.json)
    if not config.url:
        say_joining(config, emitter)
    interrupts.raise_in_command()
    return asyncio.run(_show(config, emitter, is_live=is_live))


async def _show(config: Config, emitter: Emitter, *, is_live: bool) -> int:
    async with _remote(config.url) if config.url else _direct(config, with_files=not is_live) as source:
        if is_live:
            # imported late: textual takes half a second, and only the live view needs it
            from swarm_node.top.app import TopApp  # noqa: PLC0415

            app = TopApp(source, light=is_light(os.environ.get("COLORFGBG", "")))
            # once the screen controls the terminal, Ctrl-C is a key; until then it is a signal
            loop, asyncios = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
            loop.add_signal_handler(signal.SIGINT, app.interrupt)
            try:
                await asyncio.sleep(0)  # a Ctrl-C during the import takes effect here
                await app.run_async()
            finally:
                loop.remove_signal_handler(signal.SIGINT)
                signal.signal(signal.SIGINT, asyncios)  # this handler ends the task, and so leaves the network in order
            return app.return_code or 0
        if emitter.json:
            emitter.emit("overview", overview=source.overview().model_dump(mode="json"))
            return 0
        emitter.result(await snapshot_text(source, shutil.get_terminal_size((PIPE_COLUMNS, 0)).columns))
        return 0


@asynccontextmanager
async def _direct(config: Config, *, with_files: bool) -> AsyncIterator[ViewSource]:
    """Run a dashboard's collector on the network itself, until it has seen nodes or time is up.

    `with_files` also waits for the runs' files. Raises StartError or PeerError if no peer of `config` can be joined
    through.
    """
    # imported late: the network takes half a second, and reading a dashboard does not need it
    from swarm_node.dashboard.collector import running_collector  # noqa: PLC0415
    from swarm_node.network_join import visiting  # noqa: PLC0415

    diagnostics.quieten_libraries()
    with temporary_folder("top") as folder:
        async with (
            visiting(config) as (network, membership),
            running_collector(
                network, membership, config, folder / "history.sqlite", network.traffic.peer_paths
            ) as collector,
        ):
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_S):
                    while not collector.overview().num_nodes:
                        await collector.wait_changed()
            with suppress(TimeoutError):
                async with asyncio.timeout(FILES_S):
                    while with_files and any(run.name is None for run in collector.overview().runs):
                        await collector.wait_changed()
            yield collector


@asynccontextmanager
async def _remote(url: str) -> AsyncIterator[ViewSource]:
    import httpx  # noqa: PLC0415

    from swarm_node.top.remote import DashboardClient  # noqa: PLC0415

    async with httpx.AsyncClient(headers={"User-Agent": "swarm-node"}) as client:
        remote = DashboardClient(client, url)
        await remote.start()
        following = asyncio.create_task(remote.follow(), name="follow the dashboard")
        try:
            yield remote
        finally:
            await end_tasks(following)


def is_light(colorfgbg: str) -> bool:
    """Return whether a terminal's COLORFGBG (`15;0`: white on black) means a light background."""
    return colorfgbg.rpartition(";")[2] in LIGHT_BACKGROUNDS


async def snapshot_text(source: ViewSource, width: int) -> str:
    """Return the overview and the details of the first models and runs, in lines of `width`."""
    view = source.overview()
    stale = f" · STALE: {clean(view.stale, 120)}" if view.stale else ""
    swarm = f"network {clean(view.network_id, 64)} · version {clean(view.version, 32)}"
    parts = [f"{swarm} · as of {moment(view.at)}{stale}", rendering.overview(view, width).plain]
    for model in view.models[:MAX_DETAILS]:
        if (model_detail := await source.model(model.name)) is not None:
            parts.append(rendering.model(model_detail, width).plain)
    for run in view.runs[:MAX_DETAILS]:
        if (run_detail := await source.run(run.run)) is not None:
            parts.append(rendering.run(run_detail, width).plain)
    return "\n\n".join("\n".join(line.rstrip() for line in part.splitlines()) for part in parts)
