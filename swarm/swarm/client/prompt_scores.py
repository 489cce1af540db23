"""Echoes a prompt: returns its tokens with their log probabilities under the model.

The scores come from one pass over the whole prompt (`TensorCalls.score`), outside sessions: cached pages of a prompt
have no logits, and after a server's death only its part of the pass is repeated. No state.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from swarm_protocol import limits
from swarm_protocol.session_frames import SampledToken, TokenDraw

from swarm.client.request import Prompt
from swarm.serving.session.generate import LikelyToken, Token
from swarm.serving.tokenizer.model_assets import ModelAssets


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The log probability of each of `token_ids` but the first, and the `num_logprobs` likeliest tokens in its place.

    `rows` are what `TensorCalls.score` returns, with one likely token or more.
    """

    token_ids: Sequence[int]
    rows: Sequence[Sequence[float]]
    num_logprobs: int

    def token(self, position: int) -> SampledToken:
        """Return the prompt's token at `position`, which is not the first, with its probability."""
        row = self.rows[position - 1]
        logprob = _logprob(row[-2], row)
        return SampledToken(token_id=self.token_ids[position], logprob=logprob, top=self._likeliest(row))

    def answer(self) -> SampledToken:
        """Return the likeliest token after the prompt."""
        row = self.rows[-1]
        token_id, logprob = _likeliest(row)[0]
        return SampledToken(token_id=token_id, logprob=logprob, top=self._likeliest(row))

    def _likeliest(self, row: Sequence[float]) -> tuple[tuple[int, float], ...]:
        return tuple(_likeliest(row)[: self.num_logprobs])


def _logprob(logit: float, row: Sequence[float]) -> float:
    # rounding may put a certain token above 0
    return max(min(logit - row[-1], 0.0), -limits.MAX_LOGPROB)


def _likeliest(row: Sequence[float]) -> list[tuple[int, float]]:
    """Return the likely tokens; of equal ones the lower id first, as a draw takes it."""
    num_top = len(row) // 2 - 1
    pairs = zip(row[num_top : 2 * num_top], row[:num_top], strict=True)
    likely = [(int(token_id), _logprob(logit, row)) for token_id, logit in pairs]
    return sorted(likely, key=lambda pair: (-pair[1], pair[0]))


@dataclass(frozen=True, slots=True)
class KnownToken:
    """An answer of one token that is known without a session."""

    token: SampledToken

    async def next_tokens(
        self, _tokens: Sequence[int], _draw: TokenDraw, _num_tokens: int
    ) -> AsyncGenerator[SampledToken, None]:
        yield self.token


async def echoed(
    assets: ModelAssets, prompt: Prompt, token_ids: Sequence[int], scores: PromptScores | None, *, is_whole: bool
) -> list[Token]:
    """Return the prompt as tokens, the last one with its text: one token without `scores`. `is_whole`: no answer
    follows."""
    picked = [SampledToken(token_id=token_ids[0])]
    picked += [scores.token(position) for position in range(1, len(token_ids))] if scores else []
    ids = list({*token_ids, *(token_id for token in picked for token_id, _ in token.top)})
    data = dict(zip(ids, await assets.token_bytes(ids), strict=True))
    text = prompt.prompt
    if not isinstance(text, str):
        text = b"".join(data[token_id] for token_id in token_ids).decode(errors="replace")
    last = len(picked) - 1
    return [
        Token(
            text=text if position == last else "",
            token_id=token.token_id,
            finish_reason="length" if is_whole and position == last else None,
            logprob=token.logprob,
            data=data[token.token_id] if scores else b"",
            top=tuple(
                LikelyToken(token_id=token_id, data=data[token_id], logprob=logprob) for token_id, logprob in token.top
            ),
            is_prompt=True,
        )
        for position, token in enumerate(picked)
    ]
