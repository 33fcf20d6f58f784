"""The fused back end of a GPU against torch's own, kernels run by Triton's interpreter.

Where there is a GPU the same tests run on it.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed: the GPU's kernels cannot run")

from test_embedding_backends import sparse_tables
from test_embeddings import config, lookups, make_batch, make_tables

import dlrm_kernels.embeddings.fused_gpu as fused_gpu
from dlrm_core.base.errors import InputError
from dlrm_core.config import parameters_from_sections
from dlrm_core.data.batch import Batch, extents_of
from dlrm_core.embeddings import EmbeddingTables, attach
from dlrm_kernels.embeddings.fused_gpu import FusedGpu, Tiles, in_one, tiles_for
from dlrm_kernels.memory import forecast_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def gpu_tables(rows, dim, optimizer="sgd", **how):
    tables = make_tables(rows, dim).to(DEVICE)
    tables.backend = FusedGpu(tables, optimizer, 0.1, **how)
    return tables


def weights_of(tables):
    return [weight.detach().cpu().clone() for weight in tables.weights]


def train_both(rows, dim, optimizer, *, steps=2, bags=9, largest=5, skew=False):
    """Some steps of torch's back end and of ours: (plain tables, our tables)."""
    plain, ours = make_tables(rows, dim), gpu_tables(rows, dim, optimizer)
    update = attach(plain, config(optimizer=optimizer))
    for step in range(steps):
        batch = make_batch(rows, bags, largest, 100 + step, skew)
        expected, got = plain(batch), ours(batch.to(DEVICE))
        torch.testing.assert_close([v.cpu() for v in got], list(expected), rtol=1e-4, atol=1e-5)
        random = torch.Generator().manual_seed(step)
        gradients = [torch.randn(bags, dim, generator=random) for _ in rows]
        update.zero_grad()
        torch.autograd.backward(expected, gradients)
        update.step()
        torch.autograd.backward(got, [g.to(DEVICE) for g in gradients])
    ours.backend.check()
    return plain, ours


def assert_same_weights(plain, ours):
    torch.testing.assert_close(weights_of(ours), weights_of(plain), rtol=2e-4, atol=2e-5)
    assert all(weight.grad is None for weight in ours.weights)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that a few lookups need every level of the sums."""
    tiles = Tiles(bags=8, unroll=2, listed=16, run=4, run_warps=1)
    monkeypatch.setattr(fused_gpu, "tiles_for", lambda width, bag_size: tiles)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("skew", [False, True])
def test_fused_trains_as_torch_does(optimizer, skew):
    assert_same_weights(*train_both([60, 1, 7], 16, optimizer, skew=skew))


@settings(max_examples=8)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(0, 5),
    st.sampled_from(OPTIMIZERS),
    st.booleans(),
)
def test_fused_holds_for_any_shape(rows, dim, bags, largest, optimizer, skew):
    assert_same_weights(
        *train_both(rows, dim, optimizer, steps=1, bags=bags, largest=largest, skew=skew)
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_hot_row_is_added_up_level_by_level(small_tiles, optimizer):
    # 1 and 3 rows for some 60 lookups: runs of 15 tiles, which need four levels
    assert_same_weights(*train_both([1, 3, 50], 8, optimizer, steps=1, bags=16, skew=True))


@settings(max_examples=10)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 2**16))
def test_runs_of_any_length_are_added_once(pattern, seed):
    """Runs that end, begin, or pass at any place of a tile, against one index_add."""
    tiles = Tiles(bags=16, unroll=1, listed=16, run=4, run_warps=1)
    chosen = fused_gpu.tiles_for
    fused_gpu.tiles_for = lambda width, bag_size: tiles
    try:
        rows = torch.tensor(pattern).cumsum(0)  # sorted, each row 1 to many times
        tables = gpu_tables([int(rows[-1]) + 1], 4)
        before = weights_of(tables)[0].double()
        count = len(pattern)
        gradient = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
        shuffled = rows[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]
        batch = lookups(shuffled, torch.arange(count)[None], (0, count))
        torch.autograd.backward(tables(batch.to(DEVICE)), [gradient.to(DEVICE)])
    finally:
        fused_gpu.tiles_for = chosen
    expected = before.index_add(0, shuffled, gradient.double(), alpha=-0.1)
    torch.testing.assert_close(weights_of(tables)[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_the_bits_are_those_of_every_run_and_every_lookup_tile(monkeypatch):
    results = []
    for bags, unroll in ((1, 1), (4, 4), (4, 4)):
        tiles = Tiles(bags, unroll, listed=4, run=8, run_warps=1)
        monkeypatch.setattr(fused_gpu, "tiles_for", lambda width, bag_size, tiles=tiles: tiles)
        _, ours = train_both([30, 1], 12, "adagrad", steps=1, largest=7, skew=True)
        pooled = ours(make_batch([30, 1], 9, 7, 3).to(DEVICE))
        results.append([*weights_of(ours), *(vector.detach().cpu() for vector in pooled)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_lookups_are_added_in_their_order():
    tables = gpu_tables([50], 8)
    batch = make_batch([50], 5, 9, 1)
    weight, sums = tables.weights[0].detach().cpu(), torch.zeros(5, 8)
    ends = [*batch.offsets[0, 1:].tolist(), batch.table_starts[1]]
    for bag, (begin, end) in enumerate(zip(batch.offsets[0].tolist(), ends, strict=True)):
        for index in batch.indices[begin:end]:
            sums[bag] += weight[index]
    assert torch.equal(tables(batch.to(DEVICE))[0].detach().cpu(), sums)


def test_pooled_vectors_in_bf16_are_the_rounded_sums():
    rows, batch = [40, 9], make_batch([40, 9], 6, 4, 0).to(DEVICE)
    exact, low = gpu_tables(rows, 16), gpu_tables(rows, 16, pooled_dtype=torch.bfloat16)
    gradient = torch.randn(6, 16, device=DEVICE).bfloat16()
    for a, b in zip(exact(batch), low(batch), strict=True):
        assert b.dtype == torch.bfloat16
        # the interpreter cuts off where a GPU rounds: a step of bf16 at most
        step = 0.0 if DEVICE.type == "cuda" else 2**-7
        torch.testing.assert_close(b, a.bfloat16(), rtol=step, atol=0.0)
    torch.autograd.backward(exact(batch), [gradient.float()] * 2)
    torch.autograd.backward(low(batch), [gradient] * 2)
    assert all(map(torch.equal, weights_of(exact), weights_of(low)))


@pytest.mark.parametrize("wrong", [50, -1, 2**40])
def test_a_wrong_index_is_named_later_and_nothing_is_touched(wrong):
    tables = gpu_tables([1000, 50], 16)
    start = weights_of(tables)
    batch = make_batch([1000, 50], 6, 5, 3)
    right = batch.to(DEVICE)
    spoilt = batch.indices.clone()
    spoilt[batch.table_starts[1] + 7] = wrong
    wrong_batch = Batch(**(vars(batch) | {"indices": spoilt})).to(DEVICE)
    pooled = tables(wrong_batch)
    torch.autograd.backward(pooled, [torch.ones(6, 16, device=DEVICE)] * 2)
    message = rf"table 1 has 50 rows, but lookup 7 of the batch asks for row {wrong}, .*0 to 49"
    with pytest.raises(InputError, match=message):
        tables.backend.check()
    assert all(map(torch.equal, weights_of(tables), start))
    # told once; then the tables work again
    torch.autograd.backward(tables(right), [torch.ones(6, 16, device=DEVICE)] * 2)
    tables.backend.check()
    assert not torch.equal(weights_of(tables)[0], start[0])


def test_the_next_batch_reports_the_one_before():
    tables = gpu_tables([50], 16)
    batch = make_batch([50], 6, 5, 3).to(DEVICE)
    batch.indices[4] = 77
    tables(batch)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(InputError, match=r"lookup 4 of the batch asks for row 77, .*0 to 49"):
        tables(batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o.flip(1).contiguous(), "is .* at sample"),
        (lambda o: o + 10**6, "is 1000000 at sample 0"),
        (lambda o: o - 1, "is -1 at sample 0"),
    ],
)
def test_wrong_offsets_are_named(change, message):
    tables = gpu_tables([100, 50], 16)
    start = weights_of(tables)
    batch = make_batch([100, 50], 6, 5, 4)
    batch = Batch(**(vars(batch) | {"offsets": change(batch.offsets)})).to(DEVICE)
    torch.autograd.backward(tables(batch), [torch.ones(6, 16, device=DEVICE)] * 2)
    with pytest.raises(InputError, match=rf"offsets of embedding table [01] {message}"):
        tables.backend.check()
    assert all(map(torch.equal, weights_of(tables), start))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"indices": b.indices.int()}, "batch.indices is torch.int32"),
        (lambda b: {"indices": b.indices.repeat_interleave(2)[::2]}, "batch.indices has strides"),
        (lambda b: {"offsets": b.offsets[:1]}, r"shape \(1, 6\), expected 2 tables"),
        (lambda b: {"table_starts": (0, b.table_starts[1])}, "expected 3 rising numbers"),
    ],
)
def test_a_batch_laid_out_otherwise_is_refused(change, message):
    tables = gpu_tables([100, 50], 16)
    batch = make_batch([100, 50], 6, 5, 4).to(DEVICE)
    with pytest.raises(InputError, match=message):
        tables(Batch(**(vars(batch) | change(batch))))


@pytest.mark.parametrize("place", ["half", "transposed", "wide"])
def test_a_table_that_kernels_cannot_work_on_is_refused(place):
    tables = make_tables([100, 50], 2048 if place == "wide" else 16).to(DEVICE)
    weight = tables.weights[1]
    if place != "wide":
        weight.data = weight.data.half() if place == "half" else torch.zeros(16, 50).t()
        weight.data = weight.data.to(DEVICE)
    expected = r"(table 1 (is torch.float16|has strides)|embedding_dim is 2048, .*at most 1024)"
    with pytest.raises(InputError, match=expected):
        FusedGpu(tables, "sgd", 0.1)


def test_a_padded_batch_is_the_same_as_a_compact_one():
    """Rooms of 20 indices a table, of which the device alone knows how many are real."""
    rows, batch = [60, 5], make_batch([60, 5], 4, 5, 2)
    room, indices = 20, torch.full((40,), 10**9)  # what lies beyond is never looked at
    starts = batch.table_starts
    for t in range(2):
        indices[room * t : room * t + starts[t + 1] - starts[t]] = batch.table_indices(t)
    extents = extents_of(batch.table_starts)
    extents[0] = torch.tensor([0, room])
    change = {"indices": indices, "table_starts": (0, 20, 40), "extents": extents, "padded": True}
    padded = Batch(**(vars(batch) | change))
    assert all(torch.equal(padded.table_indices(t), batch.table_indices(t)) for t in range(2))
    results = []
    for given_batch in (batch, padded):
        tables = gpu_tables(rows, 12)
        pooled = tables(given_batch.to(DEVICE))
        torch.autograd.backward(pooled, [torch.ones(4, 12, device=DEVICE)] * 2)
        tables.backend.check()
        results.append([*weights_of(tables), *(v.detach().cpu() for v in pooled)])
    assert all(map(torch.equal, *results))


def test_gradients_may_lie_in_memory_as_they_like():
    wide = torch.randn(8, 40, device=DEVICE)
    batch = make_batch([40, 40], 8, 3, 1).to(DEVICE)
    results = []
    for gradients in (
        [wide[:, :20].clone(), wide[:, 20:].clone()],
        [wide[:, :20], wide[:, 20:]],
        [wide[:, :20].t().contiguous().t(), wide[:, 20:].t().contiguous().t()],
    ):
        tables = gpu_tables([40, 40], 20)
        torch.autograd.backward(tables(batch), gradients)
        results.append(weights_of(tables))
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


def test_parts_of_one_tensor_are_not_copied():
    whole = torch.zeros(3, 5, 8)
    first, *strides = in_one(list(whole))
    assert first.data_ptr() == whole.data_ptr() and strides == [40, 8]
    first, table_stride, bag_stride = in_one(list(whole.permute(1, 0, 2)))  # 5 parts (3, 8)
    assert first.data_ptr() == whole.data_ptr() and (table_stride, bag_stride) == (8, 40)
    apart = [whole[0], whole[2], whole[1]]
    assert in_one(apart)[0].data_ptr() != whole.data_ptr()


def test_no_bags_and_no_lookups_are_fine():
    tables = gpu_tables([60, 3], 16, "adagrad")
    for bags, largest in ((0, 0), (5, 0)):
        pooled = tables(make_batch([60, 3], bags, largest, 0).to(DEVICE))
        assert all(vector.shape == (bags, 16) and not vector.any() for vector in pooled)
        torch.autograd.backward(pooled, [torch.ones(bags, 16, device=DEVICE)] * 2)


def test_weights_that_move_are_found_again():
    tables, batch = gpu_tables([60], 16), make_batch([60], 6, 4, 5).to(DEVICE)
    before = tables(batch)[0].detach()
    old = tables.weights[0].data
    tables.weights[0].data = old.clone() * 2
    old.fill_(float("nan"))
    torch.testing.assert_close(tables(batch)[0].detach(), before * 2)


def test_the_learning_rate_may_change_between_steps():
    tables, batch = gpu_tables([60], 16), make_batch([60], 6, 4, 5).to(DEVICE)
    start = weights_of(tables)[0]
    tables.backend.learning_rate = 0.0
    torch.autograd.backward(tables(batch), [torch.ones(6, 16, device=DEVICE)])
    assert torch.equal(weights_of(tables)[0], start)
    tables.backend.learning_rate = 0.5
    torch.autograd.backward(tables(batch), [torch.ones(6, 16, device=DEVICE)])
    assert tables.backend.learning_rate == 0.5
    assert not torch.equal(weights_of(tables)[0], start)


def test_indices_changed_between_forward_and_backward_are_noticed():
    tables, batch = gpu_tables([60], 16), make_batch([60], 6, 4, 6).to(DEVICE)
    pooled = tables(batch)
    batch.indices.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(pooled, [torch.ones(6, 16, device=DEVICE)])


@pytest.mark.skipif(sys.platform != "linux" or DEVICE.type == "cuda", reason="a mapped sparse file")
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])  # adagrad's state takes 8 GiB
def test_a_table_of_more_than_2_to_the_31_elements(tmp_path, optimizer):
    rows, dim = 2**31 // 64 + 1000, 64
    tables, mapped = sparse_tables(tmp_path, [rows], dim)
    wanted = torch.tensor([rows - 1, 3, rows - 1, 2**31 // 64])
    mapped[wanted.unique()] = 1.0
    tables.backend = FusedGpu(tables, optimizer, 0.5)
    batch = lookups(wanted, torch.tensor([[0, 2]]), (0, 4))
    (pooled,) = tables(batch)
    assert torch.equal(pooled.detach(), torch.full((2, dim), 2.0))
    pooled.backward(torch.full((2, dim), 0.25))
    step = {"sgd": (0.25, 0.125), "rowwise_adagrad": (0.5, 0.5)}[optimizer]
    assert torch.allclose(mapped[rows - 1], torch.tensor(1 - step[0]))
    assert torch.allclose(mapped[[3, 2**31 // 64]], torch.tensor(1 - step[1]))
    assert not mapped[[2, 4, rows - 2]].any()


def test_many_rows_and_tables_take_keys_of_64_bits():
    tables = EmbeddingTables([1] * 3, 4)
    with torch.no_grad():
        for weight in tables.weights:
            weight.zero_()
    tables.weights[1].data = torch.zeros(1, 4).expand(2**30, 4)[:1]  # its rows do not matter here
    backend = FusedGpu(tables.to(DEVICE), "sgd", 1.0)
    assert backend._key_dtype == torch.int32
    backend._row_bits, backend._key_dtype = 31, torch.int64  # as 2^31 rows would have it
    tables.backend = backend
    indices = torch.zeros(6, dtype=torch.int64)
    batch = lookups(indices, torch.tensor([[0, 1]] * 3), (0, 2, 4, 6))
    gradients = [torch.full((2, 4), float(t), device=DEVICE) for t in (1, 2, 3)]
    torch.autograd.backward(tables(batch.to(DEVICE)), gradients)
    for t, weight in enumerate(weights_of(tables)):
        assert torch.equal(weight, torch.full((1, 4), -2.0 * (t + 1)))


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_the_forecast_knows_what_the_update_needs(dim):
    parameters = parameters_from_sections(
        {
            "model": {"bottom_mlp": [4, dim], "embedding_dim": dim, "table_rows": [10**6] * 3},
            "data": {"fixed_pooling": True, "indices_per_lookup": 50},
            "training": {"device": "cuda", "embedding_backend": "fused"},
        }
    )
    forecast = forecast_memory(parameters, gpu=True)
    (item,) = [i for i in forecast if i.name.startswith("sorted lookups")]
    # keys of 4 bytes and their order twice, sources; each tile leaves two sums over, and a few more
    count = 3 * 50 * 2048
    sums = 2.25 * count / tiles_for(dim, 1.0).run * dim * 4
    assert item.bytes == pytest.approx(count * (2 * (4 + 8) + 4) + sums, rel=1e-3)


def test_the_kernels_compile_for_hopper_with_wide_loads_and_without_spills():
    """Triton compiles without a GPU; the interpreter sees neither types nor registers."""
    script = Path(__file__).parents[1] / "compile_gpu_kernels.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
