"""A service's stand-in: `stand_in.py NAME EVENTS BEHAVIOUR` notes in EVENTS what happens to it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def main(name, events, behaviour):
    def note(event):
        with open(events, "a") as file:
            file.write(f"{name} {event} {os.getpid()} {time.monotonic()}\n")

    def end(*_):
        note("asked")
        if behaviour == "stubborn" or (behaviour == "haunted" and not repeated):
            return
        time.sleep(0.3 if behaviour == "slow" else 0.05)
        note("ended")
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, lambda *_: signal.pause())  # to say nothing any more
    repeated = f"{name} started" in Path(events).read_text()
    note("started")
    if repeated and behaviour.startswith("once:"):
        sys.exit(int(behaviour.removeprefix("once:")))
    if behaviour == "refuse":
        while Path(events).read_text().count(" started ") < 2:  # nobody else is there to be ended
            time.sleep(0.005)
        sys.exit(2)
    if behaviour == "crash":
        sys.exit(3)
    if behaviour == "talk":
        os.write(1, b"first\nsecond \xff\n")
        os.write(2, b"on standard error\nunfinished")
        sys.exit(3)
    if behaviour == "flood":
        os.write(2, b"more than a pipe holds\n" * 100_000)
    if behaviour == "parent":
        subprocess.Popen([sys.executable, "-S", __file__, f"{name}-child", events, "serve"])
    if behaviour == "haunted" and not repeated:  # what keeps its output open is not of its group
        subprocess.Popen(["sleep", "2"], start_new_session=True)
    if behaviour.startswith("listen:"):
        with socket.socket(fileno=int(behaviour.removeprefix("listen:"))) as listener:
            while True:
                connection, _ = listener.accept()
                connection.sendall(str(os.getpid()).encode())
                connection.close()
    if behaviour != "silent":
        beat()
    while True:
        signal.pause()


def beat():
    """Say that it lives and is ready, for ever."""
    supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    supervisor.connect(os.environ["NOTIFY_SOCKET"].replace("@", "\0"))
    while True:
        supervisor.send(b"READY=1\nWATCHDOG=1")
        time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
