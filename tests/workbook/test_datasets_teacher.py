"""The planted teacher: its shares, the best AUC it allows, its samples with and without files."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data_set import ROWS, SMALL

from dlrm_core.config import parameters_from_sections
from dlrm_core.data.files.samples import evaluation_batches, read_batch
from dlrm_core.data.files.sources import open_source
from dlrm_core.data.files.spec import read_spec
from dlrm_core.data.files.teacher import Law, SampleMaker, TeacherConfig, Variant, sigmoid
from dlrm_core.data.loader import make_generator
from dlrm_workbook.datasets import best_auc
from dlrm_workbook.datasets.best_auc import ScoreHistogram, sampled_logits, teacher_auc
from dlrm_workbook.datasets.generate import generate
from dlrm_workbook.datasets.inspection import examine_data

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-60, 60), st.booleans()), min_size=2, max_size=60
    ).filter(lambda pairs: 0 < sum(label for _, label in pairs) < len(pairs))
)  # fmt: skip
def test_the_auc_of_a_histogram_is_the_share_of_ordered_pairs(pairs):
    # scores on whole quarters fall into bins of their own
    scores = np.array([score / 4 for score, _ in pairs])
    labels = np.array([label for _, label in pairs])
    histogram = ScoreHistogram()
    for part in (slice(0, 10), slice(10, None)):
        histogram.add(scores[part], labels[part])
    won = np.subtract.outer(scores[labels], scores[~labels])
    auc, uncertainty = histogram.auc()
    assert auc == pytest.approx((won > 0).mean() + (won == 0).mean() / 2)
    assert uncertainty == pytest.approx((won == 0).mean() / 2)
    p = 1 / (1 + np.exp(-scores))
    loss = -np.log(np.where(labels, p, 1 - p)).mean()
    assert histogram.log_loss() == pytest.approx(loss)


def test_the_sigmoid_is_the_sigmoid():
    x = np.linspace(-39, 39, 2001)
    assert np.allclose(sigmoid(x), 1 / (1 + np.exp(-x)), rtol=1e-12, atol=0)


def test_the_teachers_parts_have_the_shares_they_are_said_to_have():
    config = TeacherConfig(strength=2.0, bias=-0.5)
    maker = SampleMaker(Law(SMALL.variant, 0, config), "train")
    logits = sampled_logits(maker, 99, 0, 200_000)
    # standard errors of a mean and a deviation of 200,000 draws, five times; the pairs share
    # their tables with the single effects, which adds a few percent at most
    assert logits.mean() == pytest.approx(-0.5, abs=0.05)
    assert logits.std() == pytest.approx(2.0, rel=0.06)


def test_the_best_auc_is_the_teachers_own_and_no_other_score_beats_it(monkeypatch):
    monkeypatch.setattr(best_auc, "ROUNDS", 8)
    monkeypatch.setattr(best_auc, "SAMPLES", 1 << 15)
    law = Law(SMALL.variant, 21, TeacherConfig())
    figures = best_auc.best_figures(law)
    labels, dense, _, logits = SampleMaker(law, "test").block(0, 200_000)

    def auc(scores):
        histogram = ScoreHistogram()
        histogram.add(scores, labels)
        return histogram.auc()[0]

    # Hanley and McNeil's standard error of an AUC is below 1 / (2 sqrt(min(n+, n-)))
    allowed = 5 * (0.5 / np.sqrt(labels.sum()) + figures["bayes_auc_standard_error"])
    assert auc(logits) == pytest.approx(figures["bayes_auc"], abs=allowed)
    assert auc(dense.astype(np.float64).sum(1)) < auc(logits) - 0.05
    noisy = logits + np.random.default_rng(1).normal(size=logits.size)
    assert 0.6 < auc(noisy) < auc(logits) - 0.01
    assert labels.mean() == pytest.approx(figures["click_rate"], abs=5 * 0.5 / np.sqrt(200_000))
    weak = best_auc.best_figures(Law(SMALL.variant, 21, TeacherConfig(strength=0.0)))
    assert weak["bayes_auc"] == pytest.approx(0.5)


def test_the_metadata_carry_the_best_auc_and_the_stream_is_the_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "dlrm_workbook.datasets.generate.best_figures", lambda *_: {"bayes_auc": 0.8}
    )  # fmt: skip
    law = Law(Variant("custom", 5, ROWS, 1.2), 9, TeacherConfig(rows=20))
    folder = generate(law, {"train": 1000, "test": 4000}, tmp_path / "set", 2).folder
    metadata = read_spec(folder).metadata
    assert metadata["bayes_auc"] == 0.8
    source = open_source(folder, "split_binary", "test")
    batch = read_batch(source, ROWS, 0, 4000)
    teacher = SampleMaker(law, "test").teacher
    rows = [batch.table_indices(t).numpy() for t in range(6)]
    scores = teacher.logits(batch.dense.numpy().astype(np.float16), rows)
    histogram = ScoreHistogram()
    histogram.add(scores, batch.targets[:, 0].numpy())
    assert histogram.auc()[0] == pytest.approx(metadata["teacher_auc_on_test"], abs=1e-12)
    assert examine_data(folder, verify=True)["problems"] == []
    # the same law without files
    parameters = parameters_from_sections(
        {
            "model": {"bottom_mlp": "5-8-4", "embedding_dim": 4, "table_rows": list(ROWS),
                      "top_mlp": [1], "tables": 6},
            "data": {"generator": "teacher", "zipf_exponent": 1.2, "teacher_rows": 20},
            "training": {"batch_size": 400, "seed": 9},
        }
    )  # fmt: skip
    stream = make_generator(parameters, CPU)
    on_disk = open_source(folder, "split_binary", "train")
    stream.restore({"batches": 1})
    found, expected = stream.next_batch(), read_batch(on_disk, ROWS, 400, 800)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.dense, expected.dense)
    assert torch.equal(found.targets, expected.targets)
    assert stream.state() == {"batches": 2}
    last = list(evaluation_batches(parameters, samples=900))[-1]
    assert last.size == 100
    assert torch.equal(last.targets, read_batch(source, ROWS, 800, 900).targets)


def test_a_models_auc_is_held_against_the_teachers_on_the_same_samples(tmp_path):
    target = tmp_path / "set"
    law = Law(Variant("custom", 3, ROWS, 1.45), 5, TeacherConfig())
    generate(law, {"train": 10, "test": 3000}, target, threads=1)
    model = {"mlp_sizes": "nvidia", "dense_features": 3, "bottom_mlp": [4], "top_mlp": [1]}
    model |= {"embedding_dim": 4, "table_rows": list(ROWS), "loss": "bce"}

    def best(**training):
        data = {"generator": "dataset", "path": str(target)}
        sections = {"model": model, "data": data, "training": {"batch_size": 100} | training}
        return teacher_auc(parameters_from_sections(sections))

    whole = open_source(target, "split_binary", "test").metadata["teacher_auc_on_test"]
    assert best() == best(eval_batches=30) == whole
    # of the first 500 samples alone, counted pair by pair
    labels, _, _, logits = SampleMaker(law, "test").block(0, 500)
    difference = logits[labels][:, None] - logits[~labels]
    pairs = (difference > 0).mean() + (difference == 0).mean() / 2
    assert best(eval_batches=5) == pytest.approx(pairs, abs=1e-4)
