"""Several ranks' traces: matched collectives, waiting told from transfer, the late rank named."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_trace import call, kernel, mark, on_gpu, operator
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import SEVERAL, recording

from dlrm_workbook.analysis import rank_traces as traces
from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.findings import findings
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.trace import read_trace

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def fleet(
    folder: Path,
    work_us: Sequence[Sequence[float]],
    *,
    transfer_us: float = 50.0,
    clock_us: Mapping[int, float] | None = None,
    missing: Mapping[int, int] | None = None,
    group: Mapping[int, str] | None = None,
    kinds: Sequence[str] = (SEND, ALL_REDUCE),
    marked: bool = True,
    asked: str = "",
) -> dict[int, Profile]:
    """Ranks that work (in the bottom MLP, ``work_us[rank][step]``), then exchange; per step one
    collective of each kind, the second straight after the first.

    Args:
        clock_us: how far a rank's clock is ahead.
        missing: how many collectives at its beginning a rank's recording lacks.
        group: name and ranks of each rank's communicator.
        marked: whether steps are marked.
        asked: the range that launches the exchanges.
    """
    clock, ranks = clock_us or {}, range(len(work_us))
    events: dict[int, list[Any]] = {rank: [] for rank in ranks}
    now = dict.fromkeys(ranks, 1000.0)
    number = 0
    for step in range(len(work_us[0])):
        begun = dict(now)
        for rank in ranks:
            number += 1
            work = now[rank] + work_us[rank][step]
            events[rank] += [
                mark("## forward:bottom_mlp ##", now[rank], work),
                call("cudaLaunchKernel", now[rank] + 1, now[rank] + 2, number),
                kernel("sgemm", now[rank] + 3, work - 1, number, stream=3),
            ]
            now[rank] = work
        for kind in kinds:
            sets = {(group or {}).get(rank, "") for rank in ranks}
            for one in sorted(sets):
                members = [rank for rank in ranks if (group or {}).get(rank, "") == one]
                end = max(now[rank] for rank in members) + transfer_us
                for rank in members:
                    said = {"Collective name": "allreduce" if kind == ALL_REDUCE else "all_to_all"}
                    said |= {"Process Group Name": "dp", "Process Group Ranks": one}
                    said = said if one else {}
                    if asked:
                        number += 1
                        said |= {"correlation": number}
                        launch = call("cudaLaunchKernel", now[rank], end, number)
                        events[rank] += [mark(asked, now[rank], end), launch]
                    events[rank].append(on_gpu("kernel", kind, now[rank], end, 20, **said))
                    now[rank] = end
        for rank in ranks if marked else ():
            events[rank].append(mark(f"ProfilerStep#{step}", begun[rank], now[rank]))
    found = {}
    for rank in ranks:
        exchanged = [e for e in events[rank] if e["name"] in kinds]
        left_out = exchanged[: (missing or {}).get(rank, 0)]
        own = [e for e in events[rank] if not any(e is one for one in left_out)]
        for event in own:
            event["ts"] += 10_000 + clock.get(rank, 0.0)
        path = folder / f"rank{rank}.json"
        distributed = {"rank": rank, "world_size": len(work_us), "backend": "nccl"}
        path.write_text(json.dumps({"traceEvents": own, "distributedInfo": distributed}))
        found[rank] = read_trace(path)
    return found


# ---- a real recording -------------------------------------------------------------------


@pytest.fixture(scope="module")
def eight() -> Any:
    return open_recording(recording(SEVERAL))


def test_collectives_of_eight_ranks_are_those_of_the_raw_events(eight: Any) -> None:
    table = traces.collectives(eight.ranks)
    assert table["kind"].tolist() == ["all-to-all"] * 4 + [
        *("all-reduce", "all-to-all", "all-reduce", "all-reduce")
    ]
    assert set(table.attrs["unmatched"].values()) == {0} and set(table["ranks"]) == {8}
    assert table["elements"].tolist() == [6144, 24, 384, 3392, 394241, 6144, 112, 226960]
    # By hand from the kernels of the eight files: the second collective lasts 1032, 1025, 517,
    # 1021, 1108, 1060, 520 and 8 us on ranks 0 to 7.
    second = table.iloc[1]
    assert second["transfer_us"] == 8 and second["last_rank"] == 7
    durations = np.array([1032, 1025, 517, 1021, 1108, 1060, 520, 8])
    assert second["wait_us"] == pytest.approx((durations - 8).mean())
    assert table.attrs["waits"][1] == pytest.approx(durations - 8)
    assert second["longest_wait_us"] == 1100 and second["late_us"] == 509
    # the last one: 952, 922, 915, 879, 69, 79, 920, 803
    last = table.iloc[7]
    assert (last["transfer_us"], last["last_rank"], last["late_us"]) == (69, 4, 10)
    assert not table["counted"].iloc[0] and table["counted"].iloc[1:].all()
    assert table["spread_us"].max() < 10, "clocks of one machine"


def test_ranks_of_the_recording_add_up(eight: Any) -> None:
    table = traces.rank_table(eight.ranks).set_index("rank")
    assert table.attrs["per"] == "per iteration"
    # steps and unions of the raw events; what was launched before keeps rank 1 for 1.334 ms
    assert table["step_ms"][[0, 1]].tolist() == pytest.approx([14.455, 19.901 - 1.334])
    assert table["communication_ms"][[0, 1, 2, 3]].tolist() == pytest.approx(
        [5.798, 11.336, 3.492, 9.774]
    )
    assert table["busy_ms"][0] == pytest.approx(6.590)
    both = table[["transfer_ms", "waiting_ms", "start_ms"]].sum(axis=1)
    assert (both - table["communication_ms"]).abs().max() < 0.02, "that is all communication"
    assert table["last_in"].to_dict() == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 2, 6: 0, 7: 4}
    parts = traces.parts_over_ranks(eight.ranks)
    assert parts.attrs["each"][0].sum() == pytest.approx(6.851, abs=0.001)


def test_the_finding_names_the_late_rank(eight: Any) -> None:
    found = findings(eight.profile, attribute(eight.profile), eight.ranks)
    finding = next(one for one in found if one.id == "rank_imbalance")
    assert "above all for rank 7" in finding.title and finding.share_of_step < 0.2
    assert finding.predicted_speedup["high"] <= 1 / (1 - finding.share_of_step) + 1e-9
    alone = findings(eight.profile, attribute(eight.profile))
    assert "rank_imbalance" not in [one.id for one in alone]


# ---- small ones -------------------------------------------------------------------------


def test_a_late_rank_is_named_with_the_part_that_took_longer(tmp_path: Path) -> None:
    ranks = fleet(tmp_path, [[300.0] * 6, [500.0] * 6, [310.0] * 6])
    table = traces.collectives(ranks)
    firsts = table[(table["kind"] == "all-to-all") & table["counted"]]
    assert set(firsts["last_rank"]) == {1} and set(firsts["transfer_us"]) == {50.0}
    assert firsts["wait_us"].tolist() == pytest.approx([(200 + 190) / 3] * 5)
    assert set(firsts["component"]) == {"bottom_mlp"} and set(firsts["where"]) == {"device"}
    assert firsts["longer_us"].tolist() == pytest.approx([195.0] * 5)
    seconds = table[table["kind"] == "all-reduce"]
    assert set(seconds["last_rank"]) == {-1}, "all leave the first together"
    by_rank = traces.rank_table(ranks, table).set_index("rank")
    assert by_rank["waiting_ms"].tolist() == pytest.approx([1.0 / 6, 0.0, 0.95 / 6])
    assert by_rank["others_wait_ms"][1] == pytest.approx(0.195 * 5 / 6)
    found = findings(ranks[0], attribute(ranks[0]), ranks)
    finding = next(one for one in found if one.id == "rank_imbalance")
    assert "rank 1" in finding.title and "bottom MLP forward on the GPU" in finding.evidence


def test_ranks_without_steps_are_compared_whole(tmp_path: Path) -> None:
    work = np.random.default_rng(5).uniform(200, 900, (2, 3))
    ranks = fleet(tmp_path, work.tolist(), marked=False)
    assert all(profile.iterations.empty for profile in ranks.values())
    table = traces.collectives(ranks)
    waits = np.abs(work[0] - work[1]) / 2
    assert table["wait_us"][::2].tolist() == pytest.approx(waits.tolist(), abs=0.01)
    late = table[table["counted"] & table["last_rank"].ge(0)]
    assert set(late["component"]) == {"bottom_mlp"}
    by_rank = traces.rank_table(ranks, table)
    assert by_rank.attrs["per"] == "in the whole recording" and not by_rank["busy_ms"].isna().any()


def test_ranks_without_a_gpu_have_no_collectives(tmp_path: Path) -> None:
    ranks = {}
    for rank in (0, 1):
        path = tmp_path / f"rank{rank}.json"
        path.write_text(json.dumps({"traceEvents": [operator("aten::mm", 0, 50)]}))
        ranks[rank] = read_trace(path)
    table = traces.collectives(ranks)
    assert table.empty and "no communication kernels" in table.attrs["not_measured"]
    by_rank = traces.rank_table(ranks, table)
    assert by_rank["busy_ms"].isna().all() and by_rank["waiting_ms"].isna().all()
    assert traces.parts_over_ranks(ranks).empty
    assert traces.collectives({0: ranks[0]}).attrs["not_measured"] == traces.ONE


def test_sending_to_one_rank_is_no_collective(tmp_path: Path) -> None:
    ranks = fleet(tmp_path, [[300.0] * 4, [600.0] * 4], kinds=(SEND,), asked="nccl:send 0->1")
    table = traces.collectives(ranks)
    assert set(table["kind"]) == {"send or receive"} and not table["counted"].any()
    sent = fleet(tmp_path, [[300.0] * 4, [600.0] * 4], kinds=(SEND,), asked="nccl:all_to_all")
    assert set(traces.collectives(sent)["kind"]) == {"all-to-all"}


def test_even_ranks_wait_for_nobody(tmp_path: Path) -> None:
    ranks = fleet(tmp_path, [[300.0] * 4, [302.0] * 4])
    assert set(traces.collectives(ranks)["last_rank"]) == {-1}
    names = [one.id for one in findings(ranks[0], attribute(ranks[0]), ranks)]
    assert "rank_imbalance" not in names


def test_recordings_cut_at_different_moments_match_by_their_ends(tmp_path: Path) -> None:
    """Only the shift by whole steps makes the ends meet, since no step is as long as the next."""
    work = np.random.default_rng(3).uniform(200, 900, (3, 12))
    whole = traces.collectives(fleet(tmp_path, work.tolist()))
    cut = fleet(tmp_path, work.tolist(), missing={1: 2, 2: 5}, clock_us={1: 7e5, 2: -5e3})
    table = traces.collectives(cut)
    assert len(table) == len(whole) - 5
    assert table.attrs["unmatched"] == {0: 5, 1: 3, 2: 0}
    assert table["wait_us"].tolist() == pytest.approx(whole["wait_us"].tolist()[5:])


def test_communicators_are_told_apart_by_their_ranks(tmp_path: Path) -> None:
    group = {0: "[0, 1]", 1: "[0, 1]", 2: "[2, 3]", 3: "[2, 3]"}
    ranks = fleet(tmp_path, [[300.0] * 4, [400.0] * 4, [300.0] * 4, [900.0] * 4], group=group)
    table = traces.collectives(ranks)
    assert set(table["ranks"]) == {2}
    late = table[table["counted"] & (table["kind"] == "all-to-all")]
    assert late.groupby("last_rank")["longest_wait_us"].mean().to_dict() == {1: 100, 3: 600}


def test_collectives_that_differ_are_not_matched(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = fleet(tmp_path / "a", [[300.0] * 4])
    other = fleet(tmp_path / "b", [[300.0] * 4], kinds=(SEND, SEND, ALL_REDUCE))
    table = traces.collectives({0: one[0], 1: other[0]})
    assert table.empty and "do not match" in table.attrs["not_measured"]
    by_rank = traces.rank_table({0: one[0], 1: other[0]}, table)
    assert by_rank["waiting_ms"].isna().all() and by_rank["busy_ms"].gt(0).all()


@settings(max_examples=15)
@given(
    st.lists(st.lists(st.integers(50, 2000), min_size=5, max_size=5), min_size=2, max_size=4),
    st.integers(1, 400),
    st.lists(st.integers(-(10**7), 10**7), min_size=4, max_size=4),
)
def test_waiting_is_what_was_planted(tmp_path_factory, work, transfer, clocks) -> None:
    folder = tmp_path_factory.mktemp("fleet")
    ranks = fleet(
        folder, work, transfer_us=transfer, clock_us=dict(enumerate(clocks)), kinds=(ALL_REDUCE,)
    )
    table = traces.collectives(ranks)
    assert len(table) == 5 and table["transfer_us"].tolist() == pytest.approx([transfer] * 5)
    spent = np.array(work, dtype=float)
    np.testing.assert_allclose(table.attrs["waits"].T, spent.max(axis=0) - spent, atol=0.01)
    assert (table["spread_us"] < 1).all()
