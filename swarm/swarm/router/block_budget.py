"""Computes how many blocks of a model fit into a node's memory with room for sessions beside them. The module is pure.

A block without cache is useless: every session keeps keys and values for each of its tokens on every block. So each
block counts with its cache for as many sessions as a volunteer should hold at once, or for one session if the node can
close a gap only in that way.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError

SESSION_TOKENS = 2048
"""Tokens of prompt and answer of an ordinary session; fewer if the model's context is shorter."""

COMFORTABLE_SESSIONS = 8
PAGE_TOKENS = limits.PAGE_TOKENS
"""The minimum tokens that a session reserves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """The memory needs of a model: `block_bytes` of the largest block, `ends_bytes` of embedding and head together, and
    `kv_bytes` of one token's cache on one block.

    `loading_bytes` are needed on top of a span's weights while it is loaded; after that the cache may use them.
    """

    num_blocks: int
    block_bytes: int
    ends_bytes: int
    kv_bytes: int
    context_tokens: int
    loading_bytes: int = 0

    def weight_bytes(self, num_blocks: int) -> int:
        """Return the bytes of a span's weights with both ends of the model, since a later span may include either
        end."""
        return num_blocks * self.block_bytes + self.ends_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBudget:
    """The blocks that fit: `num_blocks` leave room for up to COMFORTABLE_SESSIONS sessions, `max_blocks` for one.
    `reason` says what fits beside the blocks."""

    num_blocks: int
    max_blocks: int
    reason: str

    def why(self, num_blocks: int) -> str:
        """Return the reason for serving `num_blocks`."""
        if num_blocks > self.num_blocks:
            return f"{self.reason}, but closing the gap is worth less cache"
        return self.reason


def block_budget(needs: ModelNeeds, max_bytes: int, max_kv_bytes: int) -> BlockBudget:
    """Return how many blocks fit into `max_bytes`, of which at most `max_kv_bytes` are for the cache.

    Raises ConfigError if not even one block fits.
    """
    tokens = min(SESSION_TOKENS, needs.context_tokens)
    for num_sessions in range(COMFORTABLE_SESSIONS, 0, -1):
        if num_blocks := _fitting(needs, max_bytes, max_kv_bytes, num_sessions * tokens):
            break
    else:
        # one session of less than an ordinary length is still better than none
        num_blocks = min(_fitting(needs, max_bytes, max_kv_bytes, PAGE_TOKENS), 1)
    if not num_blocks:
        raise ConfigError(
            f"not one block fits into {max_bytes} bytes: one takes {needs.block_bytes} and {needs.loading_bytes} more "
            f"while it is loaded, embedding and head {needs.ends_bytes}, and the cache of {PAGE_TOKENS} tokens "
            f"{PAGE_TOKENS * needs.kv_bytes}",
            remedy="allow more memory, or serve a smaller model",
        )
    reason = _in_words(needs, num_blocks, min(max_bytes - needs.weight_bytes(num_blocks), max_kv_bytes))
    max_blocks = max(num_blocks, _fitting(needs, max_bytes, max_kv_bytes, tokens))
    return BlockBudget(num_blocks=num_blocks, max_blocks=max_blocks, reason=reason)


def least_bytes(needs: ModelNeeds, num_blocks: int) -> int:
    """Return the least bytes for `num_blocks`: their weights, and the cache of a page or what loading them takes."""
    return needs.weight_bytes(num_blocks) + max(needs.loading_bytes, PAGE_TOKENS * needs.kv_bytes * num_blocks)


def kv_bytes_beside(needs: ModelNeeds, num_blocks: int, max_bytes: int, max_kv_bytes: int) -> int:
    """Return the bytes left for the cache beside a span of `num_blocks`. Raises ConfigError if they are not enough."""
    if max_bytes < least_bytes(needs, num_blocks):
        raise ConfigError(
            f"{num_blocks} blocks with embedding and head take {needs.weight_bytes(num_blocks)} bytes, "
            f"{needs.loading_bytes} more while they are loaded, and with room for {PAGE_TOKENS} tokens more than the "
            f"{max_bytes} that are allowed",
            remedy="serve fewer blocks, or allow more memory",
        )
    return min(max_bytes - needs.weight_bytes(num_blocks), max_kv_bytes)


def comfortable_bytes(needs: ModelNeeds, num_blocks: int) -> int:
    """Return the bytes that a node needs for `num_blocks` and the cache of COMFORTABLE_SESSIONS sessions."""
    num_tokens = COMFORTABLE_SESSIONS * min(SESSION_TOKENS, needs.context_tokens)
    return needs.weight_bytes(num_blocks) + max(num_tokens * needs.kv_bytes * num_blocks, needs.loading_bytes)


def _in_words(needs: ModelNeeds, num_blocks: int, cache_bytes: int) -> str:
    fits = f"{num_blocks} block{'s fit' if num_blocks > 1 else ' fits'}"
    if num_blocks == needs.num_blocks:
        fits = "the whole model fits"
    tokens = min(SESSION_TOKENS, needs.context_tokens)
    num_tokens = cache_bytes // (needs.kv_bytes * num_blocks)
    num_sessions = num_tokens // tokens
    plural = "s" if num_sessions > 1 else ""
    room = f"{num_sessions} session{plural} of {tokens} tokens" if num_sessions else f"{num_tokens} tokens"
    return f"{fits} beside the cache of {room}"


def _fitting(needs: ModelNeeds, max_bytes: int, max_kv_bytes: int, num_tokens: int) -> int:
    """Return the maximum number of blocks that fit beside a cache for `num_tokens`, or beside the largest allowed cache
    if that is smaller."""
    for num_blocks in range(needs.num_blocks, 0, -1):
        cache_bytes = min(num_tokens * needs.kv_bytes * num_blocks, max_kv_bytes)
        if needs.weight_bytes(num_blocks) + max(cache_bytes, needs.loading_bytes) <= max_bytes:
            return num_blocks
    return 0
