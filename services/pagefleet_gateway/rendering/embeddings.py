"""The JSON of answers of `/v1/embeddings`, as types, and what writes it."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.rendering.stream import Renderer


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


class EmbeddingRenderer(Renderer):
    """Writes the answer, which is never a stream."""

    def whole(self, pieces: Mapping[int, Piece]) -> bytes:
        """All embeddings; there is nothing in `pieces`."""
        tokens = self._answer.usage.prompt_tokens
        return msgspec.json.encode(
            EmbeddingList(
                data=[
                    Embedding(index=index, embedding=Raw(prompt.embedding))
                    for index, prompt in enumerate(self._answer.prompts)
                ],
                model=self._generation.model,
                usage=EmbeddingUsage(tokens, tokens),
            )
        )
