"""Tools that a chat may call: what clients say of them, and what follows for the answer.

With `tool_choice` auto the model decides: it sees the tools through its template, and its own
notation is read out of its text (`tool_parsers`). Where calls stand between tags, a `strict` tool
adds a grammar that lets any text come, but after a tag only a call of a tool that there is, whose
arguments obey its schema, or are some object if it is not strict; else arguments are what the model
wrote. Beside structured output the grammar lets the answer be that, or calls and nothing else.
Required and named calls are guaranteed by a grammar over the tools' parameters, whatever the model
was trained on: the text is then a list of calls in JSON, or the arguments of the one that is named.
With none, the model sees no tools.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pagefleet_gateway.bodies.structured import Asked
from pagefleet_gateway.errors import ApiError, bad_request
from pagefleet_gateway.sandbox.grammar_job import Source
from pagefleet_gateway.sandbox.grammars import Grammars, Schema, Structure, spaced
from pagefleet_gateway.tool_parsers.guaranteed import only, required
from pagefleet_gateway.tool_parsers.hermes import CALL_END_TAG, CALL_TAG
from pagefleet_gateway.tool_parsers.notations import NOTATIONS
from pagefleet_gateway.tool_parsers.parser import ToolParser

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 16
"""Calls that a required list may hold."""

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$(?!\n)")]
"""Python's `$` lets a line break follow, ECMAScript's does not."""


class FunctionSpec(msgspec.Struct, omit_defaults=True):
    """A function that may be called."""

    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    """JSON schema of the object that its arguments are."""
    strict: bool | None = None
    """Required and named calls obey the schema anyhow; others, between tags, if this is true."""


class Tool(msgspec.Struct):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(msgspec.Struct):
    """Which function is to be called."""

    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    """A `tool_choice` of one tool."""

    function: FunctionName


class ToolSubset(msgspec.Struct):
    """Some of the tools, and whether one of them is to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class SubsetChoice(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` among some of the tools."""

    allowed_tools: ToolSubset


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | SubsetChoice
Tools: TypeAlias = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class FunctionCall(msgspec.Struct):
    """A function with its arguments."""

    name: str
    arguments: str
    """JSON as the model wrote it."""


class ToolCall(msgspec.Struct):
    """A call that an assistant made."""

    id: str
    function: FunctionCall
    type: Literal["function"] | None = "function"


@dataclass(frozen=True)
class ToolUse:
    """What an answer may do with its tools."""

    shown: list[dict[str, Any]] | None = None
    """For the template."""
    parser: Callable[[], ToolParser] | None = None
    """Makes what reads the calls of one choice."""
    structure: Structure | None = None
    """Guarantees what calls are like, or that there are some."""
    keeps_special: bool = False
    """Special tokens are part of the text: in some models they are how calls are written."""
    parallel: bool = True
    """More than one call is wanted, if the model makes more."""


def tool_use(
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool,
    parser: str | None,
    grammars: Grammars,
    answer: Asked | None = None,
) -> ToolUse:
    """Decide what these fields ask for, with the parser of the model's family if there is one.

    answer: what must be said where nothing is called. Raises:
        ApiError: 400 that names the field.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools.", "tool_choice")
        return ToolUse()
    if choice == "none":
        return ToolUse()
    if isinstance(choice, SubsetChoice):
        tools, choice = _allowed(tools, choice.allowed_tools), choice.allowed_tools.mode
    shown = shown_tools(tools)
    named = {tool.function.name: _schema(tool) for tool in tools}
    if choice == "required":
        structure = _calls(named, parallel, grammars)
        return ToolUse(shown, partial(ToolParser, required), structure, parallel=parallel)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in named:
            raise _unknown(name)
        structure = grammars.json(named[name], f"tools.{name}.parameters")
        return ToolUse(shown, partial(ToolParser, only(name)), structure)
    if parser is None:
        raise bad_request(
            "tool_choice auto needs to know how the model writes calls: start the server with "
            f"--tool-call-parser ({', '.join(NOTATIONS)}). required and named tools work without.",
            "tool_choice",
        )
    notation = NOTATIONS[parser]
    calls = None
    if notation.tagged and answer is not None:
        calls = _answer_or_calls(answer, tools, parallel, grammars)
    elif notation.tagged and any(tool.function.strict for tool in tools):
        calls = _text_and_calls(tools, grammars)
    reader = partial(ToolParser, notation.script, named)
    return ToolUse(shown, reader, calls, keeps_special=True, parallel=parallel)


def _allowed(tools: Sequence[Tool], subset: ToolSubset) -> list[Tool]:
    names = {tool.function.name for tool in subset.tools}
    if unknown := names - {tool.function.name for tool in tools}:
        raise _unknown(min(unknown))
    return [tool for tool in tools if tool.function.name in names]


def _unknown(name: str) -> ApiError:
    return bad_request(f"tool_choice names {name!r}, which is not in tools.", "tool_choice")


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools for the template.

    Raises:
        ApiError: 400 that names `tools`; two have the same name.
    """
    if len({tool.function.name for tool in tools}) < len(tools):
        raise bad_request("tools holds two functions of the same name.", "tools")
    return [{"type": "function", "function": msgspec.to_builtins(t.function)} for t in tools]


def call_id(generation: str, choice: int, number: int) -> str:
    """The id of a call: of letters and digits, and the same wherever the answer is read again.

    Templates of Mistral's models take no more than nine characters.
    """
    return hashlib.sha256(f"{generation} {choice} {number}".encode()).hexdigest()[:9]


def shown_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Calls of earlier turns for the template, which takes arguments as an object.

    Where a model wrote something else it sees that as it was, beside what came of it.
    """
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": as_object(call.function.arguments),
            },
        }
        for call in calls
    ]


def as_object(arguments: str) -> dict[str, Any] | str:
    """The object that a call's arguments are, or what the model wrote in its place."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _schema(tool: Tool) -> Schema:
    return {"type": "object", **(tool.function.parameters or {"properties": {}})}


def _text_and_calls(tools: Sequence[Tool], grammars: Grammars) -> Structure:
    """Any text, with calls between tags; a tag begins one as soon as it is written."""
    rules = [
        "start: (tagged call)* TEXT",
        f"tagged[lazy]: TEXT {json.dumps(CALL_TAG)}",
        r"TEXT: /(.|\n)*/",
        *_tagged_calls(tools),
    ]
    structure = grammars.structure(Source("llguidance", "\n".join(rules)), "tools")
    return replace(structure, free=True)


def _answer_or_calls(
    answer: Asked, tools: Sequence[Tool], parallel: bool, grammars: Grammars
) -> Structure:
    """JSON under a schema, or calls between tags in its place."""
    alone = grammars.json(answer.schema, answer.field)  # or 400, in which the tools have no part
    tag = json.dumps(CALL_TAG)
    more = f' ("\\n" {tag} call){{0,{MAX_CALLS - 1}}}' if parallel else ""
    rules = [
        f"start: answer | {tag} call{more}",
        f"answer: %json {json.dumps(spaced(answer.schema))}",
        *_tagged_calls(tools),
    ]
    source = Source("llguidance", "\n".join(rules))
    return replace(grammars.structure(source, "tools"), field=alone.field)


def _tagged_calls(tools: Sequence[Tool]) -> list[str]:
    """Rules of a `call` behind its tag."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        schema = _schema(tool) if tool.function.strict else {"type": "object"}
        begin = json.dumps(f'\n{{"name": "{tool.function.name}", "arguments": ')
        end = json.dumps("}\n" + CALL_END_TAG)
        rules.append(f"call_{number}: {begin} arguments_{number} {end}")
        rules.append(f"arguments_{number}: %json {json.dumps(spaced(schema))}")
    return rules


def _calls(named: dict[str, Schema], parallel: bool, grammars: Grammars) -> Structure:
    """A list of calls, each under the schema of its tool; references are the schema's own."""
    more = f' (", " call){{0,{MAX_CALLS - 1}}}' if parallel else ""
    rules = [f'start: "[" call{more} "]"']
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(named))))
    for number, (name, schema) in enumerate(named.items()):
        begin = json.dumps(f'{{"name": "{name}", "parameters": ')
        rules.append(f'call_{number}: {begin} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {json.dumps(spaced(schema))}")
    return grammars.structure(Source("llguidance", "\n".join(rules)), "tools")
