"""Supervises stand-ins in a process of its own: `cell.py STAGES DRAIN_TIMEOUT`, stages in JSON."""

import asyncio
import json
import sys

from pagefleet_launcher.child import Service
from pagefleet_launcher.interrupts import Interrupts
from pagefleet_launcher.supervisor import Supervisor


async def run(stages, drain_timeout):
    services = [[Service(**service) for service in stage] for stage in stages]
    return await Supervisor(services, drain_timeout).run(Interrupts())


if __name__ == "__main__":
    sys.exit(asyncio.run(run(json.loads(sys.argv[1]), float(sys.argv[2]))))
