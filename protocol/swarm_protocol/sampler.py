"""The settings by which a session changes the logits of every draw: penalties, biases, early end tokens, a grammar.

Settings of a single draw (temperature, cuts, seed) are a TokenDraw of `session_frames`. The last server gets these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias

from swarm_protocol import limits
from swarm_protocol.checks import Checked, number, up_to, whole

TOKEN_ID_BYTES = 4
GRAMMAR_KINDS = ("json_schema", "lark")


def check_token_ids(value: bytes, field: str, *, most: int) -> bytes:
    """Check token ids of TOKEN_ID_BYTES each, little-endian, at most `most` of them."""
    num_ids, rest = divmod(len(value), TOKEN_ID_BYTES)
    if rest or num_ids > most:
        raise ValueError(f"{field} has {len(value)} bytes, and holds at most {most} ids of {TOKEN_ID_BYTES}")
    return value


def _check_kind(value: object, field: str) -> None:
    if value not in GRAMMAR_KINDS:
        raise ValueError(
            f"{field} is none of {', '.join(GRAMMAR_KINDS)}; a regular expression is written as lark: start: /[a-z]+/"
        )


TokenId: TypeAlias = Annotated[int, whole(limits.MAX_VOCAB - 1)]
Penalty: TypeAlias = Annotated[float, number(limits.MAX_PENALTY, low=-limits.MAX_PENALTY)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar(Checked):
    """A constraint on the text of an answer: a JSON schema, or a grammar in llguidance's dialect of Lark."""

    kind: Annotated[str, _check_kind]
    text: str

    def __post_init__(self) -> None:
        num_bytes = len(self.text.encode(errors="surrogatepass"))
        if not 0 < num_bytes <= limits.MAX_GRAMMAR_BYTES:
            raise ValueError(f"the grammar has {num_bytes} bytes, and may have 1 to {limits.MAX_GRAMMAR_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler(Checked):
    """The settings of a session's draws. The penalties count the tokens of the answer so far; `repetition_penalty` also
    counts those of `prompt_ids`.

    `end_ids` end the answer: they are not drawn among its first `min_tokens`, and with a grammar only where it may end.
    `bias_values` are added to the logits of `bias_ids`.
    """

    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, number(limits.MAX_REPETITION_PENALTY)] = 1.0
    prompt_ids: Annotated[bytes, partial(check_token_ids, most=limits.MAX_VOCAB)] = b""
    bias_ids: Annotated[tuple[TokenId, ...], up_to(limits.MAX_BIASES)] = ()
    bias_values: tuple[Annotated[float, number(limits.MAX_BIAS, low=-limits.MAX_BIAS)], ...] = ()
    end_ids: Annotated[tuple[TokenId, ...], up_to(limits.MAX_END_IDS)] = ()
    min_tokens: Annotated[int, whole(limits.MAX_SESSION_TOKENS)] = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not self.repetition_penalty:
            raise ValueError("repetition_penalty is 0")
        if len(self.bias_ids) != len(self.bias_values):
            raise ValueError(f"{len(self.bias_ids)} biased tokens, and {len(self.bias_values)} biases")
        if self.grammar is not None and not self.end_ids:
            raise ValueError("a grammar needs end_ids: nothing else can end the answer")
        if self.grammar is not None and self.min_tokens:
            raise ValueError("min_tokens does not go with a grammar")
