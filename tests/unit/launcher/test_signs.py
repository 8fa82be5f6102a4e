"""What a process says of itself, and who may say it."""

import asyncio
import os
import socket
from contextlib import closing

from pagefleet.notify import ADDRESS, BEAT_SECONDS, Notifier
from pagefleet_launcher.signs import Signs


def say_ready(address):
    with closing(Notifier({ADDRESS: address})) as notifier:
        notifier.beat(0.0, ready=True)


def test_readiness_is_said_with_the_signs_of_life():
    async def scenario():
        with closing(Signs()) as signs, closing(Notifier({ADDRESS: signs.address})) as notifier:
            signs.listen(os.getpid())
            notifier.beat(0.0, ready=False)
            notifier.beat(0.9 * BEAT_SECONDS, ready=True)
            while not signs.count:
                await asyncio.sleep(0)
            assert (signs.count, signs.ready.is_set()) == (1, False)
            notifier.beat(1.1 * BEAT_SECONDS, ready=True)
            await asyncio.wait_for(signs.ready.wait(), 5)
            assert signs.count == 2

    asyncio.run(scenario())


def test_what_came_before_anybody_listened_counts():
    async def scenario():
        with closing(Signs()) as signs:
            say_ready(signs.address)
            signs.listen(os.getpid())
            await asyncio.wait_for(signs.ready.wait(), 5)

    asyncio.run(scenario())


def test_only_the_process_s_own_word_counts():
    async def scenario():
        with closing(Signs()) as signs, closing(Signs()) as another:
            another.listen(os.getppid())
            signs.listen(os.getpid())
            for each in (another, signs):
                say_ready(each.address)
            await asyncio.wait_for(signs.ready.wait(), 5)
            await asyncio.sleep(0)
            assert not another.count

    asyncio.run(scenario())


def test_a_process_without_a_supervisor_says_nothing():
    Notifier({}).beat(0.0, ready=True)


def test_a_supervisor_that_is_gone_or_deaf_harms_nobody():
    """Its queue is full, or nobody has the address any more."""

    async def scenario():
        signs = Signs()
        with closing(Notifier({ADDRESS: signs.address})) as notifier:
            for beat in range(10_000):
                notifier.beat(float(beat), ready=True)
            signs.close()
            notifier.beat(10_001.0, ready=True)

    asyncio.run(scenario())


def test_a_socket_with_a_path_is_told_as_systemd_wants_it(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        say_ready(str(tmp_path / "notify"))
        assert sorted(systemd.recv(100).split(b"\n")) == [b"READY=1", b"WATCHDOG=1"]
