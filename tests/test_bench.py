"""``dlrm bench`` and ``dlrm gpu-check``: their logic, on small models and the CPU."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlrm_core.bench import compare, describe
from dlrm_core.bench_cases import GROWTH, growth_cases, shape_cases
from dlrm_core.bench_runs import Run
from dlrm_core.config import load_parameters, parameters_from_sections
from dlrm_core.errors import InputError
from dlrm_core.gpu_check import OPTIONS, check, gpu_check
from dlrm_core.touched import changed_parameters

SMALL = {
    "model": {
        "bottom_mlp": "16-32-8",
        "top_mlp": "32-16-1",
        "embedding_dim": 8,
        "table_rows": [1000, 50, 3],
    },
    "data": {"indices_per_lookup": 10, "generator": "facebook_loop"},
    "training": {"batch_size": 64, "device": "cpu"},
}
PEER = """
import sys, time
arguments = dict(a.lstrip("-").split("=") for a in sys.argv[1:] if "=" in a)
assert arguments["arch-embedding-size"] == "1000-50-3" and arguments["arch-mlp-bot"] == "16-32-8"
for i in range(int(arguments["num-batches"])):
    time.sleep(0.02)
    print(f"Finished training it {i + 1}/9 of epoch 0, 5.00 ms/it, loss 9.0")
"""


def both():
    fast = SMALL | {"data": SMALL["data"] | {"generator": "facebook"}}
    return {"plain": parameters_from_sections(SMALL), "tuned": parameters_from_sections(fast)}


def test_contestants_run_in_turns_and_train_the_same(capsys):
    results = compare(both(), peer=None, rounds=2, iterations=4, threads=1)
    order = [line.split()[2] for line in capsys.readouterr().err.splitlines()]
    assert order == ["plain:", "tuned:", "tuned:", "plain:"]
    assert results["losses_agree"] and results["loss_difference"]["tuned"] == 0
    assert len(results["rounds"]["tuned"]) == 2
    ratio = results["ratios"]["tuned"]["end_to_end_ms"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert ratio["median"] > 1.0, "the vectorised replay is faster than the loop on any machine"
    assert "tuned is" in describe(results)


def test_another_training_is_told_apart():
    def run(parameters, iterations, threads):
        wrong = parameters.data.generator == "facebook"
        return Run(1.0, 2.0, [0.5 + (2e-5 if wrong else 0.0)] * iterations)

    results = compare(both(), peer=None, rounds=1, iterations=3, threads=1, run=run)
    assert not results["losses_agree"]
    assert "NOT the same training" in describe(results)


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    times = iter([10.0, 5.0, 1.0, 30.0, 8.0, 4.0])  # a machine that drifts between rounds

    def run(parameters, iterations, threads):
        return Run(1.0, next(times), [0.5])

    ratio = compare(both(), peer=None, rounds=3, iterations=1, threads=1, run=run)["ratios"]
    # rounds: 10 / 5, then (order turned) tuned 1 and plain 30, then 8 / 4
    assert ratio["tuned"]["end_to_end_ms"] == {"median": 2.0, "low": 2.0, "high": 30.0}


def test_a_peer_runs_in_its_own_process_and_its_losses_count(tmp_path):
    (tmp_path / "dlrm_s_pytorch.py").write_text(PEER)
    results = compare(both(), peer=tmp_path, rounds=1, iterations=3, threads=1)
    peer = results["contestants"]["facebook"]
    assert peer["step_ms"] == 5.0
    assert peer["end_to_end_ms"] >= 20.0
    assert results["against"] == "facebook" and not results["losses_agree"]


def test_a_peer_that_is_none_or_fails_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no dlrm_s_pytorch\.py"):
        compare(both(), peer=tmp_path, rounds=1, iterations=3, threads=1)
    (tmp_path / "dlrm_s_pytorch.py").write_text("raise SystemExit('no such option')")
    with pytest.raises(InputError, match="no such option"):
        compare(both(), peer=tmp_path, rounds=1, iterations=3, threads=1)


@pytest.mark.parametrize("rounds, iterations", [(0, 3), (2, 0)])
def test_counts_that_measure_nothing_are_refused(rounds, iterations):
    with pytest.raises(InputError, match=f"not {rounds} and {iterations}"):
        compare(both(), peer=None, rounds=rounds, iterations=iterations, threads=1)


def test_cases_are_valid_parameters_and_grow_in_one_thing():
    seed = load_parameters("parameters/seed.yaml")
    for case in shape_cases("all")[1:]:
        assert changed_parameters(seed, case.change)[0] != seed
    for name in GROWTH:
        sizes = []
        for case in growth_cases(name):
            given = changed_parameters(seed, case.change)[0]
            sizes.append(
                given.training.batch_size
                * len(given.model.table_rows)
                * given.model.embedding_dim
                * given.data.indices_per_lookup
            )
        assert sizes == sorted(set(sizes))
    with pytest.raises(InputError, match="expected one of batch"):
        growth_cases("width")
    with pytest.raises(InputError, match="'9x9'"):
        shape_cases("8x1M-10, 9x9")


def test_the_command_writes_json(tmp_path):
    (tmp_path / "p.yaml").write_text(json.dumps(SMALL))
    command = [sys.executable, "-m", "dlrm_core", "bench", "--rounds=1", "--iterations=2"]
    command += ["-f", "p.yaml", "--reference", "p.yaml", "--json", "out/bench.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert written["settings"]["threads"] == 1 and written["machine"]
    assert [case["case"] for case in written["cases"]] == ["given"]
    assert "end to end" in done.stdout


def test_the_gpu_checks_pass_against_the_cpu_itself():
    results = check(torch.device("cpu"))
    assert len(results["checks"]) == 8 + len(OPTIONS)
    for row in results["checks"]:
        assert row["ok"], row


def test_the_gpu_checks_see_a_wrong_device(monkeypatch):
    from dlrm_core import gpu_check as module

    small, calls = module._small, []

    def wrong(device, interaction, loss, seed):
        calls.append(seed)
        return small(device, interaction, loss, seed + len(calls) % 2)

    monkeypatch.setattr(module, "_small", wrong)
    assert not any(row["ok"] for row in check(torch.device("cpu"))["checks"][:6])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_check_says_so(tmp_path):
    with pytest.raises(InputError, match="sees no GPU"):
        gpu_check(argparse.Namespace(json=str(tmp_path / "x.json"), argv=["dlrm"]))
    assert not list(Path(tmp_path).iterdir())
