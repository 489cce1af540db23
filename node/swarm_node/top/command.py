"""`swarm-node top`: opens the source that was named, a dashboard or the swarm itself, and shows it live or once."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm_protocol.errors import ConfigError

from swarm_node import interrupts
from swarm_node.command_options import Flags
from swarm_node.config import Config
from swarm_node.dashboard.source import Source
from swarm_node.events import Emitter

LIGHT_BACKGROUNDS = ("7", "15")
PIPE_COLUMNS = 100


def run(flags: Flags) -> int:
    """Raises ConfigError, StartError or PeerError."""
    config = flags.resolve()
    if bool(config.url) == bool(config.peers):
        raise ConfigError(
            "--url and --peers are both given" if config.url else "no swarm to look at is named",
            remedy="give --url the address of a dashboard, or --peers that of any node of the swarm",
        )
    is_live = not (flags.extra["once"] or flags.json) and sys.stdin.isatty() and sys.stdout.isatty()
    logging.getLogger().addHandler(logging.NullHandler())  # a warning in the middle of the screen would spoil it
    interrupts.raise_in_command()
    return asyncio.run(_show(config, Emitter(json=flags.json), is_live=is_live))


async def _show(config: Config, emitter: Emitter, *, is_live: bool) -> int:
    async with _opened(config, with_models=not (is_live or emitter.json)) as source:
        if is_live:
            # textual takes half a second to import, and nothing else needs it
            from swarm_node.top.app import Top  # noqa: PLC0415

            app = Top(source, light=is_light(os.environ.get("COLORFGBG", "")))
            await app.run_async()
            return app.return_code or 0
        if emitter.json:
            emitter.emit("overview", overview=source.overview().model_dump(mode="json"))
            return 0
        from swarm_node.top.once import picture  # noqa: PLC0415

        emitter.result(await picture(source, shutil.get_terminal_size((PIPE_COLUMNS, 0)).columns))
        return 0


@asynccontextmanager
async def _opened(config: Config, *, with_models: bool) -> AsyncIterator[Source]:
    if config.url:
        async with _remote(config.url, with_models=with_models) as source:
            yield source
    else:
        # the network takes half a second to import, and a dashboard is read without it
        from swarm_node.top.direct import looking  # noqa: PLC0415

        async with looking(config) as source:
            yield source


@asynccontextmanager
async def _remote(url: str, *, with_models: bool) -> AsyncIterator[Source]:
    import httpx  # noqa: PLC0415

    from swarm_node.top.once import MAX_DETAILS  # noqa: PLC0415
    from swarm_node.top.remote import Remote  # noqa: PLC0415

    async with httpx.AsyncClient(headers={"User-Agent": "swarm-node"}) as client:
        remote = Remote(client, url)
        await remote.start()
        if with_models:
            for model in remote.overview().models[:MAX_DETAILS]:
                remote.model(model.name)
            await remote.fetch()
        following = asyncio.create_task(remote.follow(), name="follow the dashboard")
        try:
            yield remote
        finally:
            following.cancel()
            await asyncio.wait({following})


def is_light(colorfgbg: str) -> bool:
    """Whether a terminal that says what its colours are (`15;0`: white on black) is a light one."""
    return colorfgbg.rpartition(";")[2] in LIGHT_BACKGROUNDS
