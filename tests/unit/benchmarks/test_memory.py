"""The memory benchmark as a command, on little traffic."""

from pathlib import Path

import pytest

from benchmarks import memory


def test_a_short_run_fills_every_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt,output\n40,30\n100,60\n600,90\n")
    memory.main(["--minutes", "0.2", "--seeds", "7", "--jobs", "1", "--lengths", str(lengths)])
    text = capsys.readouterr().out
    for row in ("Orca (Pow2)", "| paged ", "| DistServe", "6 beams", "4 samples", "yes |"):
        assert row in text


def test_a_file_without_lengths_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("prompt,output\n")
    with pytest.raises(SystemExit):
        memory.main(["--lengths", str(empty)])
    assert "holds no lengths" in capsys.readouterr().err


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    memory.main(["--minutes", "0.2", "--seeds", "7", "--jobs", "1", "--plots", str(tmp_path)])
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    assert (tmp_path / "memory.svg").stat().st_size > 10_000
