import gzip
import json
import random
from statistics import fmean

import pytest

from benchmarks.loadgen.lengths import WORKLOADS, Lengths, Recorded
from benchmarks.loadgen.load import PoissonRate
from benchmarks.loadgen.prompts import RandomPrompts
from benchmarks.loadgen.workload import Workload

SEED = random.randrange(1 << 32)


@pytest.fixture(autouse=True)
def _print_the_seed():
    print("seed", SEED)


@pytest.mark.parametrize(("name", "prompt", "output"), [("chat", 150, 105), ("instr", 19, 56)])
@pytest.mark.parametrize("count", [64, 1000])
def test_a_workload_has_its_means_at_any_number_of_requests(name, prompt, output, count):
    drawn = [each.clipped(512) for each in WORKLOADS[name].draw(count, random.Random(SEED))]
    assert len(drawn) == count
    assert fmean(each.prompt for each in drawn) == pytest.approx(prompt, rel=0.04)
    assert fmean(each.output for each in drawn) == pytest.approx(output, rel=0.04)
    assert all(min(each.prompt, each.output) >= 1 for each in drawn)
    assert all(max(each.prompt, each.output) <= 512 for each in drawn)


def test_recorded_lengths_are_the_last_two_columns_of_first_turns(tmp_path):
    lines = "conv,prompt_tokens,output_tokens\n7,10,20\n7,35,5\n8,600,1\n"
    for name, data in (("a.csv", lines.encode()), ("a.csv.gz", gzip.compress(lines.encode()))):
        file = tmp_path / name
        file.write_bytes(data)
        recorded = Recorded.read(file)
        assert sorted(recorded.known, key=str) == [Lengths(10, 20), Lengths(600, 1)]
        assert set(recorded.draw(100, random.Random(SEED))) == set(recorded.known)
        workload = Workload("m", recorded, 512, RandomPrompts(vocabulary=9))
        requests = workload.requests(100, SEED, "")
        assert {len(json.loads(each.body)["prompt"]) for each in requests} == {10, 512}


@pytest.mark.parametrize("lines", ["", "in,out\n", "in,out\n1,\n", "in,out\n5,many\n", "in\n5\n"])
def test_a_file_without_lengths_is_refused(tmp_path, lines):
    file = tmp_path / "lengths.csv"
    file.write_text(lines)
    with pytest.raises(ValueError, match="lengths"):
        Recorded.read(file)


def test_prompts_of_token_ids_are_exact_and_begin_with_the_prefix():
    lengths = Recorded([Lengths(5, 3), Lengths(9, 4)])
    random_ids = RandomPrompts(prefix_tokens=40, vocabulary=1000)
    requests = Workload("m", lengths, 512, random_ids).requests(8, SEED, "a")
    bodies = [json.loads(request.body) for request in requests]
    prompts = [body["prompt"] for body in bodies]
    assert {(len(body["prompt"]), body["max_tokens"]) for body in bodies} <= {(45, 3), (49, 4)}
    assert [request.output_tokens for request in requests] == [b["max_tokens"] for b in bodies]
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 1
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 8
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)


def test_contents_change_the_prompts_but_neither_lengths_nor_prefix():
    workload = Workload("m", WORKLOADS["instr"], 512, RandomPrompts(prefix_tokens=7))
    first, same, other = (
        [json.loads(r.body)["prompt"].split() for r in workload.requests(20, SEED, contents)]
        for contents in ("a", "a", "b")
    )
    assert first == same != other
    assert [len(words) for words in first] == [len(words) for words in other]
    assert {tuple(words[:7]) for words in first} == {tuple(words[:7]) for words in other}


def test_requests_are_greedy_or_have_a_seed_each():
    lengths, prompts = Recorded([Lengths(5, 3)]), RandomPrompts()
    greedy = Workload("m", lengths, 512, prompts).requests(3, SEED, "")
    sampled = Workload("m", lengths, 512, prompts, 0.8, ignore_eos=False).requests(3, SEED, "")
    bodies = [json.loads(request.body) for request in greedy + sampled]
    assert [body["temperature"] for body in bodies] == [0] * 3 + [0.8] * 3
    assert [body.get("seed") for body in bodies] == [None] * 3 + [0, 1, 2]
    assert [body.get("ignore_eos") for body in bodies] == [True] * 3 + [None] * 3
    assert [request.exact for request in greedy + sampled] == [True] * 3 + [False] * 3


def test_poisson_arrivals_have_exponential_gaps():
    arrivals = PoissonRate(5.0).arrivals(20000, random.Random(SEED))
    gaps = [later - earlier for earlier, later in zip([0.0, *arrivals], arrivals, strict=False)]
    assert min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert fmean(gap > 0.2 for gap in gaps) == pytest.approx(0.3679, abs=0.02)
