"""The SDKs that applications use; the openai package of Python is in `tests/system`."""

import os
import subprocess
from collections.abc import Callable

import pytest

from tests.clients.conftest import FOLDER, INSTALLED
from tests.system.serving import Serving


def test_openai_of_npm(server: Serving) -> None:
    script = ["node", str(FOLDER / "openai_client.cjs"), server.url, server.model]
    environment = {**os.environ, "NODE_PATH": f"{INSTALLED}/node/node_modules"}
    ended = subprocess.run(
        script, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(" passed") == 8


@pytest.mark.parametrize("client", ["litellm", "langchain"])
def test_sdk_of_python(run_client: Callable[..., str], server: Serving, client: str) -> None:
    script = FOLDER / f"{client}_client.py"
    assert run_client(client, "python", str(script), server.url, server.model).count(" passed") == 7
