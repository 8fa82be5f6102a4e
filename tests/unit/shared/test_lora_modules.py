"""`--lora-modules`, as vLLM's operators write it."""

import re

import pytest

from pagefleet.command_line import flags, parse
from pagefleet.lora_modules import lora_modules, parse_lora_modules
from pagefleet.prepared import preparation
from pagefleet.settings import GatewaySettings, ServeSettings, WorkerSettings


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sql=/a", {"sql": "/a"}),
        ("sql=/a, po et=b/c ", {"sql": "/a", "po et": "b/c"}),
        ("two=/a,one=/a", {"two": "/a", "one": "/a"}),
        ("a=b=c", {"a": "b=c"}),
        ('{"name": "sql", "path": "/a,b"}', {"sql": "/a,b"}),
        ('{"name": "a", "path": "/a"}, {"name": "b,=", "path": "/b"}', {"a": "/a", "b,=": "/b"}),
        (' [{"name": "a", "path": "/a"}]', {"a": "/a"}),
        ("[]", {}),
    ],
)
def test_folders_by_name(text: str, named: dict[str, str]) -> None:
    assert list(lora_modules(text).items()) == list(named.items())
    assert parse_lora_modules(text) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' names no LoRA adapter and its folder; write for example sql=/adapters/sql"),
        ("sql", "'sql' names no LoRA adapter and its folder"),
        ("sql=", "'sql=' names no LoRA adapter and its folder"),
        ("sql=/a,", "'' names no LoRA adapter and its folder"),
        ("=/a", "'' is no name for a LoRA adapter: printable, not empty"),
        ("a\nb=/a", r"'a\nb' is no name for a LoRA adapter"),
        ('{"name": " a", "path": "/a"}', "' a' is no name for a LoRA adapter"),
        ("a=/a,b=/b,a=/c", "the LoRA adapter 'a' is there 2 times"),
        ('{"name": "a"}', "does not name LoRA adapters: Object missing required field `path`"),
        ('{"name": "a", "path": "/a", "rank": 8}', "unknown field `rank`"),
        ("{", "does not name LoRA adapters"),
    ],
)
def test_what_names_none_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_lora_modules(text)


def test_it_reaches_the_preparation(capsys: pytest.CaptureFixture[str]) -> None:
    """From a flag or a variable, passed on by `pagefleet serve` or not."""
    text = "sql=/a,poet=/b"
    for settings in (
        parse(ServeSettings, [f"--lora-modules={text}"], {}),
        parse(WorkerSettings, [], {"PAGEFLEET_LORA_MODULES": text}),
        parse(GatewaySettings, flags(ServeSettings(lora_modules=text), GatewaySettings), {}),
    ):
        assert f"--lora-modules={text}" in preparation(settings)
    assert not [each for each in preparation(ServeSettings()) if "lora" in each]
    with pytest.raises(SystemExit):
        parse(ServeSettings, ["--lora-modules=sql"], {})
    assert "--lora-modules: 'sql' names no LoRA adapter" in capsys.readouterr().err
