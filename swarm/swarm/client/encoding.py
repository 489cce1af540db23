"""From what was asked to token ids that fit into the model. No state."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_protocol.errors import ConfigError

from swarm.client.request import DEFAULT_MAX_TOKENS, Question
from swarm.serving.model.model_assets import ModelKit


async def encode(kit: ModelKit, question: Question) -> list[int]:
    """Raises ConfigError, also if the tokenizer takes more time or memory than it may, and what `ModelKit` raises."""
    if question.prompt is None:
        token_ids = await kit.encode_chat(question.messages, question.tools, question.template_kwargs)
    elif isinstance(question.prompt, str):
        token_ids = await kit.encode(question.prompt)
    else:
        return checked(kit, question.prompt)
    if not all(0 <= token_id < kit.shape.vocab_size for token_id in token_ids):
        raise ConfigError(
            f"the tokenizer of {kit.shape.name} gives tokens for this text that the model does not know",
            remedy="use other words or another model",
        )
    return token_ids


def checked(kit: ModelKit, token_ids: Sequence[int]) -> list[int]:
    """Raises ConfigError unless the model knows them all."""
    if not all(0 <= token_id < kit.shape.vocab_size for token_id in token_ids):
        raise ConfigError(
            "the prompt has token ids that the model does not know", remedy=f"use 0 to {kit.shape.vocab_size - 1}"
        )
    return list(token_ids)


def check_fits(kit: ModelKit, num_tokens: int) -> None:
    """Raises ConfigError for an empty text, and for one over the model's context."""
    if not num_tokens:
        raise ConfigError("the text is empty", remedy="give some text")
    if num_tokens > kit.context_tokens:
        raise ConfigError(
            f"{num_tokens} tokens are {num_tokens - kit.context_tokens} over the context of {kit.shape.name}",
            remedy="shorten the text",
        )


def room_for(kit: ModelKit, num_prompt_tokens: int, max_tokens: int | None, *, min_tokens: int = 0) -> int:
    """How many tokens the answer may have: `max_tokens`, or without a number the usual, or fewer if no more fit.

    Raises ConfigError for an empty prompt, and for one that leaves no room for the answer, saying by how much; and if
    the answer may not have `min_tokens`.
    """
    if not num_prompt_tokens:
        raise ConfigError("the prompt is empty", remedy="give some text to continue")
    room = kit.context_tokens - num_prompt_tokens
    wanted = max(1, min(DEFAULT_MAX_TOKENS, room)) if max_tokens is None else max_tokens
    if wanted > room:
        raise ConfigError(
            f"{num_prompt_tokens} prompt tokens and {wanted} new ones are {wanted - room} over the context of "
            f"{kit.context_tokens} tokens of {kit.shape.name}",
            remedy="shorten the prompt or ask for fewer tokens",
        )
    if wanted < min_tokens:
        raise ConfigError(
            f"min_tokens is {min_tokens}, and the answer may have {wanted} tokens",
            remedy="ask for as many with max_tokens",
        )
    return wanted
