"""`python -m pagefleet_worker`: one worker process."""

import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pagefleet.command_line import parse, refuse
from pagefleet.endpoint import EndpointError, check_endpoint
from pagefleet.host import usable_cores
from pagefleet.manifest import Manifest, ManifestError
from pagefleet.observe import configure_logging
from pagefleet.prepared import prepared_folder
from pagefleet.settings import WorkerSettings
from pagefleet_worker.compute import Progress
from pagefleet_worker.ending import end_now, run_to_end
from pagefleet_worker.interface import Engine
from pagefleet_worker.server import ComputeEndedError, Server, ShutOutError

log = logging.getLogger("pagefleet_worker")


def main() -> None:
    """Load an engine, then run until told to stop."""
    settings = parse(WorkerSettings, sys.argv[1:], prog="pagefleet worker")
    configure_logging("worker")
    began, progress = time.monotonic(), Progress()
    try:
        key = settings.load_cell_key()
        check_endpoint(settings.worker_endpoint, key)
        engine = build_engine(settings, prepared_folder(settings), progress)
        server = Server(settings.worker_endpoint, engine, progress, key)
    except (EndpointError, ManifestError, ValueError, OSError) as error:
        refuse("pagefleet worker", error)
    # What is there now stays. To look through all of torch takes the collector 140 ms, each time in
    # the midst of somebody's step.
    gc.collect()
    gc.freeze()
    log.info("%s engine ready after %.1f s", settings.engine, time.monotonic() - began)
    try:
        server.run()
    except (ShutOutError, ComputeEndedError) as error:
        log.error("this worker gives up: %s", error)
        sys.exit(1)


def build_engine(settings: WorkerSettings, folder: Path, progress: Callable[[], None]) -> Engine:
    """The engine that `settings` name, with its model loaded.

    Raises:
        ValueError: the model or a setting is not supported; the message says why.
    """
    manifest = Manifest.load(folder)
    if settings.engine == "torch":
        os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads or usable_cores()))
        # A thread that spins for one whose core somebody else has keeps both from computing: with
        # libgomp's default a step took 20 times as long beside two busy processes on two cores.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
        # Huge pages: blocks of keys and values lie anywhere in the pool, each in pages of its own.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        if settings.tensor_parallel_size > 1:
            from pagefleet_worker.group import load_group

            return load_group(folder, settings, progress, end_with_rank)
        from pagefleet_worker.loading import load_engine

        return load_engine(folder, settings, progress)
    if settings.tensor_parallel_size > 1:
        raise ValueError(f"--engine {settings.engine} has no tensors for several devices to share.")
    from pagefleet_worker.grammar import Grammars
    from pagefleet_worker.simulated.engines import build_simulated

    return build_simulated(settings, manifest, progress, Grammars.load(folder, manifest))


def end_with_rank(rank: int, status: int) -> None:
    """End this process because a rank of its worker has ended, with the `status` of `Popen`."""
    log.error("this worker ends: its rank %d ended with status %d", rank, status)
    end_now(2 if status == 2 else 1)  # a setting that it refused would be refused again


if __name__ == "__main__":
    run_to_end(main)
