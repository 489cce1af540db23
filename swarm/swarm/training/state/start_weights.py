"""The weights of a run that starts from a checkpoint: whether they fit the run's model, and whether they are the pinned
ones.

What reads a checkpoint into a module is `swarm.trainer.start_checkpoint`'s. Pure, and blocks: it hashes all values.
"""

from __future__ import annotations

from typing import Any

from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor, nn

from swarm.training.inner.run_model import layout_of, transformers_config
from swarm.training.run.module_run import weights_digest
from swarm.training.run.run_config import RunConfig
from swarm.training.state.layout import Layout

_REMEDY = "copy [model] from the checkpoint: swarm-node run init FILE --start CHECKPOINT"
_OF_THE_FILE = frozenset(
    {"_name_or_path", "architectures", "auto_map", "dtype", "quantization_config", "transformers_version", "use_cache"}
)
"""What a config says that is no setting of its model."""
_WITHOUT_EFFECT = _OF_THE_FILE | {
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings")
}
"""What changes nothing of what the weights compute."""


def start_theta(run: RunConfig, module: nn.Module) -> Tensor:
    """The weights of `module`, the model of the run's checkpoint, as replicas start from them: fp32 CPU [N].

    Raises ConfigError if they do not fit the run's model or the run does not pin them, IntegrityError if they are not
    the ones that it pins.
    """
    layout = fitting_layout(run, module)
    if not run.start.digest:
        raise ConfigError(
            "the run does not pin the checkpoint that it starts from",
            remedy="ask its author to sign it with swarm-node run sign",
        )
    if (digest := weights_digest(module)) != run.start.digest:
        raise IntegrityError(
            f"the checkpoint has other weights than those that the run starts from: {digest[:12]} instead of "
            f"{run.start.digest[:12]}",
            remedy="bring the checkpoint that the run's author signed for",
        )
    return layout.flatten(module)


def fitting_layout(run: RunConfig, module: nn.Module) -> Layout:
    """The layout of the run's model. Raises ConfigError unless `module` has its parameters, tied as there."""
    layout = layout_of(run)
    wanted = dict(zip(layout.names, layout.shapes, strict=True))
    found = {name: parameter.shape for name, parameter in module.named_parameters()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) == found.get(name):
            continue
        here, there = (str(tuple(each[name])) if name in each else "missing" for each in (wanted, found))
        differing = ", ".join(differing_settings(run, module.config)) or "no setting"
        raise ConfigError(
            f"the checkpoint does not fit [model]: {name} is {there} in it and {here} in the run; "
            f"their configs differ in {differing}",
            remedy=_REMEDY,
        )
    return layout


def differing_settings(run: RunConfig, config: Any) -> list[str]:
    """The names of the settings by which `config`, a checkpoint's, computes something else than the run's [model]."""
    mine, theirs = transformers_config(run.model).to_dict(), config.to_dict()
    if mine["model_type"] != theirs["model_type"]:
        return ["model_type"]
    names = (mine.keys() | theirs.keys()) - _WITHOUT_EFFECT
    return sorted(name for name in names if mine.get(name) != theirs.get(name))


def model_settings(config: Any) -> dict[str, Any]:
    """`config`, a checkpoint's, as the keys of [model]: what is not as its family has it by default."""
    settings = {"model_type": config.model_type, **_without_none(config.to_diff_dict())}
    return {key: value for key, value in settings.items() if key not in _OF_THE_FILE}


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null."""
    return {
        key: _without_none(each) if isinstance(each, dict) else each for key, each in value.items() if each is not None
    }
