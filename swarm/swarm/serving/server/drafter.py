"""Guesses an answer's next tokens, so that one pass through all servers can yield several.

The guess is what followed the newest tokens where as many of them as possible occurred before, the last time that they
did (after prompt lookup: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). The last server draws after each
guess as if it were the token, and keeps the draws up to the first that differs. So drafts change the time of tokens,
and never the tokens.

The server counts what drafts gain: tokens that came at once, against the longer time of a pass, which includes all
other servers and the network. Pure: times are arguments.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from swarm_protocol import limits

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

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take drafts from now on, from these tokens and the answer's own."""
        self._text = array("i", token_ids)

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
