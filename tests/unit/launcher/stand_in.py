"""A service's stand-in: `stand_in.py NAME EVENTS BEHAVIOUR` notes in EVENTS what happens to it."""

import os
import signal
import socket
import subprocess
import sys
import time


def main(name, events, behaviour):
    def note(event):
        with open(events, "a") as file:
            file.write(f"{name} {event} {os.getpid()} {time.monotonic()}\n")

    def end(*_):
        note("asked")
        if behaviour == "stubborn":
            return
        time.sleep(0.3 if behaviour == "slow" else 0.05)
        note("ended")
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    if behaviour == "refuse":
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(2))
    note("started")
    if behaviour == "crash":
        sys.exit(3)
    if behaviour == "talk":
        os.write(1, b"first\nsecond \xff\n")
        os.write(2, b"on standard error\nunfinished")
        sys.exit(3)
    if behaviour == "parent":
        subprocess.Popen([sys.executable, "-S", __file__, f"{name}-child", events, "serve"])
    if behaviour.startswith("listen:"):
        with socket.socket(fileno=int(behaviour.removeprefix("listen:"))) as listener:
            while True:
                connection, _ = listener.accept()
                connection.sendall(str(os.getpid()).encode())
                connection.close()
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
