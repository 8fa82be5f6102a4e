"""lm-eval's `local-completions`: the loglikelihoods that it reads out of echo and logprobs are
those of transformers, token by token aligned.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from pagefleet.manifest import Manifest
from tests.system.conftest import TEXT
from tests.system.oracle import MARGIN, Oracle
from tests.system.serving import Serving

TASK = """
task: continuations
dataset_path: json
dataset_kwargs: {{data_files: {{test: {documents}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ENDINGS = (" Paris", " the pages of a table", " é\U0001f600", " 8, 13, 21", "\n\n", " of")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder with a task of texts cut at random, each with three continuations."""
    seed = random.randrange(2**32)
    print("documents of seed", seed)
    draw = random.Random(seed)
    words = TEXT.split(" ")
    documents = [
        {
            # White space at its end would be counted to the continuation.
            "question": " ".join(words[: draw.randrange(1, len(words))]).rstrip(),
            "choices": draw.sample(ENDINGS, 3),
            "answer": 0,
        }
        for _ in range(6)
    ]
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "task.yaml").write_text(TASK.format(documents=path))
    return tmp_path


def samples(folder: Path) -> list[dict[str, Any]]:
    """What lm-eval wrote of each document."""
    (file,) = folder.rglob("samples_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_loglikelihoods_are_those_of_transformers(
    run_client: Callable[..., str],
    server: Serving,
    smollm2: Path,
    tokenizer_folder: Path,
    task: Path,
) -> None:
    arguments = {
        "base_url": f"{server.url}/v1/completions",
        "model": server.model,
        "tokenizer": tokenizer_folder,
        "max_retries": 1,
    }
    run_client(
        "lm-eval",
        "lm-eval",
        "run",
        "--model=local-completions",
        f"--model_args={','.join(f'{name}={value}' for name, value in arguments.items())}",
        "--tasks=continuations",
        f"--include_path={task}",
        f"--output_path={task / 'out'}",
        "--log_samples",
        HF_HUB_OFFLINE="1",
    )
    weights = Path(Manifest.load(smollm2).weights.paths[0])
    oracle = Oracle(weights.parent, weights.name)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    for sample in samples(task / "out"):
        for ending, ((loglikelihood, is_greedy),) in zip(
            sample["doc"]["choices"], sample["resps"], strict=True
        ):
            prompt = tokenizer.encode(sample["doc"]["question"])
            ids = tokenizer.encode(sample["doc"]["question"] + ending)
            expected, margin = continuation(oracle, ids, len(prompt))
            assert float(loglikelihood) == pytest.approx(expected, abs=1e-3)
            if abs(margin) > MARGIN:
                assert (is_greedy == "True") == (margin > 0)


def continuation(oracle: Oracle, ids: list[int], start: int) -> tuple[float, float]:
    """The sum of the logprobs of the tokens from `start` on, and by how much the least sure of
    them is above the best other token (negative: below).
    """
    with torch.inference_mode():
        logits = oracle.model(torch.tensor([ids])).logits[0, start - 1 : -1]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(ids[start:]).unsqueeze(-1)).squeeze(-1)
    best_other = logprobs.scatter(-1, torch.tensor(ids[start:]).unsqueeze(-1), -torch.inf).amax(-1)
    return float(chosen.sum()), float((chosen - best_other).min())
