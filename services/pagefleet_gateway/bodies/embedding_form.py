"""How a client wants embeddings written."""

from dataclasses import dataclass

import msgspec

from pagefleet.wire import Floats, unpack_floats
from pagefleet_gateway.errors import bad_request, internal_error


@dataclass(frozen=True)
class EmbeddingForm:
    """As numbers, or as their bytes; `dimensions` is how many were asked for."""

    as_bytes: bool
    dimensions: int | None

    def written(self, embedding: Floats | None) -> bytes:
        """An embedding as JSON, as soon as it comes: many at once would keep the event loop.

        Raises:
            ApiError: 400, the model's are shorter than what was asked for; 500, a worker gave none.
        """
        if embedding is None:
            raise internal_error("no_embedding")
        size = len(embedding) // 4
        if self.dimensions is not None and size < self.dimensions:
            text = f"dimensions is {self.dimensions}, but this model's embeddings have {size}."
            raise bad_request(text, "dimensions")
        numbers = embedding if self.as_bytes else unpack_floats(embedding).tolist()
        return msgspec.json.encode(numbers)
