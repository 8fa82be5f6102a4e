"""Clients that leave, read slowly, never finish what they say, or speak nonsense."""

import contextlib
import random
import selectors
import socket
import threading
import time

import pytest

from pagefleet_gateway.http.protocol import UNREAD_BYTES, UNSENT_BYTES
from tests.faults.cell import wait_until
from tests.faults.clients import connected, receive_all, receive_until, send
from tests.faults.conftest import Load, assert_exact

LONG = 3000
"""Tokens: thirty seconds at least."""

WAITING = UNREAD_BYTES + UNSENT_BYTES
"""Of what one client does not read."""


def begun(cell, question, sock):
    """Ask, and wait until it is computed."""
    send(sock, cell.server, question)
    if question.stream:
        receive_until(sock, b"data: ")
    wait_until(lambda: cell.held_blocks() > 0)


def runs_no_step(cell):
    steps = cell.total("iteration_tokens_total_count")
    time.sleep(0.6)
    return cell.total("iteration_tokens_total_count") == steps


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("form", ["greedy", "n=2"])
def test_a_client_hangs_up(cell, questions, stream, form):
    """Its blocks are free in 200 ms, 20 steps; here in ten times that, as pulses tell it."""
    with connected(cell.server) as sock:
        begun(cell, questions.ask(form, 40, LONG, stream=stream), sock)
    steps = cell.total("iteration_tokens_total_count")
    wait_until(lambda: cell.held_blocks() == 0)
    assert cell.total("iteration_tokens_total_count") - steps < 200


def test_a_client_resets_the_connection(cell, questions):
    with connected(cell.server) as sock:
        begun(cell, questions.ask("greedy", 40, LONG), sock)
        linger = (1).to_bytes(4, "little") + bytes(4)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    wait_until(lambda: cell.held_blocks() == 0)


def test_a_client_closes_its_half(cell, questions):
    """It may want the answer still, or be gone: what counts is that nothing goes on for ever."""
    with connected(cell.server) as sock:
        send(sock, cell.server, questions.ask("greedy", 40, 30))
        sock.shutdown(socket.SHUT_WR)
        receive_all(sock)
    wait_until(lambda: cell.held_blocks() == 0)


def test_a_client_leaves_while_its_prompt_is_computed(cell, questions):
    for _ in range(5):
        with connected(cell.server) as sock:
            send(sock, cell.server, questions.ask("greedy", 3000, 10))
            time.sleep(random.uniform(0, 0.2))
    assert_exact(Load(questions).run(cell))
    wait_until(lambda: cell.held_blocks() == 0)


def test_a_client_that_reads_nothing_keeps_nobody_waiting(cell, questions):
    with connected(cell.server, receive_buffer=4096) as sock:
        send(sock, cell.server, questions.ask("greedy", 40, LONG))
        answers = Load(questions).run(cell)
        assert_exact(answers)
        assert max(answer.longest_gap for answer in answers) < 5
        wait_until(lambda: runs_no_step(cell))
        assert cell.held_blocks() > 0
        taken = 0
        while taken < 2 * WAITING:
            taken += len(sock.recv(1 << 16))


def test_half_a_request_does_no_harm(cell, questions):
    """Fifty connections that have said part of a header, or of a body."""
    half = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
    socks = [socket.create_connection((cell.server.host, cell.server.port)) for _ in range(50)]
    for number, sock in enumerate(socks):
        sock.sendall(half + b"\r\n{" if number % 2 else half[: random.randrange(len(half))])
    assert_exact(Load(questions).run(cell))
    for sock in socks:
        sock.close()


@pytest.mark.slow
def test_idle_connections_are_closed_and_keep_nobody_waiting(cell, questions):
    """Nearly all of the 10,000 that a gateway has room for say nothing, for which it gives 10 s."""
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as idle:
        for _ in range(9_900):
            sock = stack.enter_context(
                socket.create_connection((cell.server.host, cell.server.port), timeout=60)
            )
            idle.register(sock, selectors.EVENT_READ)
        answers = Load(questions).run(cell)
        assert_exact(answers)
        assert max(answer.longest_gap for answer in answers) < 5
        deadline = time.monotonic() + 100
        while idle.get_map():
            assert time.monotonic() < deadline, f"{len(idle.get_map())} are open"
            for key, _ in idle.select(1):
                receive_all(key.fileobj)
                idle.unregister(key.fileobj)


@pytest.mark.slow
def test_slow_headers_and_bodies_are_ended(cell, questions):
    """A byte every half second does not help."""
    half = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
    ended = []

    def trickle(first):
        with connected(cell.server) as sock:
            began = time.monotonic()
            sock.sendall(first)
            try:
                while time.monotonic() - began < 40:
                    time.sleep(0.5)
                    sock.sendall(b"x")
            except OSError:
                ended.append(time.monotonic() - began)

    threads = [threading.Thread(target=trickle, args=[f]) for f in (half, half + b"\r\n{")]
    for thread in threads:
        thread.start()
    assert_exact(Load(questions).run(cell))
    for thread in threads:
        thread.join()
    assert len(ended) == 2
    assert all(5 < seconds < 30 for seconds in ended)


def test_random_bytes_on_the_http_port(cell, questions):
    for _ in range(100):
        with connected(cell.server) as sock:
            sock.sendall(random.randbytes(random.randint(1, 2000)))
    assert_exact(Load(questions).run(cell))


@pytest.mark.parametrize("side", ["gateways-hub", "workers-hub"])
def test_random_bytes_on_a_port_of_the_scheduler(cell, questions, side):
    greeting = bytes([0xFF]) + bytes(8) + bytes([0x7F, 3, 1]) + b"NULL".ljust(20, b"\0") + bytes(32)
    for number in range(60):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(cell.folder / side))
            noise = random.randbytes(random.randint(1, 2000))
            sock.sendall(greeting + noise if number % 2 else noise)
    scheduler = cell.scheduler.pid
    assert_exact(Load(questions).run(cell))
    assert cell.scheduler.pid == scheduler
    assert cell.scheduler.alive
