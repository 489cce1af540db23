"""The sampling parameters of an answer, which clients set and servers apply (`drawing`).

No state, and without torch, which clients and gateways lack.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from swarm_protocol import limits
from swarm_protocol.checks import check_int
from swarm_protocol.errors import ConfigError
from swarm_protocol.sampler import Grammar, Sampler
from swarm_protocol.session_frames import TokenDraw

MAX_TEMPERATURE = 2.0
MAX_STOPS = 32
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_END_IDS = 64

OWN_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling options of which a model may have its own defaults, in its generation_config.json."""

_PENALTY = f"use {-limits.MAX_PENALTY:g} to {limits.MAX_PENALTY:g}"
_SMALLEST = math.ulp(0.0)
"""The smallest number above 0."""

_BOUNDS: Mapping[str, tuple[type[Integral | Real], float, float, str]] = {
    "temperature": (Real, 0, MAX_TEMPERATURE, f"use 0 to {MAX_TEMPERATURE:g}"),
    "top_p": (Real, _SMALLEST, 1, "use a number above 0 and up to 1"),
    "top_k": (Integral, 0, limits.MAX_VOCAB, f"use 0 for no limit, or a number up to {limits.MAX_VOCAB}"),
    "min_p": (Real, 0, 1, "use 0 to 1"),
    "seed": (Integral, -(2**63) + 1, 2**63 - 1, "use a 64-bit number"),
    "presence_penalty": (Real, -limits.MAX_PENALTY, limits.MAX_PENALTY, _PENALTY),
    "frequency_penalty": (Real, -limits.MAX_PENALTY, limits.MAX_PENALTY, _PENALTY),
    "repetition_penalty": (
        Real,
        _SMALLEST,
        limits.MAX_REPETITION_PENALTY,
        f"use 1 for none, or a number above 0 and up to {limits.MAX_REPETITION_PENALTY:g}",
    ),
    "min_tokens": (
        Integral,
        0,
        limits.MAX_SESSION_TOKENS,
        f"use 0 for no minimum, or a number up to {limits.MAX_SESSION_TOKENS}",
    ),
}
"""For each parameter: kind, minimum, maximum, and the remedy for other values."""


def check_kind(value: object, name: str, kind: type[Integral | Real]) -> None:
    """Raises ConfigError if `value`, from a caller, is not a number of this kind."""
    if isinstance(value, bool) or not isinstance(value, kind):
        called = "a whole number" if kind is Integral else "a number"
        raise ConfigError(f"{name} is {value!r:.80}", remedy=f"use {called}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """Changes of logits before a draw. `counts`: how often each token occurs in the answer so far. `banned` tokens
    cannot be drawn.

    `allowed` has a bit for each token that a grammar allows, the lowest id first; None: all.
    """

    sampler: Sampler
    counts: Mapping[int, int] = field(default_factory=dict)
    banned: tuple[int, ...] = ()
    allowed: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of how an answer's tokens are drawn, and what ends the answer. Raises ConfigError for invalid values.

    `temperature` 0 is greedy; `top_p` 1, `top_k` 0 and `min_p` 0 cut nothing. Presence and frequency penalties count
    the answer's tokens, the repetition penalty (Keskar et al. 2019, arXiv 1909.05858) the prompt's as well.
    `logit_bias` has pairs of a token id and a value to add to its logit. The order is: bias, repetition, presence and
    frequency, banned and disallowed tokens; then temperature, min_p, top_k, top_p.

    An answer ends with a token of `stop_token_ids`, with an end token of the model unless `ignore_eos`, or with a
    string of `stop`, which is cut off, or of `stop_after`, which is not. None of these ends it before `min_tokens`. A
    `grammar` constrains the text.
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
        for name, (kind, least, most, remedy) in _BOUNDS.items():
            value = getattr(self, name)
            check_kind(value, name, kind)
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value!s:.80}", remedy=remedy)
        self._check_ends()
        known = {token_id for token_id, bias in self.logit_bias if abs(bias) <= limits.MAX_BIAS}
        if len(known) != len(self.logit_bias) or len(known) > limits.MAX_BIASES or not _are_ids(known):
            raise ConfigError(
                "logit_bias has too many tokens, or an item that is not a token id with a bias",
                remedy=f"use up to {limits.MAX_BIASES} token ids with {-limits.MAX_BIAS:g} to {limits.MAX_BIAS:g} each",
            )

    def _check_ends(self) -> None:
        stops = (*self.stop, *self.stop_after)
        if max(len(self.stop), len(self.stop_after)) > MAX_STOPS or any(
            not 0 < len(text) <= MAX_STOP_CHARS for text in stops
        ):
            raise ConfigError(
                "stop has too many strings, or an empty or very long one",
                remedy=f"use at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS or not _are_ids(self.stop_token_ids):
            raise ConfigError(
                "stop_token_ids has too many items, or one that is not a token id",
                remedy=f"use at most {MAX_STOP_TOKENS} token ids",
            )
        if self.grammar is not None and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise ConfigError(f"{name} cannot be used with a grammar, which determines the end", remedy="leave it out")


def written_options(generation: Any) -> dict[str, Any]:
    """Return the sampling options of a generation config, unchecked. As for transformers' generate, those of a draw
    count only with `do_sample`, whose temperature is 1 by default. Raises TypeError if it is no JSON object."""
    if not isinstance(generation, dict):
        raise TypeError("generation_config.json: it is not an object")
    draws = generation.get("do_sample") is True
    given: dict[str, Any] = {"temperature": 1.0} if draws else {}
    names = OWN_DEFAULTS if draws else ("repetition_penalty",)
    return given | {name: generation[name] for name in names if generation.get(name) is not None}


def checked_options(written: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the options of a generation config. Some models write -1 for a `top_k` without limit. Raises ValueError
    if a request could not have these values."""
    given = {name: written[name] for name in OWN_DEFAULTS if name in written}
    try:
        if "top_k" in given:
            given["top_k"] = max(0, check_int(given["top_k"], "top_k", low=-1, high=limits.MAX_VOCAB))
        Sampling(**given)
    except (ConfigError, ValueError) as error:
        raise ValueError(f"generation_config.json: {error}") from None
    return MappingProxyType(given)


def checked_end_ids(ends: Any, name: str) -> list[int]:
    """Return the end tokens of a config: none, one, or a list. Some models name some beyond their vocabulary.

    Raises ValueError, which names `name`, for a value that no client takes.
    """
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if len(ids) > MAX_END_IDS:
        raise ValueError(f"{name} has {len(ids)} tokens, more than {MAX_END_IDS}")
    return [check_int(each, name, low=-(2**31), high=2**31) for each in ids]


def _are_ids(values: Collection[int]) -> bool:
    return all(0 <= token_id < limits.MAX_VOCAB for token_id in values)


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1), of 53 bits, for the draw at `index` of an answer."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Pick:
    """One draw. `edits` change the logits first. Reported probabilities are those of the unchanged logits.

    `drafts` are guesses at the tokens to come, each with the edits for the draw after it. This draw is made if the one
    before it gave that token.
    """

    draw: TokenDraw
    edits: LogitEdits | None = None
    drafts: tuple[tuple[int, LogitEdits | None], ...] = ()

    def then(self) -> Pick:
        """Return the draw after the first draft."""
        (_, edits), *drafts = self.drafts
        return Pick(replace(self.draw, index=self.draw.index + 1, ahead=0), edits, tuple(drafts))
