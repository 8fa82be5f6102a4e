"""The wire: golden bytes, an independent decoder, and refusal of everything else."""

import math
import random
import zlib
from array import array

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet import wire
from pagefleet.params import SamplingParams
from pagefleet.transport import MAX_FRAME_BYTES

PARAMS = SamplingParams(max_tokens=4, seed=7, temperature=0.0, eos_token_ids=(2,))

GOLDEN: list[tuple[wire.Message, str]] = [
    (wire.GatewayHello(1, "m"), "93ac4761746577617948656c6c6f01a16d"),
    (wire.Abort("r", 1, [2]), "94a541626f7274a172019102"),
    (
        wire.GatewayBeat([wire.OpenRequest("r", 0, {0: 5})], {"t": wire.TenantUse(1, 9, 0)}, "m"),
        "94ab476174657761794265617491" + "93a17200810005" + "81a174" + "93010900" + "a16d",
    ),
    (wire.GatewayBye(), "91aa47617465776179427965"),
    (wire.Inspect(3, True), "93a7496e737065637403c3"),
    (
        wire.Snapshot(
            5, 3,
            [wire.WorkerMemory(0, 1, 8, 16, 9, 4, 2, {1: 2, 3: 1}, 7, 0, 0, 1, 2, 3, 4, b"\0\xff")],
            [wire.WaitingSequence("r", [0], 1.5, 20, 1, wire.Wait.BLOCKS, 6, 5)],
        ),
        "95a8536e617073686f740503" + "91dc0010" + "000108100904028201020301"
        + "0700000102" + "0304c40200ff"
        + "9198a17291" + "00cb3ff80000000000001401a6626c6f636b730605",
    ),
    (wire.Welcome(5, 1, 9), "94a757656c636f6d65050109"),
    (wire.Moved("r"), "92a54d6f766564a172"),
    (wire.Join(9), "92a44a6f696e09"),
    (wire.Fence("late"), "92a546656e6365a46c617465"),
    (wire.WorkerBye(3, True), "93a9576f726b657242796503c3"),
    (wire.WorkerBeat(3, 17, True), "94aa576f726b6572426561740311c3"),
    (
        wire.Outputs(
            5, [wire.Output("r", 0, 1, 2, b"\2\1\0\0", finish=wire.Finish.STOP, numerics=9)]
        ),
        "94a74f75747075747305919ca172000102c40402010000c0a473746f7000c0" + "0009c0" + "90",
    ),
    (
        wire.Result(9, 1, b"", micros=7, embeddings=[(2, wire.pack_floats([0.5, -2.0]))]),
        "99a6526573756c740901c400" + "909090" + "07" + "919202c4080000003f000000c0",
    ),
    (
        wire.Plan(9, 1, wire.pack_ints([0, 0, 1, 1, 1, -2]), wire.pack_ints([wire.SAMPLED])),
        "9d" + "a4506c616e" + "0901" + "c418" + "00000000" "00000000" "01000000" "01000000"
        "01000000" "feffffff" + "c404ffffffff" + "c400" + "90" + "c400" * 6,
    ),
]  # fmt: skip

DECODERS = {
    wire.decode_from_gateway: wire.FromGateway,
    wire.decode_from_worker: wire.FromWorker,
    wire.decode_to_gateway: wire.ToGateway,
    wire.decode_to_worker: wire.ToWorker,
}


def decode(frame: bytes) -> object:
    for decoder in DECODERS:
        try:
            return decoder(frame)
        except wire.WireError:
            continue
    raise AssertionError("no direction takes this frame")


def name_of(message: object) -> str:
    return type(message).__name__


def assert_refused(frame: bytes) -> None:
    for decoder in DECODERS:
        with pytest.raises(wire.WireError):
            decoder(frame)


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=name_of)
def test_golden_bytes(message: wire.Message, golden: str) -> None:
    content = bytes.fromhex(golden)
    frame = content + zlib.crc32(content).to_bytes(4, "little")
    assert wire.encode(message) == frame
    assert decode(frame) == message


def test_an_independent_decoder_reads_a_submit() -> None:
    submit = wire.Submit(
        "r1", 2, wire.pack_ints([1, 70000]), PARAMS, [wire.ChoiceState(0, wire.pack_ints([5]))]
    )
    tag, request, attempt, prompt, params, choices, *rest = msgpack.unpackb(
        wire.encode(submit)[:-4]
    )
    assert (tag, request, attempt, *rest) == (
        *("Submit", "r1", 2, 0, b"", 0.0, None, 0, "", 1.0, "", b""),
    )
    assert list(memoryview(prompt).cast("i")) == [1, 70000]
    assert params[:3] == [4, 7, 0.0]
    assert choices == [[0, b"\x05\0\0\0", False, 0]]
    assert wire.decode_from_gateway(wire.encode(submit)) == submit


def test_fields_appended_by_a_newer_party_are_passed_over() -> None:
    newer = wire.sealed(msgpack.packb(["Fence", "late", "and one more"]))
    assert wire.decode_to_worker(newer) == wire.Fence("late")


@given(st.binary(max_size=200), st.booleans())
def test_noise_is_refused(noise: bytes, sealed: bool) -> None:
    for decoder, union in DECODERS.items():
        try:
            message = decoder(wire.sealed(noise) if sealed else noise)
        except wire.WireError:
            continue
        assert msgspec.convert(msgspec.to_builtins(message), union) == message


@pytest.mark.parametrize(
    "fields",
    [
        ["Submit", "r", 1, b"12345", msgspec.to_builtins(PARAMS), [[0]]],
        ["Submit", "r", 1, b"1234", msgspec.to_builtins(PARAMS), [[0, b"1"]]],
        ["Result", 1, 2, b"123"],
        ["Result", 1, 2, b"1234", [], [], [], 7, [[0, b"12345"]]],
        ["Plan", 1, 2, b"1234", b"12"],
        ["Plan", 1, 2, b"1234", b"1234", b"", [], b"123"],
    ],
)
def test_integers_of_odd_length_are_refused(fields: list[object]) -> None:
    frame = wire.sealed(msgpack.packb(fields))
    for decoder in DECODERS:
        with pytest.raises(wire.WireError, match=r"integers of 32 bits|Invalid value"):
            decoder(frame)


HELLO = wire.WorkerHello(1, "h", 1, 1, "model", "class", 16, 64, 8, 512, 64, 260)
SUBMIT = wire.Submit("r", 1, b"1234", PARAMS, [wire.ChoiceState(0), wire.ChoiceState(1)])


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (HELLO, "pid", 2**63),
        (HELLO, "block_size", 0),
        (HELLO, "blocks", 2**40),
        (HELLO, "blocks", -1),
        (HELLO, "slots", 2**40),
        (HELLO, "max_batched_tokens", -5),
        (HELLO, "host_blocks", 2**64 - 1),
        (HELLO, "swap_micros", math.nan),
        (HELLO, "compute_micros", math.inf),
        (SUBMIT, "choices", [[0], [1], [1]]),
        (SUBMIT, "choices", [[2**31]]),
        (SUBMIT, "choices", [[-1]]),
        (SUBMIT, "priority", 2**31),
        (SUBMIT, "age", math.nan),
        (SUBMIT, "left", -1.0),
        (SUBMIT, "window", -1),
    ],
)
def test_what_a_scheduler_could_not_keep_account_of_is_refused(
    message: wire.Message, field: str, value: object
) -> None:
    tag, *fields = msgspec.to_builtins(message)
    fields[message.__struct_fields__.index(field)] = value
    decoder = wire.decode_from_worker if message is HELLO else wire.decode_from_gateway
    assert decoder(wire.encode(message)) == message
    with pytest.raises(wire.WireError):
        decoder(wire.sealed(msgpack.packb([tag, *fields])))


@pytest.mark.parametrize(
    "logprobs",
    [
        [b"123", b"", b""],
        [b"1234", b"1234", b""],
        [b"12341234", b"1234", b"1234"],
        [b"", b"1234", b"1234"],
    ],
)
def test_logprobs_of_no_shape_are_refused(logprobs: list[bytes]) -> None:
    result = ["Result", 1, 2, b"1234", [[0, [b"1234", b"1234", b"1234"]]]]
    wire.decode_from_worker(wire.sealed(msgpack.packb(result)))
    with pytest.raises(wire.WireError):
        wire.decode_from_worker(wire.sealed(msgpack.packb([*result[:4], [[0, logprobs]]])))


def test_deep_nesting_is_refused() -> None:
    for decoder in DECODERS:
        with pytest.raises(wire.WireError):
            decoder(wire.sealed(b"\x91" * 100_000))


@pytest.mark.parametrize("message", [message for message, _ in GOLDEN], ids=name_of)
def test_every_byte_that_is_another_is_found(message: wire.Message) -> None:
    frame = wire.encode(message)
    for at, byte in enumerate(frame):
        wrong = bytearray(frame)
        wrong[at] = byte ^ random.randrange(1, 256)
        assert_refused(bytes(wrong))


@settings(deadline=None)
@given(st.data(), st.binary(min_size=4, max_size=3000))
def test_damage_is_found(data: st.DataObject, tokens: bytes) -> None:
    """One byte of a long frame, up to four in a row, or its end."""
    frame = wire.encode(wire.Join(data.draw(st.integers(0, 2**62))))
    if data.draw(st.booleans()):
        frame = wire.encode(wire.Result(1, 2, tokens[: len(tokens) // 4 * 4]))
    at = data.draw(st.integers(0, len(frame) - 4))
    mask = data.draw(st.integers(1, 2**32 - 1)).to_bytes(4, "little")
    burst = bytes(a ^ b for a, b in zip(frame[at : at + 4], mask, strict=True))
    assert_refused(frame[:at] + burst + frame[at + 4 :])
    assert_refused(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ints_are_little_endian(values: list[int]) -> None:
    packed = wire.pack_ints(values)
    assert packed == b"".join(value.to_bytes(4, "little", signed=True) for value in values)
    assert wire.unpack_ints(packed) == array("i", values)


def test_the_checksum_of_a_table_grows_with_it() -> None:
    blocks = [random.randrange(2**31) for _ in range(50)]
    crc = 0
    for block in blocks:
        crc = wire.checksum(wire.pack_ints([block]), crc)
    assert crc == wire.checksum(wire.pack_ints(blocks))
    assert wire.checksum(wire.pack_ints(blocks[::-1])) != crc


def test_outputs_that_are_too_many_for_one_frame_come_in_several() -> None:
    """As of 128 choices of 4,096 tokens with 20 logprobs, that go on at another gateway."""
    logprobs = wire.Logprobs(bytes(4 * 4096), bytes(4 * 4096 * 20), bytes(4 * 4096 * 20))
    items = [wire.Output("r", 1, n, 0, bytes(4 * 4096), logprobs) for n in range(128)]
    prompts = [wire.PromptOutput("r", 1, 1, logprobs)] * 3
    frames = wire.frames_of(wire.Outputs(5, items, prompts))
    assert max(map(len, frames)) <= MAX_FRAME_BYTES // 2
    told = [wire.decode_to_gateway(frame) for frame in frames]
    assert [piece for each in told for piece in each.prompts] == prompts
    assert [item for each in told for item in each.items] == items
    assert [bool(each.items) for each in told] == [False] + [True] * (len(told) - 1)
    for message in (wire.Outputs(5, items[:9], prompts), wire.Outputs(5, []), wire.Join(9)):
        assert wire.frames_of(message) == [wire.encode(message)]
