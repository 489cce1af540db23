"""A run's data as numbered samples: which tokens sample 4711 is, the same on every replica.

`load_corpus` is the way in. Documents come out of a source (`files`, `hub`, `python_source`) in passages, a worker
process turns them into tokens in a file (`worker`, `tokenizing`), and a `Corpus` cuts them into windows.

These names are loaded when first used: torch comes with some, and the worker starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm.training.data.byte_corpus import ByteCorpus
    from swarm.training.data.corpus import Corpus
    from swarm.training.data.corpus_loading import load_corpus
    from swarm.training.data.local import DEFAULT_DATA, LocalData, OnProgress, Progress
    from swarm.training.data.token_corpus import TokenCorpus
    from swarm.training.data.tokenizing_worker import PreparationStopped

__all__ = [
    "DEFAULT_DATA",
    "ByteCorpus",
    "Corpus",
    "LocalData",
    "OnProgress",
    "PreparationStopped",
    "Progress",
    "TokenCorpus",
    "load_corpus",
]

_MODULES = {
    "ByteCorpus": "byte_corpus",
    "Corpus": "corpus",
    "load_corpus": "corpus_loading",
    "TokenCorpus": "token_corpus",
    "PreparationStopped": "tokenizing_worker",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'swarm.training.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"swarm.training.data.{_MODULES.get(name, 'local')}"), name)
