"""Exports a run's weights as a Hugging Face directory that AutoModelForCausalLM and AutoTokenizer load. No state.

`fetch_named_state` gets the certified state from a run's members, and `export_hf`, which blocks, writes the directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from swarm_protocol.errors import ConfigError, reason_of
from torch import Tensor

from swarm.network.interface import Network
from swarm.threads import in_executor
from swarm.training.data.tokenizer import CorpusTokenizer, TokenizerFiles, tokenizer_files
from swarm.training.run.layout import Layout
from swarm.training.run.methods import Methods
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import build_model
from swarm.training.run.run_tables import BYTE_VOCABULARY
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.checkpoint import write_remedy
from swarm.training.state.replica_state import ReplicaState, check_genesis
from swarm.training.state.state_transfer import Fetcher

MAX_SHARD_BYTES = 4 << 30


async def fetch_named_state(
    network: Network, run: SignedRun, digest: bytes, holders: Sequence[str], num_values: int
) -> ReplicaState:
    """Fetch the state named `digest`, which has `num_values` parameters, from `holders`, and check it.

    Raises RoundError if they do not give it, for example because they have a later one, and IntegrityError for an
    initial state that the run's author did not sign.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="swarm-fetch") as executor:
        fetcher = Fetcher(network, Methods(run.run_id), executor)
        zeros = torch.zeros(num_values)  # momentum is zero in some runs, and is then not fetched
        blank = await in_executor(executor, ReplicaState.initial, zeros)
        state = (await fetcher.state(digest, holders, [blank])).state
    check_genesis(state.manifest, run.config)
    return state


def find_tokenizer(config: RunConfig, tokenizer: Path | None) -> TokenizerFiles:
    """Return the run's tokenizer; `tokenizer` is as for `export_hf`. Raises ConfigError if it is not found."""
    return TokenizerFiles.find(config.data.tokenizer, tokenizer, config.data.tokenizer_revision)


def export_hf(
    theta_N: Tensor,
    config: RunConfig,
    directory: Path,
    *,
    tokenizer: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write weights (several files with an index if over `max_shard_bytes`), configs and tokenizer to `directory`.

    `tokenizer` is this member's own directory or file, for a run whose data.tokenizer is "local". `directory` appears
    only when it is complete. Raises ConfigError if it exists already or cannot be written.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists already", remedy="move it away, or choose another place")
    files = find_tokenizer(config, tokenizer)
    model: Any = build_model(config.model)
    Layout.of(model, config.fragments).set_parameters(model, theta_N)
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)  # left by a killed process
        partial.mkdir(parents=True)
        _write_tokenizer(files, partial, int(model.config.max_position_embeddings))
        _write_model(model, files.load(), partial, max_shard_bytes)
        partial.rename(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        refusal = _system_error(error)
        parent = next(each for each in directory.absolute().parents if each.exists())
        message = f"the model cannot be written to {parent}: {reason_of(refusal)}"
        raise ConfigError(message, remedy=write_remedy(refusal)) from error


def _system_error(error: OSError | SafetensorError) -> Exception:
    """Return what the system said: safetensors, which is written in Rust, has it in the text of its own exception."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else error


def _write_model(model: Any, tokenizer: CorpusTokenizer, directory: Path, max_shard_bytes: int) -> None:
    """Write the model and its configs. Generation begins with the token that is before each document in training, and
    ends at the one after it, which also pads batches. Without such a token, generation does not end by itself."""
    begin, *_ = (*tokenizer.start_of_text, tokenizer.end_of_text)
    ends = {"bos_token_id": begin, "eos_token_id": tokenizer.end_of_text}
    model.config.update(ends)
    model.generation_config.update(**ends, pad_token_id=tokenizer.end_of_text)
    model.save_pretrained(directory, max_shard_size=max_shard_bytes)
    for path in directory.glob("*.safetensors"):  # safetensors makes them readable only for their owner
        path.chmod((directory / "config.json").stat().st_mode)


def _write_tokenizer(files: TokenizerFiles, directory: Path, max_tokens: int) -> None:
    """Copy the run's tokenizer, or write one for bytes."""
    if files.path is None:
        _write_byte_tokenizer(directory)
    else:
        for name, path in tokenizer_files(files.path).items():
            if name != "config.json":  # it describes another model
                shutil.copyfile(path, directory / name)
    if files.path is None or files.path.is_file():
        _write_tokenizer_config(directory, max_tokens)


def _write_byte_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose tokens are the bytes. It has no special tokens, since every token is valid text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # its own `save` raises a plain Exception where the disk is full
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def _write_tokenizer_config(directory: Path, max_tokens: int) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_characters() -> list[str]:
    """Return the printable characters that stand for bytes in byte-level vocabularies (Radford et al. 2019, GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(BYTE_VOCABULARY) if byte not in printable]
    return [chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in range(BYTE_VOCABULARY)]
