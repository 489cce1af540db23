"""The models of which a client keeps both ends on this machine, from the settings. Downloads go to the home's cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from swarm.client import KeptModel
from swarm_protocol.errors import ConfigError

from swarm_node.events.emitter import Emitter
from swarm_node.formatting import size
from swarm_node.settings.config import Config, UsageError
from swarm_node.storage.home import Home


def kept_models(config: Config, home: Home, emitter: Emitter) -> Mapping[str, KeptModel]:
    """Return what is kept of models, by name, and tell the user so.

    Raises ConfigError for settings that contradict each other, and for a directory that is not there.
    """
    for each in config.text_at_home:
        if isinstance(each.source, Path) and not each.source.is_dir():
            raise ConfigError(
                f"there is no directory {each.source} to keep {each.model} from",
                remedy="give --text-at-home [MODEL=]DIR, or [MODEL=]OWNER/NAME of a hub",
            )
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
    if len(kept) < len(config.text_at_home):
        raise UsageError("a model is kept at home twice", remedy="give --text-at-home once for each model")
    if "blocks_at_home" in config.origins and not kept:
        raise UsageError(
            f"nothing is kept at home, so {config.origin('blocks_at_home')} has no effect",
            remedy="give --text-at-home [MODEL=]SOURCE, too",
        )
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
