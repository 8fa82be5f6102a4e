"""An engine that orders its steps as on a GPU, on whatever device it has."""

import torch

from pagefleet_worker.paging.device_slots import DeviceSlots
from pagefleet_worker.step.engine import TorchEngine
from pagefleet_worker.step.graphs import Run
from pagefleet_worker.step.inputs import DeviceInputs


class Recorder:
    """Captures as a GPU does: the output of a graph stays where it is, for ever."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replays = 0

    def __call__(self, run: Run) -> Run:
        output = run().clone()
        self.sizes.append(len(output))

        def replay() -> torch.Tensor:
            self.replays += 1
            return output.copy_(run())

        return replay


def as_on_gpu(
    engine: TorchEngine, sizes: list[int] | None = None, recorder: Recorder | None = None
) -> TorchEngine:
    """`engine` with slots on its device, steps that are settled when they are read, and graphs of
    `sizes`.
    """
    facts, spare = engine.facts, torch.full_like(engine.pool[:, :, :1], torch.nan)
    pool = torch.cat((engine.pool, spare), 2)
    inputs = DeviceInputs(engine.decoder, pool, DeviceSlots.of(facts, pool.device), lambda: None)
    if sizes:
        inputs.capture(sizes, recorder or Recorder())
    return TorchEngine(
        facts, engine.decoder, engine.kernels, pool, inputs=inputs, grammars=engine.grammars
    )
