"""What the openai package expects of /v1/responses: its own types, strictly."""

from typing import Any, get_args

import pydantic
from openai.types.responses import Response, ResponseStreamEvent

_EVENTS: dict[str, type[pydantic.BaseModel]] = {
    get_args(event.model_fields["type"].annotation)[0]: event
    for event in get_args(get_args(ResponseStreamEvent)[0])
}


def checked_response(content: Any) -> Any:
    """A response, if it is one."""
    Response.model_validate(content, strict=True)
    return content


def checked_event(content: Any) -> Any:
    """An event of a stream, if it is one."""
    _EVENTS[content["type"]].model_validate(content, strict=True)
    return content
