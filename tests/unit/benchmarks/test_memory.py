"""The memory benchmark as a command, on little traffic."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import memory


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_short_run_fills_every_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And the picture, where matplotlib is installed."""
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt,output\n40,30\n100,60\n600,90\n")
    arguments = ["--minutes", "0.2", "--seeds", "7", "--lengths", str(lengths)]
    if find_spec("matplotlib") is not None:
        arguments += ["--plots", str(tmp_path)]
    memory.main(arguments)
    text = capsys.readouterr().out
    for row in ("Orca (Pow2)", "| paged ", "| DistServe", "6 beams", "4 samples", "yes |"):
        assert row in text
    for picture in tmp_path.glob("memory.*"):
        assert picture.stat().st_size > 10_000


def test_a_file_without_lengths_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("prompt,output\n")
    with pytest.raises(SystemExit):
        memory.main(["--lengths", str(empty)])
    assert "holds no lengths" in capsys.readouterr().err
