"""Parts of GPU work by its order: planted sequences, and real traces turned into HPCToolkit's."""

import functools
import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import TRACES, recording

from dlrm_core.parts import ITERATION_SPAN, span_name
from dlrm_workbook.analysis.attribution import attribute, coverage
from dlrm_workbook.recordings.alignment import (
    NO_ITERATION,
    align,
    align_profiles,
    launching_iteration,
    operation_key,
    operations_by_stream,
)
from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.spans import launched_in, with_spans
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.trace import read_trace

US = 1000
METRICS = {
    "metric": ["cpu_time_ms", "gpu_time_ms", "launches"],
    "unit": ["ms", "ms", ""],
    "meaning": ["time", "time", "kernels"],
    "source": "test",
}
PARTS = ["component", "phase"]


def built(
    operations: pd.DataFrame, host: list[tuple[int, int]], iterations: list[tuple[int, int]]
) -> Profile:
    """A profile as HPCToolkit gives it without Python frames.

    Args:
        operations: ``stream``, ``kind``, ``name``, ``start_ns``, ``end_ns``.
        host: (start, end) of the samples of the one CPU thread.
        iterations: those that the repeating launches tell.
    """
    named = operations[["kind", "name"]].drop_duplicates().reset_index(drop=True)
    count = len(named)
    contexts = pd.DataFrame(
        {
            "context": np.arange(3 + count),
            "parent": [-1, 0, 1] + [2] * count,
            "kind": ["root", "thread", "function", *named["kind"]],
            "name": ["<root>", "<main thread>", "at::launch", *named["name"]],
            "component": "other",
            "phase": "",
        }
    ).assign(shapes="", file="", line=0, module="")
    streams = sorted(operations["stream"].unique())
    placed = operations.merge(named.reset_index(names="at"), on=["kind", "name"], how="left")
    work = pd.DataFrame(
        {
            "profile": 1 + placed["stream"].map(streams.index),
            "start_ns": placed["start_ns"],
            "end_ns": placed["end_ns"],
            "context": 3 + placed["at"],
            "depth": 3,
        }
    )
    samples = pd.DataFrame(host, columns=["start_ns", "end_ns"])
    samples = samples.assign(profile=0, context=2, depth=2)
    lasted = (work["end_ns"] - work["start_ns"]) / 1e6
    kernels = work["context"].map(contexts["kind"]).eq("kernel")
    rows = [(2, "cpu_time_ms", (samples["end_ns"] - samples["start_ns"]).sum() / 1e6)]
    rows += [(c, "gpu_time_ms", ms) for c, ms in lasted.groupby(work["context"]).sum().items()]
    rows += [(c, "launches", n) for c, n in kernels.groupby(work["context"]).sum().items() if n]
    values = pd.DataFrame(rows, columns=["context", "metric", "value"])
    return Profile.build(
        contexts=contexts,
        metrics=METRICS,
        values=values.assign(profile=0, scope="exclusive"),
        threads={
            "profile": np.arange(1 + len(streams)),
            "kind": ["cpu_thread"] + ["gpu_stream"] * len(streams),
            "name": ["thread 0", *(f"GPU 1 stream {stream}" for stream in streams)],
            "rank": -1,
            "thread": [0, *streams],
        },
        trace=pd.concat([samples, work], ignore_index=True),
        iterations={
            "iteration": np.arange(len(iterations)),
            "start_ns": [start for start, _ in iterations],
            "end_ns": [end for _, end in iterations],
        },
        meta={"engine": "hpctoolkit", "device": "cuda", "not_measured": {}},
    )


def like_hpctoolkit(
    torch: Profile, rng: np.random.Generator, demangler: str
) -> tuple[Profile, pd.DataFrame]:
    """A torch recording as HPCToolkit would have made it, and the truth about its operations.

    Names are spelt HPCToolkit's way, launches and parts are gone, every time differs by up to
    10 %, 1 % of the kernels are missing and as many memory sets added.

    Returns:
        The profile; ``start_ns``, ``iteration``, ``component``, ``phase`` of each operation in
        order (memory sets that were added: iteration −2).
    """
    work = operations_by_stream(torch)
    truth = work.assign(iteration=launching_iteration(torch, work))
    truth[PARTS] = torch.contexts.loc[work["context"], PARTS].to_numpy()
    truth[["kind", "name"]] = torch.contexts.loc[work["context"], ["kind", "name"]].to_numpy()
    truth["stream"] = truth["profile"].map(torch.threads.set_index("profile")["thread"])
    truth = truth[(truth["kind"] != "kernel") | (rng.random(len(truth)) >= 0.01)]
    lasted = (truth["end_ns"] - truth["start_ns"]) * rng.uniform(0.9, 1, len(truth))
    truth["end_ns"] = truth["start_ns"] + lasted.astype(np.int64)
    extra = truth[rng.random(len(truth)) < 0.01].copy()
    extra["start_ns"] = extra["end_ns"] = extra["end_ns"] + 1
    extra = extra.assign(kind="copy", name="Memset (Device)", iteration=-2)
    truth = pd.concat([truth, extra]).sort_values(["stream", "start_ns"], kind="stable")
    spelled = {"HtoD": "<gpu copyin>", "DtoH": "<gpu copyout>", "Memset": "<gpu memset>"}

    def name(kind: str, said: str) -> str:
        if kind == "kernel":
            said = said.removeprefix("void ")
            return said if demangler == "libiberty" else said.replace("{lambda", "'lambda")
        return next((new for old, new in spelled.items() if old in said), "<gpu copy>")

    truth["name"] = [name(*pair) for pair in zip(truth["kind"], truth["name"], strict=True)]
    first, last = int(torch.trace["start_ns"].min()), int(torch.trace["end_ns"].max())
    return built(truth, [(first, last)], []), truth.reset_index(drop=True)


def only_iteration(profile: Profile, number: int) -> Profile:
    """The recording as if it knew of one iteration only."""
    tables = ("contexts", "metrics", "values", "threads", "trace")
    kept = {name: getattr(profile, name) for name in tables}
    return Profile.build(**kept, iterations=profile.iterations.iloc[[number]], meta=profile.meta)


@functools.cache
def torch_trace(name: str) -> Profile:
    return read_trace(recording(TRACES[name]))


@pytest.mark.parametrize("demangler", ["libiberty", "LLVM"])
@pytest.mark.parametrize("name", ["meta-dlrm-a100x8-rank3", "resnet50-v100-2021"])
def test_parts_of_a_real_trace_come_back_from_another_of_its_steps(name, demangler) -> None:
    torch = torch_trace(name)
    mine, truth = like_hpctoolkit(torch, np.random.default_rng(7), demangler)
    begins, ends = (torch.iterations[edge].to_numpy() for edge in ("start_ns", "end_ns"))
    found = align_profiles(mine, only_iteration(torch, 3), begins, ends)
    assert not found.reason
    assert min(found.share, found.time_share) > (0.98 if demangler == "libiberty" else 0.92)
    told = found.operations.sort_values(["profile", "start_ns"], kind="stable")
    kernels = (truth["iteration"] >= 0).to_numpy()
    assert np.array_equal(told["start_ns"], truth["start_ns"])
    same = (told[PARTS].to_numpy() == truth[PARTS].to_numpy()).all(axis=1)[kernels]
    named = (told["component"] != "other").to_numpy()[kernels]
    share = (truth["end_ns"] - truth["start_ns"])[kernels]
    right_time = share[same].sum() / share.sum()
    wrong_time = share[~same & named].sum() / share.sum()
    print(
        f"{name}, {demangler}: matched {found.share:.2%}, right {same.mean():.2%} "
        f"({right_time:.2%} of time), wrong {(~same & named).mean():.2%} ({wrong_time:.2%})"
    )
    assert same.mean() > 0.995 and right_time > 0.99 and wrong_time < 0.002
    assert (told["iteration"].to_numpy() == truth["iteration"].to_numpy())[kernels].mean() > 0.99


def test_operations_that_equal_names_leave_in_doubt_get_no_part() -> None:
    """Streams of one collective again and again, in a recording that begins in a step."""
    torch = torch_trace("torchrec-cuda-graphs-a100x16-rank0")
    begins, ends = (torch.iterations[edge].to_numpy() for edge in ("start_ns", "end_ns"))
    found = align_profiles(torch, torch, begins, ends)
    assert found.time_share < 0.7 and "at least 90% of both" in found.reason
    assert found.operations["component"].eq("other").all()


def test_names_of_both_tools_are_alike() -> None:
    ours = "at::native::reduce_kernel<512, 1, std::array<char*, 3ul> >(at::native::Op<float>)"
    theirs = "void at::native::reduce_kernel<512, 1, std::array<char*, 3> >(at::native::Op<float>)"
    assert operation_key("kernel", ours) == operation_key("kernel", theirs)
    assert operation_key("kernel", "sm90_xmma_gemm_tn") == "sm90_xmma_gemm_tn"
    lambdas = "f<(anonymous namespace)::g(int)::{lambda()#1}>(int, (anonymous namespace)::h<2>)"
    assert operation_key("kernel", lambdas) == "f<(anonymousnamespace)::g(int)::{lambda()#1}>"
    assert operation_key("copy", "<gpu copyin>") == operation_key(
        "copy", "Memcpy HtoD (Pageable -> Device)"
    )
    assert operation_key("copy", "<gpu memset>") == operation_key("copy", "Memset (Device)")


def longest_common(ours: list[int], theirs: list[int]) -> list[int]:
    """Length of the longest common subsequence of each beginning of ``ours`` with ``theirs``."""
    row = [0] * (len(theirs) + 1)
    found = [0]
    for mine in ours:
        above = row[:]
        for place, their in enumerate(theirs):
            row[place + 1] = (
                above[place] + 1 if mine == their else max(row[place], above[place + 1])
            )
        found.append(row[-1])
    return found


@given(st.lists(st.integers(0, 4), max_size=14), st.lists(st.integers(0, 4), max_size=10))
def test_alignment_has_the_fewest_differences(ours: list[int], theirs: list[int]) -> None:
    pairs = align(ours, theirs, len(ours) + len(theirs))
    assert pairs is not None
    assert all(ours[mine] == theirs[their] for mine, their in pairs)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(pairs))
    gone = pairs[-1][0] + 1 if pairs else 0
    best = min(n + len(theirs) - 2 * c for n, c in enumerate(longest_common(ours, theirs)))
    assert gone + len(theirs) - 2 * len(pairs) == best
    assert align(ours, theirs, best - 1) is None


WORK = [("data", "forward"), ("top_mlp", "forward"), ("top_mlp", "backward")]


def planted(
    names: list[int], iterations: int, lag: int, missing: set[int]
) -> tuple[pd.DataFrame, list[tuple[int, int]]]:
    """One stream's operations of 10 us, ``lag`` us behind a host that is 5 us ahead each time.

    ``names`` are one iteration's, a part each third; ``missing`` are left out.
    """
    period = 20 * len(names)
    rows, loops = [], []
    for number in range(iterations):
        loops.append((number * period * US, (number * period + 10 * len(names)) * US))
        for place, name in enumerate(names):
            start = (number * period + 20 * place + lag) * US
            part = WORK[place * len(WORK) // len(names)]
            rows.append((7, "kernel", f"k{name}", start, start + 10 * US, number, *part))
    columns = ["stream", "kind", "name", "start_ns", "end_ns", "iteration", *PARTS]
    table = pd.DataFrame(rows, columns=columns)
    return table.drop(index=[row for row in missing if row < len(table)]), loops


def torch_recording(operations: pd.DataFrame, loops: list[tuple[int, int]]) -> Profile:
    """torch.profiler's recording of planted work: each part launches its kernels from a range."""
    host, work, contexts = [], [], [(-1, "thread", "thread", "other", "")]
    known: dict[tuple[str, ...], int] = {}

    def context(parent: int, kind: str, name: str, component: str, phase: str) -> int:
        key = (str(parent), kind, name, component, phase)
        if key not in known:
            known[key] = len(contexts)
            contexts.append((parent, kind, name, component, phase))
        return known[key]

    for number, (begin, end) in enumerate(loops):
        inside = context(0, "annotation", ITERATION_SPAN, "other", "")
        host.append((0, begin, end, inside, 0))
        rows = operations[operations["iteration"] == number]
        for place, row in enumerate(rows.itertuples()):
            call = context(inside, "runtime", "cudaLaunchKernel", row.component, row.phase)
            host.append((0, begin + 2 * place + 1, begin + 2 * place + 2, call, 1))
            name = row.name if row.name.endswith((")", ">")) else f"void {row.name}(int)"
            kernel = context(call, row.kind, name, row.component, row.phase)
            work.append((1, row.start_ns, row.end_ns, kernel, 0))
    named = pd.DataFrame(contexts, columns=["parent", "kind", "name", *PARTS])
    named = named.assign(context=np.arange(len(named)), shapes="", file="", line=0, module="")
    return Profile.build(
        contexts=named,
        metrics=METRICS,
        values=None,
        threads={
            "profile": [0, 1],
            "kind": ["cpu_thread", "gpu_stream"],
            "name": ["thread", "GPU 0 stream 7"],
            "rank": -1,
            "thread": [1, 7],
        },
        trace=pd.DataFrame(
            host + work, columns=["profile", "start_ns", "end_ns", "context", "depth"]
        ),
        iterations=[
            {"iteration": n, "start_ns": begin, "end_ns": end}
            for n, (begin, end) in enumerate(loops)
        ],
        meta={"engine": "torch"},
    )


@settings(max_examples=30)
@given(
    st.permutations(range(30)),
    st.integers(1, 6),
    st.integers(0, 700),
    st.sets(st.integers(0, 179), max_size=4),
)
def test_planted_parts_are_found_however_far_the_host_is_ahead(
    names: list[int], iterations: int, lag: int, missing: set[int]
) -> None:
    whole, loops = planted(names, iterations, lag, set())
    mine, _ = planted(names, iterations, lag, missing)
    kept = {n: len(rows) for n, rows in mine.groupby("iteration")}
    if min(kept.values()) < 28:
        return
    profile = built(mine, [(0, loops[-1][1])], [])
    other = torch_recording(whole, loops)
    found = align_profiles(profile, other, *(np.array(edges) for edges in zip(*loops, strict=True)))
    assert not found.reason and found.share >= 0.9
    told = found.operations
    assert told["iteration"].tolist() == mine["iteration"].tolist()
    assert told[PARTS].to_numpy().tolist() == mine[PARTS].to_numpy().tolist()


def spans_of(operations: pd.DataFrame, loops: list[tuple[int, int]]) -> list[tuple[str, int, int]]:
    """The host's log: parts of equal length in each iteration."""
    rows = []
    for begin, end in loops:
        edges = [begin + (end - begin) * place // len(WORK) for place in range(len(WORK) + 1)]
        for part, (first, last) in zip(WORK, itertools.pairwise(edges), strict=True):
            rows.append((span_name(*part), first, last))
        rows.append((ITERATION_SPAN, begin, end))
    return rows


def test_gpu_work_has_its_iteration_and_part_and_totals_are_kept() -> None:
    mine, loops = planted(list(range(30)), 6, 400, {3, 47})
    before = built(mine, [(0, loops[-1][1])], [])
    whole, _ = planted(list(range(30)), 6, 400, set())
    placed = with_spans(before, spans_of(mine, loops), 1, torch_recording(whole, loops))
    for metric in ("gpu_time_ms", "launches", "cpu_time_ms"):
        assert placed.value_table(metric).sum() == pytest.approx(before.value_table(metric).sum())
    gpu = placed.value_table("gpu_time_ms").groupby(
        [placed.contexts["component"], placed.contexts["phase"]]
    )
    # five iterations of ten kernels a part, one of which is missing; 29 are of the warm-up
    times = gpu.sum()
    assert times["data", "forward"] == pytest.approx(0.5)
    assert times["top_mlp", "forward"] == pytest.approx(0.49)
    assert times["top_mlp", "backward"] == pytest.approx(0.5)
    assert times["other", ""] == pytest.approx(0.29)
    assert placed.value_table("launches").sum() == 178
    assert len(placed.iterations) == 5 and placed.meta["alignment"]["share"] > 0.98
    assert "aligned with a torch.profiler recording" in placed.meta["notices"][0]
    # the last kernel ends 400 us behind the host's last launch, and the iteration with it
    assert placed.iterations["end_ns"].iloc[-1] == mine["end_ns"].max()
    assert coverage(attribute(placed)) > 0.6


def test_without_a_second_recording_iterations_are_told_and_parts_are_not() -> None:
    mine, loops = planted(list(range(30)), 6, 400, set())
    own = [(g["start_ns"].min(), g["end_ns"].max()) for _, g in mine.groupby("iteration")]
    spans = spans_of(mine, loops)
    for stretches, how in ((own, "repeating sequence"), ([], "the host was in")):
        placed = with_spans(built(mine, [(0, loops[-1][1])], stretches), spans, 0, "it failed")
        assert placed.not_measured["parts of GPU work"] == "it failed"
        assert how in placed.meta["notices"][0]
        kernels = placed.contexts["kind"].eq("kernel")
        assert placed.contexts.loc[kernels, "component"].eq("other").all()
        assert len(placed.iterations) == 6


def test_another_program_is_not_aligned() -> None:
    mine, loops = planted(list(range(30)), 6, 400, set())
    foreign, _ = planted(list(range(15, 45)), 6, 400, set())
    placed = with_spans(
        built(mine, [(0, loops[-1][1])], []), spans_of(mine, loops), 0,
        torch_recording(foreign, loops),
    )  # fmt: skip
    assert placed.not_measured["parts of GPU work"].startswith("50.0% of the GPU operations")
    assert placed.contexts.loc[placed.contexts["kind"].eq("kernel"), "component"].eq("other").all()


def test_repeating_launches_count_to_the_iteration_that_launched_them() -> None:
    # the GPU is more than an iteration behind: the clock alone would be wrong
    mine, loops = planted(list(range(30)), 6, 700, set())
    begins, ends = (np.array(edges) for edges in zip(*loops, strict=True))
    own = [(g["start_ns"].min(), g["end_ns"].max()) for _, g in mine.groupby("iteration")]
    profile = built(mine, [(0, loops[-1][1])], own[1:])
    number, _ = launched_in(profile, operations_by_stream(profile), begins, ends)
    truth = mine["iteration"].to_numpy()
    assert (number[truth > 0] == truth[truth > 0]).all()
    assert (number[truth == 0] == NO_ITERATION).all()


def test_parts_of_the_h100_database_come_back_from_the_order_of_one_iteration() -> None:
    """HPCToolkit's own trace with all its irregularities; its call paths say what is true."""
    path = recording("dlrm-h100-pc.d")
    known = profile_from_database(read_database(path))
    loops = list(known.iterations[["start_ns", "end_ns"]].itertuples(index=False, name=None))
    work = operations_by_stream(known).assign(stream=7)
    work["iteration"] = np.searchsorted(known.iterations["start_ns"], work["start_ns"], "right") - 1
    for columns in (PARTS, ["kind", "name"]):
        work[columns] = known.contexts.loc[work["context"], columns].to_numpy()
    one = work[work["iteration"] == 50].assign(iteration=0)
    placed = with_spans(known, spans_of(work, loops), 0, torch_recording(one, loops[50:51]))
    assert placed.meta["alignment"]["share"] > 0.995
    assert placed.meta["alignment"]["time_share"] > 0.995

    def times(profile: Profile) -> pd.Series:
        rows = [profile.contexts[name] for name in PARTS]
        return profile.value_table("gpu_time_ms").groupby(rows).sum()

    table = pd.DataFrame({"paths": times(known), "order": times(placed)}).drop("other").dropna()
    print(table.round(3).to_string())
    assert len(table) == 13 and table["paths"].sum() > 138
    assert (table["order"] - table["paths"]).abs().max() < 0.15
    for metric in ("gpu_time_ms", "launches", "copy_bytes", "calls", "GINS"):
        whole = known.value_table(metric).sum()
        assert placed.value_table(metric).sum() == pytest.approx(whole, rel=1e-9)


def test_clocks_that_differ_are_named() -> None:
    mine, loops = planted(list(range(300)), 3, 0, set())
    whole = torch_recording(mine, loops)
    profile = built(mine, [(0, loops[-1][1])], [])

    def shifted(by_us: int) -> Profile:
        rows = [(name, start + by_us * US, end + by_us * US) for name, start, end in spans]
        return with_spans(profile, rows, 0, whole)

    # the host is 100 us ahead of the GPU at most
    spans = spans_of(mine, [(begin, begin + 5900 * US) for begin, _ in loops])
    assert not shifted(0).meta.get("cautions")
    (caution,) = shifted(1200).meta["cautions"]
    assert "before the host began the part" in caution
    assert "clocks" in shifted(10**12).not_measured["parts of GPU work"]
