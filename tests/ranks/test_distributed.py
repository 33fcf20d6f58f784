"""Several ranks compute what one process does: losses, weights, checkpoints, evaluations."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from optional_tools import needs_torchrec
from small_terabyte import deepspark, make_terabyte
from small_training import sections_with, stored, whole_checkpoint

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.config import load_parameters, parameters_from_sections
from dlrm_core.data.loader import make_generator
from dlrm_core.model import build_model
from dlrm_core.predict import Asked, Predictor
from dlrm_core.run.checkpoint import OPTIMIZER, WEIGHTS, read_checkpoint
from dlrm_core.run.evaluate import held_out_batches
from dlrm_core.train import Trainer
from dlrm_ranks.plan import require_possible, with_whole_batches
from dlrm_studies.scaling import measure as scaling
from dlrm_studies.scaling.launch import RanksFailed
from dlrm_studies.scaling.model.communication import allreduce_bytes
from dlrm_studies.scaling.model.record import read_record, record_of

STEPS = 12
OVERFLOW_STEPS = 24
"""Enough that gradients overflow on one rank, on the other, on both and on none."""

ROOT = Path(__file__).parents[2]


SECTIONS = {
    "model": {
        **{"bottom_mlp": "5-12-16", "top_mlp": "12-1", "embedding_dim": 16},
        **{"table_rows": [50, 3, 200, 65], "loss": "bce"},
    },
    "data": {"indices_per_lookup": 4, "round_targets": True},
    "training": {
        **{"batch_size": 32, "batches": STEPS, "learning_rate": 0.1, "threads": 1},
        **{"device": "cpu", "rank_timeout_s": 60.0},
    },
}
sections = partial(sections_with, SECTIONS)
RUNS = {
    # name: (changes, how every table is to be divided; None: the planner's choice)
    "table_wise": (sections(sharding="table_wise"), {"table_wise"}),
    "row_wise": (
        sections(
            sharding="row_wise",
            optimizer="rowwise_adagrad",
            embedding_backend="fused",
            eval_every=STEPS // 2,
            eval_batches=2,
        ),
        {"row_wise"},
    ),
    "column_wise": (
        sections(
            {"init": "torch", "loss": "wbce", "loss_weights": [1.0, 3.0]},
            sharding="column_wise",
            optimizer="adagrad",
            embedding_backend="fused",
        ),
        {"column_wise"},
    ),
    "mixed": (
        sections(
            {"interaction_itself": True},
            {"generator": "zipf"},
            sharding="table_wise",
            replicated_bytes=64 * 50,
            optimizer="adagrad",
            lr_warmup_steps=5,
        ),
        {"table_wise", "replicated"},
    ),
    "auto": (sections({"interaction": "cat"}), None),
    "cross": (
        sections(
            {"interaction": "dcn", "dcn_layers": 2, "dcn_rank": 6},
            sharding="table_wise",
            optimizer="adagrad",
        ),
        {"table_wise"},
    ),
    "wukong": (
        sections(
            {"interaction": "wukong", "wukong_layers": 2, "wukong_fmb": 2, "wukong_lcb": 3}
            | {"wukong_rank": 3, "wukong_hidden": 7},
            sharding="table_wise",
            optimizer="adagrad",
        ),
        {"table_wise"},
    ),
    "fp16": (
        sections(
            sharding="row_wise", replicated_bytes=64 * 50, precision="fp16", loss_scale=1024.0
        ),
        {"row_wise", "replicated"},
    ),
}
"""Each is trained by one process, and by so many ranks:"""

TUNED = {
    "auto": {"dense_backend": "fused", "fp32_matmul": "bf16x2", "embedding_backend": "auto"},
    "mixed": {"dense_backend": "fused", "fp32_matmul": "bf16x3", "fused_optimizer": True},
    # 8 and 16 rows a rank
    "row_wise": {"micro_batch": 5},
    "fp16": {"micro_batch": 7},
}
"""Runs that ranks make with the fast options; one process makes them with the plain ones."""

CASES = [
    *(("row_wise", 1), ("mixed", 1)),
    *(("table_wise", 2), ("column_wise", 2), ("auto", 2), ("cross", 2)),
    *(("wukong", 2), ("fp16", 2)),
    *(("table_wise", 4), ("row_wise", 4), ("mixed", 4)),
]

SEVERAL = [case for case in CASES if case[1] > 1]

CHAIN = {"sgd": "replicated", "rowwise_adagrad": "row_wise", "adagrad": "column_wise"}
"""Optimisers, each with a sharding, whose run goes from 1 process to 2 ranks to 4 to 1."""

LEGS = {2: (3, 6), 4: (6, 9)}
"""Ranks of such a run's middle: their first and last iteration."""


PREDICTIONS = {
    "one-hot": ({"generator": "teacher"}, {"sharding": "row_wise", "eval_batches": 9}),
    "bags": ({}, {"sharding": "table_wise", "eval_batches": 5}),
    "columns": ({"generator": "zipf"}, {"sharding": "column_wise", "eval_batches": 7}),
}
"""Data and training of evaluations on 2 and 4 ranks."""


def predicted(name):
    """The parameters of an evaluation."""
    data, training = PREDICTIONS[name]
    return sections(data=data, **training)


def chained(optimizer, until):
    # in the middle the tables are divided otherwise than at first
    sharding = CHAIN[optimizer] if until != LEGS[2][1] else "table_wise"
    return sections(
        batches=until,
        checkpoint_every=1000,
        sharding=sharding,
        optimizer=optimizer,
        # the same tables by FBGEMM's kernels, then by ours
        embedding_backend="fused" if until == LEGS[4][1] else "torch",
        keep_checkpoints=9,
    )


def trained(given, place=None, resume=None):
    checkpoint = read_checkpoint(resume) if resume else None
    trainer = Trainer(parameters_from_sections(given), checkpoint, place)
    try:
        return trainer.train()
    finally:
        trainer.close()


def measured_cases(monkeypatch, run, folder=None, say=lambda text: None, probe=1):
    """A small measurement whose launches are ``run``."""
    monkeypatch.setattr(scaling, "run_ranks", run)
    given = parameters_from_sections(sections(sharding="table_wise"))
    effort = scaling.Effort(rounds=2, warmup=1, iterations=3, seconds=5.0, probe=probe)
    return scaling.measure_scaling(given, (1, 2), folder, effort=effort, on_progress=say)


def measurement_job():
    """What its launch is asked to measure."""
    jobs = []

    def note(command, *about):
        jobs.append(json.loads(Path(command[-2]).read_text()))
        raise RanksFailed("noted")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RanksFailed, match="noted"):
        measured_cases(patch, note)
    return jobs[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of all stages: {ranks: {name: what rank 0 wrote}}, and the folder of checkpoints."""
    folder = tmp_path_factory.mktemp("ranks")
    places = {o: folder / "chain" / o for o in CHAIN}
    for optimizer, place in places.items():
        trained(chained(optimizer, LEGS[2][0]), place)
    predictions = [
        {
            "name": f"predict {name}",
            "sections": predicted(name),
            "checkpoint": str(places["rowwise_adagrad"] / f"step-{LEGS[2][0]:08d}"),
        }
        for name in PREDICTIONS
    ]
    jobs = [
        {"name": name, "sections": given, "initial": True, "place": str(folder / "{ranks}" / name)}
        for name, (given, _) in RUNS.items()
    ]
    for job in jobs:
        fast = TUNED.get(job["name"], {})
        job["sections"] = job["sections"] | {"training": job["sections"]["training"] | fast}
    overflow = RUNS["fp16"][0] | {
        "training": RUNS["fp16"][0]["training"]
        | {"loss_scale": 2.0**18, "optimizer": "adagrad", "batches": OVERFLOW_STEPS}
    }
    place = str(folder / "overflow")
    twice = [{"name": "overflow", "sections": overflow, "place": place, "initial": True}]
    make_terabyte(folder / "terabyte", train=394, test=170)
    published = {"name": "deepspark", "sections": deepspark(folder / "terabyte")}
    place = folder / "deepspark"
    published |= {"place": str(place)}
    learned = published | {"name": "predict", "checkpoint": str(place / "step-00000012")}
    stages = []
    for count in (1, *LEGS):
        own = [
            job | {"place": job["place"].format(ranks=count)}
            for job in jobs
            if (job["name"], count) in CASES
        ]
        own += twice if count == 2 else []
        own += predictions if count > 1 else []
        own += [published, learned] if count == 4 else []
        for optimizer, place in places.items() if count > 1 else ():
            begin, end = LEGS[count]
            own.append(
                {
                    "name": f"chain {optimizer}",
                    "sections": chained(optimizer, end),
                    "place": str(place),
                    "resume": str(place / f"step-{begin:08d}"),
                }
            )
        stages.append({"ranks": count, "jobs": own})
    # a measurement that is interrupted after its first round, and goes on
    measured = measurement_job()
    stages.append({"ranks": 2, "measure": measured | {"rounds": 1}})
    stages.append({"ranks": 2, "measure": measured | {"first_round": 1}})
    # as a launcher does
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in stages]
    for stage, store in zip(stages, stores, strict=True):
        stage["port"] = store.port
    (folder / "jobs.json").write_text(json.dumps(stages))
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "distributed_ranks.py", folder / "jobs.json", folder],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {
        stage["ranks"] if "jobs" in stage else f"round {stage['measure']['rounds']}": json.loads(
            (folder / f"{i}.json").read_text()
        )
        for i, stage in enumerate(stages)
    }
    return found, folder


@pytest.fixture(scope="module")
def alone():
    """Results and weights of the same runs by one process."""
    found = {}
    for name, (given, _) in RUNS.items():
        trainer = Trainer(parameters_from_sections(given))
        found[name] = trainer.train(), dict(trainer.model.named_parameters())
        trainer.close()
    return found


@needs_torchrec
@pytest.mark.parametrize(("name", "count"), CASES)
def test_ranks_have_the_losses_of_one_process(ranks, alone, name, count):
    found = ranks[0][count][name]["losses"]
    assert len(found) == STEPS
    expected = alone[name][0].losses
    assert found == pytest.approx(expected, rel=0, abs=5e-4 if name == "fp16" else 1e-5)
    dense = ranks[0][count][name]["dense_part"]
    assert dense == ("FusedDense" if "dense_backend" in TUNED.get(name, {}) else "NoneType")


@needs_torchrec
def test_all_ranks_skip_a_step_whose_gradients_overflow_on_one(ranks):
    run, place = ranks[0][2]["overflow"], ranks[1] / "overflow"
    own, (first, second) = run["overflowed"], run["skipped"]
    # in some steps it is one of them, in some the other, in some both, in some none
    assert {tuple(step) for step in zip(*own, strict=True)} == {
        *((False, False), (False, True), (True, False), (True, True))
    }
    assert first == second == sum(a or b for a, b in zip(*own, strict=True))
    assert torch.isfinite(torch.tensor(run["losses"])).all()
    assert read_checkpoint(place / f"step-{OVERFLOW_STEPS:08d}").state["skipped_steps"] == first


@needs_torchrec
@pytest.mark.parametrize(("name", "count"), SEVERAL)
def test_ranks_begin_and_end_with_the_weights_of_one_process(ranks, alone, name, count):
    given = parameters_from_sections(RUNS[name][0])
    place = ranks[1] / str(count) / name
    initial = stored(place / "step-00000000", WEIGHTS)
    model = build_model(given.model, given.training.seed, torch.device("cpu"))
    expected = dict(model.named_parameters())
    assert initial.keys() == expected.keys()
    for key, weight in expected.items():
        assert torch.equal(initial[key].view(torch.int32), weight.detach().view(torch.int32)), key
    final = stored(place / f"step-{STEPS:08d}", WEIGHTS)
    for key, weight in alone[name][1].items():
        # sums in another order, each step: a few units in the last place of weights near 1
        atol = 2e-3 if name == "fp16" else 2e-5
        assert torch.allclose(final[key], weight.detach(), rtol=0, atol=atol), key


@needs_torchrec
@pytest.mark.parametrize(("name", "count"), SEVERAL)
def test_every_row_and_column_is_on_one_rank_or_on_all(ranks, name, count):
    kinds = RUNS[name][1]
    rows = RUNS[name][0]["model"]["table_rows"]
    held = [
        shard | {"rank": rank["rank"]}
        for rank in ranks[0][count][name]["ranks"]
        for shard in rank["shards"]
    ]
    if kinds is not None:
        assert {shard["kind"] for shard in held} == kinds
    for t, size in enumerate(rows):
        covered = torch.zeros(size, 16, dtype=torch.int64)
        for shard in held:
            if shard["table"] == t:
                covered[
                    shard["first_row"] : shard["first_row"] + shard["rows"],
                    shard["first_column"] : shard["first_column"] + shard["columns"],
                ] += 1
        everywhere = any(s["table"] == t and s["kind"] == "replicated" for s in held)
        assert (covered == (count if everywhere else 1)).all()
    if name == "mixed":
        small = {s["table"] for s in held if s["kind"] == "replicated"}
        assert small == {t for t, size in enumerate(rows) if size <= 50}
    lines = ranks[0][count][name]["holdings"]
    assert [line.split(" (host ")[0] for line in lines] == [f"rank {r}" for r in range(count)]


@needs_torchrec
@pytest.mark.parametrize("optimizer", CHAIN)
def test_a_checkpoint_goes_from_1_to_2_to_4_ranks_and_back(ranks, optimizer):
    found, folder = ranks
    whole = trained(sections(optimizer=optimizer)).losses
    for count, (begin, end) in LEGS.items():
        losses = found[count][f"chain {optimizer}"]["losses"]
        assert losses == pytest.approx(whole[begin:end], rel=0, abs=1e-5)
    last = folder / "chain" / optimizer / f"step-{end:08d}"
    state = whole_checkpoint(last).tensors[OPTIMIZER]
    rows = {"rowwise_adagrad": (200,), "adagrad": (200, 16), "sgd": None}[optimizer]
    assert bool(state) == (optimizer != "sgd")
    assert not state or state["embeddings.tables.2.weight.sum"].shape == rows
    back = trained(sections(optimizer=optimizer), resume=last)
    assert back.first_iteration == end and len(back.losses) == STEPS - end
    assert back.losses == pytest.approx(whole[end:], rel=0, abs=1e-5)


@needs_torchrec
@pytest.mark.parametrize("count", (1, 4))
def test_ranks_evaluate_as_one_process_does(ranks, alone, count):
    found, expected = ranks[0][count]["row_wise"]["evaluations"], alone["row_wise"][0].evaluations
    assert [e["iteration"] for e in found] == [STEPS // 2, STEPS]
    for one, other in zip(found, expected, strict=True):
        assert one["samples"] == other["samples"] == 64
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["auc"] == pytest.approx(other["auc"], abs=0.01)


@needs_torchrec
@pytest.mark.parametrize("count", (2, 4))
@pytest.mark.parametrize("name", PREDICTIONS)
def test_ranks_predict_from_a_checkpoint_what_one_process_does(ranks, count, name):
    found, folder = ranks
    run = found[count][f"predict {name}"]
    parameters = parameters_from_sections(predicted(name))
    place = folder / "chain" / "rowwise_adagrad" / f"step-{LEGS[2][0]:08d}"
    alone = Predictor(Asked(parameters, read_checkpoint(place), []))
    expected = alone.evaluate(lambda samples: None)
    for figure in ("iteration", "samples", "auc", "loss", "log_loss", "accuracy", "click_share"):
        assert run["evaluation"][figure] == getattr(expected, figure), figure
    batch = next(held_out_batches(parameters, torch.device("cpu"), 1))
    for scores in run["scores"]:
        wanted = alone.predict(batch.part(0, len(scores))).flatten().tolist()
        assert scores == pytest.approx(wanted, abs=1e-6)
    # no rank holds the whole tables
    whole = 4 * 16 * sum(parameters.model.table_rows)
    assert sum(rank["table_bytes"] for rank in run["ranks"]) == whole
    assert all(0 <= rank["table_bytes"] < whole for rank in run["ranks"])


@needs_torchrec
def test_deepsparks_preset_trains_and_predicts_on_ranks_as_in_one_process(ranks):
    """Its order, fp16 and static loss scale; no sample is predicted twice or left out."""
    found, folder = ranks
    given = deepspark(folder / "terabyte")
    assert given["training"]["precision"] == "fp16" and given["data"]["order"] == "shuffled"
    losses = found[4]["deepspark"]["losses"]
    assert len(losses) == 12
    assert losses == pytest.approx(trained(given).losses, rel=0, abs=5e-4)
    learned = read_checkpoint(folder / "deepspark" / "step-00000012")
    alone = Predictor(Asked(parameters_from_sections(given), learned, []))
    expected, run = alone.evaluate(lambda samples: None), found[4]["predict"]["evaluation"]
    assert (run["samples"], run["auc"], run["loss"]) == (170, expected.auc, expected.loss)


@needs_torchrec
def test_what_is_exchanged_is_what_the_formulas_say(ranks):
    """Payloads of one rank in one iteration, against the model's sizes."""
    # two buckets an iteration, with two more numbers: the loss, and who stops
    dense = 4 * (5 * 12 + 12 + 12 * 16 + 16 + (16 + 10) * 12 + 12 + 12 + 1 + 2)
    # and one of the cross layers
    wide = 5 * 16
    cross = 4 * (5 * 12 + 12 + 12 * 16 + 16 + wide * 12 + 12 + 12 + 1 + 2)
    cross += 4 * 2 * (2 * wide * 6 + wide)
    given = parameters_from_sections(RUNS["cross"][0])
    assert allreduce_bytes(given) == cross - 4 * 2
    for records in ranks[0][2]["cross"]["collectives"]:
        sent = [r["bytes"] for r in records if r["what"] == "dense gradients"]
        assert len(sent) == 3 * STEPS and sum(sent) == STEPS * cross
    for name, count, forward, backward in (
        ("table_wise", 2, "alltoall", "alltoall"),
        ("table_wise", 4, "alltoall", "alltoall"),
        ("row_wise", 4, "reduce_scatter", "allgather"),
    ):
        per_rank = ranks[0][count][name]["collectives"]
        assert all(record["done"] for record in per_rank[0])
        for rank, records in enumerate(per_rank):
            sent = [r["bytes"] for r in records if r["what"] == "dense gradients"]
            assert len(sent) == 2 * STEPS and sum(sent) == STEPS * dense, rank
        pooled = [[r for r in records if r["what"].startswith("pooled")] for records in per_rank]
        kinds = {(r["what"], r["kind"]) for r in pooled[0] if r["bytes"]}
        assert kinds == {("pooled vectors", forward), ("pooled gradients", backward)}
        if name == "table_wise":
            # forward each rank sends its tables for all samples, backward all tables for its own
            total = sum(r["bytes"] for records in pooled for r in records)
            assert total == 2 * STEPS * 4 * 32 * 4 * 16


@needs_torchrec
def test_a_measurement_is_a_record_of_every_rank_and_goes_on(ranks, monkeypatch, tmp_path):
    launches = []

    def launch(command, count, timeout_s, variables, on_iteration):
        first = json.loads(Path(command[-2]).read_text())["first_round"]
        launches.append((count, first))
        Path(command[-1]).write_text(json.dumps(ranks[0][f"round {first + 1}"]))
        on_iteration(1)
        if not first:
            raise RanksFailed("interrupted")

    with pytest.raises(RanksFailed, match="interrupted"):
        measured_cases(monkeypatch, launch, tmp_path)
    said = []
    record = measured_cases(monkeypatch, launch, tmp_path, said.append)
    assert launches == [(2, 0), (2, 1)]
    assert said == ["1 of 2 rounds: measured before", "round 2 of 2, 1 rank"]
    read = record_of(record)
    assert record["notices"] == []
    assert {(r["ranks"], r["scaling"], r["batch_size"]) for r in record["runs"]} == {
        (1, "", 32),
        (2, "strong", 32),
        (2, "weak", 64),
    }
    for run in record["runs"]:
        rows = [row for row in record["iterations"] if row["run"] == run["run"]]
        assert {row["rank"] for row in rows} == set(range(run["ranks"]))
        assert {row["iteration"] for row in rows} == set(range(6))
        whole = {(row["rank"], row["iteration"]): row["time_ms"] for row in rows}
        parts = dict.fromkeys(whole, 0.0)
        for row in record["parts"]:
            if row["run"] == run["run"]:
                parts[row["rank"], row["iteration"]] += row["time_ms"]
        assert all(0.2 * whole[key] < parts[key] <= whole[key] for key in whole)
        exchanged = [row for row in record["collectives"] if row["run"] == run["run"]]
        assert all(0.0 <= row["exposed_ms"] <= row["time_ms"] + 1e-6 for row in exchanged)
    assert read.compute_profile.groupby("concurrent")["process"].nunique().to_dict() == {1: 1, 2: 2}
    sizes = read.compute_profile.groupby("concurrent")["batch_size"].unique()
    assert {count: set(of) for count, of in sizes.items()} == {1: {1, 2, 16, 32}, 2: {16, 32}}
    probe = read.link_probe.groupby(["collective", "bytes"]).size()
    assert set(probe.index.levels[0]) == {
        *("allreduce", "alltoall", "allgather", "reduce_scatter", "broadcast")
    }
    assert (read.link_probe["time_ms"] > 0).all() and record["not_measured"]["data"]
    # of no file, so a file was made for who wants to train with them
    file = tmp_path / "parameters.yaml"
    assert f"train -f {file}" in record["launch"]["one_node"]
    assert load_parameters(file).to_sections() == record["parameters"]
    # what is there is not measured again; another request is
    again = measured_cases(monkeypatch, launch, tmp_path)
    assert len(launches) == 2 and again["iterations"] == record["iterations"]
    with pytest.raises(RanksFailed, match="interrupted"):
        measured_cases(monkeypatch, launch, tmp_path, probe=2)
    assert launches[2:] == [(2, 0)]
    assert read_record(tmp_path / "scaling.json").runs.to_dict("records") == record["runs"]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match="no record of dlrm-scaling"):
        read_record(tmp_path / "other.json")


def test_what_does_not_exist_on_several_ranks_is_refused():
    for changes, model, ranks, said in (
        ({"batch_size": 30}, {}, 4, r"batch_size is 30, but there are 4 ranks"),
        ({"optimizer": "adam"}, {}, 2, r"optimizer is 'adam'.*rowwise_adagrad"),
        ({"embeddings_on_gpu_bytes": 8}, {}, 2, r"embeddings_on_gpu_bytes is 8"),
        ({"sharding": "column_wise", "optimizer": "rowwise_adagrad"}, {}, 2, "one sum a row"),
        ({}, {"bottom_mlp": "5-12-6", "embedding_dim": 6}, 2, "multiples of 4"),
        (
            {"sharding": "column_wise"},
            {"bottom_mlp": "5-12-4", "embedding_dim": 4},
            2,
            "at least 4 columns",
        ),
    ):
        given = parameters_from_sections(sections(model, **changes))
        with pytest.raises(InputError, match=said):
            require_possible(given, ranks)


def test_ranks_leave_the_short_batch_of_an_epoch_out_and_say_so():
    given = parameters_from_sections({"data": {"samples": 4100, "drop_last": False}})
    changed, (notice,) = with_whole_batches(given)
    assert make_generator(given, torch.device("cpu")).epoch.batches == 3
    assert make_generator(changed, torch.device("cpu")).epoch.batches == 2
    assert "data.drop_last: false has no effect on several ranks" in notice
    assert with_whole_batches(changed) == (changed, [])


def test_without_torchrec_one_sentence_says_what_to_install(monkeypatch):
    from dlrm_ranks import plan as packages

    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingToolError, match=r"--no-deps torchrec==1\.8\.0"):
        packages.require_torchrec()
