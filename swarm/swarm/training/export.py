"""A finished run as a Hugging Face directory that AutoModelForCausalLM and AutoTokenizer load.

Blocking; no state.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from swarm.training.model import build_model, named_parameters, views
from swarm.training.run_config import BYTE_VOCABULARY, END_OF_TEXT, RunConfig


def export_hf(theta_N: Tensor, config: RunConfig, directory: Path, *, max_shard_bytes: int = 5 << 30) -> None:
    """Write config, weights (several safetensors files with an index if over `max_shard_bytes`) and tokenizer."""
    model = build_model(config.model)
    pieces = views(theta_N, model)
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            parameter.copy_(pieces[name])
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id = END_OF_TEXT, END_OF_TEXT
    model.save_pretrained(directory, max_shard_size=max_shard_bytes)
    _write_tokenizer(directory, model.config.max_position_embeddings)


def _write_tokenizer(directory: Path, max_tokens: int) -> None:
    """Each byte is the token of its own number. There are no special tokens: any of them would be text as well."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_characters() -> list[str]:
    """The printable characters that stand for bytes in byte-level vocabularies (Radford et al. 2019, GPT-2)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTE_VOCABULARY) if byte not in own]
    return [chr(byte) if byte in own else chr(0x100 + others.index(byte)) for byte in range(BYTE_VOCABULARY)]
