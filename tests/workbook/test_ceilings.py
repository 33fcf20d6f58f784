"""Ceilings: the products are the model's own, the figures are consistent, memory is respected."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.config import parameters_from_sections
from dlrm_workbook.evidence import ceilings
from dlrm_workbook.evidence.ceilings import (
    Product,
    gather_action,
    measure_ceilings,
    model_products,
    model_shapes,
    native_precisions,
    stream_actions,
    time_products,
)
from dlrm_workbook.ground.turns import Action, best_times_ms

CPU = torch.device("cpu")


def parameters(**model):
    shape = {
        "bottom_mlp": [6, 16, 8],
        "top_mlp": [12, 1],
        "embedding_dim": 8,
        "table_rows": [500, 40],
    }
    return parameters_from_sections(
        {"model": shape | model, "training": {"batch_size": 32, "device": "cpu", "threads": 1}}
    )


@pytest.fixture
def briefly(monkeypatch):
    monkeypatch.setattr(ceilings, "GEMM_BUDGET_S", 0.3)
    monkeypatch.setattr(ceilings, "MEMORY_BUDGET_S", 0.1)
    monkeypatch.setattr(ceilings, "STREAM_BYTES", (1 << 20, 1 << 20))


def test_products_are_those_that_torch_runs():
    """Multiplications of a linear layer's forward and backward, counted by torch itself."""
    from torch.utils.flop_counter import FlopCounterMode

    run = parameters()
    mine = [p for p in model_products(run) if p.part == "bottom_mlp"]
    layers = [torch.nn.Linear(n, m) for n, m in itertools.pairwise(run.model.bottom_widths)]
    with FlopCounterMode(display=False) as counter:
        torch.nn.Sequential(*layers)(torch.rand(32, 6)).sum().backward()
    assert sum(p.flops for p in mine) == counter.get_total_flops()


def test_the_interaction_is_there_with_dot_only():
    (forward, backward) = (p for p in model_products(parameters()) if p.part == "interaction")
    assert (forward.m, forward.n, forward.k, forward.batch) == (3, 3, 8, 32)
    assert backward.flops == forward.flops
    with_cat = model_products(parameters(interaction="cat"))
    assert not [p for p in with_cat if p.part == "interaction"]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_each_call_multiplies_what_it_says(m, n, k):
    made = ceilings._Operands(CPU)
    for phase in ("forward", "backward_input", "backward_weight"):
        result = made.call(Product("top_mlp", 0, phase, m, n, k), torch.float32)()
        left, right = made.pair(Product("top_mlp", 0, phase, m, n, k), torch.float32)
        assert left.shape == (m, k) and right.shape == (k, n)
        assert torch.allclose(result, left @ right, atol=1e-4)


def test_equal_shapes_are_timed_once_and_each_has_its_row():
    run = parameters(top_mlp=[11, 11, 1])  # the interaction gives 11 values, too
    rows, missing = time_products(model_products(run), ["fp32"], CPU, 0.3)
    assert not missing and len(rows) == len(model_products(run))
    twins = [r for r in rows if r["part"] == "top_mlp" and r["phase"] == "forward"][:2]
    assert twins[0]["ms"] == twins[1]["ms"] and twins[0]["layer"] != twins[1]["layer"]
    for row in rows:
        work = 2 * row["m"] * row["n"] * row["k"] * row["batch"]
        assert row["gflops"] == pytest.approx(work / row["ms"] / 1e6)
        assert row["relative_error"] < 1e-5


def test_precisions_round_as_they_should_and_settings_are_put_back():
    have, reasons = native_precisions(CPU)
    assert "fp32" in have and "tf32" in reasons
    assert set(have) | set(reasons) == set(ceilings.PRECISIONS)
    switch = ceilings._onednn_switch()
    before = switch and switch.fp32_precision
    # rounding to 8 and 11 bits; emulated where the CPU cannot, with the same result
    rows, _ = time_products(model_products(parameters()), ["bf16", "fp16"], CPU, 0.3)
    for row in rows:
        low, high = (1e-4, 2e-2) if row["precision"] == "bf16" else (1e-5, 3e-3)
        assert low < row["relative_error"] < high
    assert (switch and switch.fp32_precision) == before


def test_what_has_no_room_is_left_out_with_the_reason(monkeypatch, briefly):
    monkeypatch.setattr(ceilings, "available_memory", lambda device: 4096)
    found, missing = measure_ceilings(model_shapes(parameters(), CPU), CPU)
    assert found["stream"] == [] and found["gather"] == []
    assert "available" in missing["ceilings.stream"]
    assert any(name.startswith("ceilings.gemm.fp32,") for name in missing)


def test_all_figures_are_there_and_agree(briefly):
    before = torch.get_num_threads()
    found, missing = measure_ceilings(model_shapes(parameters(), CPU), CPU)
    assert torch.get_num_threads() == before and found["threads"] == 1
    assert not [name for name in missing if not name.startswith("ceilings.gemm.")]
    assert {row["level"] for row in found["stream"]} == {"cache", "memory"}
    for row in found["stream"]:
        assert min(row[f"{kind}_gb_per_s"] for kind in ("read", "copy", "triad")) > 0
    assert [row["table_bytes"] for row in found["gather"]] == [500 * 8 * 4]  # fits in cache
    assert 0.05 < found["dispatch_us"] < 5000
    assert found["seconds"] > 0 and 0 <= found.get("run_queue_share", 0) <= 1


def test_streams_and_gathers_compute_what_their_names_say():
    a, b, c = torch.rand(3, 64)
    actions = stream_actions(a, b, c)
    assert actions["read"].call().item() == pytest.approx(float((a * a).sum()), rel=1e-5)
    actions["copy"].call()
    assert torch.equal(a, b)
    actions["triad"].call()
    assert torch.allclose(a, b + 3 * c)
    table = torch.arange(6.0).view(6, 1).expand(6, 4).contiguous()
    summed = gather_action(table, bags=5, bag=3)
    assert summed.call().shape == (5, 4)
    assert not torch.equal(summed.call(), summed.call()), "other rows at every call"


def test_what_fails_does_not_stop_the_rest():
    def fail():
        raise RuntimeError("not implemented for 'Half'\nlong trace")

    times, failed = best_times_ms({"a": Action(fail), "b": Action(lambda: None)}, CPU, 0.05)
    assert set(times) == {"b"} and failed == {"a": "not implemented for 'Half'"}


def test_a_budget_ends_measuring():
    calls = {name: 0 for name in "abc"}

    def slow(name):
        import time

        calls[name] += 1
        time.sleep(0.03)

    actions = {name: Action(lambda name=name: slow(name)) for name in calls}
    times, failed = best_times_ms(actions, CPU, 0.01)
    assert list(times) == ["a"] and calls == {"a": 1, "b": 0, "c": 0}
    assert all("meant for such measurements" in why for why in failed.values())


def test_probes_can_be_switched_off():
    from dlrm_workbook.recordings.torch.recorder import evidence, probed

    run = parameters()
    off = dataclasses.replace(run, profiling=dataclasses.replace(run.profiling, probes=False))
    found = evidence(off)
    assert "ceilings" not in found
    why = "profiling.probes is false"
    assert found["not_measured"]["ceilings"] == why
    assert probed(off, {"other": "reason"}) == {
        "not_measured": {"other": "reason", "part_probes": why}
    }
    assert found["memory_limit_bytes"] > found["available_bytes"] > 0
