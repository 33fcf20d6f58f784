"""Tables of 2 bytes a number: every back end against torch's, bit for bit, and against fp32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_embeddings import OPTIMIZERS, config, make_batch, take_steps

from dlrm_core.base.errors import InputError
from dlrm_core.config import parameters_from_sections
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import ROW_DTYPES, EmbeddingTables, attach
from dlrm_kernels.embeddings.fused_cpu import FusedCpu
from dlrm_kernels.embeddings.narrow_rows import TorchRows
from dlrm_kernels.memory import forecast_memory

NARROW = ("bf16", "fp16")
RATE = 0.1
WIDE = 64 if torch.cuda.is_available() else 16


def narrow_tables(rows, dim, precision):
    tables = EmbeddingTables(rows, dim, dtype=ROW_DTYPES[precision])
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in tables.weights:
            weight.copy_(torch.rand(weight.shape, generator=random) - 0.5)
    return tables


def fused_gpu(tables, optimizer):
    pytest.importorskip("triton", reason="triton is not installed: its interpreter cannot run")
    from dlrm_kernels.embeddings.fused_gpu import FusedGpu

    return FusedGpu(tables, optimizer, RATE, seed=5)


def back_end(tables, name, optimizer):
    if name == "gpu":
        return fused_gpu(tables, optimizer)
    if name == "cpu":
        return FusedCpu(tables, optimizer, RATE, seed=5)
    return TorchRows(tables, optimizer, RATE, 5)


def trained(name, rows, dim, precision, optimizer, *, steps=3, bags=20, largest=5):
    """Tables after some steps: their weights, and the pooled vectors of all steps."""
    tables = narrow_tables(rows, dim, precision)
    tables.backend = update = back_end(tables, name, optimizer)
    seen = take_steps(tables, update, rows, dim, steps, bags, largest)
    assert update.updates == steps
    return [weight.detach() for weight in tables.weights], seen


def assert_nearly_all_bits(found, expected):
    """All but a few weights are the same bits, those within one number of the format.

    A gradient added up in another order differs in its last bit, which now and then tips a
    rounding.
    """
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == other.dtype
        assert (mine != other).float().mean() < 0.02
        distance = (mine.view(torch.int16).int() - other.view(torch.int16).int()).abs()
        assert int(distance.max()) <= 1 or mine.dtype == torch.float16


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "dim"), [("cpu", 64), ("cpu", 20), ("gpu", WIDE), ("gpu", 20)])
def test_fused_rounds_as_torch_does(name, precision, optimizer, dim):
    # fewer rows than lookups: SGD takes the sum of a row's gradients as well
    # (fewer of both, and narrower, where Triton's interpreter takes milliseconds a number)
    count = 5 if name == "gpu" else 30
    how = (([count, 1, 7], dim, precision, optimizer), {"steps": 2, "bags": count})
    weights, seen = trained(name, *how[0], **how[1])
    expected, others = trained("torch", *how[0], **how[1])
    torch.testing.assert_close(seen, others, rtol=1e-2, atol=1e-2)
    assert_nearly_all_bits(weights, expected)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    st.integers(1, 150),
    st.integers(1, 40),
    st.sampled_from(NARROW),
    st.sampled_from(("adagrad", "rowwise_adagrad")),
)
def test_fused_holds_for_any_shape(rows, dim, bags, precision, optimizer):
    weights, _ = trained("cpu", rows, dim, precision, optimizer, steps=2, bags=bags)
    expected, _ = trained("torch", rows, dim, precision, optimizer, steps=2, bags=bags)
    for mine, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("name", ["cpu", "gpu", "torch"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_follows_that_of_fp32(name, precision, optimizer):
    rows = [200, 3]
    found, _ = trained(name, rows, 16, precision, optimizer)
    plain = narrow_tables(rows, 16, precision)
    wide = EmbeddingTables(rows, 16, memory=[w.detach().float() for w in plain.weights])
    update = attach(wide, config(optimizer=optimizer))
    for step in range(3):
        random = torch.Generator().manual_seed(step)
        gradients = [torch.randn(20, 16, generator=random) for _ in rows]
        pooled = wide(make_batch(rows, 20, 5, 100 + step))
        update.zero_grad()
        torch.autograd.backward(pooled, gradients)
        update.step()
    for mine, other in zip(found, wide.weights, strict=True):
        # a rounding a step (SGD: a lookup), each by less than the distance of two numbers
        torch.testing.assert_close(mine.float(), other.detach(), rtol=0, atol=0.06)


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("name", ["cpu", "gpu", "torch"])
def test_small_changes_are_kept_on_average(name, precision):
    """Changes of 1/200 of a bf16 number each: to nearest, no weight would ever move."""
    # the interpreter of the GPU's kernels takes milliseconds a row
    rows, steps, dim = (64, 4, 64) if name == "gpu" else (2000, 32, 64)
    tables = EmbeddingTables([rows], dim, dtype=ROW_DTYPES[precision])
    with torch.no_grad():
        tables.weights[0].fill_(1.0)
    tables.backend = update = back_end(tables, name, "sgd")
    nothing = torch.zeros(rows, 1)
    batch = Batch(nothing, torch.arange(rows), torch.arange(rows)[None], (0, rows), nothing)
    change = 2.0**-8 / 200
    for _ in range(steps):
        torch.autograd.backward(tables(batch), [torch.full((rows, dim), change / RATE)])
        update.step()
        update.zero_grad()
    moved = 1.0 - tables.weights[0].detach().double()
    deviation = float(moved.std()) / (rows * dim) ** 0.5
    assert abs(float(moved.mean()) - steps * change) < 5 * deviation
    assert float(moved.std()) > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rows", [[5000], [300, 20, 1], [50] * 9])
def test_the_bits_do_not_depend_on_the_number_of_threads(optimizer, rows):
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        weights, seen = trained("cpu", rows, 72, "bf16", optimizer, bags=200, largest=20)
        results.append([*weights, *seen])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_row_that_is_looked_up_often_is_rounded_once():
    """SGD on a table with fewer rows than lookups: the spread is that of one rounding."""
    tables = EmbeddingTables([1], 64, dtype=torch.bfloat16)
    with torch.no_grad():
        tables.weights[0].fill_(1.0)
    tables.backend = FusedCpu(tables, "sgd", RATE)
    nothing = torch.zeros(500, 1)
    batch = Batch(nothing, torch.zeros(500).long(), torch.arange(500)[None], (0, 500), nothing)
    # ups and downs that cancel: 500 roundings would move it by several numbers
    gradients = torch.where(torch.arange(500) % 2 == 0, 0.01, -0.01)[:, None].expand(500, 64)
    torch.autograd.backward(tables(batch), [gradients.contiguous()])
    distance = 1.0 - tables.weights[0].detach().float()
    assert float(distance.abs().max()) <= 2.0**-7


@pytest.mark.parametrize(
    ("leaf", "value", "why"),
    [
        ("optimizer", "adam", "Adam's update has no stochastic rounding"),
        ("embedding_backend", "fbgemm", "its kernels do not round"),
    ],
)
def test_what_has_no_such_update_is_refused(leaf, value, why):
    with pytest.raises(InputError, match=f"embedding_precision is 'bf16', but .*{leaf}.*{why}"):
        parameters_from_sections(
            {"model": {"embedding_precision": "bf16"}, "training": {leaf: value}}
        )


def test_the_forecast_counts_two_bytes_a_number():
    def tables_bytes(precision):
        model = {"embedding_precision": precision, "table_rows": [1000] * 8}
        items = forecast_memory(parameters_from_sections({"model": model}))
        return sum(item.bytes for item in items if item.name.startswith("embedding table"))

    assert tables_bytes("fp32") == 8 * 1000 * 64 * 4
    assert tables_bytes("bf16") == tables_bytes("fp16") == 8 * 1000 * 64 * 2
