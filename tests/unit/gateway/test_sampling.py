"""Seeds that requests do not name: unpredictable, or as `--seed` has them."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.generation import Limits
from pagefleet_gateway.requests.understanding import understand_completion
from pagefleet_worker.prepare import prepare
from tests.unit.gateway.test_app import running_cell

BODIES: list[dict[str, Any]] = [{}, {"n": 2}, {"seed": 5}, {"prompt": ["a", "b"]}, {}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("echo", tmp_path_factory.mktemp("cache"))


def seeds(model: ServedModel) -> list[int]:
    """Those of the bodies, in their order."""
    contents = [json.dumps({"prompt": "hello", "max_tokens": 1} | body).encode() for body in BODIES]
    limits = Limits(max_model_len=64)
    return [understand_completion(each, model, limits).params.seed for each in contents]


def test_with_a_seed_every_start_draws_the_same_ones(folder: Path) -> None:
    drawn = seeds(ServedModel.load(folder, seed=7))
    assert drawn == seeds(ServedModel.load(folder, seed=7))
    assert drawn[2] == 5
    assert len(set(drawn)) == len(drawn)
    assert not set(drawn) & set(seeds(ServedModel.load(folder, seed=8))) - {5}


def test_without_a_seed_they_are_new_at_every_start(folder: Path) -> None:
    assert not set(seeds(ServedModel.load(folder))) & set(seeds(ServedModel.load(folder))) - {5}


def test_a_gateway_draws_from_the_seed_that_it_is_told(folder: Path, tmp_path: Path) -> None:
    expected = seeds(ServedModel.load(folder, seed=7))
    with running_cell(folder, tmp_path, "--seed=7") as cell:
        for body in BODIES:
            cell.post(**{"prompt": "hello", "max_tokens": 1} | body)
        sent = [submit.params.seed for submit in cell.scheduler.submits]
    assert sent == [*expected[:3], expected[3], *expected[3:]]
