"""`swarm-node models list` and `models check`: the models that a network serves, and whether a model can be served.

`check` decides from the model's config alone and reads no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.heap import uncollected
from swarm.router.revisions import short_revision
from swarm_protocol.errors import SwarmError

from swarm_node import diagnostics, interrupts
from swarm_node.commands.chat import soon
from swarm_node.commands.command_options import Flags
from swarm_node.commands.daemons import check_model_directory
from swarm_node.events.emitter import Emitter
from swarm_node.settings.config import UsageError
from swarm_node.settings.parsers import HubId, parse_model
from swarm_node.storage.home import Home
from swarm_node.storage.remembered_peers import join_addrs

if TYPE_CHECKING:
    from swarm.client import Client, ModelStatus, OtherRevision

FIRST_S = 10.0
"""Records arrive within a second or two of the connection."""

MAX_CONTEXTS = 8
"""Models whose context is asked for: each has its servers send a tokenizer, which is loaded."""

HEADS = ("MODEL", "REVISION", "PUBLISHER", "BLOCKS", "SERVERS", "CONTEXT", "")

BlockSpans = Sequence[tuple[int, int]]


def list_models(flags: Flags) -> int:
    config = flags.member()
    peers = join_addrs(config)
    # with it comes torch, for seconds
    with uncollected():
        from swarm.client import Client  # noqa: PLC0415

    from swarm_node.storage.used_models import publishers_in  # noqa: PLC0415

    diagnostics.quieten_libraries()
    emitter = Emitter(json=flags.json)
    interrupts.raise_in_command()
    publishers = publishers_in(Home(config.home).publishers, config.network_id, config.publisher)
    with Client(peers=peers, network_id=config.network_id, publishers=publishers, invite=config.invite) as client:
        models = soon(client.models, FIRST_S) or ()
        contexts = _contexts(client, [model.name for model in models if not model.missing])
    if flags.json:
        listed = [
            {
                "name": model.name,
                **_of_revision(model),
                "publisher": model.publisher or None,
                "manifest": model.manifest or None,
                "standing": model.standing,
                "dtype": model.dtype or None,
                "context_tokens": contexts.get(model.name),
                "others": [_of_revision(other) for other in model.others],
            }
            for model in models
        ]
        emitter.emit("models", models=listed)
    else:
        emitter.result("\n".join(_lines(models, contexts)) or "no model is served in this network")
    return 0


def _contexts(client: Client, names: Sequence[str]) -> dict[str, int | None]:
    def ask(name: str) -> int | None:
        try:
            return client.context_tokens(name)
        except SwarmError:
            return None

    asked = names[:MAX_CONTEXTS]
    with ThreadPoolExecutor(MAX_CONTEXTS) as threads:
        return dict(zip(asked, threads.map(ask, asked), strict=True))


def served(missing: BlockSpans, num_blocks: int) -> list[tuple[int, int]]:
    """Return the spans between those that are missing."""
    edges = [0, *(edge for span in missing for edge in span), num_blocks]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def _of_revision(each: ModelStatus | OtherRevision) -> dict[str, object]:
    return {
        "revision": each.revision,
        "num_blocks": each.num_blocks,
        "served": served(each.missing, each.num_blocks),
        "missing": each.missing,
        "num_servers": each.num_servers,
    }


def _lines(models: Sequence[ModelStatus], contexts: Mapping[str, int | None]) -> Iterator[str]:
    rows = [HEADS] if models else []
    for model in models:
        rows.append(
            (model.name, *_cells(model, _publisher(model)), str(contexts.get(model.name) or "-"), _state(model.missing))
        )
        for other in model.others:
            name = f"{model.name}@{short_revision(other.revision)}"
            rows.append((name, *_cells(other, "-"), "-", f"other weights, {_state(other.missing)}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _publisher(model: ModelStatus) -> str:
    """Return the publisher's peer id; in brackets where nothing speaks for believing it yet."""
    return {"unpublished": "unpublished", "new": f"({model.publisher})"}.get(model.standing, model.publisher)


def _cells(each: ModelStatus | OtherRevision, publisher: str) -> tuple[str, str, str, str]:
    spans = ", ".join(f"{start}:{end}" for start, end in served(each.missing, each.num_blocks)) or "none"
    return short_revision(each.revision), publisher, f"{spans} of {each.num_blocks}", str(each.num_servers)


def _state(missing: BlockSpans) -> str:
    return f"nobody serves {', '.join(f'{start}:{end}' for start, end in missing)}" if missing else "whole"


def check(flags: Flags) -> int:
    model, home = named_model(flags), Home(flags.home())
    # torch takes seconds to import: what is refused above is refused at once
    from swarm_node.roles.sources import check_served  # noqa: PLC0415

    diagnostics.quieten_libraries()
    checked = check_served(model, home)
    emitter = Emitter(json=flags.json)
    if flags.json:
        emitter.emit("model_check", model=model.name, **asdict(checked))
        return 0
    emitter.result(f"{model.name} can be served: {checked.family}, {checked.num_blocks} blocks")
    if checked.untried:
        emitter.result(
            f"its config was not enough to try out its blocks ({checked.untried}): that happens when they are loaded"
        )
    return 0


def named_model(flags: Flags) -> Path | HubId:
    """Return the model that MODEL names. Raises ConfigError."""
    named = flags.options["model"]
    if not named:
        raise UsageError("MODEL is missing", remedy="give a directory, or OWNER/NAME on a hub")
    try:
        model = parse_model(named)
    except ValueError as error:
        raise UsageError(f"{named!r} {error}", remedy="give a directory, or OWNER/NAME on a hub") from error
    if isinstance(model, Path):
        check_model_directory(model, "give the directory of config.json and *.safetensors, or OWNER/NAME on a hub")
    return model
