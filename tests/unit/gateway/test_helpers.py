"""Work that takes too much is ended, and nobody else's with it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.sandbox.grammar_job import Source
from pagefleet_gateway.sandbox.grammars import Grammars
from pagefleet_gateway.sandbox.helper import Limits
from pagefleet_gateway.sandbox.helpers import Helper, HelperPool, LimitError
from pagefleet_gateway.sandbox.isolated_template import IsolatedTemplate
from pagefleet_gateway.sandbox.template import (
    ChatTemplate,
    ChatTemplateError,
    Rendered,
    TemplateSource,
)
from pagefleet_worker.prepare import prepare
from tests.unit.gateway.test_app import running_cell

LIMITS = Limits(cpu_seconds=0.3, seconds=20.0, memory=64 << 20)
USER = {"messages": [{"role": "user", "content": "hello"}]}
TURNS = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
COUNTS = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}done"
REPEATS = "{{ (messages[0].content * n) | length }}"

PARTS = " & ".join(f"/(.*[a-z]{{{length}}})*/" for length in range(2, 14))
ENDLESS = f"start: TEXT\nTEXT: {PARTS}\n"
"""A grammar that takes minutes to compile."""


def template(source: str, limits: Limits = LIMITS) -> IsolatedTemplate:
    return IsolatedTemplate(TemplateSource(source, {"bos_token": "<s>"}), limits)


def content(source: str) -> bytes:
    return msgspec.msgpack.encode(TemplateSource(source, {}))


def test_what_is_rendered_elsewhere_is_the_same() -> None:
    source = "{{ bos_token }}" + TURNS
    here = ChatTemplate(source, {"bos_token": "<s>"}).render(USER)
    assert template(source).render(USER) == here == "<s>user: hello\n"


def test_a_template_refuses_in_its_own_words() -> None:
    refusing = template("{{ raise_exception('Roles must alternate') }}")
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="Roles must alternate"):
            refusing.render(USER)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("a\n{% for %}", "malformed in line 2"),
        ("{{" + 10_000 * "(" + "1" + 10_000 * ")" + "}}", "nested too deeply"),
    ],
)
def test_a_malformed_template_is_refused_at_the_start(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        template(source)


@pytest.mark.parametrize(
    ("source", "n", "reason"),
    [
        (COUNTS, 50_000, "0.3 seconds of processor time"),
        (REPEATS, 10**9, "64 MiB of memory"),
    ],
)
def test_a_template_that_takes_too_much_is_one_error(source: str, n: int, reason: str) -> None:
    limited = template(source)
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match=reason):
            limited.render(USER | {"n": n})
        assert limited.render(USER | {"n": 2}) in ("done", "10")


def test_the_clock_limits_what_does_not_compute() -> None:
    helper = Helper("template", content(COUNTS), Limits(60.0, 0.2, 64 << 20))
    job = msgspec.json.encode({"n": 50_000})
    with pytest.raises(LimitError, match=r"more than 0.2 seconds$"):
        helper.run(job)
    assert not helper.alive


def test_one_that_died_idle_is_replaced() -> None:
    pool = HelperPool("template", content("{{ n }}"), LIMITS, 1)
    for number in range(2):
        result = pool.run(msgspec.json.encode({"n": number}))
        assert msgspec.msgpack.decode(result, type=Rendered).text == str(number)
        helper = pool._idle.get()
        helper.end()
        pool._idle.put(helper)


@pytest.mark.parametrize("again", [False, True])
def test_a_job_whose_helper_was_killed_is_done_once_more(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the kernel where others take all memory; it is refused if that comes again."""
    pool = HelperPool("template", content(COUNTS), Limits(20.0, 20.0, 64 << 20), 1)
    pool.await_ready()
    helper, new, works = pool._idle.get(), pool._new, threading.Event()
    pool._idle.put(helper)
    run = helper.run

    def killed() -> Helper:
        other = new()
        other.await_ready()
        other._process.kill()
        other._process.wait()
        return other

    def told(job: bytes) -> bytes:
        works.set()
        return run(job)

    others = iter([killed, new] if again else [new])
    monkeypatch.setattr(pool, "_new", lambda: next(others)())
    monkeypatch.setattr(helper, "run", told)
    with ThreadPoolExecutor() as threads:
        result = threads.submit(pool.run, msgspec.json.encode({"n": 3000}))
        works.wait()
        helper._process.kill()
    if again:
        assert isinstance(result.exception(), LimitError)
    else:
        assert msgspec.msgpack.decode(result.result(), type=Rendered).text == "done"
    assert pool._idle.get().alive
    assert not list(others)


@pytest.mark.parametrize("failure", [OSError("Cannot allocate memory"), None])
def test_where_none_can_be_started_whoever_needs_one_is_told_to_come_again(
    failure: OSError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HelperPool("template", content("{{ n }}"), LIMITS, 1)
    pool.await_ready()
    helper, new = pool._idle.get(), pool._new
    helper.end()
    pool._idle.put(helper)

    def fail() -> Helper:
        if failure is not None:
            raise failure
        other = new()
        other._process.kill()
        return other

    job = msgspec.json.encode({"n": 1})
    monkeypatch.setattr(pool, "_new", fail)
    with pytest.raises(ApiError) as caught:
        pool.run(job)
    monkeypatch.undo()
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    assert msgspec.msgpack.decode(pool.run(job), type=Rendered).text == "1"


def test_what_takes_too_much_is_refused_though_none_can_be_started_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = HelperPool("template", content(COUNTS), LIMITS, 1)
    pool.await_ready()

    def fail() -> Helper:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(pool, "_new", fail)
    with pytest.raises(LimitError, match="processor time"):
        pool.run(msgspec.json.encode({"n": 50_000}))
    monkeypatch.undo()
    result = pool.run(msgspec.json.encode({"n": 1}))
    assert msgspec.msgpack.decode(result, type=Rendered).text == "done"


def test_a_helper_ends_with_its_parent() -> None:
    helper = Helper("template", content("{{ n }}"), LIMITS)
    helper.await_ready()
    helper._pipe.close()
    assert helper._process.wait(timeout=20) == 0


def test_others_go_on_while_one_computes() -> None:
    pool = HelperPool("template", content(COUNTS), Limits(1.5, 20.0, 64 << 20), 2)
    small = msgspec.json.encode({"n": 1})
    pool.run(small)
    pool.run(small)
    results: list[object] = []

    def compute() -> None:
        try:
            pool.run(msgspec.json.encode({"n": 50_000}))
        except LimitError as error:
            results.append(str(error))

    slow = threading.Thread(target=compute)
    slow.start()
    for _ in range(20):
        pool.run(small)
    assert not results
    slow.join()
    assert results == ["it takes more than 1.5 seconds of processor time"]


def test_whoever_finds_none_free_is_told_to_come_again() -> None:
    pool = HelperPool("template", content("{{ n }}"), LIMITS, 1, wait=0.1)
    busy = pool._idle.get()
    with pytest.raises(ApiError) as caught:
        pool.run(msgspec.json.encode({"n": 1}))
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    assert caught.value.retry_after
    busy.end()


def test_a_grammar_that_takes_too_much_names_its_field() -> None:
    grammars = Grammars(LIMITS)
    with pytest.raises(ApiError, match=r"processor time|memory") as caught:
        grammars.structure(Source("grammar", ENDLESS), "structured_outputs.grammar")
    assert (caught.value.status, caught.value.param) == (400, "structured_outputs")
    assert grammars.structure(Source("regex", "a+"), "structured_outputs.regex").grammar


def test_a_grammar_is_compiled_once() -> None:
    grammars = Grammars(LIMITS)
    first = grammars.structure(Source("regex", "a+"), "structured_outputs.regex")
    grammars._helpers = HelperPool("template", content(""), LIMITS, 1)
    assert grammars.structure(Source("regex", "a+"), "structured_outputs.regex") == first


@pytest.mark.slow
def test_hostile_grammars_keep_nobody_else_waiting(tmp_path: Path) -> None:
    hostile = {"prompt": "abc", "max_tokens": 2, "structured_outputs": {"grammar": ENDLESS}}
    with running_cell(prepare("echo", tmp_path), tmp_path) as cell, ThreadPoolExecutor() as pool:
        attacks = [pool.submit(cell.post, **hostile) for _ in range(4)]
        for _ in range(10):
            assert cell.post(prompt="abc", max_tokens=2).status_code == 200
        assert not all(attack.done() for attack in attacks)  # those that found no helper may be
        statuses = {attack.result().status_code for attack in attacks}
    assert statuses <= {400, 503}
    assert 400 in statuses
