"""Draw the next token: the same for the same logits and seed on any machine, and after any failover.

Draws are counter-based: the n-th token's random number depends on the seed and n only. Edits of logits are elementwise,
so they are equal on any machine. A token's reported probability is that of the model's own logits, before temperature
and cuts, as OpenAI reports it. Legend: N sequences, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

import numpy as np
import torch
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Grammar, Sampler
from swarm_protocol.session_frames import SampledToken, TokenDraw
from torch import Tensor

MAX_TEMPERATURE = 2.0
MAX_STOPS = 32
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64

_WHOLE = ("top_k", "seed", "min_tokens")
_REAL = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def check_kind(value: object, name: str, kind: type[Integral | Real]) -> None:
    """Raises ConfigError for a value that is no number of this kind: a caller's, as it was given."""
    if isinstance(value, bool) or not isinstance(value, kind):
        called = "a whole number" if kind is Integral else "a number"
        raise ConfigError(f"{name} is {value!r:.80}", remedy=f"use {called}")


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
    """Return a mask [V] of the tokens without a bit."""
    bits = np.unpackbits(np.frombuffer(allowed, dtype=np.uint8), count=num_tokens, bitorder="little")
    return torch.from_numpy(bits == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of an answer are drawn, and what ends it. Raises ConfigError for values without meaning.

    `temperature` 0 is greedy; `top_p` 1, `top_k` 0 and `min_p` 0 cut nothing. Presence and frequency penalties count
    the answer's tokens, the repetition penalty (Keskar et al. 2019, arXiv 1909.05858) the prompt's as well.
    `logit_bias` are pairs of a token id and what is added to its logit. Logits are changed in this order: bias,
    repetition, presence and frequency, tokens that may not come; then temperature, min_p, top_k, top_p.

    An answer ends with a token of `stop_token_ids`, with an end token of the model unless `ignore_eos`, or with a
    string of `stop`, which is cut off, or of `stop_after`, which is not. None of these ends it before `min_tokens`. A
    `grammar` says what the text has to be.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_after: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name in _WHOLE:
            check_kind(getattr(self, name), name, Integral)
        for name in _REAL:
            check_kind(getattr(self, name), name, Real)
        self._check_draws()
        self._check_ends()

    def _check_draws(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE):
            raise ConfigError(f"temperature is {self.temperature}", remedy=f"use 0 to {MAX_TEMPERATURE:g}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}", remedy="use a number above 0 and up to 1")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}", remedy="use 0 for no limit, or a positive number")
        if abs(self.seed) >= 2**63:
            raise ConfigError(f"seed is {self.seed}", remedy="use a 64-bit number")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}", remedy="use 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= limits.MAX_PENALTY:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", remedy=f"use {-limits.MAX_PENALTY:g} to {limits.MAX_PENALTY:g}"
                )
        if not 0 < self.repetition_penalty <= limits.MAX_REPETITION_PENALTY:
            raise ConfigError(
                f"repetition_penalty is {self.repetition_penalty}",
                remedy=f"use 1 for none, or a number above 0 and up to {limits.MAX_REPETITION_PENALTY:g}",
            )
        known = {token_id for token_id, bias in self.logit_bias if abs(bias) <= limits.MAX_BIAS}
        if len(known) != len(self.logit_bias) or len(known) > limits.MAX_BIASES or not _are_ids(known):
            raise ConfigError(
                "logit_bias has too many tokens, or something that is no token id or no bias",
                remedy=f"use up to {limits.MAX_BIASES} token ids with {-limits.MAX_BIAS:g} to {limits.MAX_BIAS:g} each",
            )

    def _check_ends(self) -> None:
        stops = (*self.stop, *self.stop_after)
        if len(stops) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARS for text in stops):
            raise ConfigError(
                "stop has too many strings, or an empty or very long one",
                remedy=f"use at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS or not _are_ids(self.stop_token_ids):
            raise ConfigError(
                "stop_token_ids has too many items, or one that is no token id",
                remedy=f"use at most {MAX_STOP_TOKENS} token ids",
            )
        if not 0 <= self.min_tokens <= limits.MAX_SESSION_TOKENS:
            raise ConfigError(f"min_tokens is {self.min_tokens}", remedy="use 0 for no minimum, or a positive number")
        if self.grammar is not None and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise ConfigError(f"{name} does not go with a grammar, which says where it ends", remedy="leave it out")


def _are_ids(values: Collection[int]) -> bool:
    return all(0 <= token_id < limits.MAX_VOCAB for token_id in values)


@dataclass(frozen=True, slots=True)
class Pick:
    """One draw. `edits` change the logits first; probabilities are those of the logits without them."""

    draw: TokenDraw
    edits: LogitEdits | None = None


def pick_all(logits: Sequence[Tensor], picks: Sequence[Pick]) -> list[SampledToken | None]:
    """Draw the next token of each sequence, from its logits [V]; the greedy ones, which are most, in one go.

    Returns None for logits whose largest is not a finite number. A logit of minus infinity is never picked.
    """
    picked: list[SampledToken | None] = []
    for logits_V, (token_id, is_finite), wanted in zip(logits, _largest(logits), picks, strict=True):
        if not is_finite:
            picked.append(None)
            continue
        edited_V = logits_V
        if wanted.edits is not None:
            edited_V = wanted.edits.apply(logits_V)
            if not math.isfinite(edited_V.max()):  # all that may come is impossible
                picked.append(None)
                continue
        if wanted.edits is not None or wanted.draw.temperature:
            token_id = pick(edited_V, wanted.draw)  # noqa: PLW2901
        picked.append(_with_logprobs(logits_V, token_id, wanted.draw.num_logprobs))
    return picked


def _largest(logits: Sequence[Tensor]) -> list[tuple[int, bool]]:
    """Return the index of each row's first largest logit, and whether it is finite; NaN counts as the largest."""
    if logits[0].device.type == "cpu":
        # numpy's is several times faster than torch's, and does not wake other threads for so little
        rows = [logits_V.float().numpy() for logits_V in logits]
        return [(index := int(row.argmax()), math.isfinite(row[index])) for row in rows]
    values, indices = torch.stack(list(logits)).max(dim=1)
    return list(zip(indices.tolist(), values.isfinite().tolist(), strict=True))


def _with_logprobs(logits_V: Tensor, token_id: int, num_logprobs: int | None) -> SampledToken:
    if num_logprobs is None:
        return SampledToken(token_id=token_id)
    logprobs_V = torch.log_softmax(logits_V.float(), dim=0)
    values, ids = logprobs_V.topk(min(num_logprobs, len(logprobs_V)))
    # of equal ones the lower id first, as `pick` has it; topk promises no order among them
    top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda item: (-item[1], item[0]))
    return SampledToken(
        token_id=token_id,
        logprob=_bounded(float(logprobs_V[token_id])),
        top=tuple((likely_id, _bounded(logprob)) for likely_id, logprob in top),
    )


def _bounded(logprob: float) -> float:
    """The wire carries no infinity."""
    return max(logprob, -limits.MAX_LOGPROB)


def pick(logits_V: Tensor, draw: TokenDraw) -> int:
    """Draw the token at `draw.index` of the answer. Of equal logits the lower id is taken first."""
    if draw.temperature == 0:
        return int(logits_V.argmax())
    # from the largest down, so that a temperature near 0 makes the others nothing and not the largest infinite
    scaled_V = (logits_V.double() - logits_V.max()) / draw.temperature
    sorted_V, ids_V = torch.sort(scaled_V, descending=True, stable=True)
    if draw.min_p:
        # relative to the likeliest, which is at 0
        kept = int((sorted_V >= math.log(draw.min_p)).sum())
        sorted_V, ids_V = sorted_V[:kept], ids_V[:kept]
    if draw.top_k:
        sorted_V, ids_V = sorted_V[: draw.top_k], ids_V[: draw.top_k]
    cumulative_V = torch.softmax(sorted_V, dim=0).cumsum(0)
    # the fewest tokens that reach top_p, one at least
    kept = int((cumulative_V < draw.top_p).sum().clamp(max=len(cumulative_V) - 1)) + 1
    goal = _uniform(draw.seed, draw.index) * float(cumulative_V[kept - 1])
    return int(ids_V[min(int((cumulative_V[:kept] <= goal).sum()), kept - 1)])


def _uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
