import random

import pytest

from benchmarks.dataset import CODE_LINES, KINDS, PASSAGE_WORDS, TASKS, main, modules
from benchmarks.loadgen.prompts import Dataset

SEED = random.randrange(1 << 32)


@pytest.fixture(autouse=True)
def _print_the_seed():
    print("seed", SEED)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_prompts_and_none_twice(kind, capfdbinary, tmp_path):
    texts = []
    for seed in (SEED, SEED, SEED + 1):
        main([kind, "--count", "30", "--seed", str(seed)])
        texts.append(capfdbinary.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(texts[0])
    assert len(set(map(str, Dataset.read(file).known))) == 30


def test_a_passage_is_a_task_and_a_text():
    for prompt in KINDS["passage"](30, random.Random(SEED)):
        [message] = prompt.messages
        task, text = message.content.split("\n\n", 1)
        assert task in TASKS
        assert len(text.split()) in PASSAGE_WORDS


def test_code_is_what_a_module_says():
    sources = [source for _, source in modules()]
    for prompt in KINDS["code"](30, random.Random(SEED)):
        assert prompt.prompt.count("\n") in CODE_LINES
        assert any(prompt.prompt in source for source in sources)


def test_more_than_there_are_cannot_be_had(capsys):
    with pytest.raises(SystemExit):
        main(["question", "--count", "1000000"])
    assert "--count 1000000 of this kind cannot be had" in capsys.readouterr().err
