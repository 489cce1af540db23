"""The numbers of a model that say how large what crosses the network is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swarm_protocol import limits
from swarm_protocol.checks import check_int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a client must know of a model to check what servers send."""

    name: str
    revision: str
    num_blocks: int
    hidden_size: int
    vocab_size: int

    def __post_init__(self) -> None:
        """Raises ValueError: the numbers are a server's."""
        check_int(self.num_blocks, "num_blocks", low=1, high=limits.MAX_BLOCKS)
        # a row of either must fit into a message
        check_int(self.hidden_size, "hidden_size", low=1, high=limits.MAX_MESSAGE_BYTES // 4)
        check_int(self.vocab_size, "vocab_size", low=1, high=limits.MAX_MESSAGE_BYTES // 4)


def context_tokens(config: Any) -> int:
    """The longest sequence that a transformers config names, and no more than the network's own bound."""
    return min(
        int(getattr(config, "max_position_embeddings", None) or limits.MAX_SESSION_TOKENS), limits.MAX_SESSION_TOKENS
    )
