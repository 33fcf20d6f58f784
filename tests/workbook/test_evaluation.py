"""Evaluations during and after training, latency of predictions, and their commands."""

import json
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from observers import Calling
from small_training import parameters_with

from dlrm_core.base.errors import InputError
from dlrm_core.data.loader import make_generator
from dlrm_core.run.evaluate import HeldOut, evaluate, held_out_batches, predict
from dlrm_core.train import Trainer, train
from dlrm_workbook.analysis import training as runs
from dlrm_workbook.cli import main
from dlrm_workbook.datasets.best_auc import teacher_auc
from dlrm_workbook.evidence.latency import pool_of, warm_up_steps
from dlrm_workbook.show import train as training_figures
from dlrm_workbook.show.tables import TextTable, show

CPU = torch.device("cpu")
TEACHER = {
    "model": {
        "mlp_sizes": "nvidia",
        "dense_features": 6,
        "bottom_mlp": "16-8",
        "top_mlp": "16-1",
        "embedding_dim": 8,
        "table_rows": [200, 20, 3],
        "loss": "bce",
    },
    "data": {"generator": "teacher", "teacher_rows": 8, "teacher_strength": 3.0},
    "training": {
        "batch_size": 256,
        "batches": 120,
        "learning_rate": 0.5,
        "log_every": 40,
        "eval_batches": 16,
        "threads": 1,
        "device": "cpu",
        "embedding_backend": "fused",
    },
}


teacher = partial(parameters_with, TEACHER)


def brute_force_auc(scores, clicks):
    above, below = scores[clicks][:, None], scores[~clicks][None, :]
    return ((above > below).sum() + 0.5 * (above == below).sum()) / (above.size * below.size)


@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_an_evaluation_is_what_the_predictions_say(backend):
    chosen = teacher(embedding_backend=backend, batches=30)
    trainer = Trainer(chosen)
    trainer.train()
    before = [weight.clone() for weight in trainer.model.parameters()]
    found = trainer.evaluate()
    assert all(map(torch.equal, before, trainer.model.parameters()))
    batches = list(trainer.held_out)
    with torch.no_grad():
        scores = torch.cat([trainer.model(batch) for batch in batches]).numpy()[:, 0]
    targets = torch.cat([batch.targets for batch in batches]).numpy()[:, 0]
    assert found.samples == 16 * 256 == scores.size and found.iteration == 30
    assert found.auc == pytest.approx(brute_force_auc(scores, targets > 0.5), abs=1e-12)
    expected = torch.nn.functional.binary_cross_entropy(
        torch.tensor(scores).double(), torch.tensor(targets).double()
    )
    assert found.log_loss == pytest.approx(float(expected), rel=1e-6)
    assert found.loss == pytest.approx(float(expected), rel=1e-5)
    assert found.accuracy == np.mean((scores > 0.5) == (targets > 0.5))
    assert not found.notices() and found == trainer_like(found)
    again = trainer.evaluate()
    assert (again.auc, again.log_loss) == (found.auc, found.log_loss)


def trainer_like(found):
    """The same evaluation through JSON, as in metrics.jsonl."""
    return type(found)(**json.loads(json.dumps(asdict(found))))


@pytest.mark.parametrize("generator", ["facebook", "uniform", "teacher"])
def test_test_data_is_not_the_training_data(generator):
    data = {"generator": generator, "indices_per_lookup": 5, "round_targets": True}
    chosen = teacher(data=data, eval_batches=4)
    stream = make_generator(chosen, CPU)
    seen = {stream.next_batch().dense.numpy().tobytes() for _ in range(8)}
    held_out = HeldOut(chosen, CPU)
    tested = [batch.dense.numpy().tobytes() for batch in held_out]
    assert len(tested) == 4 and not seen & set(tested)
    assert [batch.dense.numpy().tobytes() for batch in held_out] == tested
    assert len(list(held_out_batches(chosen, CPU, 2))) == 2


def test_targets_of_one_kind_and_graded_ones_are_said():
    trainer = Trainer(teacher(data={"generator": "uniform"}))
    graded = trainer.evaluate()
    assert 0.4 < graded.auc < 0.6 and "above 0.5" in graded.notices()[0]
    batch = next(iter(trainer.held_out))
    batch.targets.fill_(1.0)
    alike = evaluate(trainer.predict, trainer.loss, [batch], CPU)
    assert alike.auc is None and "all 256 test targets are clicks" in alike.notices()[0]
    with pytest.raises(InputError, match="no samples"):
        evaluate(trainer.predict, trainer.loss, [], CPU)


def test_evaluations_come_when_due_and_a_target_ends_the_run(tmp_path):
    every = []
    result = train(teacher(eval_every=50), tmp_path, observer=Calling(every.append))
    lines = [line for line in every if "kind" in line]
    assert [line["iteration"] for line in lines] == [50, 100, 120]
    assert result.evaluations == lines and result.auc == lines[-1]["auc"]
    aucs = [line["auc"] for line in lines]
    assert aucs[0] < aucs[-1] == result.best_auc and result.reached_target is None
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == every
    target = (aucs[0] + aucs[1]) / 2
    early = train(teacher(eval_every=50, auc_target=target))
    assert early.iterations == 100 and early.reached_target and early.status == "finished"
    assert early.loss == pytest.approx(np.mean(early.losses[80:100]))
    late = train(teacher(auc_target=1.0, batches=20))
    assert late.iterations == 20 and late.reached_target is False
    assert [line["iteration"] for line in late.evaluations] == [20]


def test_evaluating_changes_nothing_of_the_training():
    plain = train(teacher(batches=60))
    evaluated = train(teacher(batches=60, eval_every=7))
    assert plain.losses == evaluated.losses
    # nor does it count as an iteration's time
    assert evaluated.evaluation_s > 0 and len(evaluated.iteration_ms) == 60
    assert sum(evaluated.iteration_ms) / 1e3 < evaluated.elapsed_s - evaluated.evaluation_s


def test_precisions_agree_in_auc():
    """fp32, bf16 and fp16 on learnable data: within 0.001, as the issue asks."""
    aucs = {
        precision: train(
            teacher(
                batches=600,
                precision=precision,
                loss_scale=1024.0,
                learning_rate=0.3,
                lr_decay_start=100,
                lr_decay_steps=500,
                auc_target=1.0,
                eval_batches=64,
            )
        ).auc
        for precision in ("fp32", "bf16", "fp16")
    }
    assert aucs["fp32"] > 0.8
    assert max(aucs.values()) - min(aucs.values()) < 0.001, aucs


@given(batches=st.integers(1, 500), max_steps=st.none() | st.integers(1, 500))
def test_length_of_a_run(batches, max_steps):
    chosen = teacher(batches=batches, max_steps=max_steps)
    assert Trainer(chosen).total == min(batches, max_steps or batches)


def test_a_stream_without_end_has_no_epochs():
    for leaf in ("epochs", "evals_per_epoch"):
        said = rf"training.{leaf} is 2, but data.generator 'teacher' makes batches without end"
        with pytest.raises(InputError, match=said):
            Trainer(teacher(**{leaf: 2}))
    with pytest.raises(InputError, match=r"data.samples is 255, but training.batch_size is 256"):
        teacher(data={"samples": 255})
    with pytest.raises(InputError, match=r"eval_every is 3, but .*evals_per_epoch is 2"):
        teacher(eval_every=3, evals_per_epoch=2)


def test_evaluations_come_so_often_an_epoch_and_short_batches_count_by_their_samples():
    data = {"samples": 11 * 256 + 100, "drop_last": False}
    result = train(teacher(data=data, epochs=2, evals_per_epoch=4, eval_batches=1))
    # 12 batches, the last of 100 samples: an evaluation every 3
    assert [line["iteration"] for line in result.evaluations] == list(range(3, 25, 3))
    assert result.samples == 2 * data["samples"]
    rate = 1e3 * result.samples / sum(result.iteration_ms)
    assert result.samples_per_second == pytest.approx(rate)
    few = train(teacher(data=data, epochs=1, evals_per_epoch=20, eval_batches=1))
    assert len(few.evaluations) == 12
    whole = train(teacher(data=data | {"drop_last": True}, epochs=2))
    assert (whole.iterations, whole.samples) == (22, 22 * 256)


def test_a_run_goes_on_in_the_middle_of_an_epoch_that_ends_in_a_short_batch(tmp_path):
    data = {"samples": 3 * 256 + 7, "drop_last": False}
    straight = train(teacher(data=data, epochs=3))
    asked = {"data": data, "epochs": 3, "checkpoint_every": 4}
    train(teacher(**asked, max_steps=5), tmp_path)
    resumed = train(teacher(**asked, resume="latest"), tmp_path)
    assert resumed.first_iteration == 5 and resumed.losses == straight.losses[5:]
    assert resumed.samples == straight.samples - (3 * 256 + 7) - 256


# ---- latency ----------------------------------------------------------------------


def test_warm_up_is_found_and_nothing_else():
    random = np.random.default_rng(1)
    cut = []
    for _ in range(200):
        steady = random.gamma(4.0, 0.25, 400)
        steady[random.integers(0, 400, 4)] *= 20  # stragglers
        cut.append(warm_up_steps(steady))
        slow = steady.copy()
        slow[:60] += 3.0 * np.exp(-np.arange(60) / 30.0)
        found = warm_up_steps(slow)
        # what is left of the warm-up in the mean is less than the noise of the mean
        assert 20 <= found <= 200
        assert abs(np.median(slow[found:]) / np.median(steady) - 1) < 0.1
    assert np.median(cut) <= 20 and max(cut) <= 200
    assert warm_up_steps([5.0]) == 0 and warm_up_steps([5.0] * 9) == 1
    assert warm_up_steps([7.0] * 10 + [1.0] * 90) == 10


def test_a_pool_holds_full_batches_only():
    chosen = teacher(eval_batches=3)
    made = list(held_out_batches(chosen, CPU, 3))
    assert [batch.size for batch in pool_of(iter(made), 2, pin=False)] == [256, 256]
    smaller = next(iter(held_out_batches(teacher(batch_size=100), CPU, 1)))
    assert len(pool_of([*made, smaller], 50, pin=False)) == 3
    with pytest.raises(InputError, match="no samples"):
        pool_of([], 50, pin=False)


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    chosen = teacher(checkpoint_every=60, auc_target=1.0)
    result = train(chosen, folder)
    path = folder / "p.yaml"
    path.write_text(json.dumps(chosen.to_sections()))
    return path, folder / "checkpoint", result


def last_line(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_evaluate_command(checkpointed, capsys):
    path, place, result = checkpointed
    assert main(["evaluate", "-f", str(path), "--checkpoint", str(place)]) == 0
    (line,) = last_line(capsys)
    assert line["auc"] == result.auc and line["iteration"] == 120
    assert line["checkpoint"].endswith("step-00000120")
    assert line["samples_per_second"] > 0 and line["ms_per_iteration"] > 0
    assert line["loss"] == result.evaluations[-1]["loss"] and line["notices"] == []
    # another back end, and other optimisers' parameters, need no other checkpoint
    more = ["-p", "training.embedding_backend=torch", "-p", "training.optimizer=adagrad"]
    assert main(["evaluate", "-f", str(path), "--checkpoint", str(place), *more]) == 0
    (other,) = last_line(capsys)
    assert other["auc"] == pytest.approx(result.auc, abs=1e-5)
    older = str(place / "step-00000060")
    assert main(["evaluate", "-f", str(path), "--checkpoint", older]) == 0
    assert last_line(capsys)[0]["iteration"] == 60
    assert main(["evaluate", "-f", str(path)]) == 0
    (initial,) = last_line(capsys)
    assert initial["iteration"] == 0 and "initial weights" in initial["notices"][0]
    assert initial["auc"] < result.auc


def test_the_infer_command(checkpointed, capsys):
    path, place, _ = checkpointed
    given = ["infer", "-f", str(path), "--checkpoint", str(place), "--steps", "60"]
    assert main([*given, "--batch-sizes", "1,32", "--protocol", "nvidia"]) == 0
    first, second, last = last_line(capsys)
    assert (first["batch_size"], second["batch_size"]) == (1, 32)
    assert first["warm_up_steps"] == 10 and first["steps"] == 50
    assert last["protocol"] == "nvidia" and len(last["batch_sizes"]) == 2
    latency = last["latency_ms"]
    assert set(latency) == {"mean", "p50", "p90", "p95", "p99"}
    assert latency["p50"] <= latency["p90"] <= latency["p95"] <= latency["p99"]
    assert last["ms_per_iteration"] == latency["p50"]
    assert last["samples_per_second"] == pytest.approx(1e3 / latency["mean"])
    assert 0 < last["loss"] < 1 and last["batch_size"] == 1
    assert main(given) == 0
    *_, last = last_line(capsys)
    assert last["batch_size"] == 256 and last["protocol"] == "steady"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--batch-sizes", "1,x"], "--batch-sizes is '1,x'"),
        (["--batch-sizes", "0"], "--batch-sizes is '0'"),
        (["--steps", "0"], "--steps is 0"),
        (["--seconds", "nan"], "--seconds is nan, expected a number above 0"),
        (["--seconds", "-1"], "--seconds is -1, expected a number above 0"),
        (["--steps", "10", "--protocol", "nvidia"], "the first 10 are left out"),
        (["--checkpoint", "/nonexistent"], "holds no checkpoint"),
        (["-p", "model.top_mlp=17-1"], "model.top_mlp"),
    ],
)
def test_what_infer_cannot_do_is_one_sentence(checkpointed, capsys, more, words):
    path, place, _ = checkpointed
    given = ["infer", "-f", str(path), "--checkpoint", str(place), *more]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_batch_that_has_no_room_is_refused_before_it_is_made(checkpointed, capsys):
    path, place, _ = checkpointed
    given = ["infer", "-f", str(path), "--checkpoint", str(place), "--batch-sizes", "1,9999999999"]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "9,999,999,999" in said and "Traceback" not in said


def test_predictions_are_the_models_in_every_precision():
    for precision, least in (("fp32", 0.0), ("bf16", 2.0**-8), ("fp16", 2.0**-11)):
        trainer = Trainer(teacher(precision=precision))
        batch = next(trainer.batches)
        predicted = predict(trainer.model, batch, trainer.step.dense.precision)
        with torch.no_grad():
            plain = trainer.model(batch)
        assert predicted.dtype == torch.float32 and not predicted.requires_grad
        # 4 layers, each rounds its inputs; the sigmoid's slope is at most 1/4
        logits = torch.logit(plain).abs().max()
        assert float((predicted - plain).abs().max()) <= 8 * least * max(1.0, float(logits))


# ---- the page ---------------------------------------------------------------------


def test_the_page_shows_quality_and_schedule(tmp_path):
    chosen = teacher(eval_every=40, auc_target=0.95, lr_warmup_steps=30, checkpoint_every=60)
    result = train(chosen, tmp_path)
    intervals = runs.intervals(tmp_path)
    evaluations = runs.evaluations(tmp_path)
    assert list(intervals["iteration"]) == [40, 80, 120] and "kind" not in intervals
    assert list(evaluations["iteration"]) == [40, 80, 120]
    best = teacher_auc(chosen)
    shown = training_figures.learning_curve(evaluations, intervals, 0.95, best)
    assert list(shown.data[0].y) == [line["auc"] for line in result.evaluations]
    for text in ("target 0.95", f"best possible, the teacher's own: {best:.5f}"):
        assert any(text in str(note.text) for note in shown.layout.annotations)
    planned = runs.schedule(chosen, result.iterations)
    rates = training_figures.learning_rate(planned, intervals)
    assert rates.data[0].y[0] == pytest.approx(0.5 / 30) and set(rates.data[1].y) == {0.5}
    for known in (None, best):
        table = show(runs.evaluations(tmp_path, known), ["auc", "below_best", "log_loss"])
        assert isinstance(table, TextTable)
        assert len(table.rows) == 3 and table.rows[-1][0] == f"{result.auc:.5f}"
        assert (f"{best - result.auc:.5f}" in table.rows[-1]) is bool(known)
    shown = show(runs.result_facts(result))
    assert isinstance(shown, TextTable)
    facts = dict(shown.rows)
    assert facts["last checkpoint"] == "step-00000120"
    assert f"{result.auc:.5f}" in facts["AUC of the last evaluation"]


def test_a_page_without_evaluations_and_schedule(tmp_path):
    train(teacher(batches=20), tmp_path)
    assert not len(runs.evaluations(tmp_path))
    assert not len(runs.schedule(teacher(), 20))
