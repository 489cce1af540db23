"""The files in which a home keeps the revisions and publishers of models that its clients use; models kept at home.

    HOME/revisions.json    {"network_id": …, "used": {MODEL: [REVISION, …], …}}        (see `UsedRevisions`)
    HOME/publishers.json   {"network_id": …, "publishers": {MODEL: PEER_ID, …}}        (see `KnownPublishers`)

If a file is missing, damaged or of another network, only this memory is lost. Clients then trust the next publisher
that they use. A model kept at home is one whose ends the settings keep on this machine. The home's cache has its
downloads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.client import KeptModel
from swarm.client.publishers import MAX_REMEMBERED, MAX_REVISIONS, MAX_USED_MODELS, KnownPublishers, Used, UsedRevisions
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

from swarm_node.events.emitter import Emitter
from swarm_node.formatting import size
from swarm_node.machine.lean_imports import let_threads_sleep
from swarm_node.settings.config import Config, UsageError
from swarm_node.storage.home import Home, JsonMemory

MAX_USED_BYTES = 2 * MAX_USED_MODELS * (limits.MAX_NAME_BYTES + MAX_REVISIONS * limits.MAX_REVISION_BYTES)
"""Twice the size of MAX_USED_MODELS entries with the longest names."""
MAX_PUBLISHERS_BYTES = 2 * MAX_REMEMBERED * (limits.MAX_NAME_BYTES + 64)
"""Twice the size of MAX_REMEMBERED entries with the longest names."""


def used_in(path: Path, network_id: str) -> UsedRevisions:
    """Return the used revisions in the file at `path` for that network. Later uses are written there."""
    memory = _memory(path, network_id, "used", "which models were used", MAX_USED_BYTES)

    def checked(used: Any) -> Used:
        read = {name: list(digests) for name, digests in used.items()}
        UsedRevisions(read)
        return read

    def with_those_there(used: Used, there: Used) -> Used:
        both = {name: dict.fromkeys((*there.get(name, ()), *used.get(name, ()))) for name in {**there, **used}}
        newest = list(both.items())[-MAX_USED_MODELS:]
        return {name: list(digests)[-MAX_REVISIONS:] for name, digests in newest}

    def keep(used: Used) -> None:  # another process with this home may have added to it
        memory.change(checked, lambda there: with_those_there(used, there or {}))

    return UsedRevisions(memory.read(checked) or {}, keep)


def publishers_in(path: Path, network_id: str, pinned: Sequence[str]) -> KnownPublishers:
    """Return the publishers in the file at `path` for that network, and the pinned ones. Later ones are written there.

    Raises ConfigError for an invalid pin.
    """
    memory = _memory(path, network_id, "publishers", "who publishes which model", MAX_PUBLISHERS_BYTES)

    def checked(remembered: Any) -> dict[str, str]:
        read = dict(remembered)
        KnownPublishers(remembered=read)
        return read

    def with_those_there(remembered: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
        new = [(model, peer_id) for model, peer_id in remembered.items() if model not in there]
        return dict([*there.items(), *new][-MAX_REMEMBERED:])

    def keep(remembered: Mapping[str, str]) -> None:  # another process with this home may have added to it
        memory.change(checked, lambda there: with_those_there(remembered, there or {}))

    return KnownPublishers(pinned, memory.read(checked) or {}, keep)


def _memory(path: Path, network_id: str, key: str, what: str, max_bytes: int) -> JsonMemory:
    return JsonMemory(path=path, owner=("network_id", network_id), key=key, what=what, max_bytes=max_bytes)


def check_kept(config: Config) -> None:
    """Raise ConfigError for settings that contradict each other, and for a directory that does not exist."""
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
            remedy="also give --text-at-home [MODEL=]SOURCE",
        )


def kept_models(config: Config, home: Home, emitter: Emitter) -> Mapping[str, KeptModel]:
    """Return the models kept at home by name, and tell the user what this means. Raises what `check_kept` raises."""
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
        emitter.say("text stays here: servers get activations instead of tokens, but could compute the text from them")
        let_threads_sleep()
    return kept


def _reporter(emitter: Emitter, model: str) -> Callable[[int, int], None]:
    """Return a function that shows the progress of a download. It is called in the downloading thread."""

    def report(num_bytes: int, total_bytes: int) -> None:
        if num_bytes < total_bytes:
            emitter.status("loading", f"{size(num_bytes)} of {size(total_bytes)} of {model}, to keep at home")

    return report
