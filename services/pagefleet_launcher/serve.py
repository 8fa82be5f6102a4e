"""`pagefleet serve`: a whole cell on this machine, as supervised processes.

    listening socket --fd--> gateway(s) --ipc--> scheduler <--ipc-- worker(s)
                                                     ^-----CURVE--- those of other machines

The launcher holds the HTTP socket. So a port that is taken is reported before anything else is
done, and connections wait in the socket's queue while a gateway starts again, or are accepted by
its successor while it still answers those that it has. The sockets between the services lie in a
private folder, which is removed when the launcher ends, or at the next start if it was killed
(folder.py).
"""

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pagefleet.cell_key import CellKeyError
from pagefleet.command_line import flags, parse
from pagefleet.endpoint import MAX_SOCKET_PATH
from pagefleet.host import usable_cores
from pagefleet.http_socket import HttpSocketError, http_socket
from pagefleet.notify import BEAT_SECONDS, Notifier
from pagefleet.prepared import preparation
from pagefleet.settings import (
    AUTO,
    GatewaySettings,
    SchedulerSettings,
    ServeSettings,
    WorkerSettings,
)
from pagefleet.writer import open_standard_streams
from pagefleet_launcher.child import Service, first_of
from pagefleet_launcher.commands import program
from pagefleet_launcher.folder import private_folder
from pagefleet_launcher.greeting import greeting, is_ready, reachable
from pagefleet_launcher.interrupts import Interrupts
from pagefleet_launcher.process import Process
from pagefleet_launcher.saying import announce, say
from pagefleet_launcher.supervisor import Supervisor

_GATEWAYS, _WORKERS = "gateways.sock", "workers.sock"
_END_MARGIN = 3.0  # seconds that processes have to end after the open streams
_STILL_STARTING = 5.0  # seconds between two messages while it starts


class CannotServe(Exception):
    """Why it does not start, as a sentence for the user."""


def main(argv: Sequence[str]) -> int:
    """Serve as `argv` says; returns the status to exit with."""
    began = time.monotonic()
    open_standard_streams()
    settings = parse(ServeSettings, argv, prog="pagefleet serve")
    try:
        settings.load_cell_key()
        with http_socket(settings) as listener, socket_folder() as folder:
            return asyncio.run(_serve(settings, listener, folder, began))
    except (CannotServe, HttpSocketError, CellKeyError) as error:
        print(f"pagefleet serve: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for sockets that only this user can enter, removed at the end.

    It is in XDG_RUNTIME_DIR, or if it cannot be there, where temporary files are.

    Raises:
        CannotServe: it cannot be there either.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = _socket_folder_in(stack, os.environ.get("XDG_RUNTIME_DIR", ""))
        except CannotServe:
            folder = _socket_folder_in(stack, tempfile.gettempdir())
        yield folder


def _socket_folder_in(stack: contextlib.ExitStack, base: str) -> Path:
    if not os.path.isabs(base):
        raise CannotServe(f"{base!r} is no absolute path for the sockets of its processes.")
    try:
        folder = stack.enter_context(private_folder(Path(base)))
    except OSError as error:
        raise CannotServe(
            f"no folder can be made for the sockets of its processes: {error.strerror}; set TMPDIR "
            "to one that can be written to."
        ) from error
    if len(os.fsencode(folder / _GATEWAYS)) > MAX_SOCKET_PATH:
        raise CannotServe(
            f"the path {folder} is too long for Unix sockets; set TMPDIR to a shorter one."
        )
    return folder


async def _serve(asked: ServeSettings, listener: socket.socket, folder: Path, began: float) -> int:
    interrupts = Interrupts()
    model = await _prepare(asked, interrupts)
    if model is None:
        return int(not interrupts.drain.is_set())
    settings = complete(asked, model, folder, listener)
    async with asyncio.TaskGroup() as tasks:
        helpers = [
            tasks.create_task(_greet_when_ready(asked, settings, listener, began)),
            tasks.create_task(_close_when_draining(listener, interrupts)),
        ]
        supervisor = Supervisor(stages(settings), settings.shutdown_timeout + _END_MARGIN)
        status = await supervisor.run(interrupts)
        for helper in helpers:
            helper.cancel()
    return status


async def _prepare(asked: ServeSettings, interrupts: Interrupts) -> Path | None:
    """The prepared folder of the model; None if that failed, and said why, or was interrupted.

    Raises:
        CannotServe: no process can be started.
    """
    try:
        process = Process("prepare", preparation(asked), capture=True)
    except OSError as error:
        raise CannotServe(f"no process can be started: {error.strerror}.") from error
    ended = asyncio.create_task(process.ended())
    await first_of(asyncio.wait([ended]), interrupts.drain.wait())
    process.kill()
    return Path(process.output.strip()) if await ended == 0 else None


def complete(
    asked: ServeSettings, model: Path, folder: Path, listener: socket.socket
) -> ServeSettings:
    """The settings of the services: those asked for, with what only the launcher knows."""
    usual = ServeSettings()
    gateway_endpoint, worker_endpoint = asked.gateway_endpoint, asked.worker_endpoint
    if gateway_endpoint == usual.gateway_endpoint:
        gateway_endpoint = f"ipc://{folder / _GATEWAYS}"
    if worker_endpoint == usual.worker_endpoint:
        worker_endpoint = f"ipc://{folder / _WORKERS}"
    return dataclasses.replace(
        asked,
        model=str(model),
        tokenizer=AUTO,
        generation_config=AUTO,
        lora_modules=None,
        fd=listener.fileno(),
        metrics_folder=asked.metrics_folder or str(folder),
        gateway_endpoint=gateway_endpoint,
        worker_endpoint=worker_endpoint,
        threads=asked.threads or max(1, usable_cores() // asked.workers),
    )


def stages(settings: ServeSettings) -> list[list[Service]]:
    """The processes of the cell, in the order of their start."""
    scheduler = program("scheduler", flags(settings, SchedulerSettings))
    # All users of the machine can read a process's arguments, but not its environment.
    public = dataclasses.replace(settings, api_key=None, resume_secret=None)
    gateway = program("gateway", flags(public, GatewaySettings))
    secret = {}
    if settings.resume_secret or not settings.cell_key:  # from a key gateways derive their own
        secret["PAGEFLEET_RESUME_SECRET"] = settings.resume_secret or secrets.token_hex(32)
    if settings.api_key:
        secret["PAGEFLEET_API_KEY"] = settings.api_key
    fds = [] if settings.fd is None else [settings.fd]
    hang = settings.hang_timeout
    return [
        [Service("scheduler", scheduler, hang_timeout=hang, overlaps=False)],
        [
            Service(f"worker-{i}", _worker(settings, i), hang_timeout=hang)
            for i in range(settings.workers)
        ],
        [
            Service(f"gateway-{i}", gateway, fds, secret, hang, retirement=signal.SIGHUP)
            for i in range(settings.gateways)
        ],
    ]


def _worker(settings: ServeSettings, number: int) -> list[str]:
    """The command of one worker, on the device or devices whose turn it is."""
    devices, each = settings.device.split(","), settings.tensor_parallel_size
    if len(devices) > 1:
        turn = [devices[at % len(devices)] for at in range(number * each, (number + 1) * each)]
        settings = dataclasses.replace(settings, device=",".join(turn))
    return program("worker", flags(settings, WorkerSettings))


async def _close_when_draining(listener: socket.socket, interrupts: Interrupts) -> None:
    """Close the socket, so that clients are refused once the gateways close theirs."""
    await interrupts.drain.wait()
    listener.close()


async def _greet_when_ready(
    asked: ServeSettings, settings: ServeSettings, listener: socket.socket, began: float
) -> None:
    """Greet the user when the cell is ready, and from then on give the supervisor signs of life."""
    host, port = reachable(listener)
    said = time.monotonic()
    while not await asyncio.to_thread(is_ready, host, port, bool(settings.ssl_certfile)):
        await asyncio.sleep(0.1)
        if time.monotonic() - said >= _STILL_STARTING:
            said = time.monotonic()
            say("serve", f"still starting ({said - began:.0f} s)")
    took = time.monotonic() - began
    announce(await asyncio.to_thread(greeting, asked, settings, host, port, took))
    with contextlib.closing(Notifier()) as notifier:
        while True:
            notifier.beat(time.monotonic(), ready=True)
            await asyncio.sleep(BEAT_SECONDS)
