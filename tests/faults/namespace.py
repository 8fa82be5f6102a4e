"""Another machine, as far as the network tells: a namespace with a cable that can be pulled."""

import contextlib
import ctypes
import os
import re
import subprocess
import threading
import time

import pytest

CLONE_NEWNET = 0x40000000


class Namespace:
    """A network namespace (ip-netns(8)) that one cable leads to; its other end is `address`.

    Processes that are started behind the words `inside` live in it, and in a namespace of process
    numbers too, as in a container.
    """

    def __init__(self):
        self.name = f"pagefleet-{os.getpid()}"
        self.address = "10.203.117.1"
        self._far_address = "10.203.117.2"
        self.inside = [
            *("ip", "netns", "exec", self.name),
            *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
        ]
        self._near, self._far = f"pfn{os.getpid() % 10**6}", f"pff{os.getpid() % 10**6}"

    @contextlib.contextmanager
    def made(self):
        """Make it; skip the test where that is not allowed."""
        done = subprocess.run(["ip", "netns", "add", self.name], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no network namespace can be made here: {done.stderr.strip()}")
        with contextlib.ExitStack() as undo:
            undo.callback(self._ip, "netns", "del", self.name)
            self._ip("link", "add", self._near, "type", "veth", "peer", self._far)
            undo.callback(self._ip, "link", "del", self._near)  # a namespace's own end takes time
            self._ip("link", "set", self._far, "netns", self.name)
            self._ip("addr", "add", f"{self.address}/30", "dev", self._near)
            self._ip("-n", self.name, "addr", "add", f"{self._far_address}/30", "dev", self._far)
            self._ip("link", "set", self._near, "up")
            self.set("up")
            yield self

    def set(self, state):
        """Plug the cable in at the far end ("up"), or out ("down")."""
        self._ip("-n", self.name, "link", "set", self._far, state)

    def lose(self, seconds):
        """Let nothing reach the far end for so long, by a route that leads nowhere.

        What the far end sends arrives. The route is this process's, whose main thread stays at the
        near end, wherever this is called.
        """
        here = ["nsenter", f"--net=/proc/{os.getpid()}/ns/net", "ip", "route"]
        route = ["blackhole", f"{self._far_address}/32"]
        subprocess.run([*here, "add", *route], check=True)
        try:
            time.sleep(seconds)
        finally:
            subprocess.run([*here, "del", *route], check=True)

    def unplug(self, seconds):
        """Let nothing pass either way for so long."""
        self.set("down")
        time.sleep(seconds)
        self.set("up")

    @contextlib.contextmanager
    def slowed(self, rate):
        """Let no more than `rate` (tc-tbf(8)) come in; skip the test where that is not allowed."""
        shape = ["tc", "qdisc", "add", "dev", self._near, "root", "tbf", "rate", rate]
        limits = ["burst", "16kb", "latency", "400ms"]
        done = subprocess.run([*shape, *limits], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no link can be slowed here: {done.stderr.strip()}")
        yield
        show = ["tc", "-s", "qdisc", "show", "dev", self._near]
        told = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        assert int(re.search(r"overlimits (\d+)", told)[1]) > 0, told

    def run(self, function):
        """Call a function in a thread that lives there; its result."""
        results = []

        def inside():
            with open(f"/run/netns/{self.name}") as namespace:
                libc = ctypes.CDLL(None, use_errno=True)
                assert libc.setns(namespace.fileno(), CLONE_NEWNET) == 0, ctypes.get_errno()
            results.append(function())

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        return results[0]

    def _ip(self, *arguments):
        subprocess.run(["ip", *arguments], check=True)
