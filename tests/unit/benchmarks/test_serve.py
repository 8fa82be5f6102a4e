import json
from collections.abc import Iterator
from itertools import pairwise
from math import ceil

import pytest

from benchmarks.serve import main
from tests.unit.benchmarks.scripted import CACHED, ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.close()


@pytest.fixture
def bench(server, tmp_path):
    """Runs the benchmark on the scripted server; gives its exit status and its report."""

    def run(*options: str) -> tuple[int, dict]:
        file = tmp_path / "report.json"
        status = main(["--url", server.url, "--warmup", "0", "--json", str(file), *options])
        return status, json.loads(file.read_text())

    return run


def test_a_point_counts_tokens_by_usage_and_chunks_by_arrival(bench, server, capsys):
    status, report = bench("--model", "pairs", "--concurrency", "4", "--requests", "20")
    [point] = report["points"]
    asked = [body["max_tokens"] for body in server.bodies]
    summary, outcomes = point["summary"], point["outcomes"]
    assert status == 0
    assert (summary["completed"], summary["failed"]) == (20, 0)
    assert sorted(outcome["output_tokens"] for outcome in outcomes) == sorted(asked)
    # The chunk that carries only the finish reason is not a token's.
    assert [len(each["chunks"]) for each in outcomes] == [
        ceil(each["output_tokens"] / 2) for each in outcomes
    ]
    assert summary["cached_share"] == CACHED / 10
    assert summary["mean_output_tokens"] == pytest.approx(sum(asked) / 20)
    speed = summary["output_tokens_per_second"]
    assert speed * summary["duration"] == pytest.approx(sum(asked))
    for each in outcomes:
        times = [each["due"], *each["chunks"], each["done"]]
        assert all(earlier <= later for earlier, later in pairwise(times))
    captured = capsys.readouterr()
    assert "4 clients" in captured.out
    assert f"{speed:.1f}" in captured.out
    assert "4 clients, seed 0: 20 of 20 done" in captured.err


def test_clients_are_as_many_as_asked_for_and_the_model_is_the_first_listed(bench, server):
    server.gather = 5
    bench("--concurrency", "5", "--requests", "25")
    assert server.most_in_flight == 5
    assert {body["model"] for body in server.bodies} == {"plain"}


def test_a_poisson_rate_does_not_wait_for_answers(bench, server):
    server.gather = 20
    status, report = bench("--rate", "1000", "--requests", "20", "--longest", "3")
    assert status == 0
    assert report["points"][0]["load"] == "1000 requests/s"
    assert report["points"][0]["summary"]["completed"] == 20
    assert server.most_in_flight == 20


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("busy", "HTTP 503", "at capacity"),
        ("broken", "cut off", "peer closed connection"),
        ("hangs", "timeout", "0.3 s"),
        ("sorry", "error event", "the worker is gone"),
        ("garbled", "malformed event", '{"choices": ['),
        ("uncounted", "no usage", "states the usage"),
        ("short", "wrong token count", "asked for"),
        ("endless", "no [DONE]", "ended after"),
    ],
)
def test_an_answer_that_is_not_whole_is_counted_and_shown(bench, capsys, model, kind, message):
    timeout = "0.3" if model == "hangs" else "60"
    status, report = bench(
        *("--model", model, "--concurrency", "3", "--requests", "3", "--timeout", timeout)
    )
    [point] = report["points"]
    assert status == 1
    assert (point["summary"]["completed"], point["summary"]["failed"]) == (0, 3)
    assert point["summary"]["output_tokens_per_second"] == 0
    assert point["summary"]["ttft_p50"] is None
    assert {outcome["kind"] for outcome in point["outcomes"]} == {kind}
    shown = capsys.readouterr().out
    assert f"3 x {kind}, for example: " in shown
    assert message in shown


def test_a_refused_connection_is_a_failure(server, capsys):
    server.close()
    assert main(["--url", server.url, "--model", "m", "--requests", "2", "--warmup", "1"]) == 1
    shown = capsys.readouterr().out
    assert "1 client, seed 0, warm-up: 1 x connection" in shown
    assert "64 clients, seed 0: 2 x connection" in shown


def test_no_two_points_ask_the_same_but_all_ask_as_much(bench, server):
    bench("--concurrency", "1,2", "--seeds", "0,1", "--requests", "6", "--warmup", "6")
    prompts = [body["prompt"] for body in server.bodies]
    assert len(prompts) == len(set(prompts)) == 6 * 2 * 4
    points = [server.bodies[start : start + 6] for start in range(0, len(prompts), 6)]
    assert len({tuple(sorted(body["max_tokens"] for body in point)) for point in points}) == 1


def test_a_dataset_is_asked_where_its_lines_belong(bench, server, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "Once upon a time"}\n{"messages": [{"role": "user", "content": "Who?"}]}\n'
    )
    options = ("--dataset-path", str(file), "--temperature", "0.8")
    status, report = bench("--requests", "2", "--concurrency", "1", *options)
    [point] = report["points"]
    text, chat = sorted(server.bodies, key=lambda body: "messages" in body)
    assert status == 0
    assert text["prompt"] == "Once upon a time"
    assert chat["messages"] == [{"role": "user", "content": "Who?"}]
    assert {text["temperature"], chat["temperature"]} == {0.8}
    # A chunk that only says whose turn it is is not a token's.
    assert [len(each["chunks"]) for each in point["outcomes"]] == [
        body["max_tokens"] for body in server.bodies
    ]


def test_an_answer_may_be_short_unless_it_has_to_ignore_its_end(bench):
    options = ("--model", "short", "--requests", "3", "--concurrency", "1", "--longest", "2")
    exact, _ = bench(*options)
    free, report = bench(*options, "--no-ignore-eos")
    assert (exact, free) == (1, 0)
    assert report["points"][0]["summary"]["mean_output_tokens"] == 1


def test_a_server_that_is_not_there_is_said_to_be_down(server, capsys):
    server.close()
    with pytest.raises(SystemExit) as exited:
        main(["--url", server.url])
    assert exited.value.code == 2
    assert "Is the server up?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--concurrency", "4,0", "'0' is no whole number of 1 or more"),
        ("--rate", "nan", "'nan' is no number above 0"),
        ("--url", "localhost:8000", "is no URL of a server"),
        ("--lengths", "/nowhere.csv", "/nowhere.csv"),
        ("--dataset-path", "/nowhere.jsonl", "/nowhere.jsonl"),
        ("--temperature", "-1", "'-1' is no number of 0 or more"),
    ],
)
def test_a_malformed_option_ends_with_a_sentence(capsys, option, value, message):
    with pytest.raises(SystemExit) as exited:
        main(["--model", "m", option, value])
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


def test_a_dataset_has_no_random_prefix(capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Once upon a time"}\n')
    with pytest.raises(SystemExit):
        main(["--model", "m", "--dataset-path", str(file), "--prefix-tokens", "4"])
    assert "--prefix-tokens and --token-ids are for random prompts" in capsys.readouterr().err
