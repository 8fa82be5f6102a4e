"""Record how SmolLM2-135M-Instruct's beams continue each other, into `beams.TAPE`.

    python -m benchmarks.paper.record_beams

The searches run on the real engine, under the real scheduler, each of them for `STEPS` tokens. They
never end before: the paper's requests have their trace's lengths as well (section 6.1).
"""

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from benchmarks.paper.beams import TAPE, BeamTape
from pagefleet.params import SamplingParams
from pagefleet.settings import DEFAULT_MODEL, WorkerSettings
from pagefleet.wire import (
    PROTOCOL,
    ChoiceState,
    GatewayHello,
    Plan,
    Submit,
    WorkerHello,
    pack_ints,
)
from pagefleet_scheduler.core import Arrived, Scheduler
from pagefleet_scheduler.sequence import Request
from pagefleet_worker.loading import load_engine
from pagefleet_worker.prepare import default_cache, prepare
from pagefleet_worker.step.engine import TorchEngine

WIDTHS = (2, 4, 6)

STEPS = 160

OPENINGS = (
    "Once upon a time, in a village at the foot of the mountains,",
    "The three most important causes of the French Revolution were",
    "def merge_sort(values):\n    ",
    "Ingredients: 200 g flour, 2 eggs, 100 g sugar, a pinch of salt.\nMethod:",
    "Photosynthesis is the process by which",
    "User: How do I learn to play the guitar?\nAssistant:",
    "Q: A train leaves at 9:40 and arrives at 13:05. How long does it take?\nA:",
    "Chapter 1\n\nIt was raining when the telephone rang.",
)


def main() -> None:
    """Record and write the tape."""
    folder = prepare(DEFAULT_MODEL, default_cache())
    settings = WorkerSettings(num_blocks=1_000, max_num_seqs=128, max_model_len=512)
    engine = load_engine(folder, settings, lambda: None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(opening).ids for opening in OPENINGS]
    searches = {}
    for width in WIDTHS:
        searches[width] = record(engine, prompts, width)
        print(f"width {width}: done", flush=True)
    BeamTape(DEFAULT_MODEL, searches).write(TAPE)
    print(f"{len(OPENINGS)} searches of {STEPS} steps for each of the widths {WIDTHS}: {TAPE}")


def record(engine: TorchEngine, prompts: Sequence[Sequence[int]], width: int) -> list[str]:
    """The choices of one search for each prompt, in the form of `BeamTape.searches`."""
    params = SamplingParams(max_tokens=STEPS + 1, seed=0, temperature=0.0, beam_width=width)
    searches = [""] * len(prompts)
    before: dict[str, list[list[int]]] = {}
    for request in _steps(engine, prompts, params):
        beams = [beam.tokens.tolist() for beam in request.sequences.values()]
        known = before.get(request.id, [prompts[int(request.id)]])
        if len(beams[0]) > len(known[0]):
            parents = [known.index(beam[:-1]) for beam in beams]
            searches[int(request.id)] += "".join(map(str, parents))
            before[request.id] = beams
    return searches


def _steps(
    engine: TorchEngine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Iterator[Request]:
    """Search from all prompts at once; gives every request after every step."""
    facts = engine.facts
    hello = WorkerHello(
        PROTOCOL, "", 0, 0, facts.fingerprint, facts.numerics, facts.block_size, facts.blocks,
        facts.slots, facts.max_model_len, facts.max_batched_tokens, facts.vocab_size,
    )  # fmt: skip
    scheduler = Scheduler(1)
    events = [Arrived(b"worker", hello), Arrived(b"gateway", GatewayHello(PROTOCOL))]
    for number, prompt in enumerate(prompts):
        submit = Submit(str(number), 1, pack_ints(prompt), params, [ChoiceState(0)])
        events.append(Arrived(b"gateway", submit))
    engine.reset()
    while events:
        sends = scheduler.handle(events, 0.0)
        plans = [send.message for send in sends if isinstance(send.message, Plan)]
        events = [Arrived(b"worker", engine.launch(plan).result()) for plan in plans]
        yield from scheduler.requests


if __name__ == "__main__":
    main()
