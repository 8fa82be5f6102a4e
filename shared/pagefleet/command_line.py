"""Settings from the command line and the environment, and back.

`max_num_seqs` is the flag `--max-num-seqs` and the environment variable `PAGEFLEET_MAX_NUM_SEQS`;
the flag wins. Anything unknown or malformed ends the program with a sentence that says how to mend
it.
"""

import argparse
import dataclasses
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from pagefleet.setting import (
    checked,
    default_of,
    flag_of,
    help_of,
    metavar_of,
    parse_boolean,
    part_of,
    variable_of,
)
from pagefleet.settings import (
    CellSettings,
    GatewaySettings,
    SchedulerSettings,
    ServeSettings,
    WorkerSettings,
)

_Settings = TypeVar("_Settings", bound=GatewaySettings | SchedulerSettings | WorkerSettings)


def parse(
    cls: type[_Settings],
    argv: Sequence[str],
    env: Mapping[str, str] = os.environ,
    prog: str | None = None,
) -> _Settings:
    """Read a service's settings from its arguments and its environment.

    Raises:
        SystemExit: help was asked for, or something is unknown or malformed (status 2).
    """
    parser = _Parser(
        prog=prog, usage="%(prog)s [OPTIONS]", description=cls.__doc__, allow_abbrev=False
    )
    groups: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        names = [field.name, *filter(None, [field.metadata["also"]])]
        variables, options = [*map(variable_of, names)], [*map(flag_of, names)]
        kind = (get_args(hints[field.name]) or (hints[field.name],))[0]  # T of `T | None`
        title = part_of(cls, field.name)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        add = groups[title].add_argument
        default, help = default_of(field), help_of(field, variables)
        if kind is bool:
            add(*options, action=argparse.BooleanOptionalAction, default=default, help=help)
            convert = parse_boolean
        else:
            convert = checked(field, field.metadata["convert"] or kind)
            add(*options, type=convert, default=default, help=help, metavar=metavar_of(field, kind))
        found = [variable for variable in variables if variable in env]
        if len(found) > 1:
            parser.error(f"{' and '.join(found)} are one setting: set one of these variables only")
        for variable in found:
            try:
                parser.set_defaults(**{field.name: convert(env[variable])})
            except (ValueError, argparse.ArgumentTypeError) as error:
                parser.error(f"environment variable {variable}: {error}")
    if mistaken := _mistaken(env):
        parser.error(f"there is no environment variable {mistaken[0]}; is {mistaken[1]} meant?")
    return cls(**vars(parser.parse_args(argv)))


def refuse(prog: str, error: object) -> NoReturn:
    """End the program because of its settings; its supervisor does not start it again.

    Raises:
        SystemExit: with status 2, as for a malformed flag.
    """
    print(f"{prog}: {error}", file=sys.stderr)
    raise SystemExit(2)


def flags(settings: CellSettings, cls: type[Any]) -> list[str]:
    """The arguments that pass a service with settings of class `cls` its part of `settings`."""
    arguments = []
    for field in dataclasses.fields(cls):
        value = getattr(settings, field.name)
        if isinstance(value, bool):
            arguments.append(flag_of(field.name) if value else f"--no-{flag_of(field.name)[2:]}")
        elif value is not None:
            arguments.append(f"{flag_of(field.name)}={value}")
    return arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nTry {self.prog} --help.\n")


def _mistaken(env: Mapping[str, str]) -> tuple[str, str] | None:
    """A variable that no service has, and the one that was probably meant.

    Others are ignored: some are no settings, some belong to a newer version.
    """
    fields = dataclasses.fields(ServeSettings)
    names = [name for field in fields for name in (field.name, field.metadata["also"]) if name]
    known = {variable_of(name): name for name in names}
    for variable in env.keys() - known.keys():
        if variable.startswith(variable_of("")):
            name = variable.removeprefix(variable_of("")).lower()
            if near := difflib.get_close_matches(name, names, n=1, cutoff=0.8):
                return variable, variable_of(near[0])
    return None
