"""Holds in a home which models have answered its clients, who published these, and which models are kept here.

    HOME/revisions.json    {"network_id": …, "used": {MODEL: [REVISION, …], …}}        (see `UsedRevisions`)
    HOME/publishers.json   {"network_id": …, "publishers": {MODEL: PEER_ID, …}}        (see `KnownPublishers`)

If a file is missing, broken or foreign, the home only loses this memory, and believes the next publisher it uses.

A kept model is one of which a client has both ends on this machine, by its settings. Downloads go to the home's cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from swarm.client import KeptModel
from swarm.client.publishers import MAX_REMEMBERED, MAX_REVISIONS, MAX_USED_MODELS, KnownPublishers, Used, UsedRevisions
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

from swarm_node.events.emitter import Emitter
from swarm_node.formatting import size
from swarm_node.settings.config import Config, UsageError
from swarm_node.storage.home import Home, JsonMemory

MAX_USED_BYTES = 2 * MAX_USED_MODELS * (limits.MAX_NAME_BYTES + MAX_REVISIONS * limits.MAX_REVISION_BYTES)
"""MAX_USED_MODELS with the longest names, twice over."""
MAX_PUBLISHERS_BYTES = 2 * MAX_REMEMBERED * (limits.MAX_NAME_BYTES + 64)
"""MAX_REMEMBERED with the longest names, twice over."""


def used_in(path: Path, network_id: str) -> UsedRevisions:
    """Return the used revisions in the file at `path` for that network; later uses are written there."""
    memory = _memory(path, network_id, "used", "which models were used", MAX_USED_BYTES)

    def checked(used: Any) -> Used:
        read = {name: list(digests) for name, digests in used.items()}
        UsedRevisions(read)
        return read

    def keep(used: Used) -> None:
        there = memory.read(checked) or {}  # another process with this home may have added to it
        both = {name: dict.fromkeys((*there.get(name, ()), *used.get(name, ()))) for name in {**there, **used}}
        newest = list(both.items())[-MAX_USED_MODELS:]
        memory.keep({name: list(digests)[-MAX_REVISIONS:] for name, digests in newest})

    return UsedRevisions(memory.read(checked) or {}, keep)


def publishers_in(path: Path, network_id: str, pinned: Iterable[str]) -> KnownPublishers:
    """Return the publishers in the file at `path` for that network, and the pinned ones; later ones are written there.

    Raises ConfigError for an invalid pin.
    """
    memory = _memory(path, network_id, "publishers", "who publishes which model", MAX_PUBLISHERS_BYTES)

    def checked(remembered: Any) -> dict[str, str]:
        read = dict(remembered)
        KnownPublishers(remembered=read)
        return read

    def keep(remembered: Mapping[str, str]) -> None:
        there = memory.read(checked) or {}  # another process with this home may have added to it
        new = [(model, peer_id) for model, peer_id in remembered.items() if model not in there]
        memory.keep(dict([*there.items(), *new][-MAX_REMEMBERED:]))

    return KnownPublishers(pinned, memory.read(checked) or {}, keep)


def _memory(path: Path, network_id: str, key: str, what: str, max_bytes: int) -> JsonMemory:
    return JsonMemory(path=path, owner=("network_id", network_id), key=key, what=what, max_bytes=max_bytes)


def check_kept(config: Config) -> None:
    """Raises ConfigError for settings that contradict each other, and for a directory that is not there."""
    for each in config.text_at_home:
        if isinstance(each.source, Path) and not each.source.is_dir():
            raise ConfigError(
                f"--text-at-home: there is no directory {each.source} to keep {each.model} from",
                remedy="give --text-at-home [MODEL=]DIR, or [MODEL=]OWNER/NAME of a hub",
            )
    names = {each.model for each in config.text_at_home}
    if len(names) < len(config.text_at_home):
        raise UsageError("a model is kept at home twice", remedy="give --text-at-home once for each model")
    if "blocks_at_home" in config.origins and not names:
        raise UsageError(
            f"nothing is kept at home, so {config.origin('blocks_at_home')} has no effect",
            remedy="give --text-at-home [MODEL=]SOURCE, too",
        )


def kept_models(config: Config, home: Home, emitter: Emitter) -> Mapping[str, KeptModel]:
    """Return what is kept of models, by name, and tell the user so. Raises as `check_kept`."""
    check_kept(config)
    kept = {
        each.model: KeptModel(
            source=each.source if isinstance(each.source, Path) else str(each.source),
            cache=home.cache / "models",
            num_first_blocks=config.blocks_at_home,
            endpoint=os.environ.get("HF_ENDPOINT"),
            on_progress=_reporter(emitter, each.model),
        )
        for each in config.text_at_home
    }
    if kept:
        emitter.say("text stays here: servers get activations in place of tokens, from which it could be computed")
        # torch's threads would otherwise spin for milliseconds after each step, on cores that others need
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return kept


def _reporter(emitter: Emitter, model: str) -> Callable[[int, int], None]:
    """Return what shows how far a download is. Called in the thread that downloads."""

    def report(num_bytes: int, total_bytes: int) -> None:
        if num_bytes < total_bytes:
            emitter.status("loading", f"{size(num_bytes)} of {size(total_bytes)} of {model}, to keep at home")

    return report
