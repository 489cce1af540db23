"""What a client may ask for beside answers: embeddings as OpenAI has them, tokens as vLLM has them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from swarm_node.gateway import http_limits
from swarm_node.gateway.chat_schema import ChatMessage, Tool
from swarm_node.gateway.request_schema import JsonObject, Label, ModelName, Text, TokenId, TokenIds, one_prompt_or_many
from swarm_node.gateway.strict_body import Neutral, OrDefault, StrictBody

Inputs = Annotated[
    list[Text | TokenIds],
    BeforeValidator(one_prompt_or_many, json_schema_input_type=Text | TokenIds | list[Text | TokenIds]),
    Field(min_length=1, max_length=http_limits.MAX_EMBEDDING_INPUTS),
]


class EmbeddingRequest(StrictBody):
    """`input` is always a list here. The vectors have the length that the model gives them."""

    neutral: ClassVar[Neutral] = {
        "add_special_tokens": (True,),
        "dimensions": (),
        "normalize": (True,),
        "priority": (0,),
        "truncate_prompt_tokens": (),
    }

    model: ModelName
    input: Inputs
    encoding_format: Annotated[Literal["float", "base64"], OrDefault("float")] = "float"
    user: Label | None = None


class TokenizeText(StrictBody):
    neutral: ClassVar[Neutral] = {"add_special_tokens": (True,), "return_token_strs": (False,)}

    model: ModelName
    prompt: Text


class TokenizeChat(StrictBody):
    neutral: ClassVar[Neutral] = {
        "add_special_tokens": (False,),
        "chat_template": (),
        "continue_final_message": (False,),
        "mm_processor_kwargs": (),
        "return_token_strs": (False,),
    }

    model: ModelName
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=http_limits.MAX_CHAT_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=http_limits.MAX_TOOLS), OrDefault([])] = Field(default_factory=list)
    add_generation_prompt: Annotated[bool, OrDefault(True)] = True
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=http_limits.MAX_TEMPLATE_KWARGS), OrDefault({})] = (
        Field(default_factory=dict)
    )


def _kind(body: object) -> str:
    return "TokenizeChat" if isinstance(body, dict) and "messages" in body else "TokenizeText"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("TokenizeText")] | Annotated[TokenizeChat, Tag("TokenizeChat")], Discriminator(_kind)
]


class DetokenizeRequest(StrictBody):
    model: ModelName
    tokens: Annotated[list[TokenId], Field(max_length=http_limits.MAX_NEW_TOKENS)]
