"""Quantized checkpoints, which keep a weight in several tensors: their formats, and the choice of the format by a
config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swarm_protocol.errors import ConfigError

from swarm.serving.model.formats.bitsandbytes import bitsandbytes
from swarm.serving.model.formats.block_floats import Fp8, Mxfp4
from swarm.serving.model.formats.format import CheckpointFormat
from swarm.serving.model.formats.packed_ints import awq, gptq

FORMATS: Mapping[str, Callable[[Mapping[str, Any]], CheckpointFormat]] = {
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "fp8": Fp8.from_config,
    "gptq": gptq,
    "mxfp4": Mxfp4.from_config,
}
"""Functions that make a format from a `quantization_config`, by `quant_method`. They raise ValueError."""

_REMEDY = "serve the unquantized checkpoint"


def format_of(config: Any) -> CheckpointFormat | None:
    """Return the format of a checkpoint; None if it is not quantized. Raises ConfigError if it cannot be
    dequantized."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError("quantization_config is not a table", remedy=_REMEDY)
    method = settings.get("quant_method")
    make = FORMATS.get(method) if isinstance(method, str) else None
    if make is None:
        raise ConfigError(
            f"quant_method {method!r:.40} is not supported; supported: {', '.join(sorted(FORMATS))}", remedy=_REMEDY
        )
    try:
        return make(settings)
    except ValueError as error:
        raise ConfigError(f"this {method} checkpoint cannot be dequantized: {error}", remedy=_REMEDY) from error
