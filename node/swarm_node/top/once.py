"""`swarm-node top --once`: the whole picture as plain text, for scripts and for what is no terminal."""

from __future__ import annotations

from swarm_node.dashboard.source import Source
from swarm_node.dashboard.views import Overview
from swarm_node.sanitizing import clean
from swarm_node.top import pictures

MAX_DETAILS = 8
"""Models and runs that are drawn in full; the overview has them all."""


async def picture(source: Source, width: int) -> str:
    """The overview and the details of its first models and runs, in lines of `width`, the join command aside."""
    view = source.overview()
    parts = [_head(view), pictures.overview(view, width).plain]
    for model in view.models[:MAX_DETAILS]:
        if (model_detail := source.model(model.name)) is not None:
            parts.append(pictures.model(model_detail, width).plain)
    for run in view.runs[:MAX_DETAILS]:
        if (run_detail := await source.run(run.run)) is not None:
            parts.append(pictures.run(run_detail, width).plain)
    return "\n\n".join("\n".join(line.rstrip() for line in part.splitlines()) for part in parts)


def _head(view: Overview) -> str:
    stale = f" · STALE: {clean(view.stale, 120)}" if view.stale else ""
    swarm = f"network {clean(view.network_id, 64)} · version {clean(view.version, 32)}"
    return f"{swarm} · as of {pictures.moment(view.at)}{stale}"
