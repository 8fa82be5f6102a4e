"""`python -m tests.simulation SEED` tells the story of one seed; `--seeds N` tries many."""

import argparse
import sys
import time

from tests.simulation.cell import Cell, SimulationFailure
from tests.simulation.scenarios import random_scenario


def main() -> None:
    """Run what the command line asks for; the exit status says whether all went well."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0, help="the seed, or the first")
    parser.add_argument("--seeds", type=int, help="how many to try, without their stories")
    arguments = parser.parse_args()
    if arguments.seeds is None:
        sys.exit(tell(arguments.seed))
    sys.exit(try_many(range(arguments.seed, arguments.seed + arguments.seeds)))


def tell(seed: int) -> int:
    """Print the story of one seed; 1 if it ends badly."""
    cell = Cell(random_scenario(seed))
    try:
        cell.live()
    except SimulationFailure as failure:
        print(failure)
        return 1
    print(*cell.world.story, sep="\n")
    return 0


def try_many(seeds: range) -> int:
    """Print which seeds fail, and why; 1 if any does."""
    failed: list[int] = []
    began = time.monotonic()
    virtual = 0.0
    for number, seed in enumerate(seeds, 1):
        cell = Cell(random_scenario(seed))
        try:
            cell.live()
        except SimulationFailure as failure:
            failed.append(seed)
            print(f"\r{str(failure).splitlines()[-2]}", flush=True)
            if len(failed) == 20:
                break
        virtual += cell.world.now
        if number % 50 == 0:
            rate = number / (time.monotonic() - began) * 60
            print(
                f"\r{number} seeds, {len(failed)} failed, {rate:.0f} a minute ", end="", flush=True
            )
    seconds = time.monotonic() - began
    print(
        f"\r{len(seeds)} seeds from {seeds.start}, {len(failed)} failed: {failed}; "
        f"{virtual:.0f} virtual seconds in {seconds:.1f}"
    )
    return bool(failed)


if __name__ == "__main__":
    main()
