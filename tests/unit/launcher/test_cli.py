import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pagefleet.manifest import Manifest
from pagefleet_launcher.cli import main
from pagefleet_launcher.commands import PROGRAMS, SERVICES


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in ["serve", "chat", "top", "tap", *PROGRAMS])


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pagefleet {version('pagefleet')}\n"


@pytest.mark.parametrize("arguments", [[], ["srve"], ["-x"]])
def test_no_such_command_is_a_usage_error(capsys, arguments):
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert "usage: pagefleet COMMAND" in errors
    assert all(repr(argument) in errors for argument in arguments)


def test_an_unknown_flag_of_serve_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", "--wrokers=2"])
    assert end.value.code == 2
    assert "--wrokers" in capsys.readouterr().err


def test_a_model_can_be_prepared_beforehand(tmp_path):
    run = "import sys; from pagefleet_launcher.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", run, "prepare", "echo", "--cache", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    folder = subprocess.check_output(command, text=True, env=environment).strip()
    assert Path(folder).parent == tmp_path / "models"
    assert Manifest.load(Path(folder)).name == "echo"


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [
        ("| true", 141, ""),
        ("> /dev/full", 1, "pagefleet: standard output cannot be written to: No space left on "),
        (">&-", 0, ""),
    ],
)
@pytest.mark.parametrize("arguments", ["--help", "--version", "keygen key"])
def test_output_that_nobody_takes(tmp_path, arguments, output, status, said):
    run = "import sys; from pagefleet_launcher.cli import main; sys.exit(main())"
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"{{ sleep 0; {sys.executable} -c '{run}' {arguments}; }} {output}; "
            "exit ${PIPESTATUS[0]}",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stderr.partition("device")[0]) == (status, said)


def test_the_launcher_imports_no_service():
    program = (
        "import sys, pagefleet_launcher.cli;"
        "print(sorted(m for m in sys.modules if m.partition('.')[0] in"
        f" {{*{list(SERVICES.values())}, 'pagefleet_kernels', 'torch', 'transformers', 'zmq'}}))"
    )
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert loaded == "[]\n"
