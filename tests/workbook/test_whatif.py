"""What-if predictions: composition of parts, overlap, other GPUs, refusals."""

import math
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_rows import profile_of_rows

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters
from dlrm_core.parts import ITERATION_SPAN, span_name
from dlrm_workbook.analysis.devices import device
from dlrm_workbook.analysis.whatif import (
    Overlap,
    host_ms,
    measured_parts,
    prediction,
    together_ms,
    what_if_parts,
    what_if_table,
)
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.show.bottlenecks import what_if_bars
from dlrm_workbook.show.tables import Text, TextTable, show

PARTS = {
    ("data", "forward"): 10.0,
    ("bottom_mlp", "forward"): 5.0,
    ("embedding", "forward"): 20.0,
    ("top_mlp", "forward"): 30.0,
    ("top_mlp", "backward"): 60.0,
}
"""Milliseconds under the profiler."""


def profile_of(parts: dict[tuple[str, str], float] = PARTS, **meta: Any) -> Profile:
    """One iteration of these parts on a CPU thread, back to back."""
    trace, at = [], 0
    for number, ms in enumerate(parts.values()):
        trace.append((0, at, at + round(ms * 1e6), number + 2, 1))
        at += round(ms * 1e6)
    meta = {"parameters": Parameters().to_sections(), "device": "cpu"} | meta
    return profile_of_rows(
        {
            "parent": [-1, 0] + [1] * len(parts),
            "kind": ["thread"] + ["annotation"] * (1 + len(parts)),
            "name": ["main", ITERATION_SPAN, *(span_name(*part) for part in parts)],
            "component": ["other", "other", *(component for component, _ in parts)],
            "phase": ["", "", *(phase for _, phase in parts)],
        },
        [(0, row, "cpu_time_ms", "exclusive", ms) for row, ms in enumerate(parts.values(), 2)],
        [(0, 0, at, 1, 0), *trace],
        [(0, 0, at)],
        **meta,
    )


def probe(change: dict[str, Any], ratios: dict[tuple[str, str], float], **more: Any) -> Any:
    base: dict[str, dict[str, float]] = {}
    then: dict[str, dict[str, float]] = {}
    for (component, phase), ratio in ratios.items():
        base.setdefault(component, {})[phase] = 2.0
        then.setdefault(component, {})[phase] = 2.0 * ratio
    return {"change": change, "base": base, "parts": then, "spread": {}, "notices": []} | more


def probed(*probes: Any, **meta: Any) -> Profile:
    return profile_of(part_probes={"base": {}, "changes": list(probes)}, **meta)


HALF_TOP = probe(
    {"model.top_mlp": [512, 1]}, {("top_mlp", "forward"): 0.5, ("top_mlp", "backward"): 0.25}
)


def test_touched_parts_scale_and_the_others_stay() -> None:
    made = prediction(probed(HALF_TOP), {"model.top_mlp": [512, 1]})
    assert made.now_ms == pytest.approx(125.0)
    assert made.mid_ms == pytest.approx(10 + 5 + 20 + 15 + 15)
    assert made.low_ms < made.mid_ms < made.high_ms
    methods = made.parts.set_index(["component", "phase"])["method"]
    assert methods["top_mlp", "forward"] == "probes"
    assert methods["embedding", "forward"] == "measured"
    assert made.speedup["mid"] == pytest.approx(125 / 65)
    assert made.speedup["low"] < made.speedup["mid"] < made.speedup["high"]


def test_the_profilers_cost_is_taken_out_first() -> None:
    dilated = probed(HALF_TOP, unprofiled_iteration_ms=[100.0, 99.0, 101.0])
    made = prediction(dilated, {"model.top_mlp": [512, 1]})
    assert made.now_ms == pytest.approx(100.0)
    assert made.mid_ms == pytest.approx(65 * 100 / 125)


def test_parts_timed_without_the_profiler_count_where_there_are_some() -> None:
    plain = {span_name(*part): ms for part, ms in PARTS.items()} | {ITERATION_SPAN: 100.0}
    plain[span_name("top_mlp", "backward")] = 20.0  # not 60: the profiler tripled it
    profile = probed(HALF_TOP, unprofiled_parts_ms=[plain] * 3, unprofiled_iteration_ms=[85.0])
    parts = measured_parts(profile).set_index(["component", "phase"])["now_ms"]
    assert parts.sum() == pytest.approx(85.0)
    assert parts["top_mlp", "backward"] == pytest.approx(20.0)
    assert prediction(profile, {"model.top_mlp": [512, 1]}).mid_ms == pytest.approx(85 - 15 - 15)


def test_a_larger_batch_is_judged_by_the_sample() -> None:
    change = {"training.batch_size": 4096}
    made = prediction(probed(probe(change, dict.fromkeys(PARTS, 2.0))), change)
    assert made.mid_ms == pytest.approx(250.0)
    assert made.speedup["mid"] == pytest.approx(1.0)


def test_a_noisy_probe_widens_the_range() -> None:
    noisy = HALF_TOP | {"spread": {"top_mlp": {"forward": 0.3, "backward": 0.3}}}
    change = {"model.top_mlp": [512, 1]}
    calm, wide = (prediction(probed(p), change) for p in (HALF_TOP, noisy))
    assert wide.mid_ms == calm.mid_ms
    assert wide.high_ms - wide.low_ms > 2 * (calm.high_ms - calm.low_ms)


def test_a_change_of_nothing_keeps_the_time_exactly() -> None:
    made = prediction(profile_of(), {"training.batches": 7})
    assert made.low_ms == made.mid_ms == made.high_ms == made.now_ms
    assert "touches no part" in made.notices[0]


def test_without_a_probe_work_decides_with_a_wider_range() -> None:
    change = {"training.batch_size": 4096}
    by_work = prediction(profile_of(), change)
    by_probe = prediction(probed(probe(change, dict.fromkeys(PARTS, 2.0))), change)
    assert by_work.method == "roofline"
    # everything but the weights' share doubles
    assert 1.8 * by_work.now_ms < by_work.mid_ms <= 2.0 * by_work.now_ms + 1e-6
    assert by_work.high_ms - by_work.low_ms > by_probe.high_ms - by_probe.low_ms


@pytest.mark.parametrize(
    "change",
    [
        {"data.generator": "facebook_loop"},
        {"data.loader": "prefetch"},
        {"training.threads": 4},
        {"training.fused_optimizer": True},
    ],
)
def test_what_work_cannot_tell_is_refused_with_its_name(change: dict[str, Any]) -> None:
    (leaf,) = change
    with pytest.raises(InputError, match=leaf) as caught:
        prediction(probed(HALF_TOP), change)
    assert "compare" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"training.batch_sze": 1}, "batch_sze"),
        ({"training.batch_size": 0}, "batch_size"),
        ({"batch_size": 4}, "batch_size"),
        ({}, "empty"),
        ({"device": "H100-SXM"}, "profile of the CPU"),
        ({"device": "H900"}, "H900"),
    ],
)
def test_impossible_changes_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        prediction(profile_of(), change)


def test_a_refused_probe_and_a_profile_without_parts_or_parameters_say_why() -> None:
    refused = probe({"training.threads": 4}, {}, refused="it needs 9 GiB")
    for profile, change, said in (
        (probed(refused), {"training.threads": 4}, "9 GiB"),
        (profile_of(parameters=None), {"training.batch_size": 1}, "parameters"),
        (profile_of({("other", ""): 3.0}), {"training.batch_size": 1}, "names no part"),
    ):
        with pytest.raises(InputError, match=said):
            prediction(profile, change)


def test_the_embedding_width_takes_the_bottom_mlp_along() -> None:
    made = prediction(profile_of(), {"model.embedding_dim": 128})
    assert any("bottom_mlp" in text for text in made.notices)
    assert made.mid_ms > made.now_ms


def test_several_leaves_are_put_together_from_their_own_probes() -> None:
    batch = probe({"training.batch_size": 4096}, dict.fromkeys(PARTS, 2.0))
    made = prediction(probed(HALF_TOP, batch), {**batch["change"], **HALF_TOP["change"]})
    assert made.mid_ms == pytest.approx(2 * (10 + 5 + 20 + 15 + 15))
    assert made.method == "probes"
    assert "put together from single probes" in made.notices


# ---- overlap --------------------------------------------------------------------

times = st.floats(0.1, 1e4)
slow = st.floats(1.0, 8.0)


@given(times, times)
def test_perfect_overlap_is_the_longer_and_halved_speed_useless(data: float, rest: float) -> None:
    assert together_ms(data, rest, 1.0, 1.0) == pytest.approx(max(data, rest))
    # one core: both take twice as long while both run
    assert together_ms(data, rest, 2.0, 2.0) == pytest.approx(data + rest)
    assert Overlap().step_ms(data, rest) == data + rest, "not probed: a plain sum"


@given(times, times, slow, slow)
def test_overlap_by_simulation(data: float, rest: float, g: float, s: float) -> None:
    """Against the two progressing in small steps until both are done."""
    left, speed, clock = [data, rest], [1 / g, 1 / s], 0.0
    while max(left) > 0:
        both = min(left) > 0
        rates = speed if both else [1.0 if ms > 0 else 0.0 for ms in left]
        until = min(ms / rate for ms, rate in zip(left, rates, strict=True) if rate and ms > 0)
        left = [ms - until * rate for ms, rate in zip(left, rates, strict=True)]
        left = [0.0 if ms < 1e-9 else ms for ms in left]
        clock += until
    assert together_ms(data, rest, g, s) == pytest.approx(clock, rel=1e-6)


CONTENDED = {
    "data_alone_ms": 10.0,
    "data_beside_ms": {"dense": 15.0, "sparse": 15.0},
    "halves": {
        "dense": {"alone_ms": 60.0, "beside_ms": 72.0},
        "sparse": {"alone_ms": 40.0, "beside_ms": 48.0},
    },
}


def test_prefetching_hides_the_data_and_slows_the_rest() -> None:
    change = {"data.loader": "prefetch"}
    made = prediction(probed(probe(change, {}, overlap=CONTENDED)), change)
    # data 10 alone takes 15 beside; meanwhile the rest, 115 alone, runs at 1 / 1.2
    assert made.mid_ms == pytest.approx(15 + 115 - 15 / 1.2)


def test_leaving_prefetching_gives_back_what_it_saved() -> None:
    sections = Parameters().to_sections()
    sections["data"]["loader"] = "prefetch"
    change = {"data.loader": "synchronous"}
    waits = PARTS | {("data", "forward"): 0.1}
    profile = profile_of(
        waits,
        parameters=sections,
        part_probes={"changes": [probe(change, {}, overlap_base=CONTENDED)]},
    )
    made = prediction(profile, change)
    # the model's step: 15 + 100 - 15 / 1.2 = 102.5 of 115.1 measured; apart 110
    assert made.mid_ms == pytest.approx(115.1 / 102.5 * 110)


# ---- GPUs -----------------------------------------------------------------------


def gpu_profile(device_ms: float, gap_ms: float, name: str = "NVIDIA A100-SXM4-80GB") -> Profile:
    """An iteration whose host issues for 30 ms and then waits for the GPU."""
    sections = Parameters().to_sections()
    sections["training"]["device"] = "cuda"
    whole = device_ms + gap_ms

    def ns(ms: float) -> int:
        return round(ms * 1e6)

    values = [(0, 2, "cpu_time_ms", 30.0), (0, 3, "cpu_time_ms", whole - 30.0)]
    values.append((1, 4, "gpu_time_ms", device_ms))
    return profile_of_rows(
        {
            "parent": [-1, 0, 1, 2, 2],
            "kind": ["root", "annotation", "annotation", "runtime", "kernel"],
            "name": [
                *("root", ITERATION_SPAN, span_name("top_mlp", "forward")),
                *("cudaDeviceSynchronize", "gemm"),
            ],
            "component": ["other"] * 2 + ["top_mlp"] * 3,
            "phase": [""] * 2 + ["forward"] * 3,
        },
        [(thread, row, metric, "exclusive", ms) for thread, row, metric, ms in values],
        [
            (0, 0, ns(whole), 1, 0),
            (0, 0, ns(whole), 2, 1),
            (0, ns(30), ns(whole), 3, 2),
            (1, ns(gap_ms), ns(whole), 4, 0),
        ],
        [(0, 0, ns(whole))],
        streams=["stream 7"],
        parameters=sections,
        device="cuda",
        device_name=f"cuda ({name})",
    )


def test_another_gpu_speeds_up_the_device_and_not_the_host() -> None:
    profile = gpu_profile(100.0, 20.0)
    made = prediction(profile, {"device": "H100-SXM"})
    ratio = (made.mid_ms - 20.0) / 100.0
    assert made.method == "roofline"
    # between the gain in bandwidth and the gain in arithmetic
    a100, h100 = device("A100-80GB"), device("H100-SXM")
    gains = [a100.memory_gb_per_s / h100.memory_gb_per_s, a100.tflops["fp32"] / h100.tflops["fp32"]]
    assert min(gains) - 1e-9 <= ratio <= max(gains) + 1e-9
    assert made.low_ms < made.mid_ms < made.high_ms


def test_no_gpu_is_faster_than_the_host_that_feeds_it() -> None:
    profile = gpu_profile(35.0, 1.0)
    assert host_ms(profile) == pytest.approx(30.0)
    made = prediction(profile, {"device": "H200"})
    assert made.mid_ms == pytest.approx(30.0)
    assert made.low_ms == pytest.approx(30.0)


def test_a_gpu_without_the_precision_is_refused() -> None:
    profile = gpu_profile(35.0, 1.0)
    with pytest.raises(InputError, match="not listed"):
        prediction(gpu_profile(35.0, 1.0, name="Quadro 3"), {"device": "H200"})
    profile.meta["parameters"]["training"]["precision"] = "bf16"
    with pytest.raises(InputError, match="V100"):
        prediction(profile, {"device": "V100-32GB"})


# ---- tables and figures ---------------------------------------------------------


def test_the_table_ranks_by_speed_and_keeps_what_cannot_be_told() -> None:
    slower = probe({"training.batch_size": 1024}, dict.fromkeys(PARTS, 0.7))
    refused = probe({"training.threads": 4}, {}, refused="it needs 9 GiB")
    profile = probed(slower, HALF_TOP, refused)
    table = what_if_table(profile)
    assert table["change"].tolist() == [
        "model.top_mlp=512-1",
        "training.batch_size=1024",
        "training.threads=4",
    ]
    assert table["speedup_mid"].iloc[1] == pytest.approx(0.5 / 0.7)
    assert math.isnan(table["mid_ms"].iloc[2]) and "9 GiB" in table["note"].iloc[2]
    parts = what_if_parts(profile)
    sums = parts.groupby("change")["time_ms"].sum()
    assert sums["as it is"] == pytest.approx(125.0)
    assert sums["training.batch_size=1024"] == pytest.approx(125 * 0.7 * 2)
    figure = what_if_bars(table, parts)
    assert isinstance(figure, go.Figure)
    ranges = figure.data[-1]
    assert list(ranges.x) == pytest.approx([125 / 1.923, 175.0], rel=1e-3)
    shown = show(table, ["change", "mid_ms", "range", "predicted", "note"])
    assert isinstance(shown, TextTable)
    assert shown.rows[2][-1].endswith("it needs 9 GiB") and shown.rows[2][1:4] == ["–"] * 3
    # a range without end must not flatten the other bars; where it ends is written
    table.loc[1, "speedup_low"] = 0.001
    wide = what_if_bars(table, parts)
    assert isinstance(wide, go.Figure)
    assert wide.layout.xaxis.range[1] < 3 * 175
    assert "up to 125,000 ms" in wide.to_json()


def test_without_probes_and_of_another_program_the_figure_is_a_sentence() -> None:
    foreign = profile_of({("other", ""): 3.0}, parameters=None)
    assert what_if_table(foreign).empty and what_if_parts(foreign).empty
    for profile in (profile_of(), foreign):
        assert isinstance(what_if_bars(what_if_table(profile), what_if_parts(profile)), Text)


def test_measured_parts_sum_to_the_unprofiled_median(tmp_path: Path) -> None:
    profile = profile_of(unprofiled_iteration_ms=[80.0, 90.0, 1000.0])
    assert measured_parts(profile)["now_ms"].sum() == pytest.approx(90.0)
    profile.save(tmp_path / "profile")
    loaded = Profile.load(tmp_path / "profile")
    assert measured_parts(loaded)["now_ms"].sum() == pytest.approx(90.0)
