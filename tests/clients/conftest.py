"""Clients and suites of others against running servers, each in an environment of its own.

`make test-clients` installs them and says where, in PAGEFLEET_CLIENTS; without it there is nothing
to collect here. Nothing of theirs is needed to build, run or test Pagefleet otherwise.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagefleet.manifest import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Manifest
from tests.system.serving import Serving, pagefleet_serve

FOLDER = Path(__file__).parent
SOURCES = ":".join(
    str(FOLDER.parents[1] / source) for source in ("shared", "kernels", "services", ".")
)
"""PYTHONPATH of a client that runs code of ours."""
INSTALLED = os.environ.get("PAGEFLEET_CLIENTS")

collect_ignore_glob = [] if INSTALLED else ["test_*.py"]

_PATIENCE = 280
_OFFLINE = {
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture(scope="session")
def run_client(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a program of a client's environment to its good end, in a folder for what it leaves;
    returns what it wrote.
    """

    def run(client: str, program: str, *arguments: str, **environment: str) -> str:
        assert INSTALLED is not None
        command = [f"{Path(INSTALLED).absolute()}/{client}/bin/{program}", *arguments]
        ended = subprocess.run(
            command,
            cwd=tmp_path_factory.mktemp(client),
            env={**os.environ, **_OFFLINE, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    return run


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Serving]:
    """`pagefleet serve` with the default model; it thinks if its answer begins so."""
    parsers = ("--tool-call-parser=hermes", "--reasoning-parser=qwen3")
    options = ("--check", "--dtype=float32", *parsers)
    with pagefleet_serve(tmp_path_factory.mktemp("serve"), *options) as serving:
        yield serving


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """`pagefleet serve` where only the form of answers matters, their ends among it."""
    cell = ("--check", "--model=echo", "--engine=echo", "--max-model-len=128")
    options = (*cell, "--strict-openai")
    with pagefleet_serve(tmp_path_factory.mktemp("echo"), *options) as serving:
        yield serving


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """The default model's tokenizer as Hugging Face's libraries expect to find it."""
    from transformers import PreTrainedTokenizerFast

    manifest, folder = Manifest.load(smollm2), tmp_path_factory.mktemp("tokenizer")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(smollm2 / TOKENIZER_FILE),
        bos_token=manifest.bos_token,
        eos_token=manifest.eos_token,
        chat_template=(smollm2 / CHAT_TEMPLATE_FILE).read_text(),
    )
    tokenizer.save_pretrained(folder)
    return folder
