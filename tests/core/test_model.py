"""The model and its step against plain formulas and against one loss.backward()."""

import copy
import ctypes
import functools
import mmap
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interaction_layers import cross_layer, dot_layer
from small_training import THREE_TABLES

from dlrm_core.config import parameters_from_sections
from dlrm_core.data.loader import batches
from dlrm_core.model import ClickLoss, build_model
from dlrm_core.train import Trainer
from dlrm_kernels.embeddings import pages


def small(**model):
    return parameters_from_sections(
        {
            "model": THREE_TABLES | model,
            "data": {"indices_per_lookup": 10, "round_targets": True},
            "training": {"batch_size": 64, "learning_rate": 0.5, "seed": 5, "threads": 1},
        }
    )


@pytest.mark.parametrize("itself", [False, True])
def test_dot_interaction_is_every_pair_once(itself):
    size, features, dim = 5, 4, 3
    vectors = torch.randn(features, size, dim, dtype=torch.float64)
    result = dot_layer(features, itself)(vectors[0], list(vectors[1:]))
    expected = [vectors[0]]
    for i in range(features):
        for j in range(i + (1 if itself else 0)):
            expected.append((vectors[i] * vectors[j]).sum(1, keepdim=True))
    torch.testing.assert_close(result, torch.cat(expected, dim=1))


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 9),
    features=st.integers(2, 6),
    dim=st.integers(1, 8),
    layers=st.integers(1, 4),
    rank=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_cross_layers_are_the_papers_formula(size, features, dim, layers, rank, seed):
    torch.manual_seed(seed)
    cross = cross_layer(features, dim, layers, rank).double()
    for weight in cross.parameters():
        torch.nn.init.normal_(weight)
    vectors = torch.randn(features, size, dim, dtype=torch.float64)
    expected = first = np.concatenate(vectors.numpy(), axis=1)
    weights = [weight.detach().numpy() for weight in cross.parameters()]
    for v, w, b in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
        expected = first * (expected @ v.T @ w.T + b) + expected
    assert len(weights) == 3 * layers
    result = cross(vectors[0], list(vectors[1:])).detach().numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9 * abs(expected).max())


@pytest.mark.parametrize("init", ["facebook", "torch"])
def test_cross_layers_begin_as_torchrecs_and_change_no_other_weight(init):
    without = build_model(small(interaction="cat", init=init).model, 3, torch.device("cpu"))
    parameters = small(interaction="dcn", dcn_layers=2, dcn_rank=300, init=init)
    model = build_model(parameters.model, 3, torch.device("cpu"))
    before, weights = dict(without.named_parameters()), dict(model.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in before.items())
    own = [weight.detach() for name, weight in weights.items() if name not in before]
    assert [tuple(weight.shape) for weight in own] == [(300, 32), (32, 300), (32,)] * 2
    for narrow, widen, bias in (own[:3], own[3:]):
        # xavier_normal_
        for weight in (narrow, widen):
            assert float(weight.std()) == pytest.approx((2 / 332) ** 0.5, rel=0.05)
        assert not bias.any()


def test_prediction_written_out_in_numpy():
    parameters = small()
    model = build_model(parameters.model, 5, torch.device("cpu"))
    batch = next(batches(parameters, torch.device("cpu")))
    x = batch.dense.double().numpy()
    for linear in model.bottom_mlp.linears:
        w, b = (p.detach().double().numpy() for p in linear.parameters())
        x = np.maximum(x @ w.T + b, 0)
    features = [x]
    for t, weight in enumerate(model.embeddings.weights):
        indices = batch.table_indices(t).numpy()
        rows = weight.detach().double().numpy()[indices]
        features.append(np.add.reduceat(rows, batch.offsets[t].numpy(), axis=0))
    z = [x] + [
        (features[i] * features[j]).sum(1, keepdims=True) for i in range(4) for j in range(i)
    ]
    z = np.concatenate(z, axis=1)
    for i, linear in enumerate(model.top_mlp.linears):
        w, b = (p.detach().double().numpy() for p in linear.parameters())
        z = z @ w.T + b
        z = np.maximum(z, 0) if i < 2 else 1 / (1 + np.exp(-z))
    np.testing.assert_allclose(model(batch).detach().numpy(), z, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["mse", "bce", "wbce"])
@pytest.mark.parametrize("interaction", ["dot", "cat", "dcn"])
@pytest.mark.parametrize("itself", [False, True])
def test_the_step_in_parts_equals_one_backward_bit_for_bit(loss, interaction, itself):
    parameters = small(
        loss=loss,
        loss_weights=[0.5, 2.0],
        interaction=interaction,
        interaction_itself=itself,
        loss_threshold=0.01,
    )
    trainer = Trainer(parameters)
    whole = copy.deepcopy(trainer.model)
    batch = next(batches(parameters, torch.device("cpu")))
    criterion = ClickLoss(loss, [0.5, 2.0])
    expected = criterion(whole(batch), batch.targets)
    expected.backward()
    torch.optim.SGD(whole.parameters(), lr=0.5, foreach=False).step()
    assert torch.equal(trainer.step(batch), expected.detach())
    for ours, theirs in zip(trainer.model.parameters(), whole.parameters(), strict=True):
        mine, reference = (
            w.grad.to_dense() if w.grad.is_sparse else w.grad for w in (ours, theirs)
        )
        assert torch.equal(mine, reference)
        assert torch.equal(ours, theirs)


def test_weighted_bce_weighs_by_target():
    p = torch.tensor([[0.3], [0.8]])
    t = torch.tensor([[0.0], [1.0]])
    expected = (-0.5 * np.log(0.7) - 2.0 * np.log(0.8)) / 2
    assert float(ClickLoss("wbce", [0.5, 2.0])(p, t)) == pytest.approx(expected, rel=1e-6)
    assert float(ClickLoss("wbce", [1.0, 1.0])(p, t)) == pytest.approx(
        float(ClickLoss("bce", [1.0, 1.0])(p, t)), rel=1e-6
    )


@pytest.mark.parametrize("init", ["facebook", "torch"])
def test_initial_weights_have_the_documented_spread(init):
    parameters = small(bottom_mlp="200-300-8", table_rows=[5000], tables=1, init=init)
    model = build_model(parameters.model, 3, torch.device("cpu"))
    table = model.embeddings.weights[0].detach()
    bound = (1 / 5000) ** 0.5
    assert table.abs().max() <= bound
    assert float(table.std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    linear = model.bottom_mlp.linears[0]
    assert float(linear.weight.detach().std()) == pytest.approx((2 / 500) ** 0.5, rel=0.02)
    assert float(linear.bias.detach().std()) == pytest.approx((1 / 300) ** 0.5, rel=0.15)
    again = build_model(parameters.model, 3, torch.device("cpu"))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_tables_drawn_in_chunks_are_the_stream_drawn_whole(monkeypatch):
    parameters = small()
    whole = build_model(parameters.model, 9, torch.device("cpu"))
    monkeypatch.setattr("dlrm_core.model._CHUNK", 37)
    chunked = build_model(parameters.model, 9, torch.device("cpu"))
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), chunked.parameters(), strict=True)
    )


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="the system is asked as Linux is")
@pytest.mark.parametrize("huge_pages", [False, True])
def test_memory_is_touched_beside_and_from_its_end(huge_pages):
    page = pages._whole_pages(torch.empty(1 << 20), mmap.PAGESIZE)
    if not pages._advise(*page, pages._MADV_POPULATE_WRITE):
        pytest.skip("this kernel touches no memory when it is asked to (before 5.14)")
    # memory that earlier tests have freed would be taken again: it has been touched before
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
    make = pages.empty_table if huge_pages else torch.empty
    tables = [make(1 << 20, 64) for _ in range(2)]
    size = sum(table.nbytes for table in tables)
    before = resident_bytes()
    tables[1][-1] = 7
    with pages.touched_beside(tables):
        ends = time.monotonic() + 60
        while resident_bytes() - before < 0.9 * size and time.monotonic() < ends:
            time.sleep(0.001)
    assert resident_bytes() - before >= 0.9 * size
    assert (tables[1][-1] == 7).all() and not tables[0].any()


@pytest.mark.parametrize("init", ["facebook", "torch"])
def test_touching_beside_changes_no_weight_and_may_be_refused(monkeypatch, init):
    def weights(least, advice=pages._MADV_POPULATE_WRITE):
        monkeypatch.setattr(pages, "_WORTH_A_THREAD", least)
        monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", advice)
        config = small(init=init, table_rows=[100_000, 50]).model
        tables = functools.partial(
            pages.tables_on_huge_pages, config.table_rows, config.embedding_dim
        )
        cpu = torch.device("cpu")
        return build_model(config, 5, cpu, tables, pages.touched_beside).state_dict()

    alone = weights(1 << 60)
    for others in (weights(0), weights(0, advice=-1)):
        for name, weight in alone.items():
            assert torch.equal(weight, others[name])
