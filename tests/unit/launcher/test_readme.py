import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pagefleet.settings import ServeSettings, parse
from pagefleet_launcher.greeting import curl

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def test_links_lead_to_what_exists():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    files = [link.partition("#")[0] for link in links]
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_make_commands_have_their_targets():
    commands = re.findall(r"^    (make .*?)(?: +#.*)?$", README, re.MULTILINE)
    assert {"make serve", "make test", "make check"} <= set(commands)
    for command in commands:
        subprocess.run(
            [*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True
        )


def test_pagefleet_commands_have_the_options_they_show(capsys):
    [options] = re.findall(r'ARGS="([^"]+)"', README)
    parse(ServeSettings, shlex.split(options), env={})
    with pytest.raises(SystemExit):
        parse(ServeSettings, ["--help"], env={})
    shown = capsys.readouterr().out
    mentioned = set(re.findall(r"`(--[a-z-]+)[ `]", README))
    assert {"--model", "--shutdown-timeout", "--workers"} <= mentioned
    assert [option for option in mentioned if option not in shown] == []


def test_the_first_request_is_the_line_that_serve_prints(tmp_path):
    (tmp_path / "chat_template.jinja").touch()
    settings = parse(ServeSettings, ["--model", str(tmp_path)], env={})
    line = curl(settings, ServeSettings().model, "http://127.0.0.1:8000")
    assert f"$ {line}\n" in README
