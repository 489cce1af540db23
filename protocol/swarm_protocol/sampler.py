"""The settings by which a session changes the logits of every draw: penalties, biases, early end tokens, a grammar.

Settings of a single draw (temperature, cuts, seed) are a TokenDraw of `session_frames`. The last server gets these.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol import limits
from swarm_protocol.checks import check_choice, check_float, check_int

TOKEN_ID_BYTES = 4
GRAMMAR_KINDS = ("json_schema", "lark")


def check_token_ids(value: bytes, field: str, *, most: int) -> bytes:
    """Token ids of TOKEN_ID_BYTES each, little-endian, `most` of them at most."""
    num_ids, rest = divmod(len(value), TOKEN_ID_BYTES)
    if rest or num_ids > most:
        raise ValueError(f"{field} has {len(value)} bytes, and holds at most {most} ids of {TOKEN_ID_BYTES}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A constraint on the text of an answer: a JSON schema, or a grammar in llguidance's dialect of Lark."""

    kind: str
    text: str

    def __post_init__(self) -> None:
        check_choice(self.kind, "kind of grammar", GRAMMAR_KINDS)
        num_bytes = len(self.text.encode(errors="surrogatepass"))
        if not 0 < num_bytes <= limits.MAX_GRAMMAR_BYTES:
            raise ValueError(f"the grammar has {num_bytes} bytes, and may have 1 to {limits.MAX_GRAMMAR_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The penalties count the tokens of the answer so far; `repetition_penalty` counts those of `prompt_ids`, too.

    `end_ids` end the answer: they are not drawn among its first `min_tokens`, and with a grammar only where it is
    fulfilled. `bias_values` are added to the logits of `bias_ids`.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_ids: bytes = b""
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    end_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for field in ("presence_penalty", "frequency_penalty"):
            check_float(getattr(self, field), field, low=-limits.MAX_PENALTY, high=limits.MAX_PENALTY)
        check_float(self.repetition_penalty, "repetition_penalty", high=limits.MAX_REPETITION_PENALTY)
        if not self.repetition_penalty:
            raise ValueError("repetition_penalty is 0")
        check_token_ids(self.prompt_ids, "prompt_ids", most=limits.MAX_VOCAB)
        if not len(self.bias_ids) == len(self.bias_values) <= limits.MAX_BIASES:
            raise ValueError(f"{len(self.bias_ids)} biased tokens, and {len(self.bias_values)} biases")
        for value in self.bias_values:
            check_float(value, "bias_values", low=-limits.MAX_BIAS, high=limits.MAX_BIAS)
        if len(self.end_ids) > limits.MAX_END_IDS:
            raise ValueError(f"end_ids has {len(self.end_ids)} items, more than {limits.MAX_END_IDS}")
        for token_id in (*self.bias_ids, *self.end_ids):
            check_int(token_id, "a token id", high=limits.MAX_VOCAB - 1)
        check_int(self.min_tokens, "min_tokens", high=limits.MAX_SESSION_TOKENS)
        if self.grammar is not None and not self.end_ids:
            raise ValueError("a grammar needs end_ids: nothing else can end the answer")
        if self.grammar is not None and self.min_tokens:
            raise ValueError("min_tokens does not go with a grammar")
