"""The model that a run trains: one that the run file describes, or a module of the author's own.

transformers builds a described model, so a run contains no code. The initial weights are equal on every machine. Each
member brings its own copy of a module, which the run identifies:

    [model]
    model_type = "module"
    num_values = 1234      # of all parameters
    digest = "…"           # of the weights that the run begins with
    num_samples = 60000    # of the data set; 0: members train on streams of their own

No state. transformers is imported only when a model is first built, since the import takes seconds.

Shapes: N values of the flat parameter vector, in the order of the run's `Layout`.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_protocol.errors import ConfigError, IntegrityError
from swarm_protocol.toml_text import toml_value
from torch import Tensor, nn

from swarm.threads import BUILDING
from swarm.training.run.layout import MAX_STATE_VALUES, Layout
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import BYTE_VOCABULARY, MODULE_TYPE
from swarm.training.run.seeded import stream
from swarm.training.run.settings import is_digest, refuse_unknown_keys

MAX_SAMPLES = 1 << 48
_KEYS = ("model_type", "num_values", "digest", "num_samples")

_MAX_SETTING = 1 << 20
_MAX_LAYERS = 1024
"""Limits for a setting and for the number of layers: the parameters of a hostile run cannot be counted before it is
built."""
_LEAST = {
    "vocab_size": BYTE_VOCABULARY,  # a token for each byte
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
_TRIED_TOKENS = 4
_SAME = 1e-5
"""Differences of logits that rounding explains, relative to the largest logit."""
_WRONG_TYPE = re.compile(r"Field '(?P<key>\w+)' expected (?P<type>int|float|str|bool), got")
_TYPES = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
_REFUSED_KEYS = frozenset({"auto_map", "quantization_config", "transformers_version", "architectures", "dtype"})


def module_run(config: RunConfig, module: nn.Module, *, num_samples: int = 0) -> RunConfig:
    """Return `config` as a run that trains `module` from its present weights, on `num_samples` samples (0: streams).

    A sample counts as one token. Raises ConfigError if the module cannot be trained.
    """
    layout = Layout.of(module, config.fragments)
    model = {
        "model_type": MODULE_TYPE,
        "num_values": layout.num_values,
        "digest": weights_digest(module),
        "num_samples": num_samples,
    }
    run = replace(config, model=model, data=replace(config.data, window_tokens=1))
    check_module_run(run)
    return run


def check_module_run(config: RunConfig) -> int:
    """Check [model] of a module run, and return the number of parameters. Raises ConfigError."""
    model = config.model
    if config.start.checkpoint:
        raise ConfigError(
            "[start] cannot be used with a module, which has its own initial weights",
            remedy="load the checkpoint into the module before module_run, and leave out [start]",
        )
    refuse_unknown_keys(model, _KEYS, "[model] of a module")
    num_values, digest, num_samples = model.get("num_values"), model.get("digest"), model.get("num_samples", 0)
    if type(num_values) is not int or not 1 <= num_values <= MAX_STATE_VALUES:
        raise _refusal(model, "num_values", f"use the number of parameters, 1 to {MAX_STATE_VALUES}")
    if not is_digest(digest):
        raise _refusal(model, "digest", "swarm.trainer.module_run fills it in")
    if type(num_samples) is not int or not 0 <= num_samples <= MAX_SAMPLES:
        raise _refusal(model, "num_samples", "use the data set's length, or 0")
    return num_values


def _refusal(model: Mapping[str, Any], key: str, remedy: str) -> ConfigError:
    """Return the error for a wrong or missing value of [model]."""
    what = f"[model] {key} = {toml_value(model[key])[:80]}" if key in model else f"[model] has no {key}"
    return ConfigError(what, remedy=remedy)


def refuse_module_run(model: Mapping[str, Any]) -> None:
    """Raises ConfigError for a run of an author's own module. For callers that need a described model."""
    if model.get("model_type") == MODULE_TYPE:
        raise ConfigError(
            "the run trains a module of its author's own, which is not in the file",
            remedy="train it from Python, where the module is: swarm.Trainer(RUN, peers=…, model=…, …)",
        )


def check_weights(config: RunConfig, module: nn.Module) -> None:
    """Raises IntegrityError unless `module` has the weights that the run begins with."""
    num_values = sum(parameter.numel() for parameter in module.parameters())
    if num_values != config.model["num_values"]:
        raise IntegrityError(
            f"the module has {num_values} parameters, but the run's has {config.model['num_values']}",
            remedy="bring the module that the run was made for",
        )
    if (digest := weights_digest(module)) != config.model["digest"]:
        raise IntegrityError(
            f"the module starts from other weights than the run's: {digest[:12]} instead of "
            f"{config.model['digest'][:12]}",
            remedy="load the weights that the run was made with, such as from a file of its author",
        )


def weights_digest(module: nn.Module) -> str:
    """Return the SHA-256 of the names, shapes and values (as fp32) of all parameters, in the names' order. Raises
    ConfigError for parameters that fp32 cannot hold."""
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        if parameter.is_complex() or parameter.is_meta:
            kind = "complex" if parameter.is_complex() else "on the meta device"
            raise ConfigError(f"the parameter {name} is {kind}", remedy="use one with real values")
        values = parameter.detach().to("cpu", torch.float32).contiguous()
        if not values.isfinite().all():
            raise ConfigError(f"the parameter {name} is not finite everywhere", remedy="use one with finite values")
        digest.update(f"{name}{tuple(parameter.shape)}\n".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def check_model(run: RunConfig) -> int:
    """Return the number of parameters of the run's model, which is built on the meta device. Raises ConfigError if it
    cannot be trained."""
    if run.trains_module:
        return check_module_run(run)
    config = transformers_config(run.model)
    num_values = layout_of(run).num_values
    if num_values > MAX_STATE_VALUES:
        raise ConfigError(f"[model] has {num_values} parameters, over {MAX_STATE_VALUES}", remedy="make it smaller")
    for key in ("bos_token_id", "eos_token_id"):  # by default, small models have the ids of their family's vocabulary
        named = run.model.get(key)
        ids = named if isinstance(named, list) else [named]
        if any(isinstance(each, int) and not 0 <= each < config.vocab_size for each in ids):
            raise _refusal(run.model, key, f"use ids from 0 to vocab_size - 1, {config.vocab_size - 1}")
    # some families have no maximum context length, but an exported checkpoint must have one
    max_tokens = getattr(config, "max_position_embeddings", 0)
    if max_tokens < run.data.window_tokens:
        raise ConfigError(
            f"[model] max_position_embeddings = {max_tokens} is less than a sample",
            remedy=f"use at least data.window_tokens, {run.data.window_tokens}",
        )
    return num_values


def layout_of(run: RunConfig) -> Layout:
    """Return the layout of the run's model, which is built on the meta device. Raises ConfigError."""
    config = transformers_config(run.model)
    try:
        with torch.device("meta"):
            model = _from_config(config)
    except Exception as error:  # whatever an architecture raises when its settings do not fit together
        raise ConfigError(f"[model] cannot be built: {_last_line(error)}", remedy="correct its settings") from error
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            shape = " by ".join(map(str, parameter.shape))
            raise ConfigError(f"[model] gives {name} no values: it is {shape}", remedy="use sizes of at least 1")
    return Layout.of(model, run.fragments)


def build_model(model: Mapping[str, Any]) -> nn.Module:
    """Return a transformers causal language model in fp32 on the CPU, in evaluation mode, whose weights the caller
    replaces. See `check_model`."""
    built: nn.Module = _from_config(transformers_config(model)).float().eval()
    return built


def check_computes(model: nn.Module) -> None:
    """Raises ConfigError unless `model`, a language model in evaluation mode, gives finite numbers for a few tokens,
    and none that depend on later tokens. transformers also builds models for which neither holds: encoders see the
    tokens that they are to predict unless their config has `is_decoder`."""
    config: Any = model.config
    num_tokens = min(_TRIED_TOKENS, config.max_position_embeddings)
    x_BT = torch.arange(1, num_tokens + 1).repeat(2, 1) + BYTE_VOCABULARY // 2
    x_BT[1, -1] += 1
    try:
        with torch.no_grad():
            logits_BTV = model(input_ids=x_BT, use_cache=False).logits
    except Exception as error:  # whatever an architecture raises when its settings do not fit together
        raise ConfigError(f"[model] cannot be run: {_last_line(error)}", remedy="correct its settings") from error
    largest = logits_BTV.abs().amax()
    if not largest.isfinite():
        raise ConfigError("[model] gives numbers that are not finite", remedy="correct its settings")
    if (logits_BTV[0, :-1] - logits_BTV[1, :-1]).abs().gt(_SAME * largest).any():
        raise ConfigError(
            f"[model] {config.model_type} sees the tokens that it is to predict",
            remedy="set is_decoder = true if the family has it, or use a decoder-only model",
        )


def initial_theta(run: RunConfig) -> Tensor:
    """Return the weights that all replicas start from, unless the run names a checkpoint: fp32 CPU [N], bit-identical
    on every machine.

    Matrices are noise with the standard deviation of the model's config: sums of four uniform numbers. Normal numbers
    would need logarithms and cosines, whose last bits differ between CPUs. Vectors of ones or zeros stay as the
    architecture makes them; vectors that it draws at random (gates of Qwen3-Next, sinks of GPT-OSS) become such noise
    too. Raises ConfigError as `check_computes`.
    """
    model = build_model(run.model)
    check_computes(model)
    std = float(getattr(transformers_config(run.model), "initializer_range", 0.02))
    pieces = {}
    # sorted by name, so that the noise does not depend on the fragments
    for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
        if parameter.dim() < 2 and _is_ones_or_zeros(parameter):
            pieces[name] = parameter.detach()
        else:
            pieces[name] = torch.from_numpy(_noise(stream(run.seed, index, parameter.numel()), std))
    return Layout.of(model, run.fragments).join(pieces)


def _is_ones_or_zeros(x: Tensor) -> bool:
    return bool((x == 1).all()) or bool((x == 0).all())


def _noise(bits_N: NDArray[np.uint64], std: float) -> NDArray[np.float32]:
    # four uniform numbers of 0..65535: their sum has mean 2 * 65535 and variance (2^32 - 1) / 3
    bits_N4 = bits_N.view(np.uint16).reshape(-1, 4)
    centred_N: NDArray[np.int32] = bits_N4.sum(axis=1, dtype=np.int32) - 2 * 65535
    return centred_N.astype(np.float32) * np.float32(std / math.sqrt((2.0**32 - 1.0) / 3.0))


def transformers_config(model: Mapping[str, Any]) -> Any:
    """Return the transformers config that [model] describes. Raises ConfigError."""
    try:
        return _described_config(model)
    except ConfigError:
        raise
    except Exception as error:  # transformers validates with many kinds of exception
        raise ConfigError(
            f"transformers refuses [model]: {_last_line(error)}", remedy="correct its settings"
        ) from error


def _described_config(model: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig  # noqa: PLC0415

    refuse_module_run(model)
    keys = dict(model)
    model_type = keys.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ConfigError("[model] has no model_type", remedy='add a line such as model_type = "llama"')
    if model_type not in CONFIG_MAPPING:
        close = difflib.get_close_matches(model_type, CONFIG_MAPPING.keys(), n=1)
        remedy = f"did you mean {close[0]!r}?" if close else "use a decoder family of transformers, such as llama"
        raise ConfigError(f"[model] model_type = {toml_value(model_type)[:80]} is not known", remedy=remedy)
    refuse_unknown_keys(keys, model_keys(model_type), "[model]")
    _check_settings(keys)
    try:
        config = AutoConfig.for_model(model_type, **keys)
    except Exception as error:
        if (wrong := _WRONG_TYPE.search(str(error))) is not None and wrong["key"] in keys:
            raise _refusal(keys, wrong["key"], f"use {_TYPES[wrong['type']]}") from error
        raise
    if not hasattr(config, "num_hidden_layers") or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refusal(model, "model_type", "use a decoder-only model")
    _check_shape(keys, config)
    return config


def model_keys(model_type: str) -> set[str]:
    """Return the keys of [model] that the family `model_type` of transformers has."""
    from transformers import AutoConfig  # noqa: PLC0415

    known = {key for key in AutoConfig.for_model(model_type).to_dict() if not key.startswith("_")}
    if "num_key_value_heads" in known:
        known.add("head_dim")  # Qwen3-MoE's attention uses it, and its config does not name it
    return known - _REFUSED_KEYS


def _check_settings(keys: Mapping[str, Any]) -> None:
    """Raises ConfigError for numbers that are impossible, or too large to be tried."""
    for key, value in keys.items():
        if isinstance(value, int) and abs(value) > _MAX_SETTING:
            raise ConfigError(f"[model] {key} = {value} is too large", remedy=f"use at most {_MAX_SETTING}")
        if isinstance(value, int) and value < (least := _LEAST.get(key, value)):
            raise _refusal(keys, key, f"use at least {least}")
        # a list of lists is a pattern of layers, which the config expands: [[["global", "local"], 12]]
        for part in value if isinstance(value, list) else ():
            if isinstance(part, list) and any(isinstance(each, int) and each > _MAX_LAYERS for each in part):
                raise ConfigError(f"[model] {key} has too many layers", remedy=f"use 1 to {_MAX_LAYERS}")


def _check_shape(keys: Mapping[str, Any], config: Any) -> None:
    """Raises ConfigError for impossible numbers of layers, or of key and value heads."""
    num_layers = config.num_hidden_layers
    if not (isinstance(num_layers, int) and 1 <= num_layers <= _MAX_LAYERS):
        raise ConfigError(f"[model] has {num_layers!r:.40} layers", remedy=f"use 1 to {_MAX_LAYERS}")
    num_heads, num_groups = getattr(config, "num_attention_heads", None), keys.get("num_key_value_heads")
    if isinstance(num_heads, int) and isinstance(num_groups, int) and num_heads % num_groups:
        raise _refusal(keys, "num_key_value_heads", f"use a divisor of num_attention_heads, {num_heads}")


def _from_config(config: Any) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    with BUILDING:
        return AutoModelForCausalLM.from_config(config)


def _last_line(error: Exception) -> str:
    """Return the last line of the error's message, which is the reason. The lines before it name what was validated."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    line = f"there is no {line}" if isinstance(error, KeyError) else line.removeprefix("ValueError: ")
    return line[:200]
