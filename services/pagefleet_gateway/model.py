"""The model that a gateway serves: its small files, read once at start."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, Final, Self

from pagefleet.manifest import Manifest
from pagefleet_gateway.errors import unknown_model
from pagefleet_gateway.sandbox.grammars import Grammars
from pagefleet_gateway.text import harmony
from pagefleet_gateway.text.chat_prompt import ChatPrompts
from pagefleet_gateway.text.tokenizer import PromptError, Tokenizer
from pagefleet_gateway.text.vocabulary import Vocabulary

THINKING_SWITCHES: Final = frozenset({"enable_thinking", "thinking"})
"""Variables by which chat templates are told whether to let the model think."""

EFFORT_VARIABLE: Final = "reasoning_effort"
"""The variable by which some are told how much to think."""

THINKING_VARIABLES: Final = THINKING_SWITCHES | {EFFORT_VARIABLE}
"""Those that a request may set."""


class NamesError(ValueError):
    """A name stands for two things."""


@dataclass(frozen=True)
class ServedModel:
    """A prepared model under the name that clients know; `named`, as a request asks for it."""

    name: str
    created: int
    """Unix time of this gateway's start."""
    manifest: Manifest
    tokenizer: Tokenizer
    chat_prompts: ChatPrompts | None
    """None for a model without a chat template."""
    grammars: Grammars
    """Compiles what answers must read like."""
    tool_call_parser: str | None = None
    """How it writes calls of tools, by a name of `tool_parsers.notations.NOTATIONS`."""
    reasoning_parser: str | None = None
    """How it writes thoughts, by a name of `text.reasoning.FAMILIES`."""
    seeds: Random = field(default_factory=SystemRandom)
    """Draws those of requests that name none."""
    aliases: tuple[str, ...] = ()
    """By which it may be asked for as well."""
    adapter: int = 0
    """The LoRA adapter that it computes with; see `SamplingParams.adapter`."""

    @classmethod
    def load(
        cls,
        folder: Path,
        names: str | None = None,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        chat_template: Path | None = None,
        seed: int | None = None,
    ) -> Self:
        """Read a prepared folder; its own name and template count where none are given.

        names: separated by commas; answers have the first.
        seed: begins the draws of seeds; without it they are the operating system's.

        Raises:
            ManifestError, VocabularyError, ChatTemplateError: the folder is not usable.
            NamesError: an adapter has one of the model's names.
            OSError: the template cannot be read.
        """
        if tool_call_parser == "openai":  # which reads what Harmony leaves
            reasoning_parser = harmony.NAME
        manifest = Manifest.load(folder)
        tokenizer = Tokenizer.load(folder)
        name, *aliases = names.split(",") if names else [manifest.name]
        for adapter in manifest.adapters:
            if adapter.name in (name, *aliases):
                raise NamesError(
                    f"{adapter.name!r} is a name of the model and of a LoRA adapter: change "
                    "--lora-modules, or --served-model-name."
                )
        return cls(
            name,
            int(time.time()),
            manifest,
            tokenizer,
            ChatPrompts.load(folder, tokenizer, chat_template),
            Grammars(),
            tool_call_parser,
            reasoning_parser,
            SystemRandom() if seed is None else Random(seed),
            tuple(aliases),
        )

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: those of its files, and of Harmony if it speaks that."""
        known = self.manifest.eos_token_ids
        if self.reasoning_parser != harmony.NAME:
            return known
        found = map(self.tokenizer.backend.token_to_id, harmony.STOPS)
        return tuple(dict.fromkeys([*known, *(each for each in found if each is not None)]))

    @property
    def names(self) -> tuple[str, ...]:
        """All by which it may be asked for, without an adapter."""
        return self.name, *self.aliases

    def named(self, name: str | None) -> Self:
        """What a request asks for that names this model, or none, or one of its LoRA adapters.

        Raises:
            ApiError: 404; it names another.
        """
        if name is None or name in self.names:
            return self
        for number, adapter in enumerate(self.manifest.adapters, 1):
            if adapter.name == name:
                return replace(self, name=name, aliases=(), adapter=number)
        raise unknown_model(name)

    @property
    def vocabulary(self) -> Vocabulary:
        """What each token stands for."""
        return self.tokenizer.vocabulary

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template knows a variable, or a role, of this name."""
        return self.chat_prompts is not None and variable in self.chat_prompts.source

    @property
    def heeds_thinking(self) -> bool:
        """Whether the chat template can tell the model to think, or how much."""
        return any(map(self.template_reads, THINKING_VARIABLES))

    def encode_chat(
        self, conversation: Mapping[str, Any], continue_final_message: bool
    ) -> list[int]:
        """The ids of a conversation, rendered by the model's own template.

        Raises:
            PromptError: the model has no template, or the text has no encoding.
            ChatTemplateError: the template refuses the messages.
        """
        if self.chat_prompts is None:
            raise PromptError("The model has no chat template; use /v1/completions.")
        return self.chat_prompts.encode(conversation, continue_final_message)
