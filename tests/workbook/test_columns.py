"""docs/columns.md lists the columns that frames of real recordings have, and no others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from recordings import SEVERAL, recording

from dlrm_core.config import load_parameters
from dlrm_core.train import Trainer
from dlrm_workbook.analysis import (
    attribution,
    compare,
    difference_tree,
    ensemble,
    gpu,
    gpu_limits,
    idleness,
    lanes,
    launches,
    operators,
    other_gpu,
    roofline,
    training,
    views,
    whatif,
)
from dlrm_workbook.analysis.ranks import traces
from dlrm_workbook.explore import recordings
from dlrm_workbook.machine import REPOSITORY
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import SCHEMA, Profile
from dlrm_workbook.samples import sample_profile
from dlrm_workbook.show import profile as about

PAGE = REPOSITORY / "docs" / "columns.md"

OF_A_PROFILE: list[Callable[[Profile], pd.DataFrame]] = [
    attribution.attribute,
    attribution.per_iteration,
    attribution.what_differed,
    attribution.device_beside_host,
    attribution.unattributed,
    attribution.data_against_compute,
    views.top_down,
    views.bottom_up,
    views.flat,
    operators.top_operators,
    operators.call_tree,
    operators.timeline,
    operators.memory,
    operators.memory_curve,
    lanes.thread_timeline,
    lanes.trace_summary,
    gpu.kernel_table,
    gpu.copy_table,
    gpu.stall_table,
    gpu_limits.operator_rates,
    gpu_limits.rate_coverage,
    idleness.idle_causes,
    idleness.thread_states,
    idleness.outside_operators,
    idleness.overlaps,
    idleness.gpu_idleness,
    idleness.idle_blame,
    launches.launches_by_part,
    launches.launch_summary,
    launches.queue_depth,
    launches.operator_load,
    other_gpu.other_gpus,
    about.facts,
    about.passes,
    about.not_measured,
]


def listed() -> dict[str, set[str]]:
    """Each table's name to its columns, as the page has them."""
    tables: dict[str, set[str]] = {}
    name = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"#+ `([\w.]+)`", line):
            name = heading[1]
            tables[name] = set()
        elif name and line.startswith("| `"):
            tables[name] |= set(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return tables


def name_of(made: Callable[..., Any]) -> str:
    """A function as the page calls it."""
    module = made.__module__.removeprefix("dlrm_workbook.").removeprefix("analysis.")
    return f"{module}.{made.__name__}"


def frames_of(profile: Profile) -> dict[str, pd.DataFrame]:
    """What a notebook can ask of one profile."""
    parts = attribution.attribute(profile)
    frames = {name_of(make): make(profile) for make in OF_A_PROFILE}
    frames |= {table: getattr(profile, table) for table in SCHEMA}
    tree = difference_tree.difference_tree(profile, profile)
    estimates = compare.part_estimates(profile)
    ceilings = profile.meta.get("ceilings") or {"source": "none"}
    made = {
        views.folded: views.folded(views.top_down(profile)),
        difference_tree.difference_tree: tree,
        difference_tree.largest_changes: difference_tree.largest_changes(tree),
        gpu.stall_reasons: gpu.stall_reasons(gpu.stall_table(profile)),
        idleness.idle_by_cause: idleness.idle_by_cause(profile, idleness.idle_causes(profile)),
        roofline.roofline: roofline.roofline(profile, parts),
        whatif.predict: whatif.predict(profile, {"training.batch_size": 4096}),
        compare.compare_parts: compare.compare_parts(estimates, estimates),
        compare.recorded_differences: compare.recorded_differences(profile, profile),
        compare.device_differences: compare.device_differences(profile, profile),
        ensemble.part_table: ensemble.part_table({"run": profile}),
        about.ceilings_frame: about.ceilings_frame(ceilings),
    }
    return frames | {name_of(function): frame for function, frame in made.items()}


def frames_of_ranks(ranks: Mapping[int, Profile]) -> dict[str, pd.DataFrame]:
    """What a notebook can ask of the profiles of several ranks."""
    matches = traces.collectives(ranks)
    return {
        name_of(traces.collectives): matches,
        name_of(traces.rank_table): traces.rank_table(ranks, matches),
        name_of(traces.part_table): traces.part_table(ranks),
    }


def frames_of_training(root: Path) -> dict[str, pd.DataFrame]:
    """What the ``train`` notebook shows before it trains, and what can be opened after."""
    parameters = load_parameters(str(REPOSITORY / "parameters" / "quick.yaml"))
    toy = Trainer(training.small_copy(parameters))
    items = training.forecast_memory(parameters)
    return {
        "training.facts": training.facts(parameters),
        "training.memory_forecast": training.memory_forecast(parameters),
        "training.peak_memory": training.peak_memory(items),
        "training.weights": training.weights(toy.model),
        "training.bags": training.bags(toy.next_batch()),
        "recordings": recordings(output_root=str(root)),
    }


def test_every_column_is_listed_and_no_listed_one_is_dead(tmp_path: Path) -> None:
    found: dict[str, set[str]] = {}
    rows: dict[str, int] = {}
    for frames in (
        frames_of(sample_profile()),
        frames_of(open_recording(recording("dlrm-h100-pc.d")).profile),
        frames_of(open_recording(recording("traces/meta-dlrm-a100x8-rank3.json.gz")).profile),
        frames_of_ranks(open_recording(recording(SEVERAL)).ranks),
        frames_of_training(tmp_path),
    ):
        for name, frame in frames.items():
            found.setdefault(name, set()).update(map(str, frame.columns))
            rows[name] = rows.get(name, 0) + len(frame)
    page = listed()
    assert page.keys() == found.keys()
    wrong = {name: page[name] ^ columns for name, columns in found.items() if page[name] != columns}
    assert not wrong, f"listed and not there, or there and not listed: {wrong}"
    empty = {name for name, count in rows.items() if not count}
    # two runs that are one have no change; the sample was recorded without counters and ceilings
    unmeasured = {"idleness.thread_states", "show.profile.ceilings_frame"}
    assert empty <= unmeasured | {"difference_tree.largest_changes"}


def test_numbers_name_their_unit_or_are_of_a_known_kind() -> None:
    """Every time, size and rate says its unit where the page lists it."""
    text = PAGE.read_text(encoding="utf-8")
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        names = re.findall(r"`([^`]+)`", cells[0]) if line.startswith("| `") else []
        for name in names:
            unit = {"_ms": "ms", "_us": "µs", "_ns": "ns", "_bytes": "B", "_mb": "10⁶ B"}
            ends = [unit[end] for end in unit if name.endswith(end)]
            if ends and len(cells) > 2:
                assert ends[0] in cells[1], line


def test_metrics_of_the_engines_are_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for metric in sample_profile().metrics["metric"]:
        assert f"`{metric}`" in text


@pytest.mark.parametrize("table", SCHEMA)
def test_the_profiles_tables_are_whole(table: str) -> None:
    assert listed()[table] == set(SCHEMA[table])
