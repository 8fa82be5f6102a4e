"""One setting: a dataclass field with all that its flag and its variable need, and its parsers."""

import argparse
import dataclasses
import re
import types
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import inf
from typing import Any

from pagefleet.host import usable_cores


def parse_size(text: str) -> int:
    """Bytes from `512MiB`, `0.5GiB`, `4GB` or a plain number.

    Raises:
        ValueError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size; write for example 512MiB or 2GiB")
    number, prefix, binary = match.groups()
    power = " kmgt".index(prefix.lower() or " ")
    return int(Fraction(number) * (1024 if binary or not prefix else 1000) ** power)


def parse_boolean(text: str) -> bool:
    """Yes or no.

    Raises:
        ValueError: it is neither.
    """
    try:
        return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
            text.lower()
        ]
    except KeyError:
        raise ValueError(f"{text!r} is neither true nor false") from None


def parse_threads(text: str) -> int:
    """A number of threads, not more than there are cores.

    Raises:
        ValueError: it is more.
    """
    threads, cores = int(text), usable_cores()
    if threads > cores:
        raise ValueError(
            f"{threads} is more than the number of cores that this process may use, {cores} (its "
            "CPU affinity and its container's quota count); lower it, or leave it out to use all"
        )
    return threads


def parse_secret(text: str) -> str:
    """A secret that can be sent in a header.

    Raises:
        ValueError: it is empty, or has white space around it.
    """
    if not text or text != text.strip():
        raise ValueError(
            "a secret is not empty and has no white space around it; is what it comes from set?"
        )
    return text


def parse_root_path(text: str) -> str:
    """What paths begin with: `/llm`, or nothing.

    Raises:
        ValueError: it is no path.
    """
    if text and not text.startswith("/"):
        raise ValueError(f"{text!r} does not begin with /; write for example /llm")
    return text


def parse_origins(text: str) -> str:
    """Origins as browsers send them (RFC 6454), in lower case, separated by commas; or `*`.

    Raises:
        ValueError: one is no origin, or no browser sends it so.
    """
    origins = text.lower()
    for origin in origins.split(","):
        if not re.fullmatch(r"\*|null|[a-z][a-z\d+.-]*://[^/\s]+", origin.strip()):
            raise ValueError(f"{origin!r} is no origin; write for example https://chat.example.org")
        if re.fullmatch(r"https://.*:443|http://.*:80", origin.strip()):
            raise ValueError(f"{origin!r} is sent by no browser: they leave out the usual port")
    return origins


def parse_names(text: str) -> str:
    """Names, separated by commas.

    Raises:
        ValueError: one is empty, or occurs twice.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len({*names}) < len(names):
        raise ValueError(f"{text!r} holds a name that is empty, or one twice")
    return ",".join(names)


def setting(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] | None = None,
    convert: Callable[[str], Any] | None = None,
    also: str | None = None,
) -> Any:
    """A field with what its flag needs to know."""
    metadata = {
        "help": help,
        "least": least,
        "most": most,
        "choices": choices,
        "convert": convert,
        "also": also,
    }
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"PAGEFLEET_{name.upper()}"


def metavar_of(field: "dataclasses.Field[Any]", kind: type[Any]) -> str:
    """What the help shows in place of a value of type `kind`."""
    if choices := field.metadata["choices"]:
        return f"{{{','.join(choices)}}}"
    return "SIZE" if field.metadata["convert"] is parse_size else kind.__name__.upper()


def help_of(field: "dataclasses.Field[Any]", variables: Sequence[str]) -> str:
    """The text for argparse: what the setting is, its default if any, and its variables."""
    default = default_of(field)
    named = ", ".join(variables)
    noted = named if default in (None, "") else f"default: {default}; {named}"
    return f"{field.metadata['help']} ({noted})".replace("%", "%%")


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """The value of a setting that is not given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def part_of(cls: type[Any], name: str) -> str:
    """The title of a setting's group in the help: what the first class that has it is about."""
    owner = next(
        base for base in reversed(cls.__mro__) if name in getattr(base, "__dataclass_fields__", ())
    )
    return (owner.__doc__ or "").rstrip(".")


_BITS = 63
"""Of the largest whole number: so many fit into a message."""

_NUMBERS: dict[Callable[[str], Any], str] = {int: "whole number", float: "number"}


def checked(field: "dataclasses.Field[Any]", convert: Callable[[str], Any]) -> Any:
    """`convert`, followed by the checks that the field asks for; for argparse."""
    limits = types.SimpleNamespace(**field.metadata)

    def check(text: str) -> Any:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8") from error
        try:
            value = convert(text)
        except ValueError as error:
            wrong = f"{text!r} is no {_NUMBERS[convert]}" if convert in _NUMBERS else str(error)
            raise argparse.ArgumentTypeError(wrong) from error
        if value in (inf, -inf):
            raise argparse.ArgumentTypeError(f"{text!r} is not finite")
        if isinstance(value, int) and value.bit_length() > _BITS:
            raise argparse.ArgumentTypeError(f"{text} has more than {_BITS} bits")
        if limits.choices is not None and value not in limits.choices:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(limits.choices)}")
        if limits.least is not None and not value >= limits.least:
            raise argparse.ArgumentTypeError(f"{text} is below {limits.least}")
        if limits.most is not None and not value <= limits.most:
            raise argparse.ArgumentTypeError(f"{text} is above {limits.most}")
        return value

    return check
