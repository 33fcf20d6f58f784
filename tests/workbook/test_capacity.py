"""What a run needs: against what runs take, by the formulas, and where it fits."""

import dataclasses
import json
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from small_training import sections_with

from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import available_host_memory
from dlrm_core.base.text import format_bytes
from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_core.model import build_model
from dlrm_kernels import memory as capacity
from dlrm_kernels.memory import (
    MemoryItem,
    advice,
    dense_peak,
    forecast_memory,
    largest_batch,
    largest_on_gpu,
    largest_rows,
    require_memory,
    total_bytes,
)
from dlrm_workbook import cli
from dlrm_workbook.analysis.capacity import CUDA_CONTEXT_BYTES, capacity_of, sheet_verdict
from dlrm_workbook.analysis.devices import DEVICES, device
from dlrm_workbook.show.tables import TextTable, show

T15_ROWS = [
    7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209,
    10667, 104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35,
]  # fmt: skip
"""NVIDIA's T15: 32,709,138 rows, with 128 floats each 15.60 GiB."""

LOWEST, HIGHEST = 0.75, 1.15
"""Taken / forecast. The share that glibc's heap keeps of freed pieces differs from shape to
shape, 0 to 0.3 of what is made anew; the forecast takes half of that."""


SECTIONS = {
    "model": {"embedding_dim": 64, "tables": 8},
    "data": {"generator": "uniform", "indices_per_lookup": 2},
    "training": {"batches": 2, "device": "cpu", "threads": 1},
}
sections = partial(sections_with, SECTIONS)
SHAPES = {
    "embeddings": sections(
        {"bottom_mlp": [64, 64], "top_mlp": [64, 1], "table_rows": 150_000},
        {"indices_per_lookup": 10},
        batch_size=512,
    ),
    "wide MLPs": sections(
        {"bottom_mlp": [512, 1024, 64], "top_mlp": [1024, 1024, 1024, 1], "table_rows": 1000},
        batch_size=8192,
    ),
    "interaction": sections(
        {"bottom_mlp": [13, 32], "top_mlp": [128, 1], "embedding_dim": 32, "tables": 64}
        | {"table_rows": 1000},
        {"indices_per_lookup": 1},
        batch_size=6144,
    ),
    # the batch makes every vector larger than 32 MiB: glibc keeps smaller pieces when freed
    "cross layers": sections(
        {"bottom_mlp": [13, 32], "top_mlp": [128, 1], "embedding_dim": 32, "tables": 20}
        | {"table_rows": 1000, "interaction": "dcn", "dcn_rank": 128},
        {"indices_per_lookup": 1},
        batch_size=16384,
    ),
    "Wukong layers": sections(
        {"bottom_mlp": [13, 64, 64], "top_mlp": [12, 1], "tables": 20, "table_rows": 1000}
        | {"interaction": "wukong", "wukong_layers": 3, "wukong_fmb": 12, "wukong_lcb": 12}
        | {"wukong_rank": 16, "wukong_hidden": 7},
        {"indices_per_lookup": 4},
        batch_size=8192,
    ),
    "sparse gradients": sections(
        {"bottom_mlp": [64, 64], "top_mlp": [64, 1], "table_rows": 40_000},
        {"indices_per_lookup": 100},
        batch_size=2048,
        optimizer="rowwise_adagrad",
    ),
    "state": sections(
        {"bottom_mlp": [64, 64], "top_mlp": [64, 1], "table_rows": 80_000},
        {"indices_per_lookup": 30, "generator": "zipf"},
        batch_size=4096,
        optimizer="adagrad",
        embedding_backend="fused",
    ),
}


def parameters(model: dict | None = None, data: dict | None = None, **training) -> Parameters:
    small = {"bottom_mlp": [16, 64], "top_mlp": [16, 1], "table_rows": [100, 300, 200], "tables": 3}
    return parameters_from_sections(sections(small | (model or {}), data, **training))


@pytest.fixture(scope="module")
def taken() -> dict[str, int]:
    program = Path(__file__).parents[1] / "peak_memory.py"
    done = subprocess.run(
        [sys.executable, str(program)],
        input=json.dumps(list(SHAPES.values())),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(SHAPES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_the_forecast_is_what_a_run_takes(taken, name):
    forecast = total_bytes(forecast_memory(parameters_from_sections(SHAPES[name])))
    lowest = 0.85 if name == "embeddings" else LOWEST  # of large pieces none stays in the heap
    assert lowest * forecast <= taken[name] <= HIGHEST * forecast, taken[name] / forecast


# ---- formulas --------------------------------------------------------------------


def by_name(found: Parameters, gpu: bool = False) -> dict[str, MemoryItem]:
    return {item.name: item for item in forecast_memory(found, gpu)}


def test_tables_and_weights_are_counted_exactly():
    found = by_name(parameters())
    assert found["embedding table 1"].bytes == 300 * 64 * 4
    assert found["bottom MLP weights"].bytes == found["bottom MLP gradients"].bytes
    assert found["bottom MLP weights"].bytes == 4 * (16 * 64 + 64)
    # the dot interaction's width: 4 * 3 / 2 + 64
    assert found["top MLP weights"].bytes == 4 * (70 * 16 + 16 + 16 * 1 + 1)
    half = by_name(parameters(precision="bf16"))
    assert half["bottom MLP weights"].bytes == 6 * (16 * 64 + 64)


def test_cross_layers_weights_are_counted_exactly():
    dcn = {"interaction": "dcn", "dcn_layers": 2, "dcn_rank": 5}
    found = parameters(dcn, optimizer="adagrad")
    width, rank = 4 * 64, 5
    own = 2 * (2 * width * rank + width)
    assert found.model.dense_weights["interaction"] == own
    items = by_name(found)
    assert items["cross layers weights"].bytes == items["cross layers gradients"].bytes == 4 * own
    assert items["top MLP weights"].bytes == 4 * (width * 16 + 16 + 16 * 1 + 1)
    dense = sum(found.model.dense_weights.values())
    assert items["optimiser state"].bytes == 4 * (600 * 64 + dense)
    model = build_model(found.model, None, torch.device("cpu"))
    assert dense == sum(weight.numel() for weight in model.dense_weights())
    assert capacity_of(found).parameters["cross_layers"] == own
    assert "weights in cross layers" in set(capacity_of(found).weights()["what"])


def test_stages_that_follow_each_other_do_not_add_up():
    items = [
        MemoryItem("a", "", 10, "host"),
        MemoryItem("b", "", 5, "host", capacity.DENSE),
        MemoryItem("c", "", 7, "host", capacity.EMBEDDINGS),
        MemoryItem("d", "", 100, "gpu"),
    ]
    assert total_bytes(items, "host") == 17
    assert total_bytes(items, "gpu") == 100
    assert total_bytes(items, "disk") == 0
    assert total_bytes(items) == 117


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("interaction", ["dot", "cat", "dcn"])
def test_the_dense_peak_grows_with_its_rows(precision, interaction):
    base = parameters({"interaction": interaction}, batch_size=100, precision=precision)
    twice = parameters({"interaction": interaction}, batch_size=200, precision=precision)
    chunk = parameters(
        {"interaction": interaction}, batch_size=200, precision=precision, micro_batch=100
    )
    one, two, three = dense_peak(base), dense_peak(twice), dense_peak(chunk)
    assert two.activations == 2 * one.activations and two.gradients == 2 * one.gradients
    assert three == one


def test_the_dense_peak_of_one_layer_is_counted_by_hand():
    # bottom 1-1, top 2-1, one table of width 1, cat: at the top MLP's backward pass the output
    # of the bottom layer, z (2) and the output are alive, and twice the output's gradient;
    # then, in the layer itself, without its output, the gradients of output and input
    tiny = parameters_from_sections(
        {
            "model": {
                "bottom_mlp": [1, 1],
                "top_mlp": 1,
                "embedding_dim": 1,
                "table_rows": 1,
                "tables": 1,
                "interaction": "cat",
            },
            "training": {"batch_size": 1},
        }
    )
    peak = dense_peak(tiny)
    assert (peak.activations + peak.gradients) // 4 == max(1 + 2 + 1 + 2, 1 + 2 + 1 + 2, 1 + 2 + 4)


def test_the_experiments_lookups_follow_the_bag_law():
    seed = parameters_from_sections({})
    found = by_name(seed)["sparse embedding gradients"]
    # 1..99 have width 1/100 but 1, which also has what rounds to 0 and 1; 100 has half
    mean = sum(range(2, 100)) / 100 + 100 * 0.005 + 1 * 0.015
    assert found.bytes == pytest.approx(2048 * 8 * mean * (64 * 4 + 8), rel=1e-6)


def test_on_a_gpu_batches_are_on_both_sides():
    data = {"loader": "prefetch", "prefetch_batches": 3}
    batches = [i for i in forecast_memory(parameters(None, data), True) if i.name == "batches"]
    assert {item.place for item in batches} == {"gpu", "host"}
    host = next(item for item in batches if item.place == "host")
    gpu = next(item for item in batches if item.place == "gpu")
    # one in use, three that wait, one in the thread's hands
    one = next(i for i in forecast_memory(parameters(), True) if i.name == "batches")
    assert host.bytes == gpu.bytes == 5 * one.bytes
    made_there = parameters(None, {"place": "device"})
    places = [i.place for i in forecast_memory(made_there, True) if i.name == "batches"]
    assert places == ["gpu"]


def test_tables_beyond_the_gpus_share_take_host_memory():
    split = parameters(embeddings_on_gpu_bytes=300 * 256, optimizer="rowwise_adagrad")
    items = forecast_memory(split, gpu=True)
    where = {item.name: item.place for item in items}
    assert [where[f"embedding table {t}"] for t in range(3)] == ["gpu", "host", "gpu"]
    found = by_name(split, True)
    assert found["optimiser state of the host"].bytes == 300 * 4
    assert found["copies of pooled vectors and gradients"].bytes == 2 * 2048 * 64 * 4
    whole = total_bytes(forecast_memory(parameters(optimizer="rowwise_adagrad"), True), "gpu")
    assert total_bytes(items, "gpu") < whole


# ---- what fits -------------------------------------------------------------------


def t15(**training) -> Parameters:
    return parameters_from_sections(
        {
            "model": {
                "mlp_sizes": "nvidia",
                "dense_features": 13,
                "bottom_mlp": [512, 256, 128],
                "top_mlp": [1024, 1024, 512, 256, 1],
                "embedding_dim": 128,
                "tables": 26,
                "table_rows": T15_ROWS,
            },
            "data": {"generator": "zipf", "indices_per_lookup": 1, "fixed_pooling": True},
            "training": {"batch_size": 65536} | training,
        }
    )


def test_nvidias_small_model_fits_where_nvidia_trained_it():
    # 15.60 GiB of tables; trained on one A100-80GB (and 40GB) with batch 65536
    found = {sheet.name: sheet_verdict(t15(), sheet) for sheet in DEVICES}
    assert all(found[name].fits for name in ("A100-40GB", "A100-80GB", "H100-SXM", "V100-32GB"))
    assert not found["V100-16GB"].fits and found["V100-16GB"].gpus == 2
    tables = sum(item.bytes for item in forecast_memory(t15(), True) if "table" in item.name)
    assert tables == 32_709_138 * 128 * 4


def test_a_larger_model_is_refused_by_how_much_it_is_too_large():
    twenty = dataclasses.replace(
        t15(), model=dataclasses.replace(t15().model, table_rows=tuple(8 * r for r in T15_ROWS))
    )
    verdict = sheet_verdict(twenty, device("A100-80GB"))
    limit = 80 * 10**9 - CUDA_CONTEXT_BYTES
    assert verdict.fits is False and verdict.limit_bytes == limit
    assert verdict.exceeded_by_bytes == verdict.needed_bytes - limit > 0
    assert verdict.largest_batch is None
    # what is said to fit does, and a little more does not
    assert verdict.rows_factor == pytest.approx(verdict.largest_rows / (8 * 32_709_138))
    assert 0 < verdict.rows_factor < 1
    assert verdict.largest_on_gpu_bytes is not None
    split = t15(embeddings_on_gpu_bytes=verdict.largest_on_gpu_bytes)
    split = dataclasses.replace(split, model=twenty.model)
    items = forecast_memory(split, True)
    assert total_bytes(items, "gpu") <= limit
    assert total_bytes(items, "host") > 60 * 10**9


def test_the_full_data_set_fits_on_eight_gpus_and_each_keeps_its_share():
    t0 = load_parameters("nvidia_t0")
    verdict = sheet_verdict(t0, device("A100-80GB"))
    assert (verdict.gpus, verdict.fits) == (8, False)
    assert verdict.each_bytes is not None and verdict.limit_bytes is not None
    eighth = sum(t0.model.table_rows) * 512 / 8
    assert eighth < verdict.each_bytes < min(verdict.limit_bytes, 1.05 * eighth)
    # whole tables where there are as many as ranks, and a table more than one rank's share is cut
    even = parameters({"tables": 4, "table_rows": 1000}, batch_size=64)
    kept = {item.name: item for item in forecast_memory(even, True, ranks=4)}
    rows = sorted(kept[f"embedding table {t}"].bytes // 256 for t in range(4))
    assert rows == [1, 1, 1, 1000]
    assert kept["vectors exchanged with other ranks"].bytes == 2 * 64 * 64 * 4
    # on both sides of a rank
    there = t15(embeddings_on_gpu_bytes=1 << 30)
    items = forecast_memory(there, True, ranks=4)
    assert total_bytes(items, "gpu") < 4 << 30 < total_bytes(items, "host") < 8 << 30


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 400), st.integers(2, 64), st.integers(24, 34), st.booleans())
def test_the_largest_is_the_last_that_fits(rows, batch, power, gpu):
    limit, place = 1 << power, "gpu" if gpu else "host"
    base = parameters({"table_rows": 1000 * rows, "tables": 4}, batch_size=batch)

    def needed(**changes) -> int:
        training = dataclasses.replace(base.training, **changes)
        changed = dataclasses.replace(base, training=training)
        return total_bytes(forecast_memory(changed, gpu), place)

    found = largest_batch(base, place, limit, gpu)
    if found is None:
        assert needed(batch_size=1) > limit
    else:
        assert needed(batch_size=found) <= limit < needed(batch_size=found + 1)
    total = largest_rows(base, place, limit, gpu)
    if total is not None:
        model = dataclasses.replace(base.model, table_rows=(total // 4,) * 4)
        assert (
            total_bytes(forecast_memory(dataclasses.replace(base, model=model), gpu), place)
            <= limit
        )
        model = dataclasses.replace(base.model, table_rows=(total // 4 + 2,) * 4)
        assert limit < total_bytes(
            forecast_memory(dataclasses.replace(base, model=model), gpu), place
        )
    on_gpu = largest_on_gpu(base, limit)
    if on_gpu is not None:
        split = dataclasses.replace(
            base, training=dataclasses.replace(base.training, embeddings_on_gpu_bytes=on_gpu)
        )
        assert total_bytes(forecast_memory(split, True), "gpu") <= limit


def test_a_refusal_says_both_numbers_the_difference_and_what_would_fit(monkeypatch):
    monkeypatch.setattr("dlrm_kernels.memory.available_memory", lambda device: 500 * 2**20)
    given = parameters({"table_rows": 1_000_000})
    needed = total_bytes(forecast_memory(given))
    with pytest.raises(InputError) as error:
        require_memory(given, torch.device("cpu"))
    first = str(error.value).splitlines()[0]
    for number in (needed, 500 * 2**20, needed - 500 * 2**20):
        assert format_bytes(number) in first
    rows = largest_rows(given, "host", 500 * 2**20, False)
    assert f"tables of {rows:,} rows in all would fit" in first
    assert "no training.batch_size would fit" in first


def test_advice_for_a_gpu_names_the_share_that_fits():
    text = advice(t15(), "gpu", 8 << 30, True)
    most = largest_on_gpu(t15(), 8 << 30)
    assert f"training.embeddings_on_gpu_bytes: {most} would fit" in text
    assert "in host memory" in text


def test_limits_of_the_process_count():
    code = (
        "import resource\n"
        "from dlrm_core.base.machine import available_host_memory\n"
        "resource.setrlimit(resource.{}, (1 << 31, -1))\n"
        "print(available_host_memory())"
    )
    for limit in ("RLIMIT_AS", "RLIMIT_DATA"):
        assert 1 << 30 < int(run_python(code.format(limit))) < 1 << 31
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


# ---- what users see --------------------------------------------------------------


def test_the_report_holds_together_and_is_json():
    found = capacity_of(t15(), gpu_bytes=10 << 30)
    assert [v.target for v in found.verdicts] == [
        "this host",
        "this GPU",
        *(sheet.name for sheet in DEVICES),
    ]
    assert found.parameters["tables"] == 32_709_138 * 128
    assert found.parameters["all"] == found.parameters["tables"] + found.parameters["mlps"]
    assert found.needed_bytes["gpu"] == found.verdicts[1].needed_bytes
    assert found.verdicts[1].fits is False and found.verdicts[2].fits is True
    assert all(v.source.startswith("https://") for v in found.verdicts[2:])
    assert json.loads(json.dumps(found.to_json()))["verdicts"][1]["target"] == "this GPU"
    shown = show(found.table())
    assert isinstance(shown, TextTable)
    fits = shown.columns.index("fits")
    assert [row[fits] for row in shown.rows[1:3]] == ["no", "yes"]
    assert "4,186,769,664" in str(show(found.weights()))


def test_the_command_prints_tables_and_json(tmp_path, capsys):
    file = tmp_path / "some.yaml"
    file.write_text(json.dumps(SHAPES["embeddings"]))
    assert cli.main(["capacity", "-f", str(file)]) == 0
    text = capsys.readouterr().out
    assert "embedding table 0" in text and "A100-40GB" in text and "this host" in text
    assert cli.main(["capacity", "-f", str(file), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["items"][0] == {
        "name": "embedding table 0",
        "shape": "150,000 x 64",
        "bytes": 38_400_000,
        "place": "host",
        "when": "always",
    }
    available = available_host_memory()
    assert available is not None
    assert tree["verdicts"][0]["limit_bytes"] == pytest.approx(available, rel=0.5)
