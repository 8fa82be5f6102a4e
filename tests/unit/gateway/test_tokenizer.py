import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, processors

from pagefleet_gateway.text.tokenizer import PromptError, PromptTooLongError, Tokenizer
from tests.unit.gateway.conftest import BACKENDS, byte_level_tokenizer

TEXTS = [
    "",
    "Hello, world",
    " two  spaces \n\n\tand tabs",
    "In 2024 there were 12345 cats, 3.5 dogs and ½ a horse",
    "naïve façade 中文 😀👩‍👩‍👧 \u200d \ufffd",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start",
]


def test_prompts_are_encoded_as_transformers_does(smollm2, tmp_path):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(smollm2 / "tokenizer.json"))
    ours = Tokenizer.load(smollm2)
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    alphabet = "the cat's 12 é中😀\n<|im_end|>"
    texts = TEXTS + ["".join(rng.choices(alphabet, k=80)) for _ in range(50)]
    assert ours.encode(texts) == [theirs(text)["input_ids"] for text in texts]
    assert all(
        ours.decode(ids, False) == text for ids, text in zip(ours.encode(texts), texts, strict=True)
    )


def test_the_post_processors_token_can_be_left_out():
    backend = byte_level_tokenizer()
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    tokenizer = Tokenizer(backend, 100)
    assert tokenizer.encode(["h"]) == [[bos, ord("h")]]
    assert tokenizer.encode(["h"], add_special_tokens=False) == [[ord("h")]]


def test_padding_and_truncation_of_the_file_do_not_apply():
    backend = byte_level_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    assert Tokenizer(backend, 100).encode(["abc"]) == [[97, 98, 99]]


def test_half_a_surrogate_pair_is_refused():
    tokenizer = Tokenizer(byte_level_tokenizer(), 100)
    with pytest.raises(PromptError, match=r"U\+D83D\) at character 3"):
        tokenizer.encode(["fine", "ab \ud83d"])


def test_what_must_be_too_long_is_refused_before_it_is_encoded():
    tokenizer = Tokenizer(byte_level_tokenizer(), 10)
    longest = len("<|im_start|>")
    assert len(tokenizer.encode(["<|im_start|>" * 10])[0]) == 10
    with pytest.raises(PromptTooLongError, match=f"{longest * 10 + 1} characters"):
        tokenizer.encode(["h" * (longest * 10 + 1)])


def test_a_prompt_that_fits_after_composition_is_not_refused():
    backend = byte_level_tokenizer()
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(backend, 1)
    decomposed = "\u03b1\u0313\u0300\u0345"
    assert len(decomposed * 3) <= len("<|im_start|>") * 4
    tokenizer.check(decomposed * 12)


@given(st.data(), st.sampled_from(sorted(BACKENDS)))
def test_a_tokens_bytes_are_what_it_adds_to_a_text(data, name):
    tokenizer = Tokenizer(BACKENDS[name](), 100)
    text = "e" + data.draw(st.text(alphabet="the l<>|12\n", max_size=10))
    first, *rest = tokenizer.encode([text])[0]
    before = tokenizer.decode([first], skip_special_tokens=False)
    joined = b"".join(map(tokenizer.vocabulary.token_bytes, rest)).decode()
    assert before + joined == tokenizer.decode([first, *rest], skip_special_tokens=False)


@pytest.mark.parametrize("name", ["byte level", "pieces"])
def test_bytes_of_characters_without_a_token_are_told_apart(name):
    vocabulary = Tokenizer(BACKENDS[name](), 100).vocabulary
    ids = Tokenizer(BACKENDS[name](), 100).encode(["😀"])[0]
    assert b"".join(map(vocabulary.token_bytes, ids)).endswith("😀".encode())
    assert all(len(vocabulary.token_bytes(i)) < 4 for i in ids)


def test_ids_outside_the_vocabulary_have_no_bytes():
    vocabulary = Tokenizer(byte_level_tokenizer(), 100).vocabulary
    assert vocabulary.size not in vocabulary
    assert vocabulary.token_bytes(vocabulary.size) == b""


def test_text_needs_neither_torch_nor_transformers():
    modules = "chat_prompt, detokenizer, stop, tokenizer, vocabulary"
    program = (
        f"from pagefleet_gateway.text import {modules}\nimport sys\n"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )


WORDS = """
import random, re
from pathlib import Path
from pagefleet_gateway.text.chat_prompt import ChatPrompts
from pagefleet_gateway.sandbox.template import ChatTemplate
from pagefleet_gateway.text.tokenizer import Tokenizer
from tests.unit.gateway.conftest import byte_level_tokenizer

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

tokenizer = Tokenizer(byte_level_tokenizer(), 4096)
prompts = ChatPrompts(tokenizer, ChatTemplate("{{ messages[0].content }}", {}))
random.seed(1)
words = ["".join(random.choices("abcdefgh", k=250)) for _ in range(8000)]
before = resident()
for word in words:
    tokenizer.encode([word])
    prompts.encode({"messages": [{"role": "user", "content": word}]})
print(resident() - before)
"""


def test_of_words_that_come_once_few_are_kept():
    """8,000 whose bytes are all tokens: the library would keep 65 MB for each of two tokenizers."""
    grown = subprocess.run(
        [sys.executable, "-c", WORDS], capture_output=True, text=True, check=True
    )
    assert int(grown.stdout) < 60_000
