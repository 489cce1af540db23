"""Draws the next token: the same for the same logits and seed on any machine, and after any failover.

Draws are counter-based: the random number of the n-th token depends only on the seed and n. Edits of logits are
elementwise, so they are equal on any machine. A token's reported probability is that of the unchanged logits, before
temperature, top_k, top_p and min_p, as in OpenAI's API. Legend: N sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from swarm_protocol import limits
from swarm_protocol.session_frames import FINGERPRINT_EVERY, FINGERPRINT_LOGITS, SampledToken, TokenDraw
from torch import Tensor

from swarm.serving.sampling.sampling import LogitEdits, Pick, uniform

NUM_LIKELIEST = 4096
"""Likeliest tokens that a draw sorts first. To sort all tokens of a large vocabulary takes ten times as long."""


def pick_all(logits: Sequence[Tensor], picks: Sequence[Pick]) -> list[SampledToken | None]:
    """Draw the next token of each sequence from its logits [V]; greedy ones, the most frequent, together.

    Returns None for logits whose maximum is not finite. A logit of minus infinity is never picked.
    """
    picked: list[SampledToken | None] = []
    for logits_V, (token_id, is_finite), wanted in zip(logits, _largest(logits), picks, strict=True):
        if not is_finite:
            picked.append(None)
            continue
        edited_V = logits_V
        if wanted.edits is not None:
            edited_V = edited(logits_V, wanted.edits)
            if not math.isfinite(edited_V.max()):  # no token is left
                picked.append(None)
                continue
        if wanted.edits is not None or wanted.draw.temperature:
            token_id = pick(edited_V, wanted.draw)  # noqa: PLW2901
        token = _with_logprobs(logits_V, token_id, wanted.draw.num_logprobs)
        if wanted.draw.index % FINGERPRINT_EVERY == 0:
            token = replace(token, fingerprint=fingerprint(logits_V))
        picked.append(token)
    return picked


def fingerprint(logits_V: Tensor) -> bytes:
    """Return the ids of the largest logits, then their values, as `SampledToken.fingerprint` has them."""
    values, ids = logits_V.float().topk(min(FINGERPRINT_LOGITS, len(logits_V)))
    return ids.cpu().numpy().astype("<i4").tobytes() + values.cpu().numpy().astype("<f4").tobytes()


def _largest(logits: Sequence[Tensor]) -> list[tuple[int, bool]]:
    """Return the index of each row's first largest logit, and whether it is finite; NaN counts as the largest."""
    if logits[0].device.type == "cpu":
        # numpy's argmax is several times faster than torch's, and wakes no other threads
        rows = [logits_V.float().numpy() for logits_V in logits]
        return [(index := int(row.argmax()), math.isfinite(row[index])) for row in rows]
    values, indices = torch.stack(list(logits)).max(dim=1)
    return list(zip(indices.tolist(), values.isfinite().tolist(), strict=True))


def _with_logprobs(logits_V: Tensor, token_id: int, num_logprobs: int | None) -> SampledToken:
    if num_logprobs is None:
        return SampledToken(token_id=token_id)
    logprobs_V = torch.log_softmax(logits_V.float(), dim=0)
    values, ids = logprobs_V.topk(min(num_logprobs, len(logprobs_V)))
    # of equal values the lower id first, as in `pick`; topk promises no order among them
    top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda item: (-item[1], item[0]))
    return SampledToken(
        token_id=token_id,
        logprob=_bounded(float(logprobs_V[token_id])),
        top=tuple((likely_id, _bounded(logprob)) for likely_id, logprob in top),
    )


def _bounded(logprob: float) -> float:
    """Return a finite value, since the wire format has no infinity."""
    return max(logprob, -limits.MAX_LOGPROB)


def pick(logits_V: Tensor, draw: TokenDraw) -> int:
    """Draw the token at `draw.index` of the answer. Of equal logits, the lower id comes first."""
    if draw.temperature == 0:
        return int(logits_V.argmax())
    if logits_V.device.type == "mps":  # Apple's devices have no float64
        logits_V = logits_V.cpu()
    # relative to the largest, so that at a temperature near 0 the others vanish and the largest stays finite
    scaled_V = (logits_V.double() - logits_V.max()) / draw.temperature
    num_kept, number = len(scaled_V), uniform(draw.seed, draw.index)
    if draw.min_p:  # relative to the likeliest, which is at 0
        num_kept = int((scaled_V >= math.log(draw.min_p)).sum())
    if draw.top_k:
        num_kept = min(num_kept, draw.top_k)
    # the likeliest tokens' share of the total shows whether the draw ends among them
    ids_V = _largest_ids(scaled_V, min(num_kept, NUM_LIKELIEST))
    reached_V = torch.softmax(scaled_V, dim=0)[ids_V].cumsum(0)
    if num_kept < len(scaled_V) or reached_V[-1] < (draw.top_p if draw.top_p < 1 else number):
        ids_V = _largest_ids(scaled_V, num_kept)
        reached_V = torch.softmax(scaled_V[ids_V], dim=0).cumsum(0)
    if draw.top_p < 1:
        # the fewest tokens that reach top_p, at least one
        reached_V = reached_V[: int((reached_V < draw.top_p).sum()) + 1]
        number *= float(reached_V[-1])
    return int(ids_V[min(int((reached_V <= number).sum()), len(reached_V) - 1)])


def _largest_ids(values_V: Tensor, num: int) -> Tensor:
    """Return the ids of the `num` largest values in descending order; of equal values, the lower id first."""
    if num >= len(values_V):
        return torch.argsort(values_V, descending=True, stable=True)
    ids = (values_V >= values_V.topk(num).values[-1]).nonzero()[:, 0]
    return ids[torch.argsort(values_V[ids], descending=True, stable=True)[:num]]


def edited(logits_V: Tensor, edits: LogitEdits) -> Tensor:
    """Return an edited copy of the logits, float32 [V]."""
    sampler, device = edits.sampler, logits_V.device
    edited_V = logits_V.float().clone()
    if sampler.bias_ids:
        edited_V[torch.tensor(sampler.bias_ids, device=device)] += torch.tensor(sampler.bias_values, device=device)
    drawn = torch.tensor(list(edits.counts), dtype=torch.int64, device=device)
    if sampler.repetition_penalty != 1.0:
        prompt = torch.from_numpy(np.frombuffer(sampler.prompt_ids, dtype="<i4").astype(np.int64)).to(device)
        seen = torch.cat([prompt, drawn])  # an id that occurs twice is written twice with the same value
        values = edited_V[seen]
        edited_V[seen] = torch.where(
            values < 0, values * sampler.repetition_penalty, values / sampler.repetition_penalty
        )
    if edits.counts and (sampler.presence_penalty or sampler.frequency_penalty):
        times = torch.tensor(list(edits.counts.values()), dtype=torch.float32, device=device)
        edited_V[drawn] -= sampler.presence_penalty + sampler.frequency_penalty * times
    if edits.banned:
        edited_V[torch.tensor(edits.banned, device=device)] = -torch.inf
    if edits.allowed is not None:
        edited_V[_forbidden(edits.allowed, len(edited_V)).to(device)] = -torch.inf
    return edited_V


def _forbidden(allowed: bytes, num_tokens: int) -> Tensor:
    """Return a mask [V] of the tokens whose bit is not set."""
    bits = np.unpackbits(np.frombuffer(allowed, dtype=np.uint8), count=num_tokens, bitorder="little")
    return torch.from_numpy(bits == 0)
