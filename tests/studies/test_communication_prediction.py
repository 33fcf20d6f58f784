"""Predictions of scaling: against made records, laws they must keep, and what was published."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_records import FIXED_MS, compute_profile, document, parameters

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters, load_parameters
from dlrm_studies.scaling.findings import scaling_findings
from dlrm_studies.scaling.model.choice import (
    Slowness,
    best_sharding,
    fullest,
    scaling_table,
    simulate,
    straggler_table,
)
from dlrm_studies.scaling.model.links import Link, Network, Range, link
from dlrm_studies.scaling.model.prediction import (
    WAITING,
    ComputeProfile,
    Prediction,
    Setting,
    expected_largest,
    measured_profile,
    schedule,
)
from dlrm_studies.scaling.model.published import (
    NodeNetwork,
    NodePlan,
    _mlperf_setting,
    mlperf_scaling,
)
from dlrm_studies.scaling.model.record import (
    exchange_times,
    imbalance,
    measured_iterations,
    predicted_and_measured,
    read_record,
    record_of,
    typical_error,
)
from dlrm_studies.scaling.model.sharding import make_plan

SLOW = Network(Link("slow", Range(40, 50, 60), Range(1.5, 2, 2.5), "made up"))
PROFILE = measured_profile(pd.DataFrame(compute_profile()))


def predict(
    base: Parameters,
    ranks: int,
    sharding: str,
    profile: ComputeProfile = PROFILE,
    hidden: bool = True,
) -> Prediction:
    """An iteration of the parameters' batch over the slow link."""
    setting = Setting(base, SLOW, profile, hidden)
    return setting.predict(make_plan(base, ranks, sharding), base.training.batch_size)


# ---- one-rank profile -------------------------------------------------------------------


def test_a_profile_finds_fixed_and_per_sample_cost() -> None:
    found = PROFILE.costs[4]["embedding", "forward"]
    assert found.fixed_ms == pytest.approx(FIXED_MS["embedding"], rel=1e-6)
    assert found.sample_ms == pytest.approx(0.02, rel=1e-6)
    assert PROFILE.costs[2]["embedding", "forward"].fixed_ms == pytest.approx(0.5, rel=1e-6)
    assert PROFILE.at(3)[0] == 4 and PROFILE.at(64)[0] == 4
    assert replace(PROFILE, shares_node=False).at(64)[0] == 1
    cost = PROFILE.costs[1]["top_mlp", "forward"]
    times = [cost.time_ms(n).mid for n in (1, 10, 64, 100, 512, 5000)]
    assert times == sorted(times)
    assert cost.time_ms(5000).mid == pytest.approx((1 + 5000 * 0.03) / 2)
    one = pd.DataFrame(compute_profile()).query("batch_size == 64")
    with pytest.raises(InputError, match="1 batch size with 1 processes"):
        measured_profile(one)


# ---- prediction -------------------------------------------------------------------------


def test_one_rank_exchanges_nothing_and_takes_its_profile_s_time() -> None:
    made = predict(parameters(256), 1, "table_wise")
    assert made.exposed_ms == 0 and made.exchanges.empty
    assert made.mid_ms == pytest.approx(PROFILE.total_ms(256, 1))
    assert made.low_ms < made.mid_ms < made.high_ms


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([2, 4, 8]),
    st.sampled_from(["table_wise", "row_wise", "column_wise", "replicated"]),
    st.sampled_from([64, 512]),
)
def test_what_is_hidden_can_only_save_time(ranks, sharding, batch) -> None:
    base = parameters(batch)
    none = predict(base, ranks, sharding, hidden=False)
    every = predict(base, ranks, sharding)
    assert every.mid_ms <= none.mid_ms + 1e-9
    assert none.exposed_ms == pytest.approx(none.exchanges["mid_ms"].sum())
    assert none.compute_ms == pytest.approx(every.compute_ms)
    for made in (none, every):
        assert made.parts["mid_ms"].sum() == pytest.approx(made.mid_ms)
        assert made.schedule.end_ms == pytest.approx(made.mid_ms)
        assert (made.parts["low_ms"] <= made.parts["mid_ms"] + 1e-12).all()
        assert (made.parts["mid_ms"] <= made.parts["high_ms"] + 1e-12).all()
        for lane, events in pd.DataFrame(made.schedule.events).groupby("lane"):
            ordered = events.sort_values("start_ms")
            ends, starts = ordered["end_ms"].to_numpy()[:-1], ordered["start_ms"].to_numpy()[1:]
            assert (starts >= ends - 1e-9).all(), lane


def test_an_exchange_hides_behind_the_bottom_mlp_only_as_far_as_that_lasts() -> None:
    compute = {("embedding", "forward"): 2.0, ("bottom_mlp", "forward"): 3.0}
    made = schedule(compute, {("pooled vectors", "forward"): 5.0})
    assert made.exposed["pooled vectors"] == pytest.approx(2.0)
    assert made.end_ms == pytest.approx(7.0)
    alone = schedule(compute, {("pooled vectors", "forward"): 5.0}, hidden=False)
    assert alone.exposed["pooled vectors"] == pytest.approx(5.0)
    assert alone.end_ms == pytest.approx(10.0)


def test_cross_layers_gradients_hide_behind_the_bottom_mlps_backward() -> None:
    compute = {("interaction", "backward"): 4.0, ("bottom_mlp", "backward"): 3.0}
    dense = {("dense gradients", "backward"): 10.0}
    made = schedule(compute, dense, bottom_share=0.1, interaction_share=0.5)
    sent = {e.name: (e.start_ms, e.end_ms) for e in made.events if e.lane == "communication"}
    # the top MLP's 4 ms run beside the interaction, the cross layers' 5 beside the bottom MLP
    assert sent["top MLP gradients"] == pytest.approx((0.0, 4.0))
    assert sent["interaction gradients"] == pytest.approx((4.0, 9.0))
    assert sent["bottom MLP gradients"] == pytest.approx((9.0, 10.0))
    assert made.exposed == {"dense gradients": pytest.approx(3.0)}
    assert made.end_ms == pytest.approx(10.0)


def test_ranks_wait_for_the_slowest_draw() -> None:
    rng = np.random.default_rng(0)
    for count in (2, 4, 64, 4096):
        drawn = rng.normal(size=(400, count)).max(axis=1)
        assert expected_largest(count) == pytest.approx(drawn.mean(), abs=0.1)
    # five of ten iterations of every part take 1 ms more: (0.9 - 0.1 quantile) / 2.56 of it
    rows = pd.concat(
        [pd.DataFrame(compute_profile()).assign(iteration=number) for number in range(10)]
    )
    rows["time_ms"] += rows["iteration"] % 2
    shaky = measured_profile(rows)
    deviation = 1 / 2.56
    assert shaky.costs[4]["top_mlp", "forward"].deviation_ms(300) == pytest.approx(deviation)
    made = predict(parameters(), 4, "table_wise", shaky)
    waiting = made.parts.set_index("phase").loc[WAITING, "mid_ms"]
    # embedding and bottom MLP; interaction, top MLP, their backward, bottom MLP's; embedding's
    stretches = math.sqrt(2) + math.sqrt(5) + math.sqrt(1)
    # four share two cores there: alone, the last one is twice as fast
    faster = shaky.total_ms(128, 1) / shaky.total_ms(128, 4)
    assert faster == pytest.approx(0.5)
    waiting /= faster
    assert waiting == pytest.approx(deviation * stretches * expected_largest(4))
    one = predict(parameters(), 4, "replicated", shaky).parts.set_index("phase")
    assert one.loc[WAITING, "mid_ms"] / faster == pytest.approx(
        deviation * math.sqrt(8) * expected_largest(4)
    )
    # four ranks that meet after each stretch, drawn
    drawn = sum(
        rng.normal(0, deviation * math.sqrt(parts), size=(4000, 4)).max(axis=1)
        for parts in (2, 5, 1)
    )
    assert waiting == pytest.approx(drawn.mean(), rel=0.05)


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="batch_size is 4, but there are 8 ranks"):
        predict(parameters(4), 8, "table_wise")


# ---- predicted and measured -------------------------------------------------------------

RUNS = [
    (ranks, batch, sharding)
    for ranks in (2, 4)
    for batch in (256, 512, 1024)
    for sharding in ("table_wise", "row_wise")
]


def test_a_record_that_follows_the_model_is_predicted() -> None:
    """Laws of the made record: cost a + b n, alpha-beta exchanges, nothing hidden."""
    record = record_of(document([(1, 512, "table_wise"), *RUNS]))
    table = predicted_and_measured(record, parameters())
    assert len(table) == len(RUNS) == 12
    assert typical_error(table) < 0.02
    assert table["in_range"].all()
    assert np.allclose(table["predicted_exposed_ms"], table["measured_exposed_ms"], rtol=0.15)


def test_a_record_that_breaks_the_model_shows_the_error() -> None:
    made = document(RUNS)
    for row in made["iterations"]:
        row["time_ms"] *= 1.5
    table = predicted_and_measured(record_of(made), parameters())
    assert typical_error(table) == pytest.approx(0.5, abs=0.03)
    assert not table["in_range"].any()


def test_measured_scaling_is_against_one_rank_with_the_same_batch() -> None:
    record = record_of(
        document([(1, 512, "table_wise"), (2, 512, "table_wise"), (4, 256, "row_wise")])
    )
    table = measured_iterations(record).set_index("run")
    ratio = table.at[0, "time_ms"] / table.at[1, "time_ms"]
    assert table.at[1, "speedup"] == pytest.approx(ratio)
    assert table.at[1, "efficiency"] == pytest.approx(ratio / 2)
    assert table.at[0, "efficiency"] == 1 and math.isnan(table.at[2, "efficiency"])
    exchanged = exchange_times(record)
    assert (exchanged["hidden_ms"].abs() < 1e-9).all()
    assert set(exchanged["run"]) == {1, 2}


def test_a_record_without_a_column_or_a_table_says_so() -> None:
    made = document([(2, 256, "table_wise")])
    with pytest.raises(InputError, match="parts has no iteration"):
        record_of(made | {"parts": [{"run": 0, "rank": 0}]})
    bare = record_of(made | {"link_probe": [], "not_measured": {"link_probe": "one rank"}})
    assert bare.reasons["link_probe"] == "one rank"
    assert "one rank" in predicted_and_measured(bare, parameters()).attrs["not_measured"]


# ---- findings ---------------------------------------------------------------------------


def test_exposed_communication_is_found_with_its_collective_and_limit() -> None:
    # rows of 4000 in 8 tables, replicated: all-reduced whole, 8 MB a step
    record = record_of(document([(2, 256, "replicated")], rate=0.5))
    found = {each.id: each for each in scaling_findings(record, parameters())}
    one = found["communication"]
    assert one.limit == "network" and "all-reduce of table gradients" in one.title
    assert "the link's rate is the limit" in one.evidence
    assert one.change["training.sharding"] == "table_wise"
    assert one.predicted_speedup["mid"] > 1.5
    assert "rank_imbalance" not in found


def test_latency_is_told_from_bytes() -> None:
    record = record_of(document([(4, 256, "table_wise")], alpha_us=4000, rate=50))
    one = scaling_findings(record, parameters())[0]
    assert one.id == "communication" and "mostly latency" in one.evidence


def test_fast_links_and_even_ranks_are_not_blamed() -> None:
    record = record_of(document(RUNS, alpha_us=1, rate=100))
    assert scaling_findings(record, parameters()) == []
    assert scaling_findings(record_of(document([(1, 512, "table_wise")])), parameters()) == []


def test_a_slow_rank_is_found_and_not_taken_for_the_link() -> None:
    record = record_of(document([(2, 512, "table_wise")], alpha_us=1, rate=100, slow_rank=2.5))
    table = imbalance(record).iloc[0]
    assert table["slowest_rank"] == 1 and table["component"] == "embedding"
    found = {each.id: each for each in scaling_findings(record, parameters())}
    assert found["rank_imbalance"].component == "embedding"
    assert "holds 4 of 8 tables" in found["rank_imbalance"].evidence
    assert found["communication"].limit == "load imbalance"
    assert "waiting for slower ranks" in found["communication"].evidence


# ---- best sharding and scaling ----------------------------------------------------------


def brute_force(setting: Setting, ranks: int, batch: int) -> float:
    """The fastest of all ways to give two kinds of tables a kind each."""
    from itertools import product

    from dlrm_studies.scaling.model.sharding import KINDS

    rows = setting.parameters.model.table_rows
    groups = sorted(set(rows))
    return min(
        setting.step_ms(
            make_plan(setting.parameters, ranks, [kinds[groups.index(n)] for n in rows], idle=True),
            batch,
        )
        for kinds in product(KINDS, repeat=len(groups))
    )


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_the_choice_is_as_fast_as_the_best_of_all(ranks: int) -> None:
    base = parameters(512, (200, 200, 200, 200, 90_000, 90_000))
    setting = Setting(base, SLOW, PROFILE)
    choice = best_sharding(setting, ranks)
    assert choice.prediction is not None
    found = setting.step_ms(choice.prediction.plan, 512)
    assert found <= brute_force(setting, ranks, 512) * 1.03
    named = choice.candidates.dropna(subset=["mid_ms"])
    assert choice.prediction.mid_ms <= named["mid_ms"].min() * (1 + 1e-9)
    assert "exposed" in choice.reason


def test_memory_rules_plans_out_and_says_so() -> None:
    base = parameters(512, (400_000,) * 4)
    whole = 4 * 400_000 * 4 * 64
    setting = Setting(base, SLOW, PROFILE, memory_bytes=0.5 * whole)
    choice = best_sharding(setting, 4)
    assert choice.prediction is not None
    assert fullest(setting, choice.prediction.plan, 512) <= 0.5 * whole
    replicated = choice.candidates.set_index("sharding").loc["replicated"]
    assert "on one rank, which has" in replicated["note"]
    assert best_sharding(replace(setting, memory_bytes=1e6), 4).prediction is None


def test_scaling_tables_keep_their_laws() -> None:
    network = Network(link("NVLink 4 (H100)"), link("InfiniBand NDR"), 8)
    setting = Setting(parameters(8192), network, replace(PROFILE, shares_node=False))
    counts = [1, 2, 8, 64, 512, 4096]
    strong = scaling_table(setting, counts, "strong").set_index("ranks")
    assert (strong["batch_size"] == 8192).all() and strong["mid_ms"].notna().all()
    assert strong.loc[1, "efficiency"] == pytest.approx(1)
    assert (strong["efficiency"] <= 1 + 1e-9).all()
    # what a step costs without any sample does not shrink
    fixed = sum(FIXED_MS.values())
    assert strong.loc[4096, "compute_ms"] > fixed * 0.9
    weak = scaling_table(setting, counts, "weak", batch_size=256).set_index("ranks")
    assert weak.loc[64, "batch_size"] == 256 * 64
    assert weak.loc[64, "efficiency"] > strong.loc[64, "efficiency"]
    few = scaling_table(Setting(parameters(16), network, PROFILE), [8, 32], "strong")
    assert few.loc[1, "note"].startswith("16 samples cannot be divided among 32")
    assert math.isnan(few.loc[1, "mid_ms"])
    refused = scaling_table(setting, [8, 64], "strong", sharding="table_wise")
    assert "reaches 8" in refused.loc[1, "note"]
    with pytest.raises(InputError, match="scaling is 'sideways'"):
        scaling_table(setting, [1], "sideways")


# ---- stragglers -------------------------------------------------------------------------


def test_stragglers_cost_what_the_expected_maximum_says() -> None:
    for ranks in (1, 4, 64):
        table = straggler_table([100.0], [10.0], [ranks], Slowness(jitter=0.05), 4000, seed=1)
        expected = 100 * (1 + 0.05 * expected_largest(ranks)) + 10
        assert table["mean_ms"][0] == pytest.approx(expected, rel=0.02)
    even = straggler_table([100.0], [10.0], [8], Slowness(jitter=0.0), 5).iloc[0]
    assert even["mean_ms"] == even["p95_ms"] == 110
    assert even["waited_share"] == even["slowdown"] == 0
    again = [simulate(9, Slowness(0.1, 0.1), 50, seed=s) for s in (5, 5, 6)]
    assert (again[0] == again[1]).all() and (again[0] != again[2]).any()


def test_hiccups_hit_more_often_the_more_ranks_there_are() -> None:
    table = straggler_table(
        [10.0] * 4, [1.0] * 4, [1, 16, 256, 4096], Slowness(0.0, 0.01, 3.0), 2000, seed=2
    )
    # at least one of R ranks is held up with probability 1 - 0.99^R, which costs 20 ms
    expected = 11 + 20 * (1 - 0.99 ** table["ranks"].to_numpy(float))
    assert np.allclose(table["mean_ms"], expected, rtol=0.05)
    with pytest.raises(InputError, match=r"hiccup is 0.5, expected at least 1"):
        Slowness(hiccup=0.5)


# ---- published --------------------------------------------------------------------------


def test_mlperf_s_machines_are_predicted_from_data_sheets() -> None:
    table = mlperf_scaling()
    machines = table.groupby("hardware", sort=False)
    assert machines.ngroups == 4
    for _, rows in machines:
        gains = rows["predicted"].diff().dropna()
        assert (gains > 0).all()  # each step is one that makes a program faster
        last = rows.iloc[-1]
        assert abs(last["error"]) < 0.20
        assert last["predicted_low"] < last["published"] < last["predicted_high"]
    ours = machines.first().set_index("devices")["error"]
    # what a program without a two-level exchange would lose over several nodes
    assert (ours[[64, 128]] < -0.5).all() and (ours[8].abs() < 0.20).all()


def test_settings_say_what_a_program_exchanges_and_waits_for() -> None:
    ranks, batch, local = 64, 135_168, 8
    setting = _mlperf_setting("H100-SXM", ranks, batch)
    plan = make_plan(setting.parameters, ranks, "column_wise", idle=True)
    wide = setting.predict(plan, batch)
    narrow = replace(setting, number_bytes=2, ahead=True).predict(plan, batch)
    before, after = (
        made.exchanges.set_index(["what", "phase"])["bytes"] for made in (wide, narrow)
    )
    assert set(before.index.get_level_values("what")) - set(
        after.index.get_level_values("what")
    ) == {"indices"}
    assert after.to_numpy() == pytest.approx(before[after.index].to_numpy() / 2)
    gone = set(wide.parts["component"]) - set(narrow.parts["component"])
    assert gone == {"data", "transfer"}
    # 26 tables of 128 numbers: each GPU sends a 64th of them, after sums over NVLink
    apart = NodeNetwork(**vars(setting.network))
    even = NodePlan(plan.ranks, plan.dim, plan.tables, plan.lookups)
    assert even.work().sum() == pytest.approx(1.0)
    sent = batch * even.columns_sent()[0] * 2
    assert sent == batch * 26 * 128 * 2 / ranks
    time = apart.time_ms("alltoall", ranks, sent)
    nvlink, infiniband = 0.78 * 450e6, 0.78 * 50e6  # bytes per ms
    least = local * sent * 7 / 8 / nvlink + sent * 7 / 8 / infiniband
    assert least < time.mid < least + 0.12  # and latencies of 14 steps


def test_the_repositorys_own_summary_is_a_record() -> None:
    found = read_record(Path(__file__).parents[2] / "benchmarks" / "results" / "scaling.json")
    assert found.compute_profile.empty
    checked = predicted_and_measured(found, load_parameters("kalamkar_small"))
    assert len(checked) == 26 and checked["case"].nunique() == 13
    assert measured_iterations(found)["time_ms"].tolist() == [181.5518, 217.0392]
