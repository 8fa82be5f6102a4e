"""Ranks that act as one worker, in processes of their own; this process is rank 0."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest

from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet.wire import Plan
from pagefleet_worker.engine import TorchEngine
from pagefleet_worker.follower import follow
from pagefleet_worker.group import Group, Order, load_group, settings_of_ranks
from pagefleet_worker.interface import DeviceLostError, PlanError
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.pending import Pending
from pagefleet_worker.prepare import prepare
from pagefleet_worker.ranks import ALONE
from tests.driver import Driver
from tests.gpu_twin import as_on_gpu
from tests.models import make_model
from tests.unit.worker.test_engine import (
    load_oracle,
    positions_compared,
    random_params,
    random_prompts,
    seen,
)

SETTINGS = WorkerSettings(num_blocks=200, max_num_seqs=32, device="cpu", dtype="float32", threads=1)

Prepared = Callable[[str], Path]


@pytest.fixture
def generator() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def three_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that three ranks share, the last of which has fewer words of its vocabulary."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    folder = tmp_path_factory.mktemp("three")
    return prepare(str(make_model("qwen3", folder / "model", **sizes)), folder)


@contextmanager
def group_of(ranks: int, folder: Path, **changes: object) -> Iterator[Group]:
    """None of its ranks may end."""
    ends: SimpleQueue[tuple[int, int]] = SimpleQueue()
    settings = replace(SETTINGS, tensor_parallel_size=ranks, **changes)
    group = load_group(folder, settings, lambda: None, lambda *end: ends.put(end))
    try:
        yield group
    finally:
        group.close()
    assert ends.empty()


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("llama-biases", 2), ("mistral", 2), ("qwen2", 2), ("llama-tied", 4)],
)
def test_greedy_tokens_are_transformers(
    name: str, ranks: int, small_model: Prepared, prepared_model: Prepared, generator: random.Random
) -> None:
    """Also where several ranks hold the same keys and values."""
    oracle, prompts = load_oracle(small_model(name)), random_prompts(generator, 6)
    greedy = [SamplingParams(max_tokens=12, seed=0, temperature=0)] * 6
    with group_of(ranks, prepared_model(name)) as group:
        for chunk, lookahead in ((16, True), (1000, False)):
            streams = Driver(group, chunk=chunk, lookahead=lookahead).run(prompts, greedy)
            compared = sum(positions_compared(oracle, stream) for stream in streams)
            assert compared >= 0.9 * 12 * len(prompts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stream_does_not_depend_on_its_company(
    dtype: str, three_heads: Path, generator: random.Random
) -> None:
    """Neither do its logprobs and those of its prompt, to the bit; the ranks add up in order."""
    prompts = random_prompts(generator, 8, 90)
    params = [random_params(generator) for _ in prompts]
    with group_of(3, three_heads, dtype=dtype) as group:
        assert group.facts.exact
        alone = [
            seen(Driver(group).run([prompt], [each])[0])
            for prompt, each in zip(prompts, params, strict=True)
        ]
        for chunk, lookahead in ((1000, False), (16, True), (generator.randint(1, 50), True)):
            driver = Driver(group, chunk=chunk, lookahead=lookahead, seed=chunk)
            assert [seen(stream) for stream in driver.run(prompts, params)] == alone


def test_a_plan_that_contradicts_ends_the_epoch_alone(
    prepared_model: Prepared, generator: random.Random
) -> None:
    prompts = random_prompts(generator, 3)
    params = [random_params(generator) for _ in prompts]
    with group_of(2, prepared_model("llama")) as group:
        before = [seen(stream) for stream in Driver(group).run(prompts, params)]
        driver = Driver(group)
        driver.step([driver.open(prompts[0], params[0])])
        driver.steps += 1
        with pytest.raises(PlanError, match="step 3 came after step 1"):
            driver.step([driver.open(prompts[1], params[1])])
        assert [seen(stream) for stream in Driver(group).run(prompts, params)] == before


class Watched:
    """An engine whose steps are kept, and the orders that it got as rank 0."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine, self.facts, self.reset = engine, engine.facts, engine.reset
        self.orders: list[Order] = []
        self.steps: list[Pending] = []

    def send(self, order: bytes) -> None:
        self.orders.append(msgspec.msgpack.decode(order, type=Order))

    def launch(self, plan: Plan) -> Pending:
        self.steps.append(self.engine.launch(plan))
        return self.steps[-1]


def test_a_follower_computes_what_rank_0_does(
    prepared_model: Prepared, generator: random.Random
) -> None:
    """As on a GPU, where slots learn what was sampled when the results are taken, which happens at
    other moments in another process.
    """
    prompts = random_prompts(generator, 6)
    params = [random_params(generator) for _ in prompts]
    engine = load_engine(prepared_model("llama"), replace(SETTINGS, threads=1), lambda: None)
    first, second = Watched(as_on_gpu(engine)), Watched(as_on_gpu(engine))
    for lookahead in (True, False):
        Driver(Group(first, [first], ALONE), chunk=16, lookahead=lookahead).run(prompts, params)
    follow(second, iter(first.orders))
    tokens, followed = ([step.result().tokens for step in each.steps] for each in (first, second))
    assert followed == tokens


def follower() -> int:
    """The pid of the only one that this process has."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    [found] = [pid for pid, command in commands.items() if b"pagefleet_worker.follower" in command]
    return found


def test_a_rank_that_dies_is_told_and_ends_the_rest(prepared_model: Prepared) -> None:
    ends: SimpleQueue[tuple[int, int]] = SimpleQueue()
    settings = replace(SETTINGS, tensor_parallel_size=2)
    folder = prepared_model("llama")
    group = load_group(folder, settings, lambda: None, lambda *end: ends.put(end))
    try:
        driver = Driver(group)
        os.kill(follower(), signal.SIGKILL)
        assert ends.get(timeout=60) == (1, -signal.SIGKILL)
        with pytest.raises(DeviceLostError):
            driver.run([[1, 2, 3]], [SamplingParams(max_tokens=3, seed=0)])
    finally:
        group.close()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"quantization": "int8"}, "Quantized matrices are not shared"),
        ({"tensor_parallel_size": 3}, "3 devices cannot share 4 attention heads"),
        ({"device": "cuda:0,cuda:0"}, "takes 2 different devices, and --device cuda:0,cuda:0"),
        ({"device": "cuda:0,cuda:1,cuda:2"}, "takes 2 different devices"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_starts(
    changes: dict[str, object], sentence: str, prepared_model: Prepared
) -> None:
    settings = replace(SETTINGS, **{"tensor_parallel_size": 2, **changes})
    with pytest.raises(ModelError, match=sentence):
        load_group(prepared_model("llama"), settings, lambda: None, lambda *_: None)


def test_an_adapted_model_is_not_shared(prepared_model: Prepared) -> None:
    settings = replace(SETTINGS, tensor_parallel_size=2)
    with pytest.raises(ModelError, match="computes a gpt2 model, and on one device"):
        load_group(prepared_model("gpt2"), settings, lambda: None, lambda *_: None)


@pytest.mark.parametrize(
    ("device", "ranks", "expected"),
    [
        ("cpu", 2, ["cpu", "cpu"]),
        ("cuda", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:3,cuda:1", 2, ["cuda:3", "cuda:1"]),
    ],
)
def test_each_rank_has_a_device(device: str, ranks: int, expected: list[str]) -> None:
    settings = replace(SETTINGS, device=device, tensor_parallel_size=ranks, threads=2)
    own = settings_of_ranks(settings)
    assert [each.device for each in own] == expected
    assert [each.threads for each in own] == [max(2 // ranks, 1)] * ranks
