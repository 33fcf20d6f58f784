"""The loop and its command line: results, interruption, devices, bare machines."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import run_python
from hypothesis import given
from hypothesis import strategies as st
from observers import Calling
from small_training import THREE_TABLES, parameters_with

from dlrm_core.base.cli import main
from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import available_memory
from dlrm_core.config import Parameters, mean_bag_size, parameters_from_sections
from dlrm_core.train import Trainer, train
from dlrm_kernels.memory import require_memory
from dlrm_kernels.products import set_fp32_matmul

ROOT = Path(__file__).parents[2]
SMALL = {
    "model": THREE_TABLES,
    "data": {"indices_per_lookup": 10},
    "training": {"batch_size": 64, "batches": 25, "log_every": 10, "threads": 1, "device": "cpu"},
}


small = partial(parameters_with, SMALL)


def write(path: Path, sections=SMALL) -> Path:
    path.write_text(json.dumps(sections))  # JSON is YAML
    return path


def test_results_add_up(tmp_path):
    seen = []
    result = train(small(), tmp_path / "out", observer=Calling(seen.append))
    assert result.status == "finished" and result.iterations == 25
    assert [interval["iteration"] for interval in seen] == [10, 20, 25]
    assert len(result.losses) == len(result.iteration_ms) == len(result.data_ms) == 25
    assert seen[-1]["loss"] == pytest.approx(sum(result.losses[20:]) / 5)
    assert result.loss == seen[-1]["loss"]
    assert result.samples_per_second == pytest.approx(64 * 25 / (sum(result.iteration_ms) / 1e3))
    mean = sum(result.iteration_ms) / 25
    assert result.mean_ms_per_iteration == pytest.approx(mean)
    assert result.data_ms_per_iteration + result.compute_ms_per_iteration == pytest.approx(mean)
    assert result.samples_per_second == pytest.approx(64e3 / result.mean_ms_per_iteration)
    assert result.peak_memory_bytes > 1e6
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [interval["loss"] for interval in seen]
    saved = json.loads((tmp_path / "out" / "result.json").read_text())
    assert saved["losses"] == result.losses


def test_training_learns_a_batch_by_heart():
    trainer = Trainer(small(batches=400, learning_rate=0.5))
    trainer.batches = itertools.repeat(next(trainer.batches))
    result = trainer.train()
    assert result.loss < 0.5 * result.losses[0]


def test_ctrl_c_keeps_what_was_computed():
    trainer = Trainer(small(batches=1000))

    def stop(iteration):
        if iteration == 13:
            raise KeyboardInterrupt

    result = trainer.train(Calling(iteration=stop))
    assert result.status == "interrupted"
    assert result.iterations == len(result.losses) == len(result.data_ms) == 13
    assert math.isfinite(result.loss)


def test_an_interruption_before_the_first_iteration_gives_no_figures():
    trainer = Trainer(small())
    trainer.batches = iter_raising(KeyboardInterrupt)
    result = trainer.train()
    assert result.status == "interrupted" and result.iterations == 0
    assert math.isnan(result.ms_per_iteration) and math.isnan(result.samples_per_second)


def iter_raising(error):
    raise error
    yield


def test_divergence_ends_the_run():
    result = train(small(learning_rate=1e30, batches=200))
    assert result.status == "diverged" and result.iterations < 200


def test_the_command_ends_cleanly_when_told_to(tmp_path):
    """By Ctrl-C; SIGTERM: tests/core/test_checkpoints.py."""
    path = write(
        tmp_path / "p.yaml",
        SMALL | {"training": SMALL["training"] | {"batches": 10_000_000, "log_every": 5}},
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "dlrm_core", "train", "-f", path, "--output", tmp_path / "out"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(120) == 130
    last = json.loads(rest.splitlines()[-1])
    assert last["status"] == "interrupted" and last["iterations"] >= 5
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "interrupted"


def test_the_last_line_of_the_command_is_the_result(tmp_path, capsys):
    file = str(write(tmp_path / "p.yaml"))
    assert main(["train", "-f", file, "-p", "training.batches=11"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["iteration"] for line in lines[:-1]] == [10, 11]
    last = lines[-1]
    assert last["iterations"] == 11
    assert last["samples_per_second"] > 0 and last["ms_per_iteration"] > 0
    assert last["loss"] == pytest.approx(lines[-2]["loss"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.batch_size=0", ["training.batch_size", "0"]),
        ("training.batchsize=1", ["training.batchsize", "training.batch_size"]),
        ("model.table_rows=[4000000000000,1,1]", ["embedding table 0", "TiB"]),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, capsys, override, words):
    assert main(["train", "-f", str(write(tmp_path / "p.yaml")), "-p", override]) == 2
    said = capsys.readouterr()
    assert not said.out
    for word in words:
        assert word in said.err


def test_an_output_that_cannot_be_written_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    file, output = str(write(tmp_path / "p.yaml")), str(tmp_path / "file" / "x")
    assert main(["train", "-f", file, "--output", output]) == 2
    said = capsys.readouterr()
    assert "cannot be written" in said.err and not said.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(InputError, match=r"training\.device is 'cuda'"):
        Trainer(small(device="cuda"))


def test_the_workload_starts_without_notebook_packages(tmp_path):
    """A bare GPU node: torch, numpy, yaml and nothing else of ours."""
    absent = ["pandas", "pyarrow", "plotly", "papermill", "tqdm", "hatchet", "nbformat", "IPython"]
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({absent}))\n"
        "from dlrm_workbook.cli import main\n"
        "file, recording = sys.argv[1:]\n"
        "trained = main(['train', '-f', file])\n"
        "sys.exit(trained or main(['record', '-f', file, '--output', recording]))\n"
    )
    path = write(tmp_path / "p.yaml", SMALL | {"profiling": {"warmup": 1, "iterations": 3}})
    run_python(code, path, tmp_path / "recording", timeout=120)
    assert (tmp_path / "recording" / "trace.json.gz").stat().st_size > 1000


def test_a_model_larger_than_memory_is_refused_table_by_table(monkeypatch):
    monkeypatch.setattr("dlrm_kernels.memory.available_memory", lambda device: 10**9)
    parameters = parameters_from_sections({"model": {"table_rows": [5_000_000, 10, 3_000_000]}})
    with pytest.raises(InputError) as error:
        require_memory(parameters, torch.device("cpu"))
    message = str(error.value)
    first, *lines = message.splitlines()
    assert "model.table_rows" in first and "953.67 MiB" in first and "GiB of memory" in first
    assert lines[0].split()[:3] == ["embedding", "table", "0"] and "1.19 GiB" in lines[0]
    assert len(lines) <= 13


def test_available_memory_is_less_than_the_machine_has():
    available = available_memory(torch.device("cpu"))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available is not None and 0 < available <= total


@given(st.integers(1, 300), st.integers(1, 300))
def test_mean_bag_size_is_the_sum_over_the_laws_sizes(rows, lookups):
    bound = min(rows, lookups)
    # the size of a bag changes where r k passes a half, as numpy and torch round
    cuts = [0, *(Fraction(2 * j + 1, 2 * bound) for j in range(bound)), 1]
    mean = Fraction(0)
    for first, last in itertools.pairwise(cuts):
        size = max(1, round((first + last) / 2 * bound))
        mean += size * (last - first)
    parameters = parameters_from_sections(
        {"model": {"table_rows": rows}, "data": {"indices_per_lookup": lookups}}
    )
    assert mean == Fraction(bound, 2) + Fraction(1, 2 * bound)
    assert mean_bag_size(parameters, 0) == pytest.approx(float(mean), rel=1e-15)


def test_the_onednn_path_is_checked_and_taken_back(monkeypatch):
    model, cpu = Parameters().model, torch.device("cpu")
    assert set_fp32_matmul("default", model, cpu) == []
    notices = set_fp32_matmul("onednn", model, cpu)
    assert notices == [] or "relative error" in notices[0]
    monkeypatch.setattr("dlrm_kernels.products._relative_error", lambda n, m: 3e-3)
    (notice,) = set_fp32_matmul("onednn", model, cpu)
    assert "3.0e-03" in notice and "default library" in notice
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
    (notice,) = set_fp32_matmul("onednn", model, torch.device("cuda"))
    assert "ignored" in notice


def test_losses_do_not_depend_on_the_fast_options():
    plain = train(small()).losses
    sections = small(fused_optimizer=True, fp32_matmul="onednn").to_sections()
    sections["data"] |= {"loader": "prefetch"}
    fast = train(parameters_from_sections(sections)).losses
    set_fp32_matmul("default", Parameters().model, torch.device("cpu"))
    assert fast == pytest.approx(plain, abs=1e-5)


def test_the_workload_loads_nothing_that_explains_draws_or_compiles(tmp_path):
    code = (
        "import json, sys\nfrom dlrm_core.base.cli import main\n"
        "code = main(['train', '-f', sys.argv[1], '-p', 'training.batches=2'])\n"
        "print(json.dumps(sorted(sys.modules)))\nsys.exit(code)"
    )
    file = str(write(tmp_path / "p.yaml"))
    modules = json.loads(run_python(code, file).splitlines()[-1])
    loaded = {name.partition(".")[0] for name in modules}
    assert not loaded & {"pandas", "plotly", "papermill", "numba", "triton"}
    beside = {name for name in modules if name.startswith(("dlrm_kernels.", "dlrm_workbook."))}
    assert beside <= {
        *("dlrm_kernels.memory", "dlrm_kernels.placement", "dlrm_kernels.embeddings"),
        *("dlrm_kernels.embeddings.pages", "dlrm_kernels.products", "dlrm_workbook.ground"),
        "dlrm_kernels.facebook_replay",
        *("dlrm_workbook.ground.marks", "dlrm_workbook.ground.profiling"),
    }
    assert "torch._dynamo" not in modules, "torch's compiler: a second of every process"
