"""What a block takes for a token, as a server observes it at work: what was measured before, moved by the passes since.

The measurement can be wrong, as when others loaded their blocks on the same machine meanwhile. The median of the newest
passes is told: a pause of the machine moves nothing, load that stays does. No clock of its own; owned by the engine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from swarm.serving.model.measure import PREFILL_TOKENS, SpanSpeed

WINDOW_PASSES = 64
MEASURED_PASSES = 16
"""What a measurement counts as. After that many passes that say otherwise, these begin to be believed."""

MIN_PROMPT_TOKENS = PREFILL_TOKENS // 2
"""Of a pass that tells what a prompt's token takes: one with fewer is a pass over the weights, and tells of these."""


class ObservedSpeed:
    """Begins with what was `measured`."""

    def __init__(self, measured: SpanSpeed) -> None:
        self._measured = measured
        self._decode_ms = deque([measured.decode_ms] * MEASURED_PASSES, maxlen=WINDOW_PASSES)
        self._prefill_ms = deque([measured.prefill_ms] * MEASURED_PASSES, maxlen=WINDOW_PASSES)

    @property
    def speed(self) -> SpanSpeed:
        return replace(self._measured, decode_ms=median(self._decode_ms), prefill_ms=median(self._prefill_ms))

    def passed(self, num_decodes: int, num_prefill_tokens: int, num_blocks: int, pass_ms: float) -> None:
        """A pass over `num_blocks` took `pass_ms` for so many single tokens and tokens of prompts."""
        block_ms = pass_ms / num_blocks
        if not num_prefill_tokens:
            # several tokens take at least as long as one, so that they can only show that one takes less
            if num_decodes == 1 or block_ms < median(self._decode_ms):
                self._decode_ms.append(block_ms)
        elif not num_decodes and num_prefill_tokens >= MIN_PROMPT_TOKENS:
            self._prefill_ms.append(block_ms / num_prefill_tokens)

    def measured_again(self, decode_ms: float, prefill_ms: float) -> None:
        """The span was measured while nobody used it."""
        self._decode_ms.extend([decode_ms] * MEASURED_PASSES)
        self._prefill_ms.extend([prefill_ms] * MEASURED_PASSES)
