"""What `pagefleet serve` says when it is ready: where it is, and commands that work when pasted."""

import dataclasses
import http.client
import json
import os
import shlex
import socket
import ssl
import sys
from pathlib import Path

from pagefleet.command_line import flags
from pagefleet.manifest import CHAT_TEMPLATE_FILE, Manifest
from pagefleet.settings import GatewaySettings, ServeSettings, WorkerSettings

EVERYWHERE = ("0.0.0.0", "*", "[::]")
"""Hosts that stand for all addresses of a machine."""


def reachable(listener: socket.socket) -> tuple[str, int]:
    """Host and port at which this machine reaches a TCP socket, which may listen everywhere."""
    host, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def is_ready(host: str, port: int, tls: bool = False) -> bool:
    """Whether a gateway there says that requests can be served.

    With `tls`, its certificate is not checked: it is known which socket is asked.
    """
    connection = http.client.HTTPConnection(host, port, timeout=1.0)
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=1.0, context=context)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def greeting(
    asked: ServeSettings, settings: ServeSettings, host: str, port: int, seconds: float
) -> str:
    """What a user can do with a cell that took `seconds` to be ready: commands to paste.

    asked: the user's settings. settings: those of the services.
    """
    manifest = Manifest.load(Path(settings.model))
    name = (settings.served_model_name or manifest.name).partition(",")[0]
    adapters = ", ".join(adapter.name for adapter in manifest.adapters)
    beside = f"LoRA adapters, by the names to ask for them: {adapters}\n" if adapters else ""
    scheme = "https" if settings.ssl_certfile else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    pagefleet = os.path.abspath(sys.argv[0])
    chat = shlex.join([pagefleet, "chat", f"--url={url}"])
    join = shlex.join([pagefleet, "worker", *_unusual(settings, WorkerSettings)])
    return f"""
Pagefleet serves {name} at {url} (ready after {seconds:.1f} s)
{beside}Ask it something:
  {curl(settings, name, url)}
Talk to it, from another terminal:
  {chat}
Add a worker:
  {join}
{elsewhere(asked)}Watch it in a browser: {url}/
Ctrl-C ends it: open streams have {settings.shutdown_timeout:g} s; a second Ctrl-C ends it at once.
"""


def elsewhere(asked: ServeSettings) -> str:
    """What to start on other machines that have the same files at the same places, if any."""
    lines = []
    if asked.listen_workers:
        end = _seen_from_afar(asked.listen_workers)
        own = dataclasses.replace(asked, worker_endpoint=end, threads=None, device="auto")
        lines.append(shlex.join(["pagefleet", "worker", *_unusual(own, WorkerSettings)]))
    if asked.listen_gateways:
        end = _seen_from_afar(asked.listen_gateways)
        # Others may see what is printed here.
        own = dataclasses.replace(asked, gateway_endpoint=end, api_key=None, resume_secret=None)
        lines.append(shlex.join(["pagefleet", "gateway", *_unusual(own, GatewaySettings)]))
    if not lines:
        return ""
    title = "Add more on another machine, where the same files are:"
    return "\n  ".join([title, *lines]) + "\n"


def _unusual(settings: ServeSettings, cls: type[WorkerSettings | GatewaySettings]) -> list[str]:
    """The flags of a service that differ from their defaults."""
    usual = flags(ServeSettings(), cls)
    return [flag for flag in flags(settings, cls) if flag not in usual]


def _seen_from_afar(endpoint: str) -> str:
    """Where others reach an endpoint of this machine. If it listens everywhere, that is under the
    machine's name, which may take a while to find out by DNS.
    """
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{socket.getfqdn()}:{port}" if address in EVERYWHERE else endpoint


def curl(settings: ServeSettings, name: str, url: str) -> str:
    """A request to the model `name`: a chat if it has a chat template, else a completion."""
    body: dict[str, object] = {"model": name, "temperature": 0}
    if (Path(settings.model) / CHAT_TEMPLATE_FILE).exists():
        path = "/v1/chat/completions"
        question = "What is the capital of France?"
        body["messages"] = [{"role": "user", "content": question}]
    else:
        path = "/v1/completions"
        body["prompt"] = "The capital of France is"
    command = ["curl", url + path, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    asks_for_key = settings.api_key or settings.api_key_file
    key = ' -H "Authorization: Bearer $PAGEFLEET_API_KEY"' if asks_for_key else ""
    return shlex.join(command) + key
