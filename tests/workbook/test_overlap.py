"""Hidden and exposed time of copies, communication and making data."""

from pathlib import Path

import gpu_trace
import pytest
from gpu_trace import launched, read

from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.context_tree import reason_of
from dlrm_workbook.analysis.idleness import overlaps


def test_copies_and_data_behind_kernels_are_hidden(tmp_path: Path) -> None:
    events = [
        *gpu_trace.events(),
        *launched(200, (0.2, 0.5), "from_before", (1, 11), stream=9),
        *launched(201, (0.6, 0.8), "ncclDevKernel_AllReduce", (80, 99), stream=11),
    ]
    table = overlaps(read(tmp_path, events)).set_index("what")
    figures = (table[["total_ms", "hidden_ms", "exposed_ms"]] * 1e3).round(3)
    assert figures.loc["copies"].tolist() == [10, 4, 6]  # 56..66, a kernel until 60
    assert figures.loc["data"].tolist() == [16, 9, 7]  # 2..18, the kernel of before until 11
    assert figures.loc["communication"].tolist() == [19, 15, 4]  # 80..99, reduce until 95
    assert table["exposed_share"]["copies"] == pytest.approx(0.6)
    assert table["of_iteration"]["data"] == pytest.approx(0.07)
    assert table["where"].to_dict() == {
        "copies": "device",
        "communication": "device",
        "data": "host",
    }


def test_on_a_cpu_what_the_iterating_thread_makes_is_exposed(tmp_path: Path) -> None:
    host_only = gpu_trace.host_events()
    profile = read(tmp_path, host_only)
    table = overlaps(profile)
    parts = attribute(profile).set_index("component")["time_ms"]
    assert table[["what", "where"]].to_numpy().tolist() == [["data", "host"]]
    assert table["exposed_ms"].tolist() == pytest.approx([parts["data"]])
    profile.meta["parameters"] = {"data": {"loader": "prefetch"}}
    profile.meta["threads_cpu"] = [
        {"kind": "python", "cpu_ms_per_iteration": 0.3},
        {"kind": "iterating", "cpu_ms_per_iteration": 9.0},
    ]
    ahead = overlaps(profile).set_index("where").loc["other threads"]
    assert (ahead["hidden_ms"], ahead["exposed_ms"]) == pytest.approx((0.3, 0))


def test_without_iterations_there_is_a_reason(tmp_path: Path) -> None:
    profile = read(tmp_path, gpu_trace.events())
    profile.iterations = profile.iterations.iloc[:0]
    assert overlaps(profile).empty and reason_of(overlaps(profile))
