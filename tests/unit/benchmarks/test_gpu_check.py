"""The GPU check without a GPU: kernels in the interpreter, and the parts that only count."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from benchmarks import gpu_check, gpu_correctness
from benchmarks.correctness.comparison import Check
from benchmarks.gpu_check import check_kernels, run_parts
from benchmarks.gpu_step import CONFIG, Company, limit_of, step_seconds
from pagefleet.settings import WorkerSettings
from pagefleet_worker.loading import load_engine
from tests.gpu_twin import as_on_gpu


def test_without_a_gpu_it_checks_the_kernels_and_says_what_it_left_out():
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--quick"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("No GPU")
    assert "Not measured: decode and prefill attention" in ended.stdout
    checked = {line.split(" | ")[0] for line in ended.stdout.splitlines() if "| ok |" in line}
    assert {"| attention", "| copy_blocks", "| sample", "| gate_mul"} <= checked
    assert "WRONG" not in ended.stdout


@pytest.mark.parametrize(
    ("rows", "context", "milliseconds"),
    [(1, 512, 3.51), (32, 1024, 4.49), (128, 1024, 7.49), (128, 4096, 19.5)],
)
def test_the_limit_of_a_step(rows, context, milliseconds):
    found = limit_of(CONFIG, rows, context, copy=4.3e12, product=790e12)
    assert found * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_a_company_goes_on_ahead_of_its_results(prepared_model):
    settings = WorkerSettings(num_blocks=40, max_num_seqs=4, device="cpu", dtype="float32")
    engine = as_on_gpu(load_engine(prepared_model("llama"), settings, lambda: None), [1, 4])
    seconds, ordering = step_seconds(engine, 3, 64)
    assert 0 < ordering < seconds
    company = Company(engine, 2, 20)
    first, second = company.launch(), company.launch()
    assert len(first.result().tokens) == len(second.result().tokens) == 8
    assert not torch.isnan(engine.pool[:, :, : engine.facts.blocks]).any()


def test_a_part_that_dies_or_hangs_is_a_line_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not run_parts(["attention"], ["--no-such-option"], 60)
    monkeypatch.setattr(gpu_check, "LEAST", 0.0)
    assert not run_parts(["sampling", "layers"], [], 0.01)
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("|")] == [
        "| attention | ended with status 2 | | | | | FAILED |",
        "| sampling | took longer than 0 s | | | | | FAILED |",
        "| layers | no time is left | | | | | FAILED |",
    ]


def test_what_fails_is_a_line_and_not_the_end(monkeypatch):
    def _norms():
        raise RuntimeError("PassManager::run failed\nat line 3")

    checks = [partial(_norms), partial(Check, "gate_mul", "37 x 80", 0.001, 0.016)]
    monkeypatch.setattr(gpu_correctness, "_quick", lambda inputs: iter(checks))
    assert list(check_kernels(torch.device("cpu"), 0, quick=True)) == [
        (False, "| norms | PassManager::run failed | inf | 0.0e+00 | | | WRONG |"),
        (True, "| gate_mul | 37 x 80 | 1.0e-03 | 1.6e-02 | | | ok |"),
    ]
