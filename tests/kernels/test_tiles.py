"""Products on matrix tiles, and what follows them, against float64 and the plain operations.

Where the processor has no tiles, the same kernels multiply by vector instructions: packing,
layouts and epilogues are tested everywhere, the tile instructions where they exist.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interaction_layers import dot_layer

from dlrm_kernels.tiles import machine
from dlrm_kernels.tiles.layout import BLOCK, DEPTH_BYTES, Arena, Engine, Result, Tiled, blocks_of
from dlrm_kernels.tiles.machine import why_no_tiles

ENGINES = [False] if why_no_tiles() else [False, True]
EPSILON = 2.0**-24  # rounding of float32


@pytest.fixture(params=ENGINES, ids=["vectors", "tiles"][: len(ENGINES)])
def engine(request):
    return Engine(tiles=request.param)


def relative_error(result, exact):
    return float((result.double() - exact).norm() / exact.norm())


def bound(left, right, parts):
    """Largest error of each entry of a product of split numbers.

    Rounding to bf16 (8 significant bits) leaves at most 2^-8 of a number, so two parts leave
    2^-16 and three 2^-24; products of that order are left out: one of two parts, two of three.
    """
    sizes = left.double().abs() @ right.double().abs()
    of_split = {1: 0.0, 2: 3 * 2.0**-16, 3: 5 * 2.0**-24}[parts]
    return (of_split + 6 * left.shape[1] * EPSILON) * sizes


def tiled(engine, matrix, parts, form, **more):
    """A matrix in one form."""
    rows, columns = (blocks_of(size) for size in matrix.shape)
    upright = form in ("rows", "columns_t")
    made = Tiled.empty(*((rows, columns) if upright else (columns, rows)), parts)
    engine.pack(matrix, parts, Result(**{form: made}, **more))
    return made


def untiled(form, shape):
    """The matrix (padded) that a rows form holds, its parts added in float64."""
    panels, depth = (blocks_of(size) for size in shape)
    bits = form.memory.view(panels, depth, form.parts, 2, 16, 32).to(torch.int32) << 16
    values = bits.view(torch.float32).double().sum(2)  # panel, depth, half, row, column
    return values.permute(0, 2, 3, 1, 4).reshape(BLOCK * panels, BLOCK * depth)


sizes = st.integers(1, 70)


@given(rows=sizes, columns=sizes, parts=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_a_tiled_matrix_is_the_matrix_with_zeros_around(rows, columns, parts, seed):
    engine = Engine(tiles=False)
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    for form, held in (("rows", matrix), ("rows_t", matrix.t())):
        padded = untiled(tiled(engine, matrix, parts, form), held.shape)
        inner = padded[: held.shape[0], : held.shape[1]]
        # each part has 8 significant bits, and the last is rounded
        assert ((inner - held.double()).abs() <= 2.0 ** (-8 * parts) * held.double().abs()).all()
        if parts == 1:
            assert torch.equal(inner.float(), held.bfloat16().float())
        assert int(padded.count_nonzero()) <= int(inner.count_nonzero())


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("shape", [(64, 64, 64), (1, 1, 1), (5, 1, 40), (70, 33, 100)])
def test_products_are_as_exact_as_their_parts_allow(engine, parts, shape):
    m, n, k = shape
    torch.manual_seed(m + n)
    left, right = torch.randn(m, k), torch.randn(k, n)
    if parts == 1:
        left, right = left.bfloat16().float(), right.bfloat16().float()
    target = torch.full((m, n), 7.0)
    a = tiled(engine, left, parts, "rows")
    b = tiled(engine, right, parts, "columns")
    engine.product(a, b, (m, n), Result(target=target))
    exact = left.double() @ right.double()
    assert ((target.double() - exact).abs() <= bound(left, right, parts)).all()
    # the same operands, made of their transposes
    a, b = tiled(engine, left.t().contiguous(), parts, "rows_t"), b
    b = tiled(engine, right.t().contiguous(), parts, "columns_t")
    again = torch.ones(m, n)
    engine.product(a, b, (m, n), Result(target=again, accumulate=True))
    assert torch.equal(again, 1 + target)


def test_two_parts_stay_below_the_error_accepted_of_fp32_products(engine):
    """Of fp32 products 1e-5 is accepted (docs/training.md); three parts are like fp32's own."""
    torch.manual_seed(0)
    left, right = torch.randn(64, 256), torch.randn(256, 64)
    exact = left.double() @ right.double()
    for parts, least, most in ((1, 1e-3, 4e-3), (2, 1e-6, 5e-6), (3, 0.0, 2e-7 + 256 * EPSILON)):
        target = torch.empty(64, 64)
        a, b = tiled(engine, left, parts, "rows"), tiled(engine, right, parts, "columns")
        engine.product(a, b, (64, 64), Result(target=target))
        assert least <= relative_error(target, exact) <= most


def test_a_long_sum_is_done_in_pieces(engine):
    """A panel of more than DEPTH_BYTES, added up in the target."""
    torch.manual_seed(0)
    left, right = torch.randn(8, 2100), torch.randn(2100, 8)
    target = torch.zeros(8, 8)
    a, b = tiled(engine, left, 3, "rows"), tiled(engine, right, 3, "columns")
    assert a.panel_bytes > DEPTH_BYTES
    engine.product(a, b, (8, 8), Result(target=target))
    exact = left.double() @ right.double()
    assert ((target.double() - exact).abs() <= bound(left, right, 3)).all()


def test_what_follows_a_product(engine):
    """Bias, ReLU, mask, sums and all forms, as separate operations would do it."""
    torch.manual_seed(1)
    m, n, k, parts = 45, 70, 50, 2
    left, right, bias, sign = (torch.randn(*s) for s in ((m, k), (k, n), (n,), (m, n)))
    rows, columns = blocks_of(m), blocks_of(n)
    padded = torch.zeros(BLOCK * columns)
    padded[:n] = bias
    mask = tiled(engine, sign, 1, "rows")
    sums = torch.empty(rows, BLOCK * columns)
    target = torch.empty(m, n)
    plain, result = torch.empty(m, n), Result(bias=padded, relu=True, mask=mask, sums=sums)
    result.target = target
    for form, shape in (("rows", (rows, columns)), ("rows_t", (columns, rows))):
        setattr(result, form, Tiled.empty(*shape, parts))
    a, b = tiled(engine, left, parts, "rows"), tiled(engine, right, parts, "columns")
    engine.product(a, b, (m, n), Result(target=plain))
    engine.product(a, b, (m, n), result)
    expected = torch.relu(plain + bias) * (sign > 0)
    assert torch.equal(target, expected)
    assert torch.allclose(sums.sum(0)[:n], expected.sum(0), atol=m * EPSILON * 100)
    for form, held in ((result.rows, expected), (result.rows_t, expected.t())):
        inner = untiled(form, held.shape)[: held.shape[0], : held.shape[1]]
        assert ((inner - held.double()).abs() <= 2.0**-16 * held.double().abs()).all()


@given(
    size=st.integers(1, 70),
    tables=st.integers(1, 35),
    dim=st.integers(1, 70),
    itself=st.booleans(),
    parts=st.sampled_from([1, 2, 3]),
    tiles=st.sampled_from(ENGINES),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_the_interaction_is_the_plain_one(size, tables, dim, itself, parts, tiles, seed):
    engine = Engine(tiles=tiles)
    random = torch.Generator().manual_seed(seed)
    wide = [torch.randn(size, dim + 3, generator=random) for _ in range(tables + 1)]
    leaves = [vector[:, :dim].double().requires_grad_() for vector in wide]
    z = dot_layer(tables + 1, itself)(leaves[0], leaves[1:])
    values = [vector[:, :dim] for vector in wide]  # rows further apart than d
    form = Tiled.empty(blocks_of(size), blocks_of(z.shape[1]), parts)
    engine.dot_forward(values, itself, parts, Result(rows=form))
    inner = untiled(form, z.shape)[:size, : z.shape[1]]
    norms = max(float(v.norm(dim=1).max()) for v in values) ** 2
    # two parts at least, and then the output is rounded to its own
    of_split = {2: 3 * 2.0**-16, 3: 5 * 2.0**-24}[max(2, parts)] + 6 * dim * EPSILON
    rounding = 2.0 ** -(8 * parts) * (z.detach().abs() + of_split * norms)
    error = (inner - z.detach()).abs()
    assert (error <= of_split * norms + rounding).all()
    gradient = torch.randn(z.shape, generator=random)
    z.backward(gradient.double())
    found = [torch.full((size, dim), 9.0) for _ in leaves]
    engine.dot_backward(gradient, values, itself, parts, found)
    largest = (
        2 * (tables + 1) * float(gradient.abs().max()) * max(float(v.abs().max()) for v in wide)
    )
    of_split += 6 * tables * EPSILON
    for leaf, mine in zip(leaves, found, strict=True):
        assert float((mine - leaf.grad).abs().max()) <= of_split * largest


def test_results_are_the_same_bits_for_every_number_of_threads(engine):
    torch.manual_seed(0)
    left, right = torch.randn(300, 90), torch.randn(90, 64)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            target, sums = torch.empty(300, 64), torch.empty(10, 64)
            a, b = tiled(engine, left, 2, "rows"), tiled(engine, right, 2, "columns")
            engine.product(a, b, (300, 64), Result(target=target, sums=sums))
            results.append((target, sums))
    finally:
        torch.set_num_threads(before)
    for target, sums in results[1:]:
        assert torch.equal(target, results[0][0]) and torch.equal(sums, results[0][1])


def test_what_is_not_a_number_stays_so(engine):
    """A diverged run must end as such: neither ReLU nor the split may hide NaN or infinity."""
    left = torch.ones(4, 8)
    left[0, 0], left[1, 1] = float("nan"), float("inf")
    for parts in (1, 2, 3):
        target = torch.empty(4, 4)
        a = tiled(engine, left, parts, "rows")
        b = tiled(engine, torch.ones(8, 4), parts, "columns")
        engine.product(a, b, (4, 4), Result(relu=True, bias=torch.zeros(32), target=target))
        assert not torch.isfinite(target[:2]).any() and torch.isfinite(target[2:]).all()


def test_shapes_that_do_not_fit_are_refused():
    engine = Engine(tiles=False)
    a, b = Tiled.empty(1, 2, 1), Tiled.empty(1, 3, 1)
    with pytest.raises(ValueError, match="left has 2 blocks"):
        engine.product(a, b, (4, 4), Result(target=torch.empty(4, 4)))
    b = Tiled.empty(1, 2, 1)
    with pytest.raises(ValueError, match="target is"):
        engine.product(a, b, (4, 4), Result(target=torch.empty(4, 5)))
    with pytest.raises(ValueError, match="blocks of 2 parts given"):
        engine.product(a, b, (4, 4), Result(rows=Tiled.empty(1, 1, 2)))
    with pytest.raises(ValueError, match="expected 32"):
        engine.product(a, b, (4, 4), Result(bias=torch.zeros(4)))
    with pytest.raises(ValueError, match="not float32"):
        engine.pack(torch.zeros(4, 4).bfloat16(), 1, Result())
    with pytest.raises(ValueError, match="gaps"):
        engine.pack(torch.zeros(8, 4).t(), 1, Result())


def test_memory_of_an_arena_does_not_overlap():
    arena = Arena(chunk_bytes=1 << 12)
    pieces = [arena.take(size) for size in (1, 100, 4096, 5000, 64)]
    for value, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(value)
    assert all((piece == value).all() for value, piece in enumerate(pieces))


def test_machines_without_tiles_are_told_what_they_lack(monkeypatch):
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"sse2", "avx512f"})
    reason = machine.why_no_tiles.__wrapped__()
    assert "amx_bf16, amx_tile" in reason or "Linux x86-64" in reason
    monkeypatch.setattr("dlrm_kernels.tiles.layout.why_no_tiles", lambda: reason)
    with pytest.raises(RuntimeError, match="tiles"):
        Engine()
