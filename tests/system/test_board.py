"""Grafana's board shows figures that a running cell really has."""

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.system.serving import pagefleet_serve

ROOT = Path(__file__).parents[2]
BOARD, README = ROOT / "compose/grafana/pagefleet.json", ROOT / "README.md"
KEY = "a key"
KEYS = f'[[keys]]\nname = "team"\nsha256 = "{sha256(KEY.encode()).hexdigest()}"\nadmin = true\n'
SELECTED = re.compile(r"\b((?:vllm:|pagefleet_)\w+)(?:\{(.*?)\})?")


def board() -> Any:
    return json.loads(BOARD.read_text())


def queries() -> Iterator[tuple[str, str]]:
    """Each query of the board, with the legend that names its lines."""
    for panel in board()["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def labels_of(query: str, selector: str | None, legend: str) -> set[str]:
    """Labels that a query needs of its figures."""
    grouped = re.findall(r"by \((.*?)\)", query)
    named = [label for group in grouped for label in group.split(", ")]
    shown = re.findall(r"{{(\w+)}}", legend)
    return {*named, *shown, *re.findall(r"(\w+)=", selector or "")}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Labels of every figure that a cell has after a request and an error, by its name."""
    folder = tmp_path_factory.mktemp("serving")
    (folder / "keys.toml").write_text(KEYS)
    options = ("--model=echo", "--engine=echo", f"--lora-modules=sql={folder}")
    options += (f"--api-key-file={folder}/keys.toml",)
    with (
        pagefleet_serve(folder, *options) as serving,
        httpx.Client(
            base_url=serving.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30
        ) as client,
    ):
        body = {"model": "sql", "prompt": "Once", "max_tokens": 8, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/completions", json={"prompt": 1.5}).status_code == 400
        text = client.get("/metrics").text
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize(("query", "legend"), [*queries()])
def test_a_query_asks_for_figures_that_there_are(
    exported: dict[str, set[str]], query: str, legend: str
) -> None:
    selected = SELECTED.findall(query)
    assert selected
    for name, selector in selected:
        assert labels_of(query, selector, legend) <= exported[name]


def test_the_readme_names_figures_that_there_are(exported: dict[str, set[str]]) -> None:
    named = set(re.findall(r"`((?:vllm:|pagefleet_)\w+)`", README.read_text()))
    assert {"vllm:num_requests_waiting", "pagefleet_stalled"} <= named
    assert named <= {*exported, *(name.removesuffix("_count") for name in exported)}


def test_the_board_lets_choose_a_model_that_there_is(exported: dict[str, set[str]]) -> None:
    [model] = board()["templating"]["list"]
    [(name, label)] = re.findall(r"label_values\((.*), (\w+)\)", model["query"]["query"])
    assert label in exported[name]


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
