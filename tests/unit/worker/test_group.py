"""Ranks that act as one worker, in processes of their own; this process is rank 0."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from shutil import copytree

import msgspec
import pytest
import torch

from benchmarks.drill.processes import is_alive
from pagefleet.command_line import flags
from pagefleet.manifest import CONFIG_FILE, Manifest
from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet.wire import Plan, unpack_floats
from pagefleet_worker.follower import follow
from pagefleet_worker.group import (
    Follower,
    Group,
    Order,
    load_group,
    meet,
    settings_of_ranks,
)
from pagefleet_worker.interface import DeviceLostError, PlanError
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model.ranks import ALONE
from pagefleet_worker.model.shares import Share
from pagefleet_worker.model_files import ModelError, fingerprint
from pagefleet_worker.prepare import prepare
from pagefleet_worker.step.engine import TorchEngine
from pagefleet_worker.step.pending import Pending
from tests.checkpoints import CHECKPOINTS, write_checkpoint
from tests.driver import Driver, Stream
from tests.gpu_twin import as_on_gpu
from tests.models import make_model
from tests.processes import killed_in_the_end
from tests.ties import ExpertMargins
from tests.unit.launcher.conftest import wait_until
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
    [
        ("llama-biases", 2),
        ("llama-tied", 2),
        ("gemma2", 2),
        ("olmo2", 2),
        *(
            pytest.param(name, ranks, marks=pytest.mark.slow)
            for name, ranks in (
                ("mistral", 2),
                ("qwen2", 2),
                ("llama-tied", 4),
                ("gemma3", 2),
                ("phi3-partial", 2),
                ("olmo2", 4),
                ("glm4", 2),
                ("glm4-moe", 2),
                ("olmoe", 4),
                ("mixtral", 2),
                ("qwen2-moe", 2),
                ("qwen3-moe", 2),
                ("gpt-oss", 2),
                ("deepseek-v2-lite", 2),
                ("deepseek-v3", 2),
            )
        ),
    ],
)
def test_greedy_tokens_are_transformers(
    name: str, ranks: int, small_model: Prepared, prepared_model: Prepared, generator: random.Random
) -> None:
    """Also where several ranks hold the same keys and values."""
    oracle = load_oracle(small_model(name))
    prompts: list[list[int]] = []
    while len(prompts) < 6:
        prompt = torch.tensor(random_prompts(generator, 1))
        with ExpertMargins() as experts:
            oracle.generate(prompt, do_sample=False, min_new_tokens=12, max_new_tokens=12)
        if experts.clear:
            prompts += prompt.tolist()
    greedy = [SamplingParams(max_tokens=12, seed=0, temperature=0)] * 6
    with group_of(ranks, prepared_model(name)) as group:
        for chunk, lookahead in ((16, True), (1000, False)):
            streams = Driver(group, chunk=chunk, lookahead=lookahead).run(prompts, greedy)
            compared = sum(positions_compared(oracle, stream) for stream in streams)
            assert compared >= 0.9 * 12 * len(prompts)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["auto", "int8", "none"])
def test_logprobs_of_a_quantized_checkpoint_are_those_of_one_worker(
    quantization: str, tmp_path: Path, generator: random.Random
) -> None:
    """Near those, as an activation may be rounded to the next of 256 numbers."""
    source = make_model("llama", tmp_path / "source", intermediate_size=128)
    write_checkpoint(source, tmp_path / "model", CHECKPOINTS["gptq of 32"])
    folder = prepare(str(tmp_path / "model"), tmp_path / "cache")
    prompts = random_prompts(generator, 4, 30)
    params = [SamplingParams(max_tokens=1, seed=0, temperature=0, prompt_logprobs=0)] * 4
    changes = {"quantization": quantization}
    alone = load_engine(folder, replace(SETTINGS, **changes), lambda: None)
    expected = Driver(alone).run(prompts, params)
    with group_of(2, folder, **changes) as group:
        found = Driver(group).run(prompts, params)
    kept = {"auto": " own-int4", "int8": " int8", "none": ""}[quantization]
    assert f"float32{kept} tp-2 block-16" in group.facts.numerics
    for stream, right in zip(found, expected, strict=True):
        assert not stream.errors
        near = 1e-4 if quantization == "none" else 0.05
        assert logprobs_of(stream) == pytest.approx(logprobs_of(right), abs=near)


def logprobs_of(stream: Stream) -> list[float]:
    """Of the prompt's tokens."""
    return [value for _, each in stream.prompt_logprobs for value in unpack_floats(each.chosen)]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
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
    plain = [SamplingParams(max_tokens=12, seed=generator.randrange(2**64)) for _ in prompts]
    penalized = [random_params(generator) for _ in prompts]  # whose steps take the last result
    engine = load_engine(prepared_model("llama"), replace(SETTINGS, threads=1), lambda: None)
    first, second = Watched(as_on_gpu(engine)), Watched(as_on_gpu(engine))
    for lookahead, params in itertools.product((True, False), (plain, penalized)):
        Driver(Group(first, [first], ALONE), chunk=16, lookahead=lookahead).run(prompts, params)
    follow(second, iter(first.orders))
    tokens, followed = ([step.result().tokens for step in each.steps] for each in (first, second))
    assert followed == tokens


def followers_of(pid: int) -> list[int]:
    """The pids of a process's other ranks."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [child for child, command in commands.items() if b"pagefleet_worker.follower" in command]


def test_a_rank_that_stops_is_seen_and_one_that_dies_is_told_and_ends_the_rest(
    prepared_model: Prepared,
) -> None:
    ends: SimpleQueue[tuple[int, int]] = SimpleQueue()
    settings = replace(SETTINGS, tensor_parallel_size=2)
    folder = prepared_model("llama")
    group = load_group(folder, settings, lambda: None, lambda *end: ends.put(end))
    try:
        driver = Driver(group)
        [follower] = followers_of(os.getpid())
        wait_until(group.lives)
        os.kill(follower, signal.SIGSTOP)
        wait_until(lambda: not group.lives())
        os.kill(follower, signal.SIGCONT)
        wait_until(group.lives)
        os.kill(follower, signal.SIGKILL)
        assert ends.get(timeout=60) == (1, -signal.SIGKILL)
        with pytest.raises(DeviceLostError):
            driver.run([[1, 2, 3]], [SamplingParams(max_tokens=3, seed=0)])
    finally:
        group.close()


@pytest.mark.parametrize(
    ("rank", "number", "status"), [(1, signal.SIGKILL, 1), (0, signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_rank_that_ends_while_loading_leaves_nothing(
    rank: int, number: int, status: int, prepared_model: Prepared, tmp_path: Path
) -> None:
    """Neither a process nor a file."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    settings = replace(SETTINGS, model=str(prepared_model("llama")), tensor_parallel_size=2)
    command = [sys.executable, "-m", "pagefleet_worker", *flags(settings, WorkerSettings)]
    worker = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)})
    with killed_in_the_end(worker):
        [follower] = wait_until(lambda: followers_of(worker.pid))
        os.kill([worker.pid, follower][rank], number)
        assert worker.wait(60) == status
        wait_until(lambda: not is_alive(follower))
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("changes", "layers"), [({"device": "cuda:9"}, 3), ({}, 4)], ids=["before they met", "after"]
)
def test_what_a_rank_alone_refuses_is_told(
    changes: dict[str, object], layers: int, prepared_model: Prepared, tmp_path: Path
) -> None:
    """By the status that keeps the launcher from trying again: here it lacks a device, or its files
    lack a layer.
    """
    folder = Path(copytree(prepared_model("llama"), tmp_path / "own"))
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | {"num_hidden_layers": layers}))
    manifest = Manifest.load(folder)
    made = fingerprint(folder, manifest.weights, manifest.adapters)
    msgspec.structs.replace(manifest, fingerprint=made).save(folder)
    own = replace(SETTINGS, tensor_parallel_size=2)
    ends: SimpleQueue[tuple[int, int]] = SimpleQueue()
    rendezvous = os.memfd_create("ranks")
    other = replace(own, model=str(folder), **changes)
    follower = Follower(Share(1, 2), other, rendezvous, lambda *end: ends.put(end))
    try:
        if layers == 4:
            meet(Share(0, 2), own, rendezvous).close()
        assert ends.get(timeout=60) == (1, 2)
    finally:
        follower.close()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"quantization": "int8"}, "A rank's 32 numbers of its heads and 48 of its neurons"),
        ({"tensor_parallel_size": 3}, "3 devices cannot share 4 attention heads"),
        ({"device": "cuda:0,cuda:0"}, "takes 2 different devices, and --device cuda:0,cuda:0"),
        ({"device": "cuda:0,cuda:1,cuda:2"}, "takes 2 different devices"),
        ({"device": "cuda:0,cpu"}, "takes 2 different devices"),
        ({"device": "cuda,cuda:1"}, "takes 2 different devices"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_starts(
    changes: dict[str, object], sentence: str, prepared_model: Prepared
) -> None:
    settings = replace(SETTINGS, **{"tensor_parallel_size": 2, **changes})
    with pytest.raises(ModelError, match=sentence):
        load_group(prepared_model("llama"), settings, lambda: None, lambda *_: None)


def test_ranks_that_cannot_meet_are_refused(prepared_model: Prepared) -> None:
    """In a network namespace of its own, whose loopback interface is down."""
    alone = ["unshare", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    settings = replace(SETTINGS, model=str(prepared_model("llama")), tensor_parallel_size=2)
    command = [sys.executable, "-m", "pagefleet_worker", *flags(settings, WorkerSettings)]
    ended = subprocess.run([*alone, *command], capture_output=True, text=True, check=False)
    sentence = ended.stderr.splitlines()[-1]
    assert ended.returncode == 2
    assert "loopback interface" in sentence
    assert "Traceback" not in ended.stderr


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
