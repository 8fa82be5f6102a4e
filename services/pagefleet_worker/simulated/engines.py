"""Workers without weights, and without torch: `--engine echo` and `--engine sim`.

Both are the EchoEngine. `echo` takes the time that `--step-seconds` says, none by default; `sim`
takes the time that a cost model gives, with a pool as large as that model's.
"""

from collections.abc import Callable

from pagefleet.manifest import Manifest
from pagefleet.settings import WorkerSettings
from pagefleet_worker.grammar import NO_GRAMMARS, Grammars
from pagefleet_worker.interface import EngineFacts
from pagefleet_worker.simulated.costs import Roofline
from pagefleet_worker.simulated.echo import EchoEngine
from pagefleet_worker.simulated.echo_decoder import EchoDecoder

ECHO_CELLS = 1 << 16
"""Positions that an echo worker's pool holds by default."""

STEP_TOKENS = 1024
"""That a step holds by default."""

SIM_CELLS = 15_728
"""Positions that fit beside OPT-13B on an A100-40G (the PagedAttention paper, section 6.1)."""


def build_simulated(
    settings: WorkerSettings,
    manifest: Manifest,
    progress: Callable[[], None],
    grammars: Grammars = NO_GRAMMARS,
) -> EchoEngine:
    """The simulated engine that the settings name, with the vocabulary of a prepared model.

    Raises:
        ValueError: the model cannot be simulated.
    """
    simulates_time = settings.engine == "sim"
    cells = SIM_CELLS if simulates_time else ECHO_CELLS
    blocks = settings.num_blocks or max(1, cells // settings.block_size)
    length = settings.max_model_len or manifest.max_model_len
    facts = EngineFacts(
        fingerprint=manifest.fingerprint,
        numerics="echo",
        block_size=settings.block_size,
        blocks=blocks,
        slots=settings.max_num_seqs,
        max_model_len=min(length, blocks * settings.block_size),
        max_batched_tokens=settings.max_num_batched_tokens or STEP_TOKENS,
        vocab_size=manifest.vocab_size,
        exact=True,
    )
    decoder = EchoDecoder(manifest.vocab_size, manifest.eos_token_ids, grammars)
    seconds = Roofline() if simulates_time else lambda rows: settings.step_seconds
    return EchoEngine(facts, decoder, progress, seconds)
