import json
import re
import shlex
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from pagefleet.command_line import parse
from pagefleet.settings import ServeSettings
from pagefleet_gateway.bodies.embedding_body import EmbeddingBody
from pagefleet_gateway.bodies.schema import ChatBody, CompletionBody
from pagefleet_gateway.http.openapi import document
from pagefleet_launcher.cli import USAGE
from pagefleet_launcher.greeting import curl

BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
}
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
    [options] = re.findall(r'make serve .*ARGS="([^"]+)"', README)
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


def test_all_routes_are_in_the_table():
    paths = set(json.loads(document())["paths"])
    table = README.partition("## The API")[2].partition("\n\nBeside")[0]
    told = set(re.findall(r"[` ](/[^`]*)`", table))
    assert told == {path for path in paths if "{" not in path}


def test_requests_are_what_the_gateway_takes():
    requests = [shlex.split(line) for line in re.findall(r"^\$ (curl .*)$", README, re.MULTILINE)]
    assert len(requests) >= 4
    for words in requests:
        url = next(word for word in words if word.startswith("http"))
        body = BODIES[urlsplit(url).path]
        content = words[words.index("-d") + 1]
        msgspec.json.decode(content, type=body)
        assert json.loads(content).keys() <= {field.name for field in msgspec.structs.fields(body)}


def test_commands_of_pagefleet_are_there():
    named = set(re.findall(r"[`/]pagefleet ([a-z]+)", README))
    assert named == {line.split()[0] for line in USAGE.splitlines() if line.startswith("  ")}
