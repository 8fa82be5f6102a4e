"""The benchmark of embeddings, beside a gateway whose scheduler is scripted."""

from collections.abc import Iterator

import pytest

from benchmarks.embeddings import main
from pagefleet_worker.prepare import prepare
from tests.unit.benchmarks.scripted import ScriptedServer
from tests.unit.gateway.test_app import Cell, running_cell


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    folder = tmp_path_factory.mktemp("cell")
    with running_cell(prepare("echo", folder), folder) as cell:
        yield cell


def test_every_text_is_asked_for_once(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    cell.scheduler.submits.clear()
    assert main([f"--url={cell.url}", "--shapes=1x1,2x4", "--texts=8", "--tokens=5"]) == 0
    prompts = [submit.prompt for submit in cell.scheduler.submits]
    assert len(set(prompts)) == len(prompts) == 2 * 8 + 8
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| 1 x 1", "| 2 x 4"]
    for line in lines:
        _, texts, tokens, *waits = (each.strip() for each in line.strip("|").split("|"))
        assert float(tokens) > 10 * float(texts) > 0
        assert 0 <= float(waits[0]) <= float(waits[1])


def test_what_is_no_whole_answer_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    server = ScriptedServer()
    assert main([f"--url={server.url}", "--shapes=1x1", "--texts=1"]) == 1
    assert capsys.readouterr().err.startswith("1 x 1: ")
    server.close()
