"""What clients may send to `POST /v1/embeddings`."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

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
