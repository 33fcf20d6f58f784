"""``dlrm bench --embeddings`` and the TorchRec contestant: turns, ratios, equality, refusals."""

import argparse
import dataclasses
import importlib.util
import json
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interaction_layers import cross_layer
from optional_tools import needs_torchrec
from small_training import THREE_TABLES, parameters_with

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.config import parameters_from_sections
from dlrm_core.data.loader import batches
from dlrm_core.model import ClickLoss, build_model
from dlrm_core.step import TrainingStep
from dlrm_studies.bench import embeddings as bench
from dlrm_studies.bench import torchrec as bench_torchrec
from dlrm_studies.bench.embeddings import CASE_GROUPS, EmbeddingCase, groups_of
from dlrm_workbook.evidence.contestants import run_ours

CASE = EmbeddingCase("small", "sgd", 3, 16, targets=(("facebook", 5.0),))


def fake_run(totals, order=None, results=None):
    """A contestant of given milliseconds that leaves results as a process does."""

    def run(name, group, threads, iterations, peer, samples):
        if order is not None:
            order.append(name)
        if isinstance(totals[name], Exception):
            raise totals[name]
        for case in group:
            rows = (results or {}).get(name, np.ones((3, 2), np.float32))
            if not name.startswith("memory"):
                np.savez(samples / f"{case.name}.npz", rows=rows, pooled=rows)
        phases = {"forward": 0.25, "backward": 0.25, "update": 0.5}
        return {
            case.name: {phase: [totals[name] * part] * iterations for phase, part in phases.items()}
            for case in group
        }

    return run


TOTALS = {"facebook": 100.0, "torch": 90.0, "fbgemm": 50.0, "fused": 20.0, "memory": 15.0}


def test_everyone_takes_a_turn_at_being_first_and_ratios_are_of_rounds():
    ledger, order = bench.open_embedding_ledger(None, 4, False), []
    bench.run_group(ledger, [CASE], 1, 5, run=fake_run(TOTALS, order))
    assert [order[5 * n] for n in range(5)] == ["facebook", "torch", "fbgemm", "fused", "memory"]
    (row,) = ledger.entries
    assert len(row["rounds"]) == 5
    ratio = row["ratios"]["fused"]["facebook"]
    assert ratio == {"median": 5.0, "low": 5.0, "high": 5.0}
    assert row["share_of_row_accesses"]["total_ms"]["median"] == pytest.approx(0.75)
    assert row["targets"] == [{"against": "facebook", "wanted": 5.0, "reached": 5.0}]
    assert row["agree"] and not row["failures"]
    text = bench.describe_embeddings(row)
    assert "fused is 5.00x faster (5.00x to 5.00x) than facebook, wanted 5.0x" in text
    assert "75% of the pace of bare accesses" in text


def test_rows_in_two_bytes_are_held_against_bare_accesses_of_as_many():
    case = CASE_GROUPS["narrow"][0]
    totals = {"facebook": 100.0, "fbgemm": 50.0, "fused": 20.0, "memory": 15.0}
    totals |= {"fused bf16": 12.5, "memory bf16": 10.0}
    near, far = np.full((3, 2), 1.02, np.float32), np.full((3, 2), 1.06, np.float32)
    for rows, same in ((near, True), (far, False)):
        ledger = bench.open_embedding_ledger(None, 4, False)
        bench.run_group(ledger, [case], 1, 1, run=fake_run(totals, results={"fused bf16": rows}))
        (row,) = ledger.entries
        assert row["agree"] is same
    assert row["share_of_row_accesses"]["total_ms"]["median"] == pytest.approx(0.8)
    assert [target["reached"] for target in row["targets"]] == [8.0, 4.0]
    assert "memory bf16" not in row["ratios"]["fused bf16"]
    assert "fused bf16 is 8.00x faster than facebook, wanted 5.0x" in bench.describe_embeddings(row)


def test_a_machine_that_slows_down_does_not_change_the_ratio():
    ledger = bench.open_embedding_ledger(None, 4, False)
    for rounds, slower in ((1, 1.0), (2, 3.0), (3, 9.0)):
        slow = {name: time_ms * slower for name, time_ms in TOTALS.items()}
        bench.run_group(ledger, [CASE], 1, rounds, run=fake_run(slow))
    assert ledger.entries[0]["ratios"]["fused"]["fbgemm"]["high"] == pytest.approx(2.5)


def test_going_on_measures_only_the_rounds_that_lack(tmp_path):
    file, order = tmp_path / "e.json", []
    ledger = bench.open_embedding_ledger(file, 4, False)
    bench.run_group(ledger, [CASE], 1, 2, run=fake_run(TOTALS, order))
    again = bench.open_embedding_ledger(file, 4, False, resume=True)
    bench.run_group(again, [CASE], 1, 3, run=fake_run(TOTALS, order))
    assert len(order) == 15
    bench.run_group(again, [CASE], 2, 1, run=fake_run(TOTALS, order))
    assert [(row["threads"], len(row["rounds"])) for row in again.entries] == [(1, 3), (2, 1)]
    with pytest.raises(InputError, match="was begun with iterations 4, but now it is 8"):
        bench.open_embedding_ledger(file, 8, False, resume=True)
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"versions": {"torch": "1.0"}}))
    with pytest.raises(InputError, match=r"was begun with versions\.torch"):
        bench.open_embedding_ledger(file, 4, False, resume=True)


@pytest.mark.parametrize(
    ("found", "same"),
    [
        (np.full((3, 2), 1.0005, np.float32), True),
        (np.full((3, 2), 1.002, np.float32), False),
        (np.full((3, 2), np.nan, np.float32), False),
        (np.ones((2, 2), np.float32), False),
    ],
)
def test_who_computes_something_else_is_found(found, same):
    ledger = bench.open_embedding_ledger(None, 4, False)
    run = fake_run(TOTALS, results={"fused": found})
    bench.run_group(ledger, [CASE], 1, 1, run=run)
    (row,) = ledger.entries
    assert row["agree"] is same
    assert ("NOT the same results" in bench.describe_embeddings(row)) is not same


def test_one_lost_step_of_a_row_is_no_rounding():
    # of the bench: rate 0.1, gradients from 0.005 on
    before = np.zeros((1, 1), np.float32) + 1e-3
    assert bench._share(before, before - np.float32(0.1 * 0.005)) > 1


def test_who_fails_is_named_and_the_others_are_compared():
    ledger = bench.open_embedding_ledger(None, 4, False)
    totals = TOTALS | {"fbgemm": InputError("pip install fbgemm-gpu-cpu")}
    bench.run_group(ledger, [CASE], 1, 2, run=fake_run(totals))
    (row,) = ledger.entries
    assert row["failures"] == {"fbgemm": "pip install fbgemm-gpu-cpu"}
    assert "fbgemm" not in row["contestants"] and "fbgemm" not in row["ratios"]["fused"]
    assert "fbgemm did not run: pip install" in bench.describe_embeddings(row)


def test_unknown_groups_are_refused():
    with pytest.raises(InputError, match="--embeddings is 'fast'"):
        groups_of("sgd,fast")


def test_groups_share_their_contestants_and_names_are_one_cases_only():
    names = [case.name for group in CASE_GROUPS.values() for case in group]
    assert len(names) == len(set(names))
    for group in groups_of("all").values():
        assert len({case.contestants for case in group}) == 1


@pytest.mark.parametrize("threads", ["0", "two", "1,-1"])
def test_impossible_counts_are_refused(threads):
    arguments = argparse.Namespace(
        peer=None, json=None, iterations=2, resume=False, argv=["dlrm"], threads=threads,
        embeddings="sgd", rounds=1,
    )  # fmt: skip
    with pytest.raises(InputError, match="--threads is"):
        bench.bench_embeddings(arguments, "dlrm bench")


def test_real_contestants_compute_the_same(monkeypatch):
    monkeypatch.setattr(bench, "ROWS", 2000)
    names = ["facebook", "fused", "memory"]  # fbgemm: tests/kernels/test_embedding_backends.py
    group = [
        dataclasses.replace(CASE, name=f"{optimizer}-{skew}", optimizer=optimizer, skew=skew)
        for optimizer in ("sgd", "rowwise_adagrad")
        for skew in (None, 1.45)
    ]
    group = [dataclasses.replace(case, contestants=tuple(names)) for case in group]
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    ledger = bench.open_embedding_ledger(None, 2, False)
    bench.run_group(ledger, group, 1, 1)
    for row in ledger.entries:
        assert row["agree"] and not row["failures"]
        assert set(row["contestants"]) == set(names)
        assert all(figures["total_ms"] > 0 for figures in row["contestants"].values())
        sorts = {name for name, figures in row["contestants"].items() if "sort_ms" in figures}
        assert sorts == ({"fused"} if row["optimizer"] == "rowwise_adagrad" else set())
        assert ("sorting alone, timed apart: " in bench.describe_embeddings(row)) is bool(sorts)
        assert row["differences"][0].keys() == set(names) - {"facebook", "memory"}


# ---- TorchRec ------------------------------------------------------------------------------------


DCN = {"interaction": "dcn", "dcn_layers": 3, "dcn_rank": 5}


SECTIONS = {
    "model": THREE_TABLES,
    "data": {"indices_per_lookup": 10},
    "training": {"batch_size": 64, "seed": 5, "learning_rate": 0.05},
}
small = partial(parameters_with, SECTIONS)


@pytest.mark.parametrize("features", [2, 3, 9])
def test_torchrecs_pairs_are_ours_in_another_order(features):
    vectors = torch.randn(features, 5)
    products = vectors @ vectors.T
    ours = products[tuple(torch.tril_indices(features, features, offset=-1))]
    theirs = products[tuple(torch.triu_indices(features, features, offset=1))]
    # the halves of a product with its own transpose may differ in the last bit
    torch.testing.assert_close(ours[bench_torchrec.pair_order(features)], theirs)


@needs_torchrec
@settings(max_examples=20, deadline=None)
@given(
    size=st.integers(1, 9),
    features=st.integers(2, 6),
    dim=st.integers(1, 16),
    layers=st.integers(1, 4),
    rank=st.integers(1, 20),
)
def test_cross_layers_and_their_gradients_are_torchrecs(size, features, dim, layers, rank):
    from torchrec.modules.crossnet import LowRankCrossNet

    torch.manual_seed(size)
    width = features * dim
    ours = cross_layer(features, dim, layers, rank)
    for weight in ours.weights:
        torch.nn.init.normal_(weight)
    theirs = LowRankCrossNet(width, layers, rank)
    bench_torchrec.take_cross_weights(ours, theirs)
    leaves = [torch.randn(size, dim, requires_grad=True) for _ in range(features)]
    z, expected = ours(leaves[0], leaves[1:]), theirs(torch.cat(leaves, dim=1))
    torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-5)
    inputs = [*leaves, *theirs.V_kernels, *theirs.W_kernels, *theirs.bias]
    theirs_gradients = torch.autograd.grad(expected.square().mean(), inputs)
    weights = [weight for place in range(3) for weight in ours.weights[place::3]]
    for one, other in zip(
        torch.autograd.grad(z.square().mean(), [*leaves, *weights]), theirs_gradients, strict=True
    ):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * max(scale, 1.0))


@needs_torchrec
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_training_with_cross_layers_is_that_of_torchrecs_dlrm_dcn(optimizer):
    chosen, cpu = small(DCN, optimizer=optimizer), torch.device("cpu")
    model = build_model(chosen.model, chosen.training.seed, cpu)
    theirs = bench_torchrec.TorchRecStep(chosen, model, cpu)
    assert type(theirs.model).__name__ == "DLRM_DCN"
    loss = ClickLoss.of(chosen.model)
    ours, stream = TrainingStep(model, loss, chosen.training), batches(chosen, cpu)
    losses = []
    for _ in range(20):
        batch = next(stream)
        losses.append((float(ours(batch)), float(theirs(batch))))
    one, other = zip(*losses, strict=True)
    assert one == pytest.approx(other, abs=1e-5)
    # all weights learn
    trained = {name: weight.detach() for name, weight in model.named_parameters()}
    first = build_model(chosen.model, chosen.training.seed, cpu)
    for name, weight in first.named_parameters():
        assert not torch.equal(trained[name], weight), name
    cross = dict(theirs.model.inter_arch.crossnet.named_parameters())
    for layer in range(3):
        for kind, name in (("V_kernels", f"{2 * layer}.weight"), ("bias", f"{2 * layer + 1}.bias")):
            torch.testing.assert_close(
                trained[f"interaction.products.{name}"],
                cross[f"{kind}.{layer}"].detach(),
                rtol=1e-4,
                atol=1e-5,
            )


@needs_torchrec
def test_torchrec_trains_as_our_model_does():
    given = small(optimizer="rowwise_adagrad")
    theirs = bench_torchrec.run_torchrec(given, 2, 1)
    ours = run_ours(given, 2, 1)
    assert theirs.losses == pytest.approx(ours.losses, abs=1e-5)
    assert 0 < theirs.step_ms <= theirs.end_to_end_ms


def test_without_torchrec_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingToolError, match=r"pip install --no-deps torchrec==1\.8\.0"):
        bench_torchrec.run_torchrec(small(), 2, 1)


@pytest.mark.parametrize(
    ("section", "leaf", "value", "message"),
    [
        ("model", "interaction", "cat", "model.interaction is 'cat'"),
        ("training", "precision", "bf16", "training.precision is 'bf16'"),
        ("training", "optimizer", "adam", "training.optimizer is 'adam'"),
    ],
)
def test_what_torchrecs_model_cannot_be_is_refused(section, leaf, value, message):
    sections = small().to_sections()
    sections[section][leaf] = value
    with pytest.raises(InputError, match=message):
        bench_torchrec.require_same_model(parameters_from_sections(sections))
