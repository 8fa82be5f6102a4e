"""Flags and variables become settings; what is unknown or malformed stops the start."""

import contextlib
import dataclasses

import pytest

from pagefleet import command_line
from pagefleet.setting import flag_of, parse_size
from pagefleet.settings import GatewaySettings, SchedulerSettings, ServeSettings, WorkerSettings

ALL = (GatewaySettings, SchedulerSettings, WorkerSettings, ServeSettings)


@pytest.mark.parametrize("cls", ALL)
def test_defaults_need_nothing(cls: type[ServeSettings]) -> None:
    assert command_line.parse(cls, [], {}) == cls()


def test_a_flag_wins_over_its_variable() -> None:
    env = {"PAGEFLEET_MAX_NUM_SEQS": "7", "PAGEFLEET_DTYPE": "float32", "HOME": "/"}
    parsed = command_line.parse(WorkerSettings, ["--max-num-seqs", "9"], env)
    assert (parsed.max_num_seqs, parsed.dtype) == (9, "float32")


def test_booleans_can_be_switched_off_both_ways() -> None:
    assert not command_line.parse(SchedulerSettings, ["--no-lookahead"], {}).lookahead
    assert not command_line.parse(SchedulerSettings, [], {"PAGEFLEET_LOOKAHEAD": "false"}).lookahead


@pytest.mark.parametrize(
    ("argv", "env", "sentence"),
    [
        (["--no-such-flag"], {}, "no-such-flag"),
        (["--max-num-seq", "4"], {}, "max-num-seq"),
        (["--max-num-seqs", "0"], {}, "below 1"),
        (["--max-num-seqs", "many"], {}, "'many' is no whole number"),
        (["--max-num-seqs", str(1 << 63)], {}, "more than 63 bits"),
        (["--kv-cache-memory", "9000000000GiB"], {}, "more than 63 bits"),
        (["--step-seconds", "some"], {}, "'some' is no number"),
        (["--step-seconds", "inf"], {}, "'inf' is not finite"),
        (["--model", "\udcff"], {}, "is not UTF-8"),
        ([], {"PAGEFLEET_MODEL": "\udcff"}, "PAGEFLEET_MODEL: '\\udcff' is not UTF-8"),
        (["--dtype", "float8"], {}, "none of auto, float32"),
        (["--kv-cache-memory", "some"], {}, "write for example 512MiB"),
        ([], {"PAGEFLEET_BLOCK_SIZE": "0"}, "PAGEFLEET_BLOCK_SIZE: 0 is below 1"),
        (["--gpu-memory-utilization", "nan"], {}, "below"),
        ([], {"PAGEFLEET_TENSOR_PARALLEL_SIZE": "0"}, "0 is below 1"),
        (["--threads", "0"], {}, "below 1"),
        (["--threads", "5000"], {}, "5000 is more than the number of cores"),
        ([], {"PAGEFLEET_THREADS": "5000"}, "PAGEFLEET_THREADS: 5000 is more than"),
    ],
)
def test_what_is_wrong_is_said(
    argv: list[str], env: dict[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command_line.parse(WorkerSettings, argv, env)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ServeSettings)])
def test_a_number_of_any_length_is_taken_or_refused(name: str, digits: int) -> None:
    """Python's own limits are 308 digits of a float and 4300 of an int that is read."""
    with contextlib.suppress(SystemExit):
        parsed = command_line.parse(ServeSettings, [f"{flag_of(name)}={'9' * digits}"], {})
        assert getattr(parsed, name) == "9" * digits


@pytest.mark.parametrize(
    ("argv", "env", "sentence"),
    [
        (["--root-path=llm"], {}, "'llm' does not begin with /; write for example /llm"),
        (["--allowed-origins=https://a.org, b.org"], {}, "' b.org' is no origin; write for"),
        (["--allowed-origins=https://a.org/"], {}, "is no origin"),
        (["--served-model-name=a,,b"], {}, "'a,,b' holds a name that is empty, or one twice"),
        (["--served-model-name=a, a"], {}, "'a, a' holds a name that is empty, or one twice"),
        (["--allowed-origins=https://a.org:443"], {}, "is sent by no browser"),
        ([], {"PAGEFLEET_API_KEY": ""}, "PAGEFLEET_API_KEY: a secret is not empty"),
        (["--api-key", "key\n"], {}, "no white space around it"),
        (["--resume-secret="], {}, "a secret is not empty"),
        (
            [],
            {"PAGEFLEET_MAX_NUM_SEQ": "4"},
            "no environment variable PAGEFLEET_MAX_NUM_SEQ; is PAGEFLEET_MAX_NUM_SEQS meant?",
        ),
        ([], {"PAGEFLEET_DATA_PARALEL_SIZE": "4"}, "is PAGEFLEET_DATA_PARALLEL_SIZE meant?"),
    ],
)
def test_what_would_do_nothing_is_refused(
    argv: list[str], env: dict[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command_line.parse(GatewaySettings, argv, env)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_what_is_right_is_taken() -> None:
    env = {"PAGEFLEET_FAULTS": "x", "PAGEFLEET_CLIENTS": "y", "PAGEFLEET_WORKERS": "2"}
    told = command_line.parse(
        GatewaySettings, ["--root-path=/llm", "--allowed-origins=http://A.org:8080,*"], env
    )
    assert (told.root_path, told.allowed_origins) == ("/llm", "http://a.org:8080,*")
    assert command_line.parse(GatewaySettings, ["--served-model-name", "a, b/c"], {}) == (
        GatewaySettings(served_model_name="a,b/c")
    )


def test_a_setting_has_all_of_its_names() -> None:
    for argv, env in (
        (["--workers=3"], {}),
        (["--data-parallel-size=3"], {}),
        ([], {"PAGEFLEET_WORKERS": "3"}),
        ([], {"PAGEFLEET_DATA_PARALLEL_SIZE": "3"}),
        (["--workers=3"], {"PAGEFLEET_DATA_PARALLEL_SIZE": "4"}),
    ):
        assert command_line.parse(ServeSettings, argv, env).workers == 3


OPERATORS_KNOW = {
    "--model", "--served-model-name", "--host", "--port", "--max-model-len", "--max-num-seqs",
    "--api-key", "--dtype", "--max-num-batched-tokens", "--gpu-memory-utilization", "--block-size",
    "--kv-cache-dtype", "--seed", "--tensor-parallel-size", "--data-parallel-size",
    "--enable-prefix-caching", "--enforce-eager", "--tokenizer", "--chat-template",
    "--generation-config", "--max-logprobs", "--max-num-queued-reqs", "--shutdown-timeout",
    "--scheduling-policy", "--tool-call-parser", "--ssl-certfile", "--ssl-keyfile",
    "--allowed-origins", "--root-path", "--lora-modules",
}  # fmt: skip
"""Flags of vLLM that keep their names."""


def test_flags_that_operators_know_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(ServeSettings, ["--help"], {})
    words = set(capsys.readouterr().out.replace(",", " ").split())
    assert words >= OPERATORS_KNOW


def test_two_variables_of_one_setting_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    env = {"PAGEFLEET_WORKERS": "3", "PAGEFLEET_DATA_PARALLEL_SIZE": "3"}
    with pytest.raises(SystemExit) as stopped:
        command_line.parse(ServeSettings, [], env)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "PAGEFLEET_WORKERS and PAGEFLEET_DATA_PARALLEL_SIZE are one setting" in said


def test_sizes() -> None:
    assert parse_size("0.5GiB") == 2**29
    assert parse_size("2mb") == 2_000_000
    assert parse_size("17") == 17


@pytest.mark.parametrize("cls", ALL)
def test_flags_carry_every_field_on(cls: type[ServeSettings]) -> None:
    told = command_line.parse(
        ServeSettings,
        ["--port=81", "--no-check", "--kv-cache-memory=1MiB", "--no-lookahead", "--threads=1"],
        {},
    )
    passed = command_line.parse(cls, command_line.flags(told, cls), {})
    for field in dataclasses.fields(cls):
        assert getattr(passed, field.name) == getattr(told, field.name)


def test_help_names_flag_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(WorkerSettings, ["--help"], {})
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-num-seqs INT" in text
    assert "(default: 256; PAGEFLEET_MAX_NUM_SEQS)" in text


def test_help_names_what_there_is_to_choose(capsys: pytest.CaptureFixture[str]) -> None:
    """And it says no default where there is none, and which part of a cell a flag is for."""
    with pytest.raises(SystemExit):
        command_line.parse(ServeSettings, ["--help"], {})
    shown = capsys.readouterr().out
    text = " ".join(shown.split())
    for field in dataclasses.fields(ServeSettings):
        if choices := field.metadata["choices"]:
            assert f"{{{','.join(choices)}}}" in text
    assert "default: None" not in text
    assert "--swap-space SIZE" in text
    sections = [line for line in shown.splitlines() if line[:1].isalpha() and line.endswith(":")]
    assert sections[1:] == [
        "What gateways and workers must agree on:",
        "A cell of several machines:",
        "A worker:",
        "The scheduler:",
        "The HTTP gateway:",
        "All services at once, on one machine:",
    ]
