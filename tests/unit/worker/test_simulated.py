"""The EchoEngine against its oracle: run by a small random planner, and by scripts with a fault."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pagefleet.manifest import Manifest, SamplingDefaults, Weights
from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet.wire import (
    SAMPLED,
    Logprobs,
    Open,
    Plan,
    Result,
    checksum,
    pack_ints,
    unpack_floats,
    unpack_ints,
)
from pagefleet_worker.interface import EngineFacts, PlanError
from pagefleet_worker.paging.slots import Row, Slot
from pagefleet_worker.sampling.draw import NO_TOKEN
from pagefleet_worker.simulated.costs import Roofline, distserve_opt_13b
from pagefleet_worker.simulated.echo import EchoEngine
from pagefleet_worker.simulated.echo_decoder import (
    EMBEDDING_SIZE,
    EchoDecoder,
    echo_embedding,
    echo_prompt_logprobs,
    echo_tokens,
)
from pagefleet_worker.simulated.engines import build_simulated
from tests.driver import Driver

DECODER = EchoDecoder(260, (257, 259))


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def make_engine(blocks: int = 64, block_size: int = 4, slots: int = 8) -> EchoEngine:
    facts = EngineFacts("echo", "echo", block_size, blocks, slots, blocks * block_size, 512, 260)
    return EchoEngine(facts, DECODER, progress=lambda: None)


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 24, "seed": 0, "temperature": 0.0} | fields))


def any_params(rng: random.Random) -> SamplingParams:
    choices: dict[str, object] = {
        "temperature": rng.choice((0.7, 1.0)),
        "top_k": rng.randint(1, 50),
        "top_p": rng.uniform(0.2, 1),
        "min_p": 0.01,
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "logit_bias": {rng.randrange(260): 5.0},
        "bad_words": ((rng.randrange(260),),),
        "eos_token_ids": DECODER.eos_token_ids,
        "min_tokens": 5,
        "logprobs": rng.randint(0, 5),
        "prompt_logprobs": rng.randint(0, 5),
        "adapter": rng.randint(1, 2),
    }
    wanted = rng.sample(sorted(choices), rng.randint(0, len(choices)))
    fields = {name: choices[name] for name in wanted}
    return params(seed=rng.getrandbits(64), max_tokens=rng.randint(5, 40), **fields)


@dataclass
class Run:
    """A sequence of the planner."""

    prompt: list[int]
    params: SamplingParams
    salt: bytes
    choices: list[int]
    output: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, tuple[float, ...]] = field(default_factory=dict)
    firsts: list[int] = field(default_factory=list)
    """First tokens of several choices: to be forked."""
    slot: int = -1
    table: list[int] = field(default_factory=list)
    computed: int = 0
    recorded: bool = False
    """The engine has recorded the last token itself."""

    @property
    def known(self) -> list[int]:
        return self.prompt + self.output

    @property
    def is_done(self) -> bool:
        out = self.output
        return len(out) == self.params.max_tokens or bool(out and self.params.ends(out[-1]))


class Planner:
    """Orders random steps: chunks, mixed batches, preemption, shared prefixes, forks."""

    def __init__(self, engine: EchoEngine, rng: random.Random, waiting: list[Run]) -> None:
        self.engine, self.rng, self.number = engine, rng, 0
        self.size = engine.facts.block_size
        self.free = rng.sample(range(engine.facts.blocks), engine.facts.blocks)
        self.slots = list(range(engine.facts.slots))
        self.uses: Counter[int] = Counter()
        self.waiting, self.running, self.done = waiting, list[Run](), list[Run]()
        self.seen: Counter[str] = Counter()
        """What happened how often."""

    def run(self) -> None:
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        self.release: list[int] = []
        self.freed: list[int] = []
        self.opens: list[Open] = []
        self.forks: list[tuple[int, int, int]] = []
        self.tables: list[tuple[int, int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.stop_some()
        self.fork_some()
        while self.waiting and len(self.slots) and len(self.free) > 4:
            self.open(self.waiting.pop(self.rng.randrange(len(self.waiting))))
        rows = [row for run in self.running if (row := self.row(run))]
        if not rows:
            self.stop_one()
        flat = [value for run, tokens, logits in rows for value in self.fields(run, tokens, logits)]
        plan = Plan(
            epoch=1,
            step=self.number,
            rows=pack_ints(flat),
            tokens=pack_ints(token for _, tokens, _ in rows for token in tokens),
            release=pack_ints(self.release),
            opens=self.opens,
            forks=pack_ints(value for fork in self.forks for value in fork),
            tables=pack_ints(value for triple in self.tables for value in triple),
            copies=pack_ints(value for pair in self.copies for value in pair),
        )
        self.number += 1
        self.take(self.engine.launch(plan).result(), rows)
        self.free += self.freed
        self.slots += self.release

    def stop_some(self) -> None:
        for run in list(self.running):
            if run.is_done or self.rng.random() < 0.03:
                self.stop(run)

    def stop_one(self) -> None:
        new = {order.slot for order in self.opens} | {fork[0] for fork in self.forks}
        if old := [run for run in self.running if run.slot not in new]:
            self.stop(self.rng.choice(old))

    def stop(self, run: Run) -> None:
        self.release.append(run.slot)
        for block in run.table:
            self.uses[block] -= 1
            if not self.uses[block]:
                self.freed.append(block)
        run.table, run.computed, run.recorded = [], 0, False
        if run.firsts:
            run.firsts, run.logprobs = [], []
        self.running.remove(run)
        self.seen["preempted"] += not run.is_done
        (self.done if run.is_done else self.waiting).append(run)

    def fork_some(self) -> None:
        for run in list(self.running):
            others = len(run.firsts) - 1
            if run.firsts and len(self.slots) >= others and len(self.free) >= others:
                self.running.remove(run)
                for index, (choice, first) in enumerate(zip(run.choices, run.firsts, strict=True)):
                    self.fork(run, choice, first, run.slot if index == 0 else self.slots.pop())
                self.seen["forked"] += 1

    def fork(self, run: Run, choice: int, first: int, slot: int) -> None:
        child = Run(run.prompt, run.params, run.salt, [choice], [first])
        child.slot, child.table, child.computed = slot, run.table[:], run.computed
        if run.logprobs:
            child.logprobs = [run.logprobs[run.choices.index(choice)]]
        child.prompt_logprobs = run.prompt_logprobs
        self.forks.append((slot, run.slot, choice))
        self.running.append(child)
        if slot == run.slot:
            return
        self.uses.update(child.table)
        if run.computed % self.size:
            copy = self.allocate(child, len(child.table) - 1)
            self.copies.append((run.table[-1], copy))
            self.uses[run.table[-1]] -= 1
            self.seen["copied"] += 1

    def open(self, run: Run) -> None:
        run.slot = self.slots.pop()
        for donor in self.running:
            if donor.salt == run.salt and run.params.prompt_logprobs is None:
                pairs = zip(run.known[:-1], donor.known[: donor.computed], strict=False)
                common = next(
                    (i for i, (ours, theirs) in enumerate(pairs) if ours != theirs),
                    min(len(run.known) - 1, donor.computed),
                )
                if common // self.size > len(run.table):
                    run.table = donor.table[: common // self.size]
        run.computed = len(run.table) * self.size
        self.seen["shared"] += bool(run.table)
        self.uses.update(run.table)
        self.tables += [(run.slot, index, block) for index, block in enumerate(run.table)]
        prompt, output = pack_ints(run.prompt), pack_ints(run.output)
        self.opens.append(Open(run.slot, run.params, prompt, output, run.choices, run.salt))
        self.running.append(run)

    def allocate(self, run: Run, index: int) -> int:
        block = self.free.pop()
        self.uses[block] += 1
        run.table[index : index + 1] = [block]
        self.tables.append((run.slot, index, block))
        return block

    def row(self, run: Run) -> tuple[Run, list[int], int] | None:
        if run.firsts or run.is_done or self.rng.random() < 0.2:
            return None
        known = run.known
        count = self.rng.randint(1, min(9, len(known) - run.computed))
        missing = -(-(run.computed + count) // self.size) - len(run.table)
        if missing > len(self.free):
            return None
        for _ in range(missing):
            self.allocate(run, len(run.table))
        tokens = known[run.computed : run.computed + count]
        logits = int(run.computed + count == len(known))
        if logits and run.recorded and self.rng.random() < 0.5:
            tokens[-1] = SAMPLED
        run.computed += count
        return run, tokens, logits

    def fields(self, run: Run, tokens: list[int], logits: int) -> tuple[int, ...]:
        start = run.computed - len(tokens)
        crc = checksum(pack_ints(run.table))
        return run.slot, start, len(tokens), logits, len(run.table), crc

    def take(self, result: Result, rows: list[tuple[Run, list[int], int]]) -> None:
        assert not result.errors
        tokens, logprobs, at = unpack_ints(result.tokens), dict(result.logprobs), 0
        for run, _, logits in rows:
            for _ in range(logits * len(run.choices)):
                run.logprobs += [logprobs[at]] if at in logprobs else []
                (run.output if len(run.choices) == 1 else run.firsts).append(tokens[at])
                run.recorded = len(run.choices) == 1
                at += 1
        assert at == len(tokens)
        for part in result.prompts:
            for offset, each in enumerate(by_token(part.logprobs)):
                rows[part.row][0].prompt_logprobs[part.position + offset] = each


def by_token(logprobs: Logprobs) -> list[tuple[float, ...]]:
    """For each token its logprob, then its alternatives' ids and logprobs."""
    chosen, ids, best = (
        unpack_floats(logprobs.chosen),
        unpack_ints(logprobs.top_ids),
        unpack_floats(logprobs.top),
    )
    width = len(ids) // len(chosen)
    return [
        (value, *ids[i * width : (i + 1) * width], *best[i * width : (i + 1) * width])
        for i, value in enumerate(chosen)
    ]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_any_execution_gives_the_stream_of_the_oracle(block_size: int, rng: random.Random) -> None:
    """In chunks, in batches, preempted, forked, with shared prefixes, at any block size."""
    stems = [[rng.randrange(260) for _ in range(40)] for _ in range(2)]
    waiting = []
    for _ in range(24):
        stem = rng.choice(stems)[: rng.randint(1, 40)]
        prompt = stem + [rng.randrange(260) for _ in range(rng.randint(0, 5))]
        choices = list(range(rng.choice((1, 1, 3))))
        wanted = any_params(rng)
        salt = rng.choice((b"", b"a")) + bytes(wanted.adapter)
        waiting.append(Run(prompt, wanted, salt, choices))
    engine = make_engine(blocks=320 // block_size, block_size=block_size)
    planner = Planner(engine, rng, waiting[:])
    planner.run()
    assert len(planner.done) == sum(len(run.choices) for run in waiting)
    for run in planner.done:
        expected = echo_tokens(DECODER, run.prompt, run.params, run.choices[0], run.salt)
        assert run.output == expected.tokens
        assert run.logprobs == expected.logprobs
        count = run.params.prompt_logprobs
        if count is not None and len(run.prompt) > 1:
            prompt = echo_prompt_logprobs(DECODER, run.prompt, count, run.salt, run.params.adapter)
            assert run.prompt_logprobs == dict(enumerate(by_token(prompt), 1))
    assert planner.seen["preempted"]
    assert planner.seen["forked"]
    assert planner.seen["shared"]


class Script:
    """One sequence whose block table a test may break; the plans themselves are consistent."""

    def __init__(
        self, engine: EchoEngine, prompt: list[int], salt: bytes = b"", adapter: int = 0
    ) -> None:
        self.engine, self.salt, self.params = engine, salt, params(adapter=adapter)
        self.prompt, self.output = prompt, list[int]()
        self.slot, self.computed, self.table = -1, 0, list[int]()

    def open(self, slot: int, number: int, table: list[int], computed: int = 0) -> None:
        """Compute the prompt, but for what is said to be in the table already."""
        self.slot, self.table, self.computed = slot, table, computed
        prompt, output = pack_ints(self.prompt), pack_ints(self.output)
        order = Open(slot, self.params, prompt, output, [0], self.salt)
        self.step(number, opens=[order])

    def step(
        self, number: int, copies: tuple[int, ...] = (), opens: list[Open] | None = None
    ) -> None:
        """Compute what is known and sample."""
        tokens = (self.prompt + self.output)[self.computed :]
        crc = checksum(pack_ints(self.table))
        plan = Plan(
            epoch=1,
            step=number,
            rows=pack_ints((self.slot, self.computed, len(tokens), 1, len(self.table), crc)),
            tokens=pack_ints(tokens),
            opens=opens or [],
            tables=pack_ints(v for i, b in enumerate(self.table) for v in (self.slot, i, b)),
            copies=pack_ints(copies),
        )
        self.computed += len(tokens)
        self.output += unpack_ints(self.engine.launch(plan).result().tokens)

    def go_on(self, number: int, steps: int = 8) -> None:
        for step in range(number, number + steps):
            self.step(step)

    @property
    def is_right(self) -> bool:
        """Whether its stream is that of the oracle."""
        expected = echo_tokens(DECODER, self.prompt, self.params, 0, self.salt).tokens
        return self.output == expected[: len(self.output)]


PROMPT = list(range(10, 24))  # three and a half blocks of four
TABLE = [5, 2, 9, 7, 1, 11, 13, 15]


def swap_blocks(script: Script) -> None:
    script.table[0], script.table[1] = script.table[1], script.table[0]


def read_a_block_never_written(script: Script) -> None:
    script.table[1] = 30


def miss_a_copy(script: Script) -> None:
    script.table[3] = 30


def read_a_block_twice(script: Script) -> None:
    script.table[2] = script.table[1]


def read_what_another_sequence_left(script: Script) -> None:
    script.table[1] = 21


def let_another_sequence_write(script: Script) -> None:
    other = Script(script.engine, list(range(50, 60)))
    other.open(2, 2, [40, script.table[1], 41])


@pytest.mark.parametrize(
    "corrupt",
    [
        swap_blocks,
        read_a_block_never_written,
        miss_a_copy,
        read_a_block_twice,
        read_what_another_sequence_left,
        let_another_sequence_write,
        None,
    ],
)
def test_a_corrupted_block_changes_the_stream(corrupt: Callable[[Script], None] | None) -> None:
    engine = make_engine()
    Script(engine, [1, 2, 3, 4, *PROMPT[4:]]).open(1, 0, [20, 21, 22, 23])
    script = Script(engine, PROMPT)
    script.open(0, 1, TABLE[:])
    assert script.is_right
    if corrupt:
        corrupt(script)
    script.go_on(3 if corrupt is let_another_sequence_write else 2)
    assert script.is_right == (corrupt is None)


@pytest.mark.parametrize("dimensions", [0, 1, 5, 99])
def test_an_embedding_tells_of_all_that_was_read(dimensions: int, rng: random.Random) -> None:
    wanted = params(max_tokens=0, embedding=dimensions, adapter=rng.randrange(3))
    driver = Driver(make_engine(), chunk=rng.randint(1, 9))
    prompts = [rng.choices(range(260), k=rng.randint(1, 30)) for _ in range(5)]
    for stream in driver.run(prompts, [wanted] * 5):
        expected = echo_embedding(stream.prompt, dimensions, adapter=wanted.adapter)
        assert stream.embedding == expected
        assert len(stream.embedding) == 4 * min(dimensions or EMBEDDING_SIZE, EMBEDDING_SIZE)


def test_a_corrupted_block_changes_an_embedding() -> None:
    driver = Driver(make_engine(), chunk=8)
    stream = driver.open(PROMPT, params(max_tokens=0, embedding=0))
    driver.step([stream]).land()
    stream.table[0] = driver.free.pop()
    driver.deltas += [stream.slot, 0, stream.table[0]]
    driver.step([stream]).land()
    assert stream.embedding not in (None, echo_embedding(PROMPT))


def test_a_copied_block_does_not_change_the_stream() -> None:
    script = Script(make_engine(), PROMPT)
    script.open(0, 0, TABLE[:])
    script.table[3] = 30
    script.step(1, copies=(7, 30))
    script.go_on(2)
    assert script.is_right


@pytest.mark.parametrize(
    ("hit", "is_right"),
    [
        ([20, 21], True),
        ([24, 25], False),  # another first token
        ([20, 25], False),  # the right tokens, computed after another first token
        ([28, 29], False),  # another tenant's
        ([31, 32], False),  # computed with a LoRA adapter
    ],
)
def test_only_the_right_prefix_may_be_shared(hit: list[int], is_right: bool) -> None:
    engine = make_engine()
    Script(engine, [*PROMPT[:8], 77]).open(1, 0, [20, 21, 22])
    Script(engine, [99, *PROMPT[1:8], 77]).open(2, 1, [24, 25, 26])
    Script(engine, [*PROMPT[:8], 77], b"another").open(3, 2, [28, 29, 30])
    Script(engine, [*PROMPT[:8], 77], adapter=1).open(4, 3, [31, 32, 33])
    script = Script(engine, PROMPT)
    script.open(0, 4, [*hit, 9, 7, 1, 11], computed=8)
    script.go_on(5)
    assert script.is_right == is_right


def test_a_resumed_stream_needs_its_tokens_in_their_order() -> None:
    for swapped in (False, True):
        script = Script(make_engine(), PROMPT)
        script.open(0, 0, TABLE[:])
        script.go_on(1, 4)
        resumed = Script(make_engine(), PROMPT)
        resumed.output = script.output[:]
        if swapped:
            resumed.output[1:3] = resumed.output[2:0:-1]
        resumed.open(0, 0, TABLE[:])
        resumed.output = script.output + resumed.output[5:]
        resumed.go_on(1)
        assert resumed.is_right != swapped


def test_a_reset_forgets_slots_and_blocks() -> None:
    engine = make_engine()
    script = Script(engine, PROMPT)
    script.open(0, 0, TABLE[:])
    engine.reset()
    with pytest.raises(PlanError):
        script.step(1)
    engine.reset()
    again = Script(engine, PROMPT)
    again.open(0, 0, TABLE[:], computed=8)
    assert not again.is_right


def test_the_masks_of_one_row_do_not_stop_the_others() -> None:
    engine = make_engine()
    tables = ([0], [1])
    orders = [
        Open(0, params(allowed_token_ids=(5,), bad_words=((5,),)), pack_ints([1]), b"", [0]),
        Open(1, params(), pack_ints([1]), b"", [0]),
    ]
    crcs = [checksum(pack_ints(table)) for table in tables]
    plan = Plan(
        epoch=1,
        step=0,
        rows=pack_ints((0, 0, 1, 1, 1, crcs[0], 1, 0, 1, 1, 1, crcs[1])),
        tokens=pack_ints((1, 1)),
        opens=orders,
        tables=pack_ints((0, 0, 0, 1, 0, 1)),
    )
    result = engine.launch(plan).result()
    assert list(unpack_ints(result.tokens)) == [
        NO_TOKEN,
        *echo_tokens(DECODER, [1], params(max_tokens=1)).tokens,
    ]
    assert [error.row for error in result.errors] == [0]


@pytest.mark.parametrize(
    ("changes", "drafts", "tokens", "errors"),
    [
        ({"allowed_token_ids": (5,), "bad_words": ((7, 5),)}, [5, 7], [5, 5, NO_TOKEN], 0),
        ({"allowed_token_ids": (5,), "bad_words": ((5, 5),)}, [5], [5, NO_TOKEN], 1),
        (
            {"allowed_token_ids": (5,), "bad_words": ((5, 5),), "stop_token_ids": (5,)},
            [5],
            [5, NO_TOKEN],
            0,
        ),
    ],
    ids=["a wrong draft", "a right one", "the end"],
)
def test_to_have_no_token_to_choose_is_an_error_where_one_may_come(
    changes: dict[str, object], drafts: list[int], tokens: list[int], errors: int
) -> None:
    driver = Driver(make_engine())
    stream = driver.open([1], params(**changes))
    stream.output, stream.asked = drafts[:], len(drafts)
    driver.step([stream], logits=1 + len(drafts)).land()
    assert stream.output[len(drafts) :] == tokens
    assert len(stream.errors) == errors


def test_streams_end_after_tens_to_hundreds_of_tokens(rng: random.Random) -> None:
    lengths = []
    for temperature in (0.0, 1.0):
        for _ in range(40):
            each = params(
                max_tokens=2000,
                seed=rng.getrandbits(64),
                temperature=temperature,
                eos_token_ids=DECODER.eos_token_ids,
            )
            prompt = [rng.randrange(260) for _ in range(5)]
            lengths.append(len(echo_tokens(DECODER, prompt, each).tokens))
    assert 30 < sum(lengths) / len(lengths) < 200
    assert len(set(lengths)) > 40


def test_streams_go_on_where_nothing_ends_them() -> None:
    stream = echo_tokens(DECODER, [1, 2, 3], params(max_tokens=500))
    assert len(stream.tokens) == 500
    assert len(set(stream.tokens)) > 100


def test_a_vocabulary_has_room_for_the_candidates() -> None:
    with pytest.raises(ValueError, match="64"):
        EchoDecoder(63)


def make_manifest() -> Manifest:
    return Manifest(
        format_version=1,
        name="echo",
        architecture="echo",
        weights=Weights("none"),
        vocab_size=260,
        max_model_len=4096,
        bos_token=None,
        eos_token=None,
        eos_token_ids=DECODER.eos_token_ids,
        sampling=SamplingDefaults(),
        fingerprint="00",
    )


def test_a_step_takes_the_time_that_is_said() -> None:
    slept: list[float] = []
    facts = make_engine().facts
    engine = EchoEngine(facts, DECODER, lambda: None, lambda rows: 0.25 * len(rows), slept.append)
    Script(engine, PROMPT).open(0, 0, TABLE[:])
    assert slept == [0.25]


def test_engines_are_built_from_settings() -> None:
    settings = WorkerSettings(engine="echo", num_blocks=100, max_model_len=2000)
    echo = build_simulated(settings, make_manifest(), lambda: None)
    assert (echo.facts.blocks, echo.facts.max_model_len) == (100, 1600)
    assert echo.facts.exact
    script = Script(echo, PROMPT)
    script.open(0, 0, [3])
    assert script.is_right
    sim = build_simulated(WorkerSettings(engine="sim"), make_manifest(), lambda: None)
    assert sim.facts.blocks == 15_728 // 16
    assert (sim.facts.numerics, sim.facts.vocab_size) == (echo.facts.numerics, 260)


def test_cost_models_agree_with_hand_calculation() -> None:
    order = Open(0, params(), pack_ints(range(200)), b"", [0])
    slot = Slot.opened(order)
    prefill = Row(0, slot, 100, slot.tokens[100:200], 1)
    decode = Row(0, slot, 999, slot.tokens[:1], 1)
    roofline = Roofline()
    read = (200 + 1000) * 819_200 / (1.555e12 * 0.55)
    expected = 1e-3 + 26e9 / (1.555e12 * 0.7) + read + 2 * 13e9 * 100 / 156e12 + 0.6e-3
    assert roofline([prefill, decode]) == pytest.approx(expected)
    assert distserve_opt_13b([decode] * 10) == pytest.approx(
        (23.475 + 5.929e-4 * 10_000 + 0.0607 * 10) / 1000
    )
    assert distserve_opt_13b([decode] * 100) == pytest.approx(
        (20.206 + 4.908e-4 * 100_000 + 0.120 * 100) / 1000
    )
    assert distserve_opt_13b([prefill]) == pytest.approx((22.05 + 14.05 + 0.0808) / 1000)


def test_neither_torch_nor_numpy_is_imported() -> None:
    code = (
        "import sys, pagefleet_worker.simulated.engines;"
        "print(sorted({'torch', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"
