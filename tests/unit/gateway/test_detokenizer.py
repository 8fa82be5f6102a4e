import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pagefleet_gateway.text.detokenizer import MAX_HELD_BYTES, Detokenizer
from pagefleet_gateway.text.tokenizer import Tokenizer as GatewayTokenizer
from pagefleet_gateway.text.vocabulary import Vocabulary
from tests.unit.gateway.conftest import BACKENDS

TOKENIZERS = {name: make() for name, make in BACKENDS.items()}
VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}

names = st.sampled_from(sorted(TOKENIZERS))
words = st.text(alphabet="the l é😀中\ufffd <>|", max_size=12)


@st.composite
def outputs(draw: st.DrawFn, name: str) -> list[int]:
    """Ids of real text, broken by ids at random (also of no token)."""
    tokenizer = TOKENIZERS[name]
    some_id = st.integers(0, tokenizer.get_vocab_size() + 3)
    encoded = words.map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    parts = draw(st.lists(st.one_of(encoded, st.lists(some_id, max_size=4)), max_size=6))
    return [token_id for part in parts for token_id in part]


def stream(detokenizer: Detokenizer, ids: list[int], step: int) -> str:
    pieces = [detokenizer.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    return "".join([*pieces, detokenizer.finish()])


def longest_run(tokenizer: Tokenizer, ids: list[int]) -> int:
    tokens = [tokenizer.id_to_token(i) or "" for i in ids]
    runs = "".join("b" if t.startswith("<0x") else "" if t == "" else "." for t in tokens)
    return max(map(len, runs.split(".")))


@settings(max_examples=400)
@given(st.data(), names, st.booleans(), st.integers(1, 4))
def test_the_pieces_are_the_decoded_whole(data, name, skip, step):
    ids = data.draw(outputs(name))
    tokenizer = TOKENIZERS[name]
    if longest_run(tokenizer, ids) > MAX_HELD_BYTES:
        return
    text = stream(Detokenizer(VOCABULARIES[name], skip_special_tokens=skip), ids, step)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=400)
@given(st.data(), names, st.booleans())
def test_an_output_goes_on_from_its_prompt(data, name, skip):
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode(data.draw(words)).ids
    ids = tokenizer.encode(data.draw(words), add_special_tokens=False).ids
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    after = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    assert after.startswith(before)
    detokenizer = Detokenizer(VOCABULARIES[name], prompt, skip)
    assert before + stream(detokenizer, ids, 1) == after


@given(st.data(), st.sampled_from(["byte level", "pieces"]), st.integers(1, 3))
def test_a_character_that_the_prompt_leaves_incomplete_is_the_outputs(data, name, cut):
    tokenizer = TOKENIZERS[name]
    byte_ids = [tokenizer.token_to_id(token) for token in byte_tokens(name, "中😀")]
    prompt, output = byte_ids[: 3 + cut], byte_ids[3 + cut :]
    assert stream(Detokenizer(VOCABULARIES[name], prompt), output, 1) == "😀"


def byte_tokens(name: str, text: str) -> list[str]:
    if name == "pieces":
        return [f"<0x{byte:02X}>" for byte in text.encode()]
    alphabet = [TOKENIZERS[name].id_to_token(byte) for byte in range(256)]
    return [alphabet[byte] for byte in text.encode()]


@given(st.data(), names, st.booleans())
def test_offsets_are_where_the_tokens_text_begins(data, name, skip):
    tokenizer = TOKENIZERS[name]
    text = data.draw(st.text(alphabet="thel .,", min_size=1, max_size=20))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(VOCABULARIES[name], skip_special_tokens=skip)
    offsets = [detokenizer.push_one(token_id)[1] for token_id in ids]
    starts = [len(tokenizer.decode(ids[:count])) for count in range(len(ids))]
    assert offsets == starts


def test_a_long_run_of_bytes_does_not_wait_for_its_end():
    tokenizer = TOKENIZERS["pieces"]
    detokenizer = Detokenizer(VOCABULARIES["pieces"])
    text = "中" * 100
    ids = tokenizer.encode(text, add_special_tokens=False).ids[1:]
    given_out = ""
    for count, token_id in enumerate(ids, 1):
        given_out += detokenizer.push([token_id])
        assert len(given_out.encode()) >= count - MAX_HELD_BYTES - 1
    assert given_out + detokenizer.finish() == text


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_token_costs_the_same_at_the_end_of_a_long_output(name):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    vocabulary = VOCABULARIES[name]
    detokenizer = Detokenizer(vocabulary)

    def cost() -> float:
        ids = [rng.randrange(vocabulary.size) for _ in range(2000)]
        start = time.process_time()
        for token_id in ids:
            detokenizer.push([token_id])
        return time.process_time() - start

    first = min(cost() for _ in range(3))
    for _ in range(5):
        cost()
    assert min(cost() for _ in range(3)) < 3 * first


def test_the_default_models_text_is_streamed_exactly(smollm2):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    tokenizer = GatewayTokenizer.load(smollm2)
    for _ in range(50):
        ids = [rng.randrange(tokenizer.vocabulary.size) for _ in range(200)]
        skip = rng.random() < 0.5
        text = stream(Detokenizer(tokenizer.vocabulary, skip_special_tokens=skip), ids, 1)
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)
