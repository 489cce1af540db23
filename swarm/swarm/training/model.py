"""The model that a run config describes, and its first weights, equal on every machine.

Models are transformers' own; no code comes with a config. Nothing here has state. transformers is imported when a model
is first built, since that takes a second that other commands should not wait for.
Shapes: N values of the flat parameter vector: all parameters in the order of their names, tied ones once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swarm.training.permutation import mix
from swarm.training.run_config import refuse_unknown_keys
from swarm_protocol.errors import ConfigError

MAX_PARAMETERS = 1 << 34
"""128 GiB of outer state: beyond what any volunteer holds."""
_MAX_SETTING = 1 << 20
_MAX_LAYERS = 1024
_REFUSED_KEYS = frozenset({"auto_map", "quantization_config", "transformers_version", "architectures", "dtype"})


def check_model(model: Mapping[str, Any]) -> int:
    """The number of parameters of the model; builds it without memory. Raises ConfigError if it cannot be built."""
    config = _transformers_config(model)
    try:
        with torch.device("meta"):
            num_values = sum(parameter.numel() for parameter in _from_config(config).parameters())
    except Exception as error:  # whatever an architecture raises for settings that do not fit together
        raise ConfigError(f"[model] cannot be built: {_first_line(error)}", remedy="correct its settings") from error
    if num_values > MAX_PARAMETERS:
        raise ConfigError(f"[model] has {num_values} parameters, over {MAX_PARAMETERS}", remedy="make it smaller")
    return num_values


def build_model(model: Mapping[str, Any]) -> nn.Module:
    """A transformers causal language model in fp32 on the CPU, with arbitrary weights. Raises as `check_model`."""
    check_model(model)
    built: nn.Module = _from_config(_transformers_config(model)).float()
    return built


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The canonical order of a flat vector's pieces."""
    return sorted(model.named_parameters())


def flatten(model: nn.Module) -> Tensor:
    """fp32 CPU [N]: a copy of the parameters."""
    return torch.cat([parameter.detach().reshape(-1).float().cpu() for _, parameter in named_parameters(model)])


def views(theta_N: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The pieces of `theta_N` by parameter name, shaped, without a copy. Raises ValueError if the sizes differ."""
    parameters = named_parameters(model)
    pieces = theta_N.split([parameter.numel() for _, parameter in parameters])
    return {
        name: piece.view(parameter.shape) for (name, parameter), piece in zip(parameters, pieces, strict=True)
    }


def initial_theta(model: Mapping[str, Any], seed: int) -> Tensor:
    """The weights that every replica starts from: fp32 CPU [N], bit-identical on every machine.

    Matrices get noise with the standard deviation of the config's `initializer_range`. It is the sum of four uniform numbers instead
    of a normal one, as normal ones take logarithms and cosines, whose last bits differ between CPUs. Vectors keep what
    the architecture gives them, which is ones or zeros.
    """
    built = build_model(model)
    std = float(getattr(_transformers_config(model), "initializer_range", 0.02))
    for index, (_, parameter) in enumerate(named_parameters(built)):
        if parameter.dim() >= 2:
            noise_N = _noise(parameter.numel(), seed=seed, stream=index, std=std)
            parameter.data.copy_(torch.from_numpy(noise_N).view(parameter.shape))
    return flatten(built)


def _noise(num_values: int, *, seed: int, stream: int, std: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    key = mix(mix(np.array([seed], dtype=np.uint64)) + np.uint64(stream))
    bits_N = mix(key + np.arange(num_values, dtype=np.uint64))
    sum_N = np.zeros(num_values, dtype=np.int64)
    for shift in (0, 16, 32, 48):
        sum_N += ((bits_N >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    # four uniform numbers of 0..65535 have mean 2 * 65535 and variance (2^32 - 1) / 3
    centred_N = (sum_N - 2 * 65535).astype(np.float32)
    return centred_N * np.float32(std * (3.0 / (2.0**32 - 1.0)) ** 0.5)


def _transformers_config(model: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig  # noqa: PLC0415

    keys = dict(model)
    model_type = keys.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ConfigError("[model] has no model_type", remedy='add a line such as model_type = "llama"')
    refuse_unknown_keys({model_type: None}, CONFIG_MAPPING.keys(), "[model] model_type")
    defaults = AutoConfig.for_model(model_type).to_dict()
    known = {key for key in defaults if not key.startswith("_")} - _REFUSED_KEYS
    refuse_unknown_keys(keys, known, "[model]")
    for key, value in keys.items():
        if isinstance(value, int) and abs(value) > _MAX_SETTING:
            raise ConfigError(f"[model] {key} = {value} is too large", remedy=f"use at most {_MAX_SETTING}")
    try:
        config = AutoConfig.for_model(model_type, **keys)
    except Exception as error:  # transformers validates with many kinds of exception
        raise ConfigError(f"[model] is refused: {_first_line(error)}", remedy="correct its settings") from error
    if getattr(config, "num_hidden_layers", 1) > _MAX_LAYERS:
        raise ConfigError(f"[model] has over {_MAX_LAYERS} layers", remedy="use fewer")
    return config


def _from_config(config: Any) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
