"""Of what is repeated the faster half counts, the same repetitions for what belongs together."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_workbook.analysis.steady import undisturbed

TIMES = st.lists(st.floats(0.1, 9.0), min_size=1, max_size=9)


@given(TIMES, TIMES, st.integers(1, 3))
def test_the_faster_half_of_each_setting_is_kept_on_all_ranks_alike(first, second, ranks):
    rows = pd.DataFrame(
        [
            {"run": run, "rank": rank, "iteration": i, "time_ms": time_ms * (1 + rank)}
            for run, times in enumerate((first, second))
            for i, time_ms in enumerate(times)
            for rank in range(ranks)
        ]
    )
    kept = undisturbed(rows, ["run"], "iteration")
    for run, times in enumerate((first, second)):
        own = kept[kept["run"] == run]
        chosen = set(own["iteration"])
        half = -(-len(times) // 2)
        assert len(chosen) == half and len(own) == half * ranks
        others = [time_ms for i, time_ms in enumerate(times) if i not in chosen]
        # sums over the ranks round
        assert max(times[i] for i in chosen) <= min(others, default=10.0) * (1 + 1e-9)


def test_parts_are_chosen_by_the_whole_they_make():
    parts = pd.DataFrame(
        {
            "iteration": [0, 0, 1, 1, 2, 2],
            "component": ["a", "b"] * 3,
            # the fastest a is in the slowest iteration
            "time_ms": [2.0, 2.0, 1.0, 9.0, 3.0, 2.0],
        }
    )
    kept = undisturbed(parts.assign(size=8), ["size"], "iteration")
    assert kept.groupby("component")["time_ms"].mean().to_dict() == pytest.approx(
        {"a": 2.5, "b": 2.0}
    )


def test_rows_without_a_count_are_all_kept():
    rows = pd.DataFrame({"size": [1, 1, 1, 2], "time_ms": [3.0, 1.0, 2.0, 9.0]})
    assert undisturbed(rows, ["size"], "iteration").equals(rows)
    counted = rows.assign(iteration=[0, 1, 2, 0])
    assert sorted(undisturbed(counted, ["size"], "iteration")["time_ms"]) == [1.0, 2.0, 9.0]
    assert undisturbed(counted[:0], ["size"], "iteration").empty
