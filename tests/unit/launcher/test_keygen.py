"""`pagefleet keygen`: a file that all of a cell can use, and never over another."""

from pagefleet.cell_key import CellKey
from pagefleet_launcher.cli import main


def test_it_makes_a_key_and_says_what_to_do_with_it(tmp_path, capsys):
    file = tmp_path / "cell.key"
    assert main(["keygen", str(file)]) == 0
    said = capsys.readouterr().out
    assert f"--cell-key={file}" in said
    assert file.read_text().split()[-1] not in said
    CellKey.load(file)


def test_it_leaves_a_file_that_exists_as_it_is(tmp_path, capsys):
    file = tmp_path / "cell.key"
    file.write_text("mine")
    assert main(["keygen", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"pagefleet keygen: {file} exists")
    assert file.read_text() == "mine"
