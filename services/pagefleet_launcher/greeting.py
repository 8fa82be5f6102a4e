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

from pagefleet.manifest import CHAT_TEMPLATE_FILE, Manifest
from pagefleet.settings import GatewaySettings, ServeSettings, WorkerSettings, flags

EVERYWHERE = ("0.0.0.0", "*", "[::]")
"""Addresses of a listener that is reached at all that a machine has."""


def reachable(listener: socket.socket) -> tuple[str, int]:
    """Host and port where this machine reaches a TCP socket, even one that listens everywhere."""
    host, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def is_ready(host: str, port: int, tls: bool = False) -> bool:
    """Whether a gateway answers there that requests can be served.

    With `tls` whatever certificate it shows is taken: the question is about this very socket.
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
    """What a user can do with a cell that is ready, after `seconds`: commands to paste.

    asked: what the user said. settings: what the services were told.
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
    """What to start on other machines, with the same files at the same places; or nothing."""
    lines = []
    if asked.listen_workers:
        end = _seen_from_afar(asked.listen_workers)
        own = dataclasses.replace(asked, worker_endpoint=end, threads=None, device="auto")
        lines.append(shlex.join(["pagefleet", "worker", *_unusual(own, WorkerSettings)]))
    if asked.listen_gateways:
        end = _seen_from_afar(asked.listen_gateways)
        # Whoever reads over the user's shoulder may read what is printed here.
        own = dataclasses.replace(asked, gateway_endpoint=end, api_key=None, resume_secret=None)
        lines.append(shlex.join(["pagefleet", "gateway", *_unusual(own, GatewaySettings)]))
    if not lines:
        return ""
    title = "Add more on another machine, where the same files are:"
    return "\n  ".join([title, *lines]) + "\n"


def _unusual(settings: ServeSettings, cls: type[WorkerSettings | GatewaySettings]) -> list[str]:
    """The flags of a service that are not what they are by default."""
    usual = flags(ServeSettings(), cls)
    return [flag for flag in flags(settings, cls) if flag not in usual]


def _seen_from_afar(endpoint: str) -> str:
    """Where others reach what listens at an endpoint; for one that is everywhere here, this
    machine's name is asked for, which may take as long as DNS does.
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
