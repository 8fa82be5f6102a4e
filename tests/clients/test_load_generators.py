"""Load generators of others: a short run of each is whole, and counts what we count."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.system.serving import Serving

REQUESTS, TOKENS = 6, 8


def test_aiperf(
    run_client: Callable[..., str], server: Serving, tokenizer_folder: Path, tmp_path: Path
) -> None:
    run_client(
        "aiperf",
        "aiperf",
        "profile",
        f"--model={server.model}",
        f"--url={server.url}",
        "--endpoint-type=chat",
        "--streaming",
        f"--tokenizer={tokenizer_folder}",
        "--ui=none",
        f"--request-count={REQUESTS}",
        "--concurrency=2",
        "--synthetic-input-tokens-mean=30",
        f"--output-tokens-mean={TOKENS}",
        f"--artifact-dir={tmp_path}",
    )
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report["error_summary"]
    assert report["usage_completion_tokens"]["max"] <= TOKENS
    assert report["time_to_first_token"]["min"] > 0


def test_guidellm(
    run_client: Callable[..., str], server: Serving, tokenizer_folder: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    run_client(
        "guidellm",
        "guidellm",
        "run",
        f"--backend=kind=openai_http,target={server.url},model={server.model}",
        "--profile=kind=concurrent,streams=2",
        f"--constraint=kind=max_requests,count={REQUESTS}",
        f"--tokenizer=kind=hf_auto,model={tokenizer_folder}",
        f"--data=kind=synthetic_text,prompt_tokens=30,output_tokens={TOKENS}",
        f"--output=kind=json,path={report}",
        "--disable-console",
        HF_HUB_OFFLINE="1",
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    counts = benchmark["metrics"]["output_token_count"]["successful"]
    assert counts["min"] == counts["max"] == TOKENS
