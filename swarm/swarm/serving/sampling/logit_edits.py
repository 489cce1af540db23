"""Changes to the logits of one draw: biases, penalties, tokens that may not come. Elementwise, so equal on any machine.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from swarm_protocol.sampler import Sampler
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """`counts`: how often each token of the answer so far has come. `banned` may not come.

    Of the others only those may that have their bit in `allowed`, the lowest id first; None: all.
    """

    sampler: Sampler
    counts: Mapping[int, int] = field(default_factory=dict)
    banned: tuple[int, ...] = ()
    allowed: bytes | None = None

    def apply(self, logits_V: Tensor) -> Tensor:
        """A changed copy, float32 [V]."""
        sampler, device = self.sampler, logits_V.device
        edited_V = logits_V.float().clone()
        if sampler.bias_ids:
            edited_V[torch.tensor(sampler.bias_ids, device=device)] += torch.tensor(sampler.bias_values, device=device)
        drawn = torch.tensor(list(self.counts), dtype=torch.int64, device=device)
        if sampler.repetition_penalty != 1.0:
            prompt = torch.from_numpy(np.frombuffer(sampler.prompt_ids, dtype="<i4").astype(np.int64)).to(device)
            seen = torch.unique(torch.cat([prompt, drawn]))
            values = edited_V[seen]
            edited_V[seen] = torch.where(
                values < 0, values * sampler.repetition_penalty, values / sampler.repetition_penalty
            )
        if self.counts and (sampler.presence_penalty or sampler.frequency_penalty):
            times = torch.tensor(list(self.counts.values()), dtype=torch.float32, device=device)
            edited_V[drawn] -= sampler.presence_penalty + sampler.frequency_penalty * times
        if self.banned:
            edited_V[torch.tensor(self.banned, device=device)] = -torch.inf
        if self.allowed is not None:
            edited_V[_forbidden(self.allowed, len(edited_V)).to(device)] = -torch.inf
        return edited_V


def _forbidden(allowed: bytes, num_tokens: int) -> Tensor:
    """Of so many tokens those that have no bit: a mask [V]."""
    bits = np.unpackbits(np.frombuffer(allowed, dtype=np.uint8), count=num_tokens, bitorder="little")
    return torch.from_numpy(bits == 0)
