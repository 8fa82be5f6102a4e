"""`POST /v1/embeddings`: what clients may send, and what they get."""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw

from pagefleet_gateway.bodies.schema import RequestBody, Side, TokenId, Truncation, Word

TokenIdList: TypeAlias = Annotated[list[TokenId], Meta(min_length=1)]


class EmbeddingBody(RequestBody, kw_only=True):
    """Texts or token ids whose embeddings are wanted."""

    input: Word | Annotated[list[Word | TokenId | TokenIdList], Meta(min_length=1)]
    """As the prompt of a completion."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Numbers of an embedding to keep, from the first; what is left is scaled to length 1."""
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Side | None = None
    add_special_tokens: bool | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """The embedding of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[
        Raw,
        Meta(
            extra_json_schema={
                "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]
            }
        ),
    ]
    """Its numbers; as base64, those are float32, little-endian."""


class EmbeddingUsage(msgspec.Struct):
    """Tokens that a request took."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The answer, in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
