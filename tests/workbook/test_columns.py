"""``dlrm help columns`` lists the columns of frames of real recordings, and no others."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import scaling_records
from compare_profiles import TINY, noisy
from recordings import SEVERAL, recording
from test_bench import bare_round
from test_compare import change_comparison
from test_compare_pages import Measured
from test_scaling_page import with_spans
from test_stability import seed_run

from dlrm_core.config import load_parameters, parameters_from_sections
from dlrm_core.train import Trainer, train
from dlrm_studies import other_gpu
from dlrm_studies.bench import analyse as bench
from dlrm_studies.bench import embeddings_show
from dlrm_studies.bench import show as bench_show
from dlrm_studies.bench.bare import judge_bare
from dlrm_studies.protocols import measure as protocols_run
from dlrm_studies.protocols import show as protocols
from dlrm_studies.scaling import analyse as scaling
from dlrm_studies.scaling.model import choice, communication, links, published, record
from dlrm_studies.stability import measure as stability
from dlrm_studies.time_to_train import measure as target
from dlrm_workbook.analysis import (
    attribution,
    compare,
    device_counters,
    difference_tree,
    ensemble,
    experiment,
    gpu,
    gpu_limits,
    idleness,
    lanes,
    launches,
    lines,
    operators,
    reference,
    reuse,
    roofline,
    training,
    verdict,
    views,
    whatif,
)
from dlrm_workbook.analysis import rank_traces as traces
from dlrm_workbook.analysis.capacity import Capacity, capacity_here
from dlrm_workbook.analysis.findings import findings
from dlrm_workbook.explore import recordings
from dlrm_workbook.ground.machine import REPOSITORY
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import SCHEMA, Profile
from dlrm_workbook.runner.index import write_index
from dlrm_workbook.samples import sample_profile
from dlrm_workbook.show import profile as about
from dlrm_workbook.show.tables import COLUMNS, COLUMNS_FILE, FORMATS
from dlrm_workbook.trials.compare.comparison import Comparison, Outcome
from dlrm_workbook.trials.sweep.analyse import SweepSummary
from dlrm_workbook.trials.sweep.plan import Sweep

OF_A_BENCHMARK: list[Callable[[Mapping[str, Any]], pd.DataFrame]] = [
    bench.times,
    bench.ratios,
    bench.without,
    bench.ladder,
    bench.bare,
    bench.reached,
    bench.losses,
    bench.conditions,
]


OF_A_PROFILE: list[Callable[[Profile], pd.DataFrame]] = [
    attribution.attribute,
    attribution.per_iteration,
    attribution.what_differed,
    attribution.device_beside_host,
    attribution.unattributed,
    views.top_down,
    views.bottom_up,
    views.flat,
    operators.top_operators,
    operators.call_tree,
    operators.timeline,
    operators.memory,
    operators.memory_curve,
    lanes.thread_timeline,
    gpu.kernel_table,
    gpu.copy_table,
    gpu.stall_table,
    device_counters.counter_table,
    gpu_limits.operator_rates,
    gpu_limits.rate_coverage,
    idleness.idle_causes,
    idleness.thread_states,
    idleness.outside_operators,
    idleness.overlaps,
    idleness.gpu_idleness,
    idleness.idle_blame,
    reuse.cache_hit_shares,
    reuse.row_reuse,
    launches.launches_by_part,
    launches.launch_summary,
    launches.queue_depth,
    launches.operator_load,
    lines.lines,
    lines.functions,
    lines.statements,
    lines.hottest,
    whatif.what_if_parts,
    verdict.timed_table,
    other_gpu.other_gpus,
    about.recording_facts,
    about.passes,
    about.unmeasured_frame,
]


def listed() -> dict[str, set[str]]:
    """Each table's name to its columns, as the page has them."""
    tables: dict[str, set[str]] = {}
    name = ""
    for line in COLUMNS_FILE.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"#+ `([\w.]+)`", line):
            name = heading[1]
            tables[name] = set()
        elif line.startswith("# "):
            name = ""
        elif name and line.startswith("| `"):
            tables[name] |= set(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return tables


def name_of(made: Callable[..., Any]) -> str:
    """A function as the page calls it."""
    module = made.__module__.removeprefix("dlrm_workbook.").removeprefix("analysis.")
    return f"{module}.{made.__qualname__}"


def frames_of(profile: Profile) -> dict[str, pd.DataFrame]:
    """What a notebook can ask of one profile."""
    parts = attribution.attribute(profile)
    frames = {name_of(make): make(profile) for make in OF_A_PROFILE}
    frames |= {table: getattr(profile, table) for table in SCHEMA}
    tree = difference_tree.difference_tree(profile, profile)
    estimates = compare.part_estimates(profile)
    ceilings = profile.meta.get("ceilings") or {"source": "none"}
    scaled = reference.at_reference(profile)
    found = findings(scaled, attribution.attribute(scaled))
    made: dict[Callable[..., Any], pd.DataFrame] = {
        findings: pd.DataFrame([vars(finding) for finding in found]),
        verdict.table: verdict.table(verdict.stages(scaled, found)),
        reference.other_times: reference.other_times(scaled),
        other_gpu.parts_held_against: other_gpu.parts_held_against(profile, profile),
        other_gpu.held_against: other_gpu.held_against(profile, profile),
        views.folded: views.folded(views.top_down(profile)),
        difference_tree.difference_tree: tree,
        difference_tree.largest_changes: difference_tree.largest_changes(tree),
        gpu.stall_reasons: gpu.stall_reasons(gpu.stall_table(profile)),
        idleness.idle_by_cause: idleness.idle_by_cause(profile, idleness.idle_causes(profile)),
        roofline.roofline: roofline.roofline(profile, parts),
        roofline.operator_limits: roofline.operator_limits(profile),
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
        name_of(traces.parts_over_ranks): traces.parts_over_ranks(ranks),
    }


def frames_of_training(root: Path) -> dict[str, pd.DataFrame]:
    """What the ``train`` notebook shows before it trains and after, and what can be opened."""
    parameters = load_parameters(str(REPOSITORY / "parameters" / "quick.yaml"))
    toy = Trainer(training.small_copy(parameters))
    items = training.forecast_memory(parameters)
    capacity = capacity_here(parameters)
    small = training.small_copy(parameters)
    planned = {"batches": 4, "log_every": 2, "eval_every": 2, "eval_batches": 1}
    planned |= {"lr_warmup_steps": 3}
    data = dataclasses.replace(small.data, round_targets=True)
    told = dataclasses.replace(small.training, **planned)
    small = dataclasses.replace(small, data=data, training=told)
    (root / "trained").mkdir()
    result = train(small, root / "trained")
    return {
        "training.planned_facts": training.planned_facts(parameters),
        "training.memory_forecast": training.memory_forecast(parameters),
        "training.peak_memory": training.peak_memory(items),
        "training.weights": training.weights(toy.model),
        "training.bags": training.bags(toy.next_batch()),
        "training.one_step": training.one_step(toy, toy.next_batch()),
        "training.result_facts": training.result_facts(result),
        "training.intervals": training.intervals(root / "trained"),
        "training.evaluations": training.evaluations(root / "trained", best=0.9),
        "training.losses": training.losses(result),
        "training.boxes": training.boxes(small),
        "training.schedule": training.schedule(small, 4),
        name_of(Capacity.table): capacity.table(),
        name_of(Capacity.weights): capacity.weights(),
        "recordings": recordings(output_root=str(root)),
    }


def frames_of_steps_timed_together() -> dict[str, pd.DataFrame]:
    """Whole steps under changes, and a run that both profilers measured."""
    profile = sample_profile()
    change = {"training.precision": "bf16"}
    profile.meta["together"] = {
        "base_ms": [10.0, 11.0],
        "stages": [{"change": change, "ms": [5.0, 5.5]}],
    }
    engines = [noisy(0, meta={"engine": name}) for name in ("hpctoolkit", "torch")]
    both = compare.engines_side_by_side(*engines)
    scaled = reference.at_reference(profile)
    parts = attribution.attribute(scaled)
    named = {f"{engine}_ms": "NAME_ms" for engine in ("hpctoolkit", "torch")}
    named |= {f"{engine}_cost_ms": "NAME_cost_ms" for engine in ("hpctoolkit", "torch")}
    return {
        name_of(verdict.timed_table): verdict.timed_table(profile),
        name_of(verdict.finding_table): verdict.finding_table(findings(scaled, parts)),
        name_of(compare.engines_side_by_side): both.rename(columns=named),
    }


def frames_of_the_experiment(profile: Profile) -> dict[str, pd.DataFrame]:
    """What the ``experiment`` notebook makes of the GPU's recording."""
    return {
        name_of(experiment.beside): experiment.beside(profile, None),
        name_of(experiment.steps): experiment.steps(profile),
        name_of(experiment.tables_seen): experiment.tables_seen(profile),
    }


def frames_of_a_comparison(folder: Path) -> dict[str, pd.DataFrame]:
    """What the ``compare`` notebook shows of a change that was run in turns."""
    compared = change_comparison(folder)
    compared.profiles["changed"] = noisy(1, meta={"versions": {"torch": "3"}})
    profiles = dict.fromkeys(compared.profiles, "PROFILE")
    settings = {"baseline_ms": "SETTING_ms", "step-1_ms": "SETTING_ms", "step-2_ms": "SETTING_ms"}
    settings |= {f"baseline / step-{n}": "BASELINE / SETTING" for n in (1, 2)}
    made: dict[Callable[..., Any], pd.DataFrame] = {
        Comparison.prediction_table: compared.prediction_table(),
        Comparison.ratio_table: compared.ratio_table().rename(columns=settings),
        Comparison.outcome_table: compared.outcome_table(),
        Comparison.other_times: compared.other_times(),
        Comparison.difference_table: compared.difference_table().rename(columns=profiles),
        Outcome.part_table: compared.outcomes[0].part_table(),
    }
    return {name_of(function): frame for function, frame in made.items()} | {
        "trials.compare.analyse.round_table": compared.times
    }


def frames_of_a_sweep(folder: Path) -> dict[str, pd.DataFrame]:
    """What the ``sweep`` notebook shows of a finished grid."""
    grid = {"training.batch_size": [16, 32, 64, 128]}
    swept = parameters_from_sections(TINY | {"sweep": grid})
    sweep = Sweep.begin(folder, swept, ["profile"], {}, "dlrm run profile")
    assert sweep.run(Measured()) == 0
    found = SweepSummary(folder)
    table = found.finding_table()
    points = {name: "at N" for name in table.columns if name.startswith("at ")}
    return {
        "trials.sweep.analyse.SweepSummary.points": found.points,
        name_of(SweepSummary.finding_table): table.rename(columns=points),
        name_of(ensemble.law_table): found.laws,
    }


def frames_of_scaling(folder: Path) -> dict[str, pd.DataFrame]:
    """What the ``scaling`` notebook shows of a finished record."""
    runs = [(1, 512, "table_wise"), (2, 512, "table_wise"), (4, 512, "row_wise")]
    file = folder / "record.json"
    file.write_text(json.dumps(with_spans(scaling_records.document(runs, slow_rank=1.5))))
    found = scaling.start(scaling_records.parameters(), folder, record=str(file))
    found.measure()
    strong = found.predicted("strong", (1, 2, 64))
    checked = record.predicted_and_measured(found.record, found.parameters)
    assert found.link_check is not None
    made: dict[Callable[..., Any], pd.DataFrame] = {
        communication.study_table: communication.study_table(),
        communication.volumes_by_sharding: found.volumes(4),
        choice.memory_extremes: found.memory(4),
        links.links_table: found.links,
        links.check: found.link_check,
        choice.scaling_table: strong,
        choice.best_sharding: found.choice(4).candidates,
        choice.straggler_table: found.stragglers(strong, choice.Slowness()),
        record.measured_iterations: record.measured_iterations(found.record),
        record.predicted_and_measured: checked,
        record.shown_iteration: record.shown_iteration(found.record, 2),
        record.parts_by_rank: record.parts_by_rank(found.record, 2),
        record.imbalance: record.imbalance(found.record),
        record.exchange_times: record.exchange_times(found.record),
        published.mlperf_scaling: published.mlperf_scaling(),
    }
    return {name_of(function): frame for function, frame in made.items()}


def frames_of_a_benchmark() -> dict[str, pd.DataFrame]:
    """What the ``benchmark`` notebook shows of the results that the repository holds."""
    results = REPOSITORY / "benchmarks" / "results"
    step = bench.read_benchmark(results / "step.json")
    one = next(case for case in step["cases"] if case["kind"] == "shape")
    one["bare"] = judge_bare([bare_round(0, 40.0, 4.0, 4.0)], one["runs"], {"plain": "fp32"})
    backends = embeddings_show.read_embeddings(str(results / "embeddings.json"))
    assert backends is not None
    timed = bench.times(step)
    few = parameters_from_sections(TINY)
    told = {
        "title": "tiny",
        "parameters": few.to_sections(),
        "measured": protocols_run.measure(Trainer(few), 4, [16], steps=30),
        "machine": {},
        "versions": {},
        "command": "",
    }
    seeds = stability.summarise(few, [seed_run(number, 0.8) for number in range(3)])
    spread = stability.stability_table({"fp32": seeds})
    devices = {f"peak_memory_{name}_bytes": "peak_memory_DEVICE_bytes" for name in ("host", "gpu")}
    growth = bench.growth(step)
    result = dict.fromkeys(target.KEPT, 0.5) | {
        "power": {"energy_j": 1.0},
        "evaluations": [{"iteration": 1, "elapsed_s": 1.0, "auc": 0.5}],
    }
    reached = {"target": 0.5, "price_per_hour": 1.0, "result": result}
    reached["parameters"] = few.to_sections()
    made: dict[Callable[..., Any], pd.DataFrame] = {
        **{make: make(step) for make in OF_A_BENCHMARK},
        bench.growth: growth,
        bench.slopes: bench.slopes(growth),
        embeddings_show.embedding_times: embeddings_show.embedding_times(backends),
        bench_show.best_speeds: bench_show.best_speeds(timed),
        protocols.training: protocols.training(told),
        protocols.latencies: protocols.latencies(told),
        protocols.power_and_memory: protocols.power_and_memory(told),
        protocols.speeds: protocols.speeds(told, bench_show.best_speeds(timed)),
        protocols.eight_columns: protocols.eight_columns(told, {"fp32": seeds}),
        stability.stability_table: spread.rename(columns=devices),
        stability.precision_table: stability.precision_table({"fp32": seeds, "bf16": seeds}),
        target.time_to_auc: target.time_to_auc(reached),
        target.auc_by_time: target.auc_by_time(reached),
    }
    return {name_of(function): frame for function, frame in made.items()}


def frame_of_the_list(root: Path) -> dict[str, pd.DataFrame]:
    """The list of all runs, whose columns are those of the page."""
    run = root / "2026-01-02" / "030405-train-quick"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"notebook": "train"}')
    page = write_index(root).read_text(encoding="utf-8")
    return {"index.html": pd.DataFrame([], columns=re.findall(r"<th[^>]*>([^<]*)</th>", page))}


def test_every_column_is_listed_and_no_listed_one_is_dead(tmp_path: Path) -> None:
    found: dict[str, set[str]] = {}
    rows: dict[str, int] = {}
    on_gpu = open_recording(recording("dlrm-h100-pc.d")).profile
    counted = open_recording(recording("labelled/hta-cupti-counters.json.gz")).profile
    places = [tmp_path / name for name in ("compared", "swept", "scaled", "trained", "listed")]
    for place in places:
        place.mkdir()
    for frames in (
        frames_of(sample_profile()),
        frames_of(on_gpu),
        frames_of_the_experiment(on_gpu),
        frames_of_steps_timed_together(),
        frames_of_a_comparison(places[0]),
        frames_of_a_sweep(places[1]),
        frames_of_scaling(places[2]),
        frames_of_a_benchmark(),
        frame_of_the_list(places[4]),
        frames_of(open_recording(recording("traces/meta-dlrm-a100x8-rank3.json.gz")).profile),
        {"device_counters.counter_table": device_counters.counter_table(counted)},
        frames_of_ranks(open_recording(recording(SEVERAL)).ranks),
        frames_of_training(places[3]),
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
    # no stack was sampled; only the heads of the page are read; the profile is our own program's
    unmeasured |= {
        "lines.lines",
        "lines.functions",
        "lines.statements",
        "lines.hottest",
        "index.html",
        "roofline.operator_limits",
    }
    # tests/workbook/test_statistics.py has them with rows
    unmeasured |= {"reuse.cache_hit_shares", "reuse.row_reuse"}
    assert empty <= unmeasured | {"difference_tree.largest_changes"}


def test_numbers_name_their_unit_or_are_of_a_known_kind() -> None:
    """Every time, size and rate says its unit where the page lists it."""
    text, _, titles = COLUMNS_FILE.read_text(encoding="utf-8").partition("# How tables show them")
    assert len(COLUMNS) == titles.count("\n| `")
    assert all(look.label and look.format in ("", *FORMATS) for look in COLUMNS.values())
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        names = re.findall(r"`([^`]+)`", cells[0]) if line.startswith("| `") else []
        for name in names:
            unit = {"_ms": "ms", "_us": "µs", "_ns": "ns", "_bytes": "B", "_mb": "10⁶ B"}
            ends = [unit[end] for end in unit if name.endswith(end)]
            if ends and len(cells) > 2:
                assert ends[0] in cells[1], line


def test_metrics_of_the_engines_are_named() -> None:
    text = COLUMNS_FILE.read_text(encoding="utf-8")
    for metric in sample_profile().metrics["metric"]:
        assert f"`{metric}`" in text


@pytest.mark.parametrize("table", SCHEMA)
def test_the_profiles_tables_are_whole(table: str) -> None:
    assert listed()[table] == set(SCHEMA[table])
