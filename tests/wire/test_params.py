"""SamplingParams are valid by construction, made or decoded."""

import math

import msgspec
import pytest

from pagefleet.params import MAX_GRAMMAR_CHARACTERS, Guide, SamplingParams


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8, "seed": 1} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("seed", 2**64),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 1.1),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2e-309),
        ("repetition_penalty", 1e300),
        ("min_tokens", 9),
        ("logprobs", 129),
        ("beam_width", 17),
        ("length_penalty", math.nan),
        ("length_penalty", 1e308),
        ("length_penalty", -400.0),
        ("prompt_logprobs", -1),
        ("bad_words", ((),)),
        ("allowed_token_ids", ()),
        ("logit_bias", {3: math.inf}),
        ("guide", Guide("a" * (MAX_GRAMMAR_CHARACTERS + 1))),
        ("embedding", -1),
        ("embedding", 0),
        ("adapter", -1),
        ("adapter", 2**31),
    ],
)
def test_out_of_range_names_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        params(**{field: value})


def test_ranges_are_checked_when_decoded() -> None:
    good = msgspec.to_builtins(params(temperature=0.5))
    bad = [value if value != 0.5 else math.nan for value in good]
    assert msgspec.convert(good, SamplingParams) == params(temperature=0.5)
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.convert(bad, SamplingParams)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": (9, 10)},
        {"logit_bias": {10: 1.0}},
        {"bad_words": ((1, 2), (3, -1))},
        {"allowed_token_ids": (0, 10)},
    ],
)
def test_tokens_outside_the_vocabulary(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(fields))} .* vocabulary of 10"):
        params(**fields).check_vocabulary(10)


def test_tokens_inside_the_vocabulary() -> None:
    good = params(stop_token_ids=(10,), logit_bias={0: 1.0}, bad_words=((1, 2),))
    assert good.check_vocabulary(11) is good
