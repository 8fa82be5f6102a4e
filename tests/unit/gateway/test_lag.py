"""The loop's lag, where something blocks it."""

import asyncio
import time

from pagefleet_gateway.http.lag import INTERVAL_SECONDS, watch_lag


def test_what_blocks_the_loop_is_seen():
    seen = []
    blocked = 0.2

    async def run():
        enough = asyncio.Event()

        def observe(seconds):
            seen.append(seconds)
            if len(seen) == 3:
                enough.set()

        task = asyncio.create_task(watch_lag(observe))
        asyncio.get_running_loop().call_later(INTERVAL_SECONDS * 1.5, time.sleep, blocked)
        await enough.wait()
        task.cancel()

    asyncio.run(run())
    assert all(seconds >= 0 for seconds in seen)
    assert max(seen) > blocked / 2
