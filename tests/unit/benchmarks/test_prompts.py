import random
from collections import Counter

import pytest

from benchmarks.loadgen.prompts import Dataset, Message, Prompt

SEED = random.randrange(1 << 32)


@pytest.fixture(autouse=True)
def _print_the_seed():
    print("seed", SEED)


def test_a_line_has_a_prompt_or_messages_and_perhaps_more(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "Who?", "output_tokens": 10}\n\n'
        '{"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 5}\n'
    )
    text, chat = Dataset.read(file).known
    assert text == Prompt("Who?")
    assert chat == Prompt(messages=[Message("user", "Where?")])
    assert (text.route, chat.route) == ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "\n",
        "Who?\n",
        '{"text": "Who?"}\n',
        '{"prompt": "Who?", "messages": []}\n',
        '{"messages": [{"from": "human", "value": "Who?"}]}\n',
        '{"prompt": "Who?"}\n{"prompt": 5}\n',
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path, lines):
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    with pytest.raises(ValueError, match="prompts"):
        Dataset.read(file)


def test_every_prompt_of_a_dataset_comes_once_before_any_comes_again():
    known = [Prompt(str(number)) for number in range(20)]
    first, same, other = (Dataset(known).draw([1] * 50, SEED, contents) for contents in "aab")
    assert first == same != other
    for start in (0, 20):
        assert Counter(p.prompt for p in first[start : start + 20]) == Counter(map(str, range(20)))
    assert len({p.prompt for p in first[40:]}) == 10
