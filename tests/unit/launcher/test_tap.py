"""What `pagefleet tap` prints of each message."""

import msgpack
import pytest

from pagefleet import wire
from pagefleet.params import SamplingParams
from pagefleet_launcher.cli import main
from pagefleet_launcher.tap import describe, unsealed
from tests.wire.test_messages import GOLDEN


def printed(message):
    return describe(msgpack.unpackb(unsealed(wire.encode(message)), strict_map_key=False))


@pytest.mark.parametrize("message", [message for message, _ in GOLDEN])
def test_every_message_is_one_line_with_the_names_of_its_fields(message):
    name, *fields = printed(message).split(" ")
    assert name == type(message).__name__
    assert "\n" not in printed(message)
    shown = {each.lstrip("[(").partition("=")[0] for each in fields}
    assert set(message.__struct_fields__) <= shown


def test_lists_of_integers_are_read_and_shortened():
    tokens = wire.pack_ints(range(20))
    assert "tokens=[0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 and 4 more]" in printed(
        wire.Result(1, 2, tokens)
    )


def test_parts_of_a_message_have_names_too():
    output = wire.Output("r", 0, 1, 2, wire.pack_ints([258]), finish=wire.Finish.STOP)
    text = printed(wire.Outputs(5, [output]))
    assert text.startswith("Outputs epoch=5 items=[(request=r attempt=0 choice=1 position=2 ")
    assert "tokens=[258]" in text
    assert "finish=stop" in text


def test_parameters_of_all_kinds_are_shown():
    params = SamplingParams(
        max_tokens=4, seed=7, eos_token_ids=(2, 3), logit_bias={5: 1.5}, bad_words=((1, 2), (3,))
    )
    text = printed(wire.Submit("r", 1, wire.pack_ints([5]), params, [wire.ChoiceState(0)]))
    assert "eos_token_ids=[2, 3]" in text
    assert "choices=[(index=0 tokens=[] finished=False" in text


@pytest.mark.parametrize(
    "frame",
    [
        *(["Proclaim", 1, b"x"], ["encode", 1], ["PROTOCOL"], ["Message", 1]),
        *(["Join"], ["Join", "9"], ["Join", 9, b"more"], ["Result", 1, 2, b"abc"]),
        ["Outputs", 5, [["r", 0, 1, 2, "tokens"]]],
    ],
)
def test_what_another_version_says_is_shown_as_it_came(frame):
    name, *fields = frame
    assert describe(frame) == f"{name}, of another version: {fields}"


def test_a_damaged_frame_is_known():
    frame = wire.encode(wire.Join(9))
    assert unsealed(frame) is not None
    assert unsealed(frame[:-1] + b"x") is None


def test_what_is_no_address_is_told_in_a_sentence(capsys):
    assert main(["tap", "nowhere"]) == 1
    said = capsys.readouterr().err
    assert "pagefleet tap: nowhere: " in said
    assert "for example ipc:///tmp/pagefleet-tap" in said
