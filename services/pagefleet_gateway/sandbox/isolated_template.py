"""A chat template that is rendered in helper processes (`helper`), where it can do no harm."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pagefleet_gateway.sandbox.helper import Limits
from pagefleet_gateway.sandbox.helpers import HelperError, HelperPool, LimitError
from pagefleet_gateway.sandbox.template import ChatTemplateError, Rendered, TemplateSource

LIMITS: Final = Limits(cpu_seconds=2.0, seconds=10.0, memory=512 << 20)
"""To render one conversation."""

_HELPERS: Final = 2


class IsolatedTemplate:
    """Renders as `template.ChatTemplate` does, elsewhere.

    Raises:
        ChatTemplateError: the template is malformed.
    """

    def __init__(self, source: TemplateSource, limits: Limits = LIMITS) -> None:
        content = msgspec.msgpack.encode(source)
        self._helpers = HelperPool("template", content, limits, _HELPERS)
        try:
            self._helpers.await_ready()
        except HelperError as error:
            raise ChatTemplateError(str(error)) from error

    def render(self, conversation: Mapping[str, Any]) -> str:
        """The prompt of a conversation.

        Raises:
            ChatTemplateError: the template refuses it, or takes too much to render it.
            ApiError: 503, too many are being rendered.
        """
        try:
            result = self._helpers.run(msgspec.json.encode(conversation))
        except LimitError as error:
            raise ChatTemplateError(
                f"The chat template cannot be rendered with these messages: {error}."
            ) from error
        rendered = msgspec.msgpack.decode(result, type=Rendered)
        if rendered.refusal is not None:
            raise ChatTemplateError(rendered.refusal)
        return rendered.text
