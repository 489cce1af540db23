"""Keeps the state that sampling needs in a session of the last block: the answer's tokens so far, what its grammar
allows next, and the drafts.

Drafts aside, all of the state follows from the Sampler that the session was opened with, and from those tokens. Another
server that takes over the session therefore draws the same tokens, once the client has sent the earlier ones.

Drafts are guesses at the next tokens, so that one pass through all servers can yield several tokens. A guess is what
followed the newest tokens where as many of them as possible occurred before, the last time that they did (after prompt
lookup: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). The last server draws after each guess as if it
were the token, and keeps the draws up to the first that differs. So drafts change the time of tokens, and never the
tokens. The server counts what drafts gain: tokens that came at once, against the longer time of a pass, which includes
all other servers and the network.

All of it is used in the server's event loop; `Drafter` gets the time as an argument.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import repeat

import numpy as np
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, PeerTimeout, PeerViolation
from swarm_protocol.sampler import Sampler
from swarm_protocol.session_frames import TokenDraw

from swarm.serving.engine.engine import cheap_drafts
from swarm.serving.grammar.grammar_masks import GrammarPool, TokenMask
from swarm.serving.peer_shares import Held
from swarm.serving.sampling.sampling import LogitEdits, Pick
from swarm.serving.wire.tensor_stream import check_ids

RECALL_S = 10.0
"""Seconds for which a draw waits for the answer's earlier tokens, which the client sends at the same time."""

DRAFTS_S = 0.02
"""Maximum seconds for which a drawn token waits for the drafts that its grammar allows after it. A busy machine takes
several milliseconds to hear from the grammar's process."""

MAX_MATCH_TOKENS = 16
"""Number of newest tokens that are looked for at the most."""

MAX_PLACES = 2048
"""Number of places of the newest token that are compared. More would hold up the event loop in a text of one token."""

FIRST_DRAFTS = 4

MAX_CREDIT = 4.0
"""Passes without drafts that drafts may cost before they pause."""

PAUSE_TOKENS = 64
"""Number of tokens without drafts after they did not pay. A trial after it costs about one pass."""

WEIGHT = 0.2
"""Weight of the last pass in the mean time of passes without drafts."""


class Drafter:
    """The drafts of one session of the last block. `begin` gives it the tokens before the first draw."""

    def __init__(self) -> None:
        self.drafts: tuple[int, ...] = ()
        self._text: array[int] | None = None
        self._num_most = FIRST_DRAFTS
        self._credit = MAX_CREDIT / 2
        self._num_paused = 0
        self._plain_s: float | None = None
        self._since_s: float | None = None

    def begin(self, token_ids: np.ndarray) -> None:
        """Take drafts from now on, from these tokens and the answer's own."""
        self._text = array("i", token_ids.astype(np.int32).tobytes())

    def drew(self, tokens: Sequence[int], now_s: float) -> None:
        """Record the tokens that one pass has yielded."""
        if self._text is None:
            return
        if self._since_s is not None:
            self._count(len(tokens), now_s - self._since_s)
        self._text.extend(tokens)
        self._num_paused -= len(tokens)
        self.withdraw()

    def _count(self, num_tokens: int, pass_s: float) -> None:
        if not self.drafts:
            known_s = pass_s if self._plain_s is None else self._plain_s
            self._plain_s = known_s + WEIGHT * (pass_s - known_s)
            return
        is_right = num_tokens > len(self.drafts)
        self._num_most = min(2 * self._num_most, limits.MAX_DRAFTS) if is_right else num_tokens
        if self._plain_s:
            self._credit = min(MAX_CREDIT, self._credit + num_tokens - pass_s / self._plain_s)
        if self._credit <= 0:
            self._num_paused, self._credit, self._num_most = PAUSE_TOKENS, 1.0, 1

    def room(self, most: int) -> int:
        """Return how many drafts may follow the newest token, up to `most`; 0 without a text and while they pause."""
        is_off = self._text is None or self._num_paused > 0 or self._plain_s is None
        return 0 if is_off else max(0, most)

    def guess(self, most: int) -> tuple[int, ...]:
        """Return what followed the newest tokens, up to `most` tokens of it, and fewer after wrong drafts."""
        return self._found(min(most, self._num_most)) if most > 0 else ()

    def sends(self, drafts: tuple[int, ...], now_s: float) -> None:
        """Record the drafts that follow the newest token, whose pass begins now."""
        self.drafts, self._since_s = drafts, now_s

    def withdraw(self) -> None:
        """Forget the drafts, which were not sent."""
        self.drafts, self._since_s = (), None

    def _found(self, most: int) -> tuple[int, ...]:
        assert self._text is not None
        text = np.frombuffer(self._text, dtype=np.int32)[-limits.MAX_DRAFT_TEXT_TOKENS :]
        if not len(text):
            return ()
        places = np.flatnonzero(text[:-1] == text[-1])[-MAX_PLACES:]
        for num_before in range(1, min(MAX_MATCH_TOKENS, len(text))):
            longer = places[places >= num_before]
            longer = longer[text[longer - num_before] == text[-1 - num_before]]
            if not len(longer):
                break
            places = longer
        if not len(places):
            return ()
        follows = text[int(places[-1]) + 1 :]
        return tuple(np.resize(follows[:most], most).tolist())  # a text that repeats itself is taken to go on so


class SessionSampler:
    """The sampler of the session of `sequence`. Call `close` at its end. Raises PeerViolation for token ids outside the
    vocabulary, and like `GrammarPool.open`."""

    def __init__(self, sampler: Sampler, vocab_size: int, grammars: GrammarPool, sequence: Held) -> None:
        prompt_ids = np.frombuffer(sampler.prompt_ids, dtype="<i4")
        check_ids(prompt_ids, vocab_size)
        check_ids(np.array((*sampler.bias_ids, *sampler.end_ids), dtype=np.int64), vocab_size)
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._drawn: list[int] = []
        self._counts: Counter[int] = Counter()
        self._changed = asyncio.Event()
        self._mask: asyncio.Future[TokenMask] | None = None
        self._allowed_after: list[bytes] = []
        self._grammar = grammars.open(sampler.grammar, sequence) if sampler.grammar is not None else None

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
        if self._mask is None:
            return self._edits(index, self._counts, None)
        mask = await asyncio.shield(self._mask)
        if not (allowed := self._with_ends(mask)):
            raise _no_token(blocked=bool(mask.allowed.strip(b"\0")))
        return self._edits(index, self._counts, allowed)

    def edits_after(self, drafts: Sequence[int]) -> list[LogitEdits]:
        """Return the edits for the draw after each of the drafts, as if these had been drawn. With a grammar, they are
        the first ones that `drew` returned."""
        counts, found = self._counts, list[LogitEdits]()
        allowed = self._allowed_after if self._mask is not None else repeat(None)
        for index, (token_id, after) in enumerate(zip(drafts, allowed, strict=False), len(self._drawn) + 1):
            counts = counts.copy()  # a sum of counters would take a Python loop over all tokens of the answer
            counts[token_id] += 1
            found.append(self._edits(index, counts, after))
        return found

    def _edits(self, index: int, counts: Counter[int], allowed: bytes | None) -> LogitEdits:
        banned = self._sampler.end_ids if index < self._sampler.min_tokens else ()
        return LogitEdits(sampler=self._sampler, counts=counts, banned=banned, allowed=allowed)

    async def drew(self, token_ids: Sequence[int], guess: tuple[int, ...] = (), most: int = 0) -> tuple[int, ...]:
        """Append the tokens that were drawn, and return the drafts that may follow, at most `most`: `guess`, or with a
        grammar what it forces and allows of `guess`, which takes up to DRAFTS_S."""
        self._drawn += token_ids
        self._counts.update(token_ids)
        self._go_on(guess, most)
        if (mask := self._mask) is None or not most:
            return guess
        await asyncio.wait([mask], timeout=DRAFTS_S)
        if not mask.done() or mask.cancelled() or mask.exception():
            return ()  # `edits` waits for it, and raises its error
        return self._drafts_of(mask.result())

    def _drafts_of(self, mask: TokenMask) -> tuple[int, ...]:
        """Return the mask's drafts, up to the first that ends the answer, or after which no token can be drawn."""
        drafts = list[int]()
        for token_id, after in mask.drafts:
            allowed = self._with_ends(after)
            if token_id in self._sampler.end_ids or token_id >= self._vocab_size or not allowed:
                break
            drafts.append(token_id)
            self._allowed_after.append(allowed)
        return tuple(drafts)

    def close(self) -> None:
        """Free the grammar; a second call does nothing."""
        if self._grammar is not None:
            self._grammar.close()
        self._grammar = self._mask = None

    def _go_on(self, guess: tuple[int, ...] = (), most: int = 0) -> None:
        """Start to compute the next mask, while the last token goes through the model."""
        self._allowed_after = []
        if self._drawn and self._drawn[-1] in self._sampler.end_ids:
            self.close()  # the client ignores tokens that are drawn after an end token, until it closes the session
        if self._grammar is not None:
            # no token is appended before the mask is ready
            self._mask = self._grammar.mask(self._drawn, guess, most)
            self._mask.add_done_callback(_seen)

    def _with_ends(self, mask: TokenMask) -> bytes:
        """Return the mask with the end tokens, which are allowed only where the grammar may end. It is empty if no
        token is allowed."""
        allowed = bytearray(mask.allowed.ljust(-(-self._vocab_size // 8), b"\0"))
        for token_id in self._sampler.end_ids:
            byte, bit = divmod(token_id, 8)
            allowed[byte] = allowed[byte] & ~(1 << bit) | mask.may_end << bit
        return bytes(allowed) if allowed.strip(b"\0") else b""


class SessionDraws:
    """Says how a session of the last block draws, and after which drafts. It has a `sampler` if its client asked for
    one."""

    def __init__(self, sampler: SessionSampler | None) -> None:
        self.sampler = sampler
        self.drafter = Drafter()

    async def pick(self, draw: TokenDraw, num_drafts: int) -> Pick:
        """Return what the engine is to draw: the token of `draw`, and one after each of the first `num_drafts` drafts.
        Raises like `SessionSampler.edits`."""
        drafts = self.drafter.drafts[:num_drafts]
        if self.sampler is None:
            return Pick(draw, drafts=tuple((token_id, None) for token_id in drafts))
        edits = await self.sampler.edits(draw.index)
        return Pick(draw, edits, tuple(zip(drafts, self.sampler.edits_after(drafts), strict=True)))

    async def next_drafts(self, drawn: Sequence[int], ahead: int, num_sequences: int) -> tuple[int, ...]:
        """Append the tokens that a pass of `num_sequences` has drawn, and return the drafts to follow them, at most
        `ahead`."""
        # sequences of one pass here come to the next server together, where none sees the others' drafts
        most = self.drafter.room(min(ahead, cheap_drafts(num_sequences)))
        guess = self.drafter.guess(most)
        return guess if self.sampler is None else await self.sampler.drew(drawn, guess, most)


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
