"""How many prompt tokens a step may take beside the decodes, learnt from the steps that ran.

A step takes a pass over the weights, which is what steps without prompt tokens measure, and some time a prompt token,
which grows with the context. No clock of its own.
"""

from __future__ import annotations

FIRST_TOKENS = 64
"""A step before anything was measured: a fraction of a second on a slow machine."""

MIN_TOKENS = 16
"""However slow the machine is, prompts must get on; and a pass over the weights for less than this is wasted."""

ROUND_TOKENS = 64
"""Kernels take rows by so many (`packing`): of others, the last ones are computed for nothing."""

WEIGHT = 0.3
"""Of one measurement that is better than expected. One that is worse counts fully, so that the bound holds again in the
next step."""


class StepCost:
    """`max_step_ms` bounds the time of a step with prompt tokens, and `max_alone_ms` that of one whose seat is the only
    one: for few tokens each, a pass over the weights takes about as long as for many. `max_step_tokens` bounds their
    number."""

    def __init__(self, *, max_step_ms: float, max_alone_ms: float, max_step_tokens: int) -> None:
        self._max_step_ms = max_step_ms
        self._max_alone_ms = max_alone_ms
        self._max_step_tokens = max_step_tokens
        self._decode_ms = 0.0
        self._token_ms = 0.0

    def prefill_tokens(self, *, is_alone: bool = False) -> int:
        """As many as a step may have now, beside any decodes."""
        if not self._token_ms:
            return min(FIRST_TOKENS, self._max_step_tokens)
        max_ms = self._max_alone_ms if is_alone else self._max_step_ms
        fitting = int((max_ms - self._decode_ms) / self._token_ms)
        if fitting > ROUND_TOKENS:
            fitting -= fitting % ROUND_TOKENS
        return min(max(fitting, MIN_TOKENS), self._max_step_tokens)

    def measured(self, num_prefill_tokens: int, step_ms: float) -> None:
        """A step has taken `step_ms` with so many prompt tokens, or with none."""
        if not num_prefill_tokens:
            self._decode_ms = _learnt(self._decode_ms, step_ms, 1.0)
            return
        token_ms = max(step_ms - self._decode_ms, 1e-3) / num_prefill_tokens
        # a short rest of a prompt says little of a full step
        share = min(1.0, num_prefill_tokens / self.prefill_tokens())
        self._token_ms = _learnt(self._token_ms, token_ms, share)


def _learnt(known: float, found: float, weight: float) -> float:
    if not known:
        return found
    return known + weight * (1.0 if found > known else WEIGHT) * (found - known)
