"""Keeps the state that sampling needs in a session of the last block: the answer's tokens so far, and what its grammar
allows next.

All of the state follows from the Sampler that the session was opened with, and from those tokens. Another server that
takes over the session therefore draws the same tokens, once the client has sent the earlier ones. The sampler is used
in the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np
from swarm_protocol.errors import ConfigError, PeerRefused, PeerTimeout, PeerViolation
from swarm_protocol.sampler import Sampler

from swarm.serving.grammar.grammar_masks import GrammarPool, TokenMask
from swarm.serving.peer_shares import Held
from swarm.serving.sampling.sampling import LogitEdits
from swarm.serving.wire.tensor_stream import check_ids

RECALL_S = 10.0
"""Seconds for which a draw waits for the answer's earlier tokens, which the client sends at the same time."""


class SessionSampler:
    """The sampler of the session of `sequence`. Call `close` at its end. Raises PeerViolation for token ids outside the
    vocabulary, and PeerRefused for a grammar without `grammars`."""

    def __init__(self, sampler: Sampler, vocab_size: int, grammars: GrammarPool | None, sequence: Held) -> None:
        prompt_ids = np.frombuffer(sampler.prompt_ids, dtype="<i4")
        check_ids(prompt_ids, vocab_size)
        check_ids(np.array((*sampler.bias_ids, *sampler.end_ids), dtype=np.int64), vocab_size)
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._drawn: list[int] = []
        self._counts: Counter[int] = Counter()
        self._changed = asyncio.Event()
        self._mask: asyncio.Future[TokenMask] | None = None
        if sampler.grammar is not None and grammars is None:
            raise PeerRefused("this server follows no grammars", remedy="ask another server")
        self._grammar = grammars.open(sampler.grammar, sequence) if sampler.grammar is not None and grammars else None

    @property
    def can_draft(self) -> bool:
        """Return whether the edits after guessed tokens are known at once. Those of a grammar are not."""
        return self._sampler.grammar is None

    async def prepare(self) -> None:
        """Wait until the grammar, if there is one, is ready. Raises ConfigError for a grammar that cannot be used."""
        self._go_on()
        if self._mask is not None:
            await asyncio.shield(self._mask)

    def recall(self, token_ids: bytes) -> None:
        """Set the answer's tokens so far, once the session is ready and before the first draw. Raises PeerViolation."""
        drawn = np.frombuffer(token_ids, dtype="<i4")
        check_ids(drawn, self._vocab_size)
        # a session has only one mask under way, so that each finds a thread
        is_preparing = self._grammar is not None and (self._mask is None or not self._mask.done())
        if self._drawn or is_preparing:
            raise PeerViolation("tokens of an answer that goes on here already, or before its session is ready")
        self._drawn = drawn.tolist()
        self._counts = Counter(self._drawn)
        self._go_on()
        self._changed.set()

    async def edits(self, index: int) -> LogitEdits:
        """Return the edits for the draw of the token at `index`. Raises ConfigError if the grammar has become too
        complex, PeerTimeout if the tokens before it were not sent, and PeerViolation if a later token was drawn
        already."""
        try:
            async with asyncio.timeout(RECALL_S):
                while len(self._drawn) < index:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise PeerTimeout(f"the {index} tokens before this one were not sent") from None
        if len(self._drawn) > index:
            raise PeerViolation(f"token {index} was asked for after {len(self._drawn)} were drawn")
        allowed = None if self._mask is None else self._with_ends(await asyncio.shield(self._mask))
        return self._edits(index, self._counts, allowed)

    def edits_after(self, drafts: Sequence[int]) -> list[LogitEdits]:
        """Return the edits for the draw after each of the drafts, as if these had been drawn. Only if `can_draft`."""
        counts, found = self._counts, list[LogitEdits]()
        for index, token_id in enumerate(drafts, len(self._drawn) + 1):
            counts = counts.copy()  # a sum of counters would take a Python loop over all tokens of the answer
            counts[token_id] += 1
            found.append(self._edits(index, counts))
        return found

    def _edits(self, index: int, counts: Counter[int], allowed: bytes | None = None) -> LogitEdits:
        banned = self._sampler.end_ids if index < self._sampler.min_tokens else ()
        return LogitEdits(sampler=self._sampler, counts=counts, banned=banned, allowed=allowed)

    def drew(self, token_id: int) -> None:
        """Append the token that was drawn."""
        self._drawn.append(token_id)
        self._counts[token_id] += 1
        self._go_on()

    def close(self) -> None:
        """Free the grammar; a second call does nothing."""
        if self._grammar is not None:
            self._grammar.close()
        self._grammar = self._mask = None

    def _go_on(self) -> None:
        """Start to compute the next mask, while the last token goes through the model."""
        if self._drawn and self._drawn[-1] in self._sampler.end_ids:
            self.close()  # the client ignores tokens that are drawn after an end token, until it closes the session
        if self._grammar is not None:
            # no token is appended before the mask is ready
            self._mask = self._grammar.mask(self._drawn)
            self._mask.add_done_callback(_seen)

    def _with_ends(self, mask: TokenMask) -> bytes:
        """Return the mask with the end tokens, which are allowed only where the grammar may end."""
        allowed = bytearray(mask.allowed.ljust(-(-self._vocab_size // 8), b"\0"))
        for token_id in self._sampler.end_ids:
            byte, bit = divmod(token_id, 8)
            allowed[byte] = allowed[byte] & ~(1 << bit) | mask.may_end << bit
        if not any(allowed):
            raise _no_token(blocked=any(mask.allowed))
        return bytes(allowed)


def _no_token(*, blocked: bool) -> ConfigError:
    """Return the error for a grammar that allows no token. If `blocked`, the grammar needs an end token as text."""
    if blocked:
        return ConfigError(
            "the model's end token stands in the way: the grammar allows no other token here, and must go on",
            remedy="use a grammar or JSON schema that does not need the end token's text",
        )
    return ConfigError("the grammar allows no token here", remedy="use another grammar or JSON schema")


def _seen(mask: asyncio.Future[TokenMask]) -> None:
    """Mark the error of `mask` as retrieved: `edits` raises it, if it is still called."""
    if not mask.cancelled():
        mask.exception()
