"""How late the event loop is: what every stream of this gateway waits for while something else,
which belongs into a thread or another process, keeps the loop to itself.
"""

import asyncio
from collections.abc import Callable
from typing import Final

INTERVAL_SECONDS: Final = 0.05
"""Between two looks."""


async def watch_lag(observe: Callable[[float], None]) -> None:
    """Tell, for as long as the task lives, by how many seconds the loop wakes it too late."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_SECONDS
        await asyncio.sleep(INTERVAL_SECONDS)
        observe(max(0.0, loop.time() - due))
