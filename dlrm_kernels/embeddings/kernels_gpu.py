"""Triton kernels of the ``fused`` back end on a GPU: all tables of a model in one launch.

Shapes: B bags (samples), T tables of R rows, d embedding width (DIM), N lookups.
A row's address is ``reference + (places[t] + row * (DIM / VEC)) * VEC`` numbers, in 64 bits:
``reference`` is any table, ``places`` says how far off each table begins. The factor VEC
(16 bytes where tables and rows are aligned to as much) is written out so that the compiler
sees the alignment and loads 16 bytes a thread; an address read from memory hides it.

A lookup is known by its key, ``table << ROW_BITS | row``. Keys of nothing (padding, a
lookup that was refused) are ``limit``, T << ROW_BITS, or more.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# the type checker sees untyped decorators: triton's parameters are told by the call
from __future__ import annotations

import triton
import triton.language as tl

from dlrm_kernels.embeddings.checks import ADAGRAD, ROWWISE, SGD
from dlrm_kernels.rounding import GOLDEN, GROUP_BITS, PHILOX_ROUNDS

_ADAGRAD, _ROWWISE, _SGD = (tl.constexpr(kind) for kind in (ADAGRAD, ROWWISE, SGD))
GROUP_ROW_BITS = tl.constexpr(GROUP_BITS)
MEMBERS = tl.constexpr((1 << GROUP_BITS) - 1)
ROUNDS = tl.constexpr(PHILOX_ROUNDS)
STRIDE = tl.constexpr(GOLDEN)


@triton.jit
def _note(fault, kind, table, place, value, wrong):
    """Keep the first of the wrong places, unless a fault is noted already.

    ``fault`` is four int64: its kind (0: none), table, place in the table, value found.
    """
    if tl.max(wrong.to(tl.int32), 0) > 0:
        first = tl.min(tl.where(wrong, place, 1 << 62), 0)
        found = tl.sum(tl.where(wrong & (place == first), value, 0), 0)
        free, taken = tl.full([], 0, tl.int64), tl.full([], kind, tl.int64)
        if tl.atomic_cas(fault, free, taken) == 0:
            tl.store(fault + 1, table)
            tl.store(fault + 2, first)
            tl.store(fault + 3, found)


@triton.jit
def _bags_of(offsets, extents, table, tables, bag, bags):
    """Begin (within the table) and end of bags, the table's begin, and whether all is sound."""
    inside = bag < bags
    start = tl.load(extents + table)
    size = tl.load(extents + tables + table)
    at = offsets + table * bags + bag
    begin = tl.load(at, mask=inside, other=0)
    end = tl.load(at + 1, mask=bag + 1 < bags, other=0)
    end = tl.where(bag + 1 < bags, end, size)
    sound = (begin >= 0) & (begin <= end) & (end <= size) & ((bag > 0) | (begin == 0))
    return begin, end, start, inside, sound


@triton.jit
def pool(
    reference,
    places,
    rows,
    indices,
    offsets,
    extents,
    fault,
    pooled,
    tables,
    bags,
    blocks,
    BAD_INDEX: tl.constexpr,
    BAD_OFFSET: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VEC: tl.constexpr,
    BAGS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sums of bags: (T, B, DIM) in ``pooled``'s type, added in fp32 in the lookups' order.

    A program takes BAGS bags of one table side by side, so their rows are on their way
    at once; UNROLL more of each bag follow before the first is needed. The order of
    additions is the lookups' own whatever these are. Every index is checked before its
    row is read; a wrong one counts as no lookup and is noted in ``fault``.
    """
    table = (tl.program_id(0) // blocks).to(tl.int64)
    bag = (tl.program_id(0) % blocks).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    begin, end, start, inside, sound = _bags_of(offsets, extents, table, tables, bag, bags)
    _note(fault, BAD_OFFSET, table, bag, begin, inside & (sound == 0))
    length = tl.where(inside & sound, end - begin, 0)
    begin = tl.where(inside & sound, begin, 0)
    count = tl.load(rows + table)
    place = tl.load(places + table)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([BAGS, WIDTH], tl.float32)
    refused = tl.full([BAGS], 1 << 62, tl.int64)
    for done in range(0, tl.max(length, 0), UNROLL):
        for ahead in tl.static_range(UNROLL):
            lookup = done + ahead
            index = tl.load(indices + start + begin + lookup, mask=lookup < length, other=0)
            fits = (index >= 0) & (index < count)
            refused = tl.where(fits | (lookup >= length), refused, tl.minimum(refused, lookup))
            row = (place + index * (DIM // VEC)) * VEC
            wanted = (fits & (lookup < length))[:, None] & (column < DIM)[None, :]
            found = tl.load(reference + row[:, None] + column[None, :], mask=wanted, other=0.0)
            total += found.to(tl.float32)
    wrong = refused < length
    if tl.max(wrong.to(tl.int32), 0) > 0:
        value = tl.load(indices + start + begin + refused, mask=wrong, other=0)
        _note(fault, BAD_INDEX, table, begin + refused, value, wrong)
    at = (table * bags + bag) * DIM
    written = inside[:, None] & (column < DIM)[None, :]
    tl.store(pooled + at[:, None] + column[None, :], total.to(pooled.dtype.element_ty), written)


@triton.jit
def list_lookups(
    rows,
    indices,
    offsets,
    extents,
    keys,
    sources,
    tables,
    bags,
    blocks,
    ROW_BITS: tl.constexpr,
    BAGS: tl.constexpr,
):
    """For each lookup its key, and its bag ``table * B + bag``: (N,) each.

    Places in ``keys`` that belong to no lookup, or to a wrong one, are left as they are.
    """
    table = (tl.program_id(0) // blocks).to(tl.int64)
    bag = (tl.program_id(0) % blocks).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    begin, end, start, inside, sound = _bags_of(offsets, extents, table, tables, bag, bags)
    length = tl.where(inside & sound, end - begin, 0)
    count = tl.load(rows + table)
    source = (table * bags + bag).to(tl.int32)
    for lookup in range(0, tl.max(length, 0)):
        at = start + begin + lookup
        index = tl.load(indices + at, mask=lookup < length, other=-1)
        fits = (lookup < length) & (index >= 0) & (index < count)
        key = (table << ROW_BITS) + index
        tl.store(keys + at, key.to(keys.dtype.element_ty), mask=fits)
        tl.store(sources + at, source, mask=fits)


@triton.jit
def _add_runs(begins_left, sum_left, begins_right, sum_right):
    """One step of a scan that starts anew where a run begins."""
    kept = tl.where(begins_right > 0, 0.0, sum_left)
    return begins_left | begins_right, kept + sum_right


@triton.jit
def _words(seed, update, table, row, column):
    """The random words of rows (n,) and columns (d,), by the law of dlrm_kernels.rounding."""
    block = (column // 64 * 16 + column % 16)[None, :].to(tl.uint32)
    group = (row >> GROUP_ROW_BITS)[:, None].to(tl.uint32)
    zero = tl.zeros_like(block) + tl.zeros_like(group)
    a, b, c, d = tl.philox(
        seed,
        zero + block,
        zero + group,
        zero + table[:, None].to(tl.uint32),
        zero + update.to(tl.uint32),
        ROUNDS,
    )
    which = (column // 16 % 4)[None, :]
    word = tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))
    member = (row & MEMBERS)[:, None].to(tl.uint32)
    return word + member * STRIDE


@triton.jit
def _to_bf16(value, word):
    """float32 as bf16, up or down by a word of 32 bits."""
    bits = value.to(tl.uint32, bitcast=True)
    kept = (bits + (word >> 16)) >> 16
    kept = tl.where(value == value, kept, 0x7FC0)
    return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _to_half(value, word):
    """float32 as fp16, up or down by a word of 32 bits."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    exponent = size >> 23
    dropped = tl.maximum(126 - exponent, 13)
    beyond = tl.minimum(tl.maximum(dropped - 31, 0), 31)
    small = ((size & 0x7FFFFF) | 0x800000) >> beyond
    mantissa = tl.where(exponent < 113, small, size - (112 << 23)).to(tl.uint32)
    dropped = tl.minimum(dropped, 31).to(tl.uint32)
    kept = (mantissa + (word >> (32 - dropped))) >> dropped
    kept = tl.minimum(kept, 0x7C00)
    kept = tl.where(value == value, kept, 0x7E00)
    kept = kept | ((bits >> 16) & 0x8000).to(tl.uint32)
    return kept.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _update(
    tables,
    rates,
    random,
    key,
    gradient,
    complete,
    column,
    EPSILON: tl.constexpr,
    ROW_BITS: tl.constexpr,
    DIM: tl.constexpr,
    VEC: tl.constexpr,
    KIND: tl.constexpr,
):
    """Apply a row's whole gradient to it, once; rows in parallel."""
    reference, places, states, state_places = tables
    seed, updates, numbers = random
    rate = tl.load(rates)
    key = tl.where(complete, key, 0)
    table = key >> ROW_BITS
    row = (key - (table << ROW_BITS)).to(tl.int64)
    wanted = complete[:, None] & (column < DIM)[None, :]
    at = (tl.load(places + table) + row * (DIM // VEC)) * VEC
    at = at[:, None] + column[None, :]
    weight = tl.load(reference + at, mask=wanted, other=0.0).to(tl.float32)
    if KIND == _SGD:
        change = rate * gradient
    elif KIND == _ADAGRAD:
        state_at = (tl.load(state_places + table) + row * (DIM // VEC)) * VEC
        state_at = state_at[:, None] + column[None, :]
        total = tl.load(states + state_at, mask=wanted, other=0.0) + gradient * gradient
        tl.store(states + state_at, total, mask=wanted)
        change = tl.div_rn(rate * gradient, tl.sqrt_rn(total) + EPSILON)
    else:
        tl.static_assert(KIND == _ROWWISE)
        state_at = tl.load(state_places + table) + row
        squares = tl.sum(tl.where(wanted, gradient * gradient, 0.0), 1) / DIM
        total = tl.load(states + state_at, mask=complete, other=0.0) + squares
        tl.store(states + state_at, total, mask=complete)
        change = gradient * tl.div_rn(rate, tl.sqrt_rn(total) + EPSILON)[:, None]
    changed = weight - change
    if reference.dtype.element_ty != tl.float32:
        words = _words(seed, tl.load(updates), tl.load(numbers + table), row, column)
        if reference.dtype.element_ty == tl.bfloat16:
            changed = _to_bf16(changed, words)
        else:
            changed = _to_half(changed, words)
    tl.store(reference + at, changed, mask=wanted)


@triton.jit
def settle_runs(
    keys,
    order,
    sources,
    gradients,
    table_stride,
    bag_stride,
    bags,
    count,
    limit,
    next_keys,
    next_sums,
    fault,
    reference,
    places,
    states,
    state_places,
    rates,
    seed,
    updates,
    numbers,
    EPSILON: tl.constexpr,
    ROW_BITS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VEC: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    LOOKUPS: tl.constexpr,
):
    """Add up runs of equal keys in tiles of TILE elements; update rows whose run is whole.

    With LOOKUPS the elements are lookups in the order of their keys: element i is the
    gradient of bag ``sources[order[i]]``. Else they are what tiles of the level below
    left over, two each: ``gradients`` (count, DIM) fp32.

    A run that lies in one tile is whole: its row is updated here. Of the others a tile
    leaves at most two sums for the next level: of the run that came in (element
    2 * tile) and of the one that goes on (2 * tile + 1); a run that comes in and goes on
    leaves its sum and a zero, so that equal keys stay neighbours. The tree of additions
    is fixed by the sorted keys alone: the same bits every run, and a row with a million
    lookups takes a few levels instead of one thread's million steps.
    """
    tile = tl.program_id(0)
    lane = tl.arange(0, TILE)
    i = tile * TILE + lane
    column = tl.arange(0, WIDTH)
    in_row = (column < DIM)[None, :]
    key = tl.load(keys + i, mask=i < count, other=limit)
    before = tl.load(keys + i - 1, mask=(i > 0) & (i < count), other=-1)
    after = tl.load(keys + i + 1, mask=i + 1 < count, other=-1)
    came = tl.load(keys + tile * TILE - 1, mask=tile > 0, other=-1)
    # once a fault is noted nothing is a lookup any more
    below = tl.where(tl.load(fault) == 0, limit, 0)
    valid = (key < below) & (i < count)
    if LOOKUPS:
        source = tl.load(sources + tl.load(order + i, mask=valid, other=0), mask=valid, other=0)
        at = (source // bags).to(tl.int64) * table_stride
        at += (source % bags).to(tl.int64) * bag_stride
    else:
        at = i.to(tl.int64) * DIM
    gradient = tl.load(
        gradients + at[:, None] + column[None, :], mask=valid[:, None] & in_row, other=0.0
    ).to(tl.float32)
    begins = key != before
    if tl.min((begins | (valid == 0)).to(tl.int32), 0) == 0:
        starts = tl.broadcast_to(begins.to(tl.int32)[:, None], [TILE, WIDTH])
        _, gradient = tl.associative_scan((starts, gradient), 0, _add_runs)
    ends = key != after
    entered = key == came
    complete = valid & ends & (entered == 0)
    tables, random = (reference, places, states, state_places), (seed, updates, numbers)
    _update(
        *(tables, rates, random, key, gradient, complete, column),
        *(EPSILON, ROW_BITS, DIM, VEC, KIND),
    )
    # for the next level
    goes_on = valid & (lane == TILE - 1) & (ends == 0)
    left_over = (valid & ends & entered) | goes_on
    slot = (2 * tile + (entered == 0).to(tl.int32)).to(tl.int64) * DIM
    tl.store(
        next_sums + slot[:, None] + column[None, :], gradient, mask=left_over[:, None] & in_row
    )
    passes = goes_on & entered
    zero = tl.zeros([TILE, WIDTH], tl.float32)
    slot = (2 * tile + 1).to(tl.int64) * DIM + (lane * 0).to(tl.int64)
    tl.store(next_sums + slot[:, None] + column[None, :], zero, mask=passes[:, None] & in_row)
    first = tl.min(tl.where(valid & entered, key, limit), 0)
    last = tl.min(tl.where(goes_on, key, limit), 0)
    tl.store(next_keys + 2 * tile, first)
    tl.store(next_keys + 2 * tile + 1, last)
