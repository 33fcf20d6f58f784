"""The way from the measured step to the machine's limit, and the sentence above it."""

import json
from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest

from dlrm_core.config import parameters_from_sections
from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.devices import device
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.analysis.roofline import roofline
from dlrm_workbook.analysis.verdict import (
    ANOTHER_BATCH,
    BY_CEILINGS,
    INSTEAD,
    PREDICTED,
    TIMED,
    Stage,
    combined,
    commands,
    document,
    finding_table,
    findings_timed,
    headline,
    quality,
    stages,
    table,
    with_timed,
)
from dlrm_workbook.analysis.whatif import prediction, what_if_table
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.trace import read_trace
from dlrm_workbook.show.bottlenecks import verdict_bars
from dlrm_workbook.show.profile import findings_text
from tests.finding_profiles import made
from tests.gpu_trace import events, write

STEP = {
    ("data", "forward", ""): 40.0,
    ("embedding", "update", "aten::add_"): 20.0,
    ("top_mlp", "forward", "aten::addmm"): 30.0,
    ("top_mlp", "backward", "aten::mm"): 60.0,
}
PARAMETERS = parameters_from_sections(
    {"data": {"generator": "facebook_loop", "loader": "synchronous"}}
).to_sections()


def probe(change: dict[str, Any], **ratios: float) -> dict[str, Any]:
    """A probe in which each part's phases take ``ratio`` ms after, and 1 ms before."""
    phases = ("forward", "backward", "update")
    return {
        "change": change,
        "parts": {part: dict.fromkeys(phases, ratio) for part, ratio in ratios.items()},
        "base": {part: dict.fromkeys(phases, 1.0) for part in ratios},
        "spread": {},
        "touched": list(ratios),
    }


def advised(name: str, change: dict[str, Any], mid: float = 1.5) -> Finding:
    speedup = {"low": mid - 0.1, "mid": mid, "high": mid + 0.1}
    return Finding(name, f"Title of {name}", "data", 0.3, "Seen.", "Do.", change, speedup)


BF16 = {"training.precision": "bf16"}
LOOP = {"data.generator": "facebook"}


@pytest.fixture
def profile() -> Profile:
    probes = [
        probe(LOOP, data=0.1),
        probe(BF16, top_mlp=0.5, bottom_mlp=0.5, interaction=0.5, loss=0.5, optimizer=0.5),
    ]
    return made(STEP, PARAMETERS, part_probes={"base": {}, "changes": probes})


def times(stage: Stage) -> dict[str, float]:
    return dict(zip(stage.parts["component"], stage.parts["time_ms"], strict=True))


def test_changes_add_up_stage_by_stage(profile: Profile) -> None:
    way = stages(profile, [advised("slow_data", LOOP), advised("precision", BF16)])
    assert [stage.mid_ms for stage in way] == pytest.approx([150, 114, 69])
    assert times(way[-1]) == pytest.approx({"data": 4, "embedding": 20, "top_mlp": 45})
    assert way[0].change == {} and way[-1].change == LOOP | BF16
    for stage in way[1:]:
        assert stage.low_ms < stage.mid_ms < stage.high_ms
        assert sum(times(stage).values()) == pytest.approx(stage.mid_ms)


def test_what_cannot_be_predicted_or_does_not_help_has_no_stage(profile: Profile) -> None:
    profile.meta["part_probes"]["changes"].append(
        probe({"training.fused_optimizer": True}, top_mlp=1.2, bottom_mlp=1.0, optimizer=1.0)
    )
    found = [
        advised("unknown", {"training.batch_size": "many"}),
        advised("slower", {"training.fused_optimizer": True}),
        advised("no parameter", {}),
        advised("slow_data", LOOP),
    ]
    way = stages(profile, found)
    assert [stage.mid_ms for stage in way if not stage.aside] == pytest.approx([150, 114])
    unknown, slower = (stage for stage in way if stage.aside)
    assert (unknown.name, unknown.note) == ("or batch_size: many", ANOTHER_BATCH)
    assert slower.basis == INSTEAD and "gains nothing" in slower.note
    vain = found[1:2]
    assert "Start with" not in headline(vain, stages(profile, vain), "")


def test_the_way_ends_at_what_the_machine_allows(profile: Profile) -> None:
    roofline = pd.DataFrame(
        {
            "component": ["top_mlp", "data"],
            "phase": ["forward", "forward"],
            "time_ms": [90.0, 60.0],
            "ceiling_ms": [25.0, 0.0],
            "limit": ["arithmetic", ""],
        }
    )
    last = stages(profile, [], roofline)[-1]
    assert last.mid_ms == 25 and times(last) == {"top_mlp": 25}
    unknown = roofline.assign(ceiling_ms=[25.0, float("nan")])
    assert len(stages(profile, [], unknown)) == 1, "half a limit is none"


def test_each_step_has_the_limit_of_its_own_configuration(profile: Profile) -> None:
    """Changes that went to 124 ms stood above a limit of 177 ms, of the step without them."""
    profile.meta["ceilings"] = device("V100-32GB").ceilings() | {"source": "measured"}
    attribution = attribute(profile)
    advice = [advised("slow_data", LOOP), advised("precision", {"training.precision": "fp16"})]
    fp16 = probe(advice[1].change, top_mlp=0.01, bottom_mlp=0.01)
    profile.meta["part_probes"]["changes"].append(fp16)
    way = stages(profile, advice, roofline(profile, attribution))
    now, _, last, limit = (stage.limit_ms for stage in way)
    assert limit == last < 0.7 * now and limit == way[-1].mid_ms
    assert all(stage.limit_ms <= stage.mid_ms for stage in way)
    assert way[-1].name == "hardware limit, with these changes"
    text = headline(advice, way, "")
    assert f"{milliseconds(now)}; with the changes: {milliseconds(last)}." in text
    ticks = verdict_bars(way).data[-1]
    assert list(ticks.x) == [stage.limit_ms for stage in way[:-1]] and list(ticks.y) == [0, 1, 2]


def test_the_headline_names_limit_change_and_gain(profile: Profile) -> None:
    found = [advised("slow_data", LOOP), advised("precision", BF16)]
    text = headline(found, stages(profile, found), "The largest part is data.")
    assert text.startswith("**Title of slow_data.** The largest part is data.")
    assert "`-p data.generator=facebook`" in text and "predicted 1.3x faster (1.3x to 1.4x)" in text
    assert "Both advised changes together: 2.2x faster (" in text
    assert "from 150 ms to 69.0 ms" in text and "predicted, not timed together" in text
    assert "No known bottleneck" in headline([], stages(profile, []), "The limit is arithmetic.")


def test_a_profile_of_another_program_has_no_way() -> None:
    assert stages(made({("other", "", "work"): 5.0}, {}), []) == []
    assert verdict_bars([]).markdown == ""  # type: ignore[union-attr]


def test_the_figure_holds_every_stage_and_its_total(profile: Profile) -> None:
    way = stages(profile, [advised("slow_data", LOOP), advised("precision", BF16)])
    chart = verdict_bars(way)
    assert isinstance(chart, go.Figure)
    drawn = sum(sum(trace.x) for trace in chart.data)
    assert drawn == pytest.approx(sum(stage.mid_ms for stage in way))
    assert [note.text.startswith("<b>") for note in chart.layout.annotations] == [True] * 3
    last = table(way).iloc[-1]
    assert (last["step"], last["mid_ms"]) == ("+ precision: bf16", pytest.approx(69.0))


def test_the_document_is_json_with_what_checks_rely_on(profile: Profile) -> None:
    attribution = attribute(profile)
    found = [advised("slow_data", LOOP)]
    way = stages(profile, found)
    changes = what_if_table(profile)
    made_document = document(profile, attribution, found, way, pd.DataFrame(), changes)
    again = json.loads(json.dumps(made_document, allow_nan=False))
    assert again["findings"][0]["id"] == "slow_data"
    assert again["stages"][-1]["ms"]["mid"] == pytest.approx(114)
    assert len(again["what_if"]) == 2 and again["roofline"] == []
    assert {"attribution", "coverage", "profiler", "passes", "not_measured"} <= set(again)


ONEDNN = {"training.fp32_matmul": "onednn"}
FUSED = {"training.embedding_backend": "fused"}


def timed_together(profile: Profile, *stages: tuple[dict[str, Any], list[float]]) -> None:
    """Put whole steps into the profile that were timed beside one of 100 ms."""
    profile.meta["together"] = {
        "base_ms": [100.0] * len(stages[0][1]),
        "stages": [{"change": change, "ms": ms} for change, ms in stages],
    }


def test_what_was_timed_as_a_whole_step_goes_before_what_is_predicted(profile: Profile) -> None:
    timed_together(profile, (LOOP, [80.0, 80.0, 80.0]), (LOOP | BF16, [40.0, 50.0, 62.5]))
    way = stages(profile, [advised("slow_data", LOOP), advised("precision", BF16)])
    assert [stage.basis for stage in way[1:]] == [TIMED, TIMED]
    assert [stage.mid_ms for stage in way] == pytest.approx([150, 120, 75])
    exact, wide = (stage.high_ms / stage.low_ms for stage in way[1:])
    assert exact < 1.11 < wide, "rounds that differ widen the range"
    assert sum(times(way[2]).values()) == pytest.approx(75)
    text = headline([advised("slow_data", LOOP)], way, "")
    assert "Both advised changes together: 2.0x faster (" in text and "timed as whole steps" in text


def test_a_timed_change_is_predicted_by_its_whole_step(profile: Profile) -> None:
    probed = prediction(profile, LOOP)
    assert with_timed(probed, profile) is probed, "nobody timed it"
    timed_together(profile, (LOOP, [80.0, 80.0, 80.0]))
    whole = with_timed(probed, profile)
    assert whole.method == TIMED and whole.mid_ms == pytest.approx(0.8 * probed.now_ms)
    assert whole.low_ms < whole.mid_ms < whole.high_ms
    assert probed.parts["then_ms"].sum() / whole.parts["then_ms"].sum() == pytest.approx(
        probed.mid_ms / whole.mid_ms
    )
    assert "parts timed alone had predicted" in whole.notices[-1]


def test_a_change_has_one_gain_wherever_a_page_names_it(profile: Profile) -> None:
    timed_together(profile, (LOOP, [80.0, 80.0, 80.0]))
    bound = {"low": 1.0, "mid": 1.1, "high": 1.2}
    given = [advised("slow_data", LOOP, mid=3.8), advised("precision", BF16)]
    given.append(replace(advised("none", {}), predicted_speedup=bound))
    found = findings_timed(profile, given)
    assert [replace(one, timed_speedup={}) for one in found] == given, "their order stays"
    table = finding_table(found)
    assert table["basis"].tolist() == [TIMED, "predicted", "upper bound: all of its time saved"]
    way = stages(profile, found)
    first = way[1].speedup(way[0].mid_ms)
    assert (
        table["gain"][0] == pytest.approx(first) and table["gain"][1] == given[1].predicted_speedup
    )
    text = findings_text(found).markdown
    assert "**Timed as a whole step.** 1.2x faster" in text
    assert "Parts timed alone had predicted 3.8x." in text


def test_all_findings_are_on_the_page_and_what_does_not_combine_has_its_command(profile) -> None:
    profile.meta["part_probes"]["changes"] += [
        probe(ONEDNN, top_mlp=0.7, bottom_mlp=0.7),
        probe(FUSED, embedding=0.5),
    ]
    found = [
        advised("slow_data", LOOP),
        advised("precision", BF16),
        advised("gemm", ONEDNN),
        advised("tables", FUSED),
    ]
    way = stages(profile, found)
    assert [stage.mid_ms for stage in way] == pytest.approx([150, 114, 69, 59, 123])
    assert (way[-1].basis, way[-1].note) == (INSTEAD, "takes the place of precision: bf16")
    assert commands(way, ["-f", "seed.yaml"])[-1] == (
        "dlrm run compare -f seed.yaml -p change.training.fp32_matmul=onednn"
    )
    assert table(way)["basis"].tolist()[1:4] == [PREDICTED] * 3
    assert combined(parameters_from_sections({}), found)[-1] == LOOP | BF16 | FUSED


def test_changes_put_together_of_several_leaves_are_predicted_from_their_own_probes(
    profile: Profile,
) -> None:
    """A change of two leaves, probed as one, goes on with a third: it once ended the way."""
    both = LOOP | {"data.loader": "prefetch"}
    overlap = {
        "data_alone_ms": 4.0,
        "data_beside_ms": {"dense": 4.0, "sparse": 4.0},
        "halves": {
            "dense": {"alone_ms": 90.0, "beside_ms": 90.0},
            "sparse": {"alone_ms": 20.0, "beside_ms": 20.0},
        },
    }
    profile.meta["part_probes"]["changes"].append(probe(both, data=0.1) | {"overlap": overlap})
    way = stages(profile, [advised("slow_data", both), advised("precision", BF16)])
    assert [stage.mid_ms for stage in way] == pytest.approx([150, 110, 65])


def test_a_recording_of_another_program_shows_its_step_and_what_its_gpu_idles(tmp_path) -> None:
    (only,) = stages(read_trace(write(tmp_path / "trace.json", events())), [])
    assert only.name == "the step, as recorded" and only.mid_ms == pytest.approx(0.1)
    assert times(only)["idle"] == pytest.approx(0.041)


def test_the_quality_line_names_what_spoils_the_figures(profile: Profile) -> None:
    attribution = attribute(profile)
    said = quality(profile, attribution, [])
    assert said["level"] == "amber" and "no steps" in said["sentence"]
    profile.meta["unprofiled_iteration_ms"] = [150.0] * 6
    timed_together(profile, (LOOP, [80.0, 80.0]))
    profile.meta["together"]["base_ms"] = [450.0, 450.0]
    said = quality(profile, attribution, [])
    assert said["level"] == "red" and "the step took 3.00x its time" in said["sentence"]
    profile.meta["serialised"] = True
    said = quality(profile, attribution, [])
    assert said["level"] == "red" and said["sentence"].index("serialised") < 120


def test_what_was_measured_beside_other_processes_is_not_reliable(profile: Profile) -> None:
    """The page said "Other processes keep 1.8 cores busy" above a green line."""
    profile.meta["unprofiled_iteration_ms"] = [150.0] * 9
    profile.meta["counters"] = {"wall_ms": [150.0] * 9, "run_queue_ms": [100.0] * 9}
    beside = Finding("other_processes", "Other processes keep 1.8 cores busy", "", 0.9, "", "")
    said = quality(profile, attribute(profile), [beside])
    assert said["level"] == "red" and "no core in 66.7% of its time" in said["sentence"], said


def test_the_quality_line_doubts_what_scatter_may_change_and_names_it(profile: Profile) -> None:
    """Every page was amber, also of clean runs, and readers stop looking: noise counts where a
    conclusion is no larger than it."""
    attribution = attribute(profile)
    profile.meta["unprofiled_iteration_ms"] = [150.0, 165.0, 135.0] * 3  # of 14.8 %, the mean of 5

    def found(*shares: float) -> dict[str, str]:
        findings = [
            Finding(str(share), f"Cause of {share}", "other", share, "", "") for share in shares
        ]
        return quality(profile, attribution, findings)

    assert found()["level"] == "green" and "spread 14.8%" in found()["sentence"]
    assert found(0.4, 0.2)["level"] == "green"
    small = found(0.04)
    assert small["level"] == "amber", small
    assert "“Cause of 0.04” may be wrong, since iterations without" in small["sentence"], small
    profile.meta["unprofiled_iteration_ms"] = [150.0, 240.0, 60.0] * 3
    near, nothing = found(0.4, 0.3), found()
    assert near["level"] == "amber" and "may not be the largest" in near["sentence"], near
    assert nothing["level"] == "amber" and "up to 30% of the step" in nothing["sentence"], nothing
    profile.meta["unprofiled_iteration_ms"] = [300.0] * 9  # no profiler makes a step faster
    assert "took 0.50x the time of the plain one" in found(0.4)["sentence"]
    assert found(0.4)["level"] == "red" and "the step may take less" in found(0.4)["sentence"]


def test_the_limits_bar_is_as_long_as_it_says_where_a_ceiling_is_above_the_time() -> None:
    profile = made(STEP, {"sections": PARAMETERS})
    roofline = pd.DataFrame(
        {
            "component": ["data", "embedding", "top_mlp", "top_mlp"],
            "phase": ["forward", "update", "forward", "backward"],
            "time_ms": [40.0, 20.0, 30.0, 60.0],
            "ceiling_ms": [10.0, 35.0, 20.0, 70.0],
            "limit": ["memory", "memory", "compute", "compute"],
        }
    )
    (limit,) = [stage for stage in stages(profile, [], roofline) if stage.basis == BY_CEILINGS]
    assert limit.mid_ms == 10 + 20 + 20 + 60
    drawn = limit.parts.set_index("component")["time_ms"].to_dict()
    assert drawn == {"data": 10.0, "embedding": 20.0, "top_mlp": 80.0}
