"""A run's corpus on this machine: from memory, from tokens that were kept, or made by a worker. Blocks; no state.

Kept tokens are named after what they were made of. Those that the run pins by their digest are used without a look at
the source, which may be gone or out of reach by then.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from swarm_protocol.errors import ConfigError, IntegrityError

from swarm.training.data import cache
from swarm.training.data.byte_corpus import ByteCorpus
from swarm.training.data.corpus import Corpus
from swarm.training.data.document_files import FileSource
from swarm.training.data.hub import HubSource
from swarm.training.data.local import DEFAULT_DATA, LocalData
from swarm.training.data.passages import Source
from swarm.training.data.python_source import PythonSource
from swarm.training.data.token_corpus import TokenCorpus
from swarm.training.data.token_file import TokenFile, read_header
from swarm.training.data.tokenizer import TokenizerFiles, check_vocabulary
from swarm.training.data.tokenizing_worker import Job, tokenize
from swarm.training.run.run_config import DataConfig

_FORM = "1"
"""Of passages, split and token files: tokens made in another form are made anew."""


def load_corpus(
    config: DataConfig,
    *,
    seed: int,
    vocab_size: int = 0,
    local: LocalData = DEFAULT_DATA,
) -> Corpus:
    """The data of a run whose model has `vocab_size` tokens (0: unknown). At once if its tokens were kept.

    Raises ConfigError for data or a tokenizer that cannot be had or used, IntegrityError for data that is not the run's
    or changes while it is read, and `worker.PreparationStopped` soon after `local.stop` has said so.
    """
    check_meaning(config, local)
    if config.source == "python-stdlib" and config.tokenizer == "bytes":
        corpus = ByteCorpus.load(config, seed=seed)
        check_vocabulary(corpus.vocab_size, vocab_size)
        return corpus
    folder = local.cache_folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)  # tokens are the text
    except OSError as error:
        raise ConfigError(
            f"tokens cannot be kept in {folder}: {error.strerror}",
            remedy="make it writable, or name another cache folder in XDG_CACHE_HOME",
        ) from error
    tokens, name = _pinned(folder, config.digest), "the run"
    if tokens is None:
        tokenizer = TokenizerFiles.find(config.tokenizer, local.tokenizer, config.tokenizer_revision)
        source = _find_source(config, local)
        path, name = folder / f"{_key(source, tokenizer)}.tokens", source.name
        tokens = _open(path)
        if tokens is None:
            tokenize(Job(source=source, tokenizer=tokenizer, path=path, vocab_size=vocab_size), local)
            tokens = TokenFile(path)
    cache.used(tokens.path, local.max_cache_bytes)
    check_vocabulary(tokens.header.vocab_size, vocab_size)
    return TokenCorpus.of(tokens, config, seed=seed, source=name)


def check_meaning(config: DataConfig, local: LocalData) -> None:
    """Raises ConfigError for what a member names and the run does not use."""
    if local.path is not None and config.source != "files":
        what = "the standard library" if config.source == "python-stdlib" else f"the data set {config.hub_id}"
        raise ConfigError(f"the run trains on {what}, so {local.path} means nothing", remedy="leave out --data")
    if local.tokenizer is not None and config.tokenizer != "local":
        raise ConfigError(
            f"the run's tokenizer is {config.tokenizer}, so {local.tokenizer} means nothing",
            remedy="leave out --tokenizer",
        )


def _find_source(config: DataConfig, local: LocalData) -> Source:
    if config.source == "python-stdlib":
        return PythonSource.find()
    if config.source == "hub":
        return HubSource.find(config.hub_id, config.hub_config, config.split, config.text_key, config.revision)
    if local.path is None:
        raise ConfigError("the run trains on each member's own files", remedy="name a file or folder: --data PATH")
    return FileSource.find(local.path, config.text_key)


def _key(source: Source, tokenizer: TokenizerFiles) -> str:
    return hashlib.blake2b(repr((_FORM, source.key, tokenizer.key)).encode(), digest_size=16).hexdigest()


def _pinned(folder: Path, digest: str) -> TokenFile | None:
    for path in sorted(folder.glob("*.tokens")) if digest else ():
        try:
            found = read_header(path).digest
        except IntegrityError:
            continue
        if found == digest and (tokens := _open(path)) is not None:
            return tokens
    return None


def _open(path: Path) -> TokenFile | None:
    """None if there are none, or none that are whole."""
    try:
        return TokenFile(path)
    except IntegrityError:
        return None
