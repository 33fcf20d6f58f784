"""Every back end of the embeddings against torch's own: lookups, gradients, updated weights."""

import inspect
import sys
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_training import THREE_TABLES, parameters_with

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.config import TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import EmbeddingTables, attach
from dlrm_core.train import Trainer
from dlrm_kernels import native
from dlrm_kernels.embeddings.fused_cpu import share_out
from dlrm_kernels.embeddings.kernels import sgd_owned
from dlrm_kernels.embeddings.pages import tables_on_huge_pages
from dlrm_kernels.memory import forecast_memory

DENSE = (16 * 32 + 32) + (32 * 8 + 8) + (14 * 32 + 32) + (32 * 16 + 16) + (16 + 1)
"""Weights of the MLPs of ``parameters()``: bottom 16-32-8, top 14-32-16-1."""

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


def lookups(indices, offsets, table_starts):
    """A batch of these lookups, whose other inputs are zeros."""
    nothing = torch.zeros(offsets.shape[1], 1)
    return Batch(nothing, indices, offsets, table_starts, nothing)


def make_batch(rows, bags, largest, seed, skew=False):
    """Bags of 0 to ``largest`` lookups; with skew nearly all of them ask for row 0."""
    random = torch.Generator().manual_seed(seed)
    indices, offsets, starts = [], [], [0]
    for count in rows:
        sizes = torch.randint(0, largest + 1, (bags,), generator=random)
        ends = sizes.cumsum(0)
        offsets.append(ends - sizes)
        drawn = torch.rand(int(ends[-1]) if bags else 0, generator=random, dtype=torch.float64)
        indices.append(((drawn**8 if skew else drawn) * count).long())
        starts.append(starts[-1] + len(drawn))
    return lookups(torch.cat(indices), torch.stack(offsets), tuple(starts))


def make_tables(rows, dim, seed=0, huge_pages=False):
    tables = tables_on_huge_pages(rows, dim) if huge_pages else EmbeddingTables(rows, dim)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in tables.weights:
            weight.uniform_(-1, 1, generator=random)
    return tables


def train_tables(tables, config, rows, dim, *, steps=4, bags=37, largest=6, skew=False):
    """Some steps on random gradients; the pooled vectors of each step."""
    update = attach(tables, config)
    return take_steps(tables, update, rows, dim, steps, bags, largest, skew)


def take_steps(tables, update, rows, dim, steps, bags, largest, skew=False):
    seen = []
    for step in range(steps):
        pooled = tables(make_batch(rows, bags, largest, 100 + step, skew))
        seen += [vector.detach().clone() for vector in pooled]
        random = torch.Generator().manual_seed(step)
        gradients = [torch.randn(bags, dim, generator=random) for _ in rows]
        update.zero_grad()
        torch.autograd.backward(pooled, gradients)
        update.step()
    return seen


def config(**training):
    return TrainingConfig(learning_rate=0.1, **training)


def assert_same_training(fused, rows, dim, optimizer, atol=2e-5, **how):
    plain = make_tables(rows, dim)
    other = make_tables(rows, dim, huge_pages=True)
    expected = train_tables(plain, config(optimizer=optimizer), rows, dim, **how)
    got = train_tables(other, fused, rows, dim, **how)
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=atol)
    torch.testing.assert_close(
        [w.detach() for w in other.weights],
        [w.detach() for w in plain.weights],
        rtol=2e-4,
        atol=atol,
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("skew", [False, True])
def test_fused_trains_as_torch_does(optimizer, threads, skew):
    torch.set_num_threads(threads)
    fused = config(optimizer=optimizer, embedding_backend="fused")
    assert_same_training(fused, [1000, 1, 7, 50], 64, optimizer, skew=skew)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    st.integers(1, 150),
    st.integers(1, 40),
    st.integers(0, 9),
    st.sampled_from(OPTIMIZERS),
    st.booleans(),
)
def test_fused_holds_for_any_shape(rows, dim, bags, largest, optimizer, skew):
    fused = config(optimizer=optimizer, embedding_backend="fused")
    assert_same_training(
        fused, rows, dim, optimizer, steps=2, bags=bags, largest=largest, skew=skew
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rows", [[5000], [300, 20, 1], [50] * 9])
def test_the_bits_do_not_depend_on_the_number_of_threads(optimizer, rows):
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        tables = make_tables(rows, 72)
        fused = config(optimizer=optimizer, embedding_backend="fused")
        seen = train_tables(tables, fused, rows, 72, bags=200, largest=20)
        results.append([*seen, *(w.detach() for w in tables.weights)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("dim", [4, 20, 64])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_that_come_up_once_get_the_bits_that_sorted_ones_get(optimizer, dim, threads):
    rows, bags, hot = (1 << 20) + 50, 40, 7  # of a table with more rows than the map has slots
    torch.set_num_threads(threads)
    random = torch.Generator().manual_seed(0)
    few = torch.randint(0, rows, (bags, 5), generator=random)
    few[3, 1], few[9, 2], few[5, 4] = few[20, 0], few[21, 0], few[22, 0] % 50 + (1 << 20)
    few[6, 3], few[30, 1] = few[5, 4] - (1 << 20), hot + 1
    # with many lookups of one row the whole table is sorted
    many = torch.cat([few, torch.full((bags, 20), hot)], dim=1)
    found = []
    for indices in (few, many):
        tables = make_tables([rows], dim)
        update = attach(tables, config(optimizer=optimizer, embedding_backend="fused"))
        starts = torch.arange(bags)[None] * indices.shape[1]
        batch = lookups(indices.reshape(-1), starts, (0, indices.numel()))
        for step in range(2):
            gradients = torch.randn(bags, dim, generator=torch.Generator().manual_seed(step))
            torch.autograd.backward(tables(batch), [gradients])
        found.append((tables.weights[0].detach(), update.states[0]))
    others = [int(row) for row in few.unique() if row != hot]
    start = make_tables([rows], dim).weights[0]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one[others], other[others])
    assert all(bool((found[0][0][row] != start[row]).any()) for row in others)


def test_gradients_may_lie_in_memory_as_they_like():
    rows, batch = [40, 40], make_batch([40, 40], 8, 3, 1)
    wide = torch.randn(8, 40)
    forms = {
        "contiguous": [wide[:, :20].clone(), wide[:, 20:].clone()],
        "columns of a wider tensor": [wide[:, :20], wide[:, 20:]],
        "transposed": [wide[:, :20].t().contiguous().t(), wide[:, 20:].t().contiguous().t()],
        "one row for all": None,
    }
    results = {}
    for name, gradients in forms.items():
        tables = make_tables(rows, 20)
        attach(tables, config(embedding_backend="fused"))
        if gradients is None:
            gradients = [torch.ones(1, 20).expand(8, 20)] * 2
        torch.autograd.backward(tables(batch), gradients)
        results[name] = [w.detach() for w in tables.weights]
    for name in ("columns of a wider tensor", "transposed"):
        torch.testing.assert_close(results[name], results["contiguous"], rtol=0, atol=0)
    plain = make_tables(rows, 20)
    update = attach(plain, config())
    torch.autograd.backward(plain(batch), [torch.ones(8, 20)] * 2)
    update.step()
    torch.testing.assert_close(
        results["one row for all"], [w.detach() for w in plain.weights], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"indices": b.indices.int()}, "batch.indices is torch.int32"),
        (lambda b: {"offsets": b.offsets.int()}, "batch.offsets is torch.int32"),
        (lambda b: {"indices": b.indices.repeat_interleave(2)[::2]}, "batch.indices has strides"),
        (lambda b: {"offsets": b.offsets[:1]}, r"shape \(1, 6\), expected 2 tables"),
        (lambda b: {"table_starts": (0, b.table_starts[1])}, "expected 3 rising numbers"),
        (lambda b: {"table_starts": (0, 10**6, len(b.indices))}, "expected 3 rising numbers"),
        (lambda b: {"offsets": b.offsets.flip(1).contiguous()}, "offsets of embedding table 0"),
        (lambda b: {"offsets": b.offsets + 10**6}, "offsets of embedding table 0"),
        (lambda b: {"offsets": b.offsets - 1}, "offsets of embedding table 0"),
    ],
)
def test_a_batch_laid_out_otherwise_is_refused(change, message):
    tables = make_tables([100, 50], 16)
    attach(tables, config(embedding_backend="fused"))
    batch = make_batch([100, 50], 6, 5, 4)
    with pytest.raises(InputError, match=message):
        tables(Batch(**(vars(batch) | change(batch))))


@pytest.mark.parametrize("place", ["half", "transposed"])
def test_a_table_that_kernels_cannot_work_on_is_refused(place):
    tables = make_tables([100, 50], 16)
    weight = tables.weights[1]
    weight.data = weight.data.half() if place == "half" else torch.zeros(16, 50).t()
    with pytest.raises(InputError, match=r"embedding table 1 (is torch.float16|has strides)"):
        attach(tables, config(embedding_backend="fused"))


def test_weights_that_move_are_found_again():
    rows, batch = [60], make_batch([60], 10, 4, 5)
    tables = make_tables(rows, 16)
    attach(tables, config(embedding_backend="fused"))
    tables(batch)
    old = tables.weights[0].data
    tables.weights[0].data = old.clone() + 1
    old.fill_(float("nan"))
    pooled = tables(batch)[0]
    expected = torch.nn.functional.embedding_bag(
        batch.indices, tables.weights[0].detach(), batch.offsets[0], mode="sum"
    )
    torch.testing.assert_close(pooled.detach(), expected)


def test_indices_changed_between_forward_and_backward_are_noticed():
    tables = make_tables([60], 16)
    attach(tables, config(embedding_backend="fused"))
    batch = make_batch([60], 10, 4, 6)
    pooled = tables(batch)
    batch.indices.fill_(10**9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(pooled, [torch.ones(10, 16)])


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40), st.integers(1, 64))
def test_units_of_work_cover_every_table_once(lookups, threads):
    plan = share_out(tuple(np.cumsum([0, *lookups]).tolist()), threads)
    for table in range(len(lookups)):
        mine = plan[plan[:, 0] == table]
        slices = int(mine[0, 2])
        assert 1 <= slices <= threads
        assert sorted(mine[:, 1]) == list(range(slices))
        assert (mine[:, 2] == slices).all()


def test_a_giant_table_is_cut_and_equal_ones_are_not():
    assert share_out((0, 1000, 1010, 1020), 4)[:4].tolist() == [[0, s, 4] for s in range(4)]
    assert share_out(tuple(range(0, 900, 100)), 2)[:, 2].tolist() == [1] * 8
    assert share_out(tuple(range(0, 900, 100)), 1)[:, 2].tolist() == [1] * 8


SECTIONS = {
    "model": THREE_TABLES,
    "data": {"indices_per_lookup": 10},
    "training": {"batch_size": 64, "batches": 15, "seed": 5},
}
parameters = partial(parameters_with, SECTIONS)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"embedding_backend": "fast"}, "expected one of torch, fused, fbgemm, auto"),
        ({"optimizer": "adamw"}, "expected one of sgd, adagrad, rowwise_adagrad, adam"),
    ],
)
def test_combinations_that_cannot_work_are_refused(training, message):
    with pytest.raises(InputError, match=message):
        TrainingConfig(**training)


def test_tables_on_another_device_are_refused_in_one_sentence():
    tables = EmbeddingTables([5], 4).to("meta")
    with pytest.raises(
        InputError, match=r"table 0 is torch.float32 on meta.*fused back end of the CPU"
    ):
        attach(tables, config(embedding_backend="fused"))


def test_without_numba_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(MissingToolError, match="pip install numba"):
        attach(make_tables([5], 4), config(embedding_backend="fused"))


def small_kernel(job):
    """Compiled in no time."""


def notice_of_a_new_process(monkeypatch, cache):
    """Notices where nothing is loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    # without what this process remembers
    monkeypatch.setattr(native, "cache_folder", inspect.unwrap(native.cache_folder))
    kernel, notice = inspect.unwrap(native.compile_kernel)(small_kernel)
    assert kernel.name == "small_kernel"
    return notice


def test_compiled_kernels_are_kept_and_their_loss_is_survived(tmp_path, monkeypatch):
    assert native.compile_kernel(sgd_owned)[1] == ""
    folder, _ = native.cache_folder("kernels", native.SOURCES)
    assert list(folder.rglob("*sgd_owned*.nbc")), "what the programs call can be kept"
    assert notice_of_a_new_process(monkeypatch, tmp_path) == ""
    kept = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {p.suffix for p in kept} == {".nbi", ".nbc"}
    before = {p: p.stat().st_mtime_ns for p in kept}
    assert notice_of_a_new_process(monkeypatch, tmp_path) == ""
    assert {p: p.stat().st_mtime_ns for p in kept} == before
    for path in kept:
        path.write_bytes(b"damaged")
    assert "compiled anew" in notice_of_a_new_process(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    "place", ["numba.__version__", "llvmlite.__version__", "llvmlite.binding.get_host_cpu_name"]
)
def test_another_compiler_or_processor_has_a_cache_of_its_own(place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    found = native.cache_folder.__wrapped__("kernels", native.SOURCES)
    assert native.cache_folder.__wrapped__("kernels", native.SOURCES) == found
    other = "another" if place.endswith("__version__") else (lambda: "another")
    monkeypatch.setattr(place, other)
    assert native.cache_folder.__wrapped__("kernels", native.SOURCES) != found


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    said = notice_of_a_new_process(monkeypatch, blocked)
    assert "no writable folder for compiled kernels" in said


@pytest.mark.parametrize(
    ("training", "name", "expected"),
    [
        ({"optimizer": "adagrad"}, "optimiser state", 4 * (1053 * 8 + DENSE)),
        ({"optimizer": "rowwise_adagrad"}, "optimiser state", 4 * (1053 + DENSE)),
        ({"embedding_backend": "fused"}, "sparse embedding gradients", None),
        ({"embedding_backend": "fused"}, "optimiser state", None),
    ],
)
def test_the_forecast_of_memory_counts_what_the_update_keeps(training, name, expected):
    found = {item.name: item.bytes for item in forecast_memory(parameters(**training))}
    assert found.get(name) == expected


def test_what_the_back_end_fell_back_to_is_among_the_runs_notices(monkeypatch):
    monkeypatch.setattr(
        "dlrm_kernels.embeddings.fused_cpu.compile_kernel", lambda kernel: (None, "compiled anew")
    )
    assert Trainer(parameters(embedding_backend="fused")).notices == ["compiled anew"]
