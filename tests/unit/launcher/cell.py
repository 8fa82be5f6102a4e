"""Supervises stand-ins in a process of its own: `cell.py STAGES DRAIN_TIMEOUT`, stages in JSON."""

import asyncio
import json
import sys

from pagefleet_launcher.supervisor import Child, Interrupts, Supervisor


async def run(stages, drain_timeout):
    supervisor = Supervisor([[Child(*child) for child in stage] for stage in stages], drain_timeout)
    return await supervisor.run(Interrupts())


if __name__ == "__main__":
    sys.exit(asyncio.run(run(json.loads(sys.argv[1]), float(sys.argv[2]))))
