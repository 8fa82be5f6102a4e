"""The SDKs that applications use; the openai package of Python is in `tests/system`."""

import os
import subprocess
from collections.abc import Callable

import pytest

from tests.clients.conftest import FOLDER, INSTALLED
from tests.system.serving import Serving


@pytest.mark.parametrize(("client", "checks"), [("openai", 10), ("ai", 13)])
def test_sdk_of_npm(server: Serving, client: str, checks: int) -> None:
    script = ["node", str(FOLDER / f"{client}_client.cjs"), server.url, server.model]
    environment = {**os.environ, "NODE_PATH": f"{INSTALLED}/node/node_modules"}
    ended = subprocess.run(
        script, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(" passed") == checks


@pytest.mark.parametrize(
    ("client", "checks"), [("litellm", 9), ("langchain", 9), ("agents", 5), ("anthropic", 12)]
)
def test_sdk_of_python(
    run_client: Callable[..., str], server: Serving, client: str, checks: int
) -> None:
    said = run_client(client, "python", f"{FOLDER}/{client}_client.py", server.url, server.model)
    assert said.count(" passed") == checks
