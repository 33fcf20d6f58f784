"""Adagrad and row-wise Adagrad fused into the backward pass, on the CPU; SGD rounded once a row.

Both need a row's whole gradient before its update (unlike SGD, which may subtract
lookup by lookup), so a unit sorts its lookups by row: a stable radix sort of keys
``row B' + bag`` (B' the least power of two not below B) by the bits of the row. Then
each row's gradients are summed in the order of the bags and the row is updated once.
Where most rows come up once, those rows' gradient is their bag's: they are updated bag after
bag, as SGD updates, and only the rows that come up again are sorted.
A unit owns all rows of a table or a hashed share of them, so no two threads meet,
and every row's sum has one order: the bits do not depend on the number of threads.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import numpy as np

from dlrm_kernels.embeddings.kernels import (
    AHEAD,
    BAGS,
    DIM,
    FORMAT,
    GRADIENTS,
    INDICES,
    KEYS,
    KIND,
    NUMBERS,
    PLAN,
    RATES,
    REGION,
    ROWS,
    SCRATCH,
    SEED,
    STARTS,
    STATES,
    STEP,
    STRIDES,
    TABLES,
    UPDATE,
    WEIGHTS,
    WORDS,
    bag_begin,
)
from dlrm_kernels.embeddings.kernels_narrow import (
    FLOAT,
    change_narrow,
    change_row,
    draw_words,
    words_bytes,
)
from dlrm_kernels.rounding import GOLDEN, GROUP_BITS
from dlrm_kernels.vectors import (
    LANES,
    UNITS,
    add,
    add_words,
    compiled,
    divide,
    enter,
    field,
    item,
    lane_sum,
    load_first,
    load_float,
    load_vector,
    load_words,
    multiply,
    owner,
    prefetch,
    splat,
    splat_word,
    square_root,
    store_first,
    store_float,
    store_int,
    store_vector,
    subtract,
    take_unit,
    warm,
    zeros,
)

DIGIT_BITS = 11
"""Most bits sorted in one pass: 2048 counters fit the first-level cache."""

MOST_SLOT_BITS = 20
"""Slots of the map of rows, at most: at two bits each they take 256 KiB of the second-level cache.
Rows of a larger table share slots; one that shares is sorted, as if it came up again."""

MAP_BYTES = (2 << MOST_SLOT_BITS) // 8

FEW = 0.5
"""Share of a unit's lookups that may find their slot taken, for the others to be done unsorted."""

ADAGRAD, ROWWISE, SGD = 0, 1, 2


@compiled
def scratch_bytes(dim):
    """Bytes of scratch of one thread: counters of the sort, the map of rows, a row's gradient."""
    return 8 * (1 << DIGIT_BITS) + MAP_BYTES + 4 * ((dim + 15) // 16 * 16)


@compiled
def bits_for(count):
    """Bits that tell 0 .. count - 1 apart."""
    bits = 0
    while (1 << bits) < count:
        bits += 1
    return bits


@compiled
def first_place(job, table, mine, slices):
    """The place of a slice's first key: slices of a table share its region, one by one."""
    indices, starts = field(job, INDICES), field(job, STARTS)
    begin, end = item(starts, table), item(starts, table + 1)
    place = begin
    if slices > 1:
        for i in range(begin, end):
            if owner(item(indices, i), slices) < mine:
                place += 1
    return place


@compiled
def comes_again(slots, row, bits):
    """Whether the map of :func:`mark_rows` has a row's slot as taken more than once."""
    slot = row & ((1 << bits) - 1)
    return (item(slots, slot >> 5) >> (2 * (slot & 31) + 1)) & 1


@compiled
def collect(job, table, mine, slices, shift, keys, few, slots, bits):
    """Write the keys of a slice's lookups, bag after bag; their number.

    Args:
        few: whether only those that come again are written.
    """
    indices, count = field(job, INDICES), 0
    for bag in range(field(job, BAGS)):
        for i in range(bag_begin(job, table, bag), bag_begin(job, table, bag + 1)):
            row = item(indices, i)
            if few and not comes_again(slots, row, bits):
                continue
            if slices == 1 or owner(row, slices) == mine:
                store_int(keys + 8 * count, (row << shift) | bag)
                count += 1
    return count


@compiled
def mark_rows(job, table, mine, slices, slots, bits):
    """Note in two bits a slot which rows a slice looks up, and which it looks up again.

    Returns:
        Whether few lookups found their slot taken; the map is whole only then.
    """
    indices, starts = field(job, INDICES), field(job, STARTS)
    begin, end = item(starts, table), item(starts, table + 1)
    mask, again, counted = (1 << bits) - 1, 0, 0
    early = begin + (end - begin) // 8
    for word in range(((1 << bits) + 31) // 32):
        store_int(slots + 8 * word, 0)
    for i in range(begin, end):
        if i == early and again > FEW * counted:
            return False
        row = item(indices, i)
        if slices == 1 or owner(row, slices) == mine:
            slot = row & mask
            at, shift = slots + 8 * (slot >> 5), 2 * (slot & 31)
            word = item(at, 0)
            taken = (word >> shift) & 1
            store_int(at, word | ((1 | (taken << 1)) << shift))
            again += taken
            counted += 1
    return again <= FEW * counted


@compiled
def sort_keys(keys, other, count, shift, bits, counters):
    """Radix sort of ``count`` keys by ``bits`` bits from ``shift`` up; where the result is."""
    passes = (bits + DIGIT_BITS - 1) // DIGIT_BITS
    if passes == 0:
        return keys
    width = (bits + passes - 1) // passes
    mask = (1 << width) - 1
    for number in range(passes):
        low = shift + number * width
        for digit in range(mask + 1):
            store_int(counters + 8 * digit, 0)
        for i in range(count):
            slot = counters + 8 * ((item(keys, i) >> low) & mask)
            store_int(slot, item(slot, 0) + 1)
        total = 0
        for digit in range(mask + 1):
            here = item(counters, digit)
            store_int(counters + 8 * digit, total)
            total += here
        for i in range(count):
            key = item(keys, i)
            slot = counters + 8 * ((key >> low) & mask)
            place = item(slot, 0)
            store_int(slot, place + 1)
            store_int(other + 8 * place, key)
        keys, other = other, keys
    return keys


@compiled
def sum_64(keys, begin, end, mask, gradients, stride, out):
    """64 columns of :func:`sum_gradients` (functions of their own: see kernels.sum_64)."""
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    for i in range(begin, end):
        p = gradients + (item(keys, i) & mask) * stride
        a = add(a, load_vector(p))
        b = add(b, load_vector(p + 64))
        c = add(c, load_vector(p + 128))
        d = add(d, load_vector(p + 192))
    store_vector(out, a)
    store_vector(out + 64, b)
    store_vector(out + 128, c)
    store_vector(out + 192, d)
    low = add(multiply(a, a), multiply(b, b))
    return lane_sum(add(low, add(multiply(c, c), multiply(d, d))))


@compiled
def sum_16(keys, begin, end, mask, gradients, stride, out):
    """16 columns of :func:`sum_gradients`."""
    a = zeros()
    for i in range(begin, end):
        a = add(a, load_vector(gradients + (item(keys, i) & mask) * stride))
    store_vector(out, a)
    return lane_sum(multiply(a, a))


@compiled
def sum_few(keys, begin, end, mask, gradients, stride, out, count):
    """Fewer than 16 columns of :func:`sum_gradients`."""
    squares = np.float32(0)
    for k in range(count):
        one = np.float32(0)
        for i in range(begin, end):
            one += load_float(gradients + (item(keys, i) & mask) * stride + 4 * k)
        store_float(out + 4 * k, one)
        squares += one * one
    return squares


@compiled
def sum_gradients(keys, begin, end, mask, gradients, stride, dim, out):
    """Sum the gradients of the bags of ``keys[begin:end]`` into ``out``; its sum of squares."""
    squares, column = np.float32(0), 0
    while column + 64 <= dim:
        at = 4 * column
        squares += sum_64(keys, begin, end, mask, gradients + at, stride, out + at)
        column += 64
    while column + 16 <= dim:
        at = 4 * column
        squares += sum_16(keys, begin, end, mask, gradients + at, stride, out + at)
        column += 16
    if column < dim:
        at = 4 * column
        squares += sum_few(keys, begin, end, mask, gradients + at, stride, out + at, dim - column)
    return squares


@compiled
def adagrad_row(row, state, gradient, dim, rate, epsilon):
    """s += g^2; w -= rate g / (sqrt(s) + eps), weight by weight."""
    rates, epsilons = splat(rate), splat(epsilon)
    column = 0
    while column + 16 <= dim:
        at = 4 * column
        g = load_vector(gradient + at)
        s = add(load_vector(state + at), multiply(g, g))
        store_vector(state + at, s)
        change = divide(multiply(rates, g), add(square_root(s), epsilons))
        store_vector(row + at, subtract(load_vector(row + at), change))
        column += 16
    while column < dim:
        at = 4 * column
        h = load_float(gradient + at)
        t = load_float(state + at) + h * h
        store_float(state + at, t)
        store_float(row + at, load_float(row + at) - rate * h / (np.sqrt(t) + epsilon))
        column += 1


@compiled
def subtract_scaled(row, gradient, scale, dim):
    """w -= scale g."""
    scales, column = splat(scale), 0
    while column + 16 <= dim:
        at = 4 * column
        change = multiply(scales, load_vector(gradient + at))
        store_vector(row + at, subtract(load_vector(row + at), change))
        column += 16
    while column < dim:
        at = 4 * column
        store_float(row + at, load_float(row + at) - scale * load_float(gradient + at))
        column += 1


@compiled
def end_of_row(keys, begin, count, shift):
    """Behind the last of the keys that have the row of ``keys[begin]``."""
    row, end = item(keys, begin) >> shift, begin + 1
    while end < count and item(keys, end) >> shift == row:
        end += 1
    return end


@compiled
def rowwise_64(row, state, keys, begin, end, mask, gradients, stride, rate, epsilon):
    """Row-wise Adagrad of a row of 64 floats, its gradient in registers throughout.

    The same operations in the same order as for other widths.
    """
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    for i in range(begin, end):
        p = gradients + (item(keys, i) & mask) * stride
        a = add(a, load_vector(p))
        b = add(b, load_vector(p + 64))
        c = add(c, load_vector(p + 128))
        d = add(d, load_vector(p + 192))
    low = add(multiply(a, a), multiply(b, b))
    squares = lane_sum(add(low, add(multiply(c, c), multiply(d, d))))
    total = load_float(state) + squares / np.float32(64)
    store_float(state, total)
    scales = splat(rate / (np.sqrt(total) + epsilon))
    store_vector(row, subtract(load_vector(row), multiply(scales, a)))
    store_vector(row + 64, subtract(load_vector(row + 64), multiply(scales, b)))
    store_vector(row + 128, subtract(load_vector(row + 128), multiply(scales, c)))
    store_vector(row + 192, subtract(load_vector(row + 192), multiply(scales, d)))


@compiled
def rowwise_wide(row, state, keys, begin, end, mask, gradients, stride, dim, rate, epsilon, out):
    """Row-wise Adagrad of a row of any width: s += mean(g^2); w -= rate g / (sqrt(s) + eps)."""
    squares = sum_gradients(keys, begin, end, mask, gradients, stride, dim, out)
    total = load_float(state) + squares / np.float32(dim)
    store_float(state, total)
    subtract_scaled(row, out, rate / (np.sqrt(total) + epsilon), dim)


@compiled
def rowwise_rows(
    weights, states, keys, count, shift, gradients, stride, dim, rate, epsilon, out, ahead, step
):
    """Row-wise Adagrad of every row of the sorted keys."""
    mask, size, begin = (1 << shift) - 1, 4 * dim, 0
    while begin < count:
        end = end_of_row(keys, begin, count, shift)
        soon = item(keys, min(end + ahead, count - 1)) >> shift
        warm(weights + soon * size, size, step)
        prefetch(states + soon * 4)
        row = item(keys, begin) >> shift
        w, s = weights + row * size, states + row * 4
        if dim == 64:
            rowwise_64(w, s, keys, begin, end, mask, gradients, stride, rate, epsilon)
        else:
            rowwise_wide(w, s, keys, begin, end, mask, gradients, stride, dim, rate, epsilon, out)
        begin = end


@compiled
def adagrad_rows(
    weights, states, keys, count, shift, gradients, stride, dim, rate, epsilon, out, ahead, step
):
    """Adagrad of every row of the sorted keys."""
    mask, size, begin = (1 << shift) - 1, 4 * dim, 0
    while begin < count:
        end = end_of_row(keys, begin, count, shift)
        soon = item(keys, min(end + ahead, count - 1)) >> shift
        warm(weights + soon * size, size, step)
        warm(states + soon * size, size, step)
        sum_gradients(keys, begin, end, mask, gradients, stride, dim, out)
        row = item(keys, begin) >> shift
        adagrad_row(weights + row * size, states + row * size, out, dim, rate, epsilon)
        begin = end


@compiled
def rowwise_lone_64(
    w,
    s,
    indices,
    begin,
    end,
    last,
    g,
    rate,
    epsilon,
    slots,
    bits,
    ahead,
    step,
    mine,
    slices,
    bag,
    shift,
    keys,
    count,
):
    """Row-wise Adagrad of a bag's lone rows of 64 floats, the bag's gradient in registers.

    Returns:
        Number of keys, with those of the bag's other rows.
    """
    a, b = add(zeros(), load_vector(g)), add(zeros(), load_vector(g + 64))
    c, d = add(zeros(), load_vector(g + 128)), add(zeros(), load_vector(g + 192))
    low = add(multiply(a, a), multiply(b, b))
    squares = lane_sum(add(low, add(multiply(c, c), multiply(d, d)))) / np.float32(64)
    for i in range(begin, end):
        soon = item(indices, min(i + ahead, last))
        if slices == 1 or owner(soon, slices) == mine:
            warm(w + soon * 256, 256, step)
            prefetch(s + soon * 4)
        row = item(indices, i)
        if slices == 1 or owner(row, slices) == mine:
            if comes_again(slots, row, bits):
                store_int(keys + 8 * count, (row << shift) | bag)
                count += 1
            else:
                total = load_float(s + row * 4) + squares
                store_float(s + row * 4, total)
                scales, p = splat(rate / (np.sqrt(total) + epsilon)), w + row * 256
                store_vector(p, subtract(load_vector(p), multiply(scales, a)))
                store_vector(p + 64, subtract(load_vector(p + 64), multiply(scales, b)))
                store_vector(p + 128, subtract(load_vector(p + 128), multiply(scales, c)))
                store_vector(p + 192, subtract(load_vector(p + 192), multiply(scales, d)))
    return count


@compiled
def update_lone_rows(job, table, mine, slices, shift, keys, slots, bits, number, out):
    """Update the rows whose slot was taken once, bag after bag; the others' keys are written.

    A lone row gets the bits that it would get if it were sorted.

    Args:
        number: place for a bag's number.

    Returns:
        Number of keys.
    """
    dim, kind, ahead, step = field(job, DIM), field(job, KIND), field(job, AHEAD), field(job, STEP)
    indices, last = field(job, INDICES), item(field(job, STARTS), table + 1) - 1
    w, s = item(field(job, WEIGHTS), table), item(field(job, STATES), table)
    g, stride = item(field(job, GRADIENTS), table), item(field(job, STRIDES), table)
    rate, epsilon = load_float(field(job, RATES)), load_float(field(job, RATES) + 4)
    size, state_size, count = 4 * dim, 4 * dim, 0
    if kind == ROWWISE:
        state_size = 4
    for bag in range(field(job, BAGS)):
        begin, end = bag_begin(job, table, bag), bag_begin(job, table, bag + 1)
        if kind == ROWWISE and dim == 64:
            count = rowwise_lone_64(
                w, s, indices, begin, end, last, g + bag * stride, rate, epsilon, slots, bits,
                ahead, step, mine, slices, bag, shift, keys, count,
            )  # fmt: skip
            continue
        store_int(number, bag)
        squares = sum_gradients(number, 0, 1, -1, g, stride, dim, out) / np.float32(dim)
        for i in range(begin, end):
            soon = item(indices, min(i + ahead, last))
            if slices == 1 or owner(soon, slices) == mine:
                warm(w + soon * size, size, step)
                warm(s + soon * state_size, state_size, step)
            row = item(indices, i)
            if slices > 1 and owner(row, slices) != mine:
                continue
            if comes_again(slots, row, bits):
                store_int(keys + 8 * count, (row << shift) | bag)
                count += 1
            elif kind == ROWWISE:
                total = load_float(s + row * 4) + squares
                store_float(s + row * 4, total)
                subtract_scaled(w + row * size, out, rate / (np.sqrt(total) + epsilon), dim)
            else:
                adagrad_row(w + row * size, s + row * size, out, dim, rate, epsilon)
    return count


@compiled
def adagrad_changes(state, gradient, dim, rate, epsilon):
    """s += g^2; rate g / (sqrt(s) + eps) in the place of g."""
    rates, epsilons, column = splat(rate), splat(epsilon), 0
    while column < dim:
        at, count = 4 * column, min(LANES, dim - column)
        g = load_first(gradient + at, count)
        s = add(load_first(state + at, count), multiply(g, g))
        store_first(state + at, s, count)
        change = divide(multiply(rates, g), add(square_root(s), epsilons))
        store_first(gradient + at, change, count)
        column += LANES


@compiled
def rowwise_narrow_64(
    row, state, keys, begin, end, mask, gradients, stride, rate, epsilon, drawn, member, form
):
    """Row-wise Adagrad of a row of 64 numbers of 2 bytes, its gradient in registers throughout.

    The same operations in the same order as for other widths.
    """
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    for i in range(begin, end):
        p = gradients + (item(keys, i) & mask) * stride
        a = add(a, load_vector(p))
        b = add(b, load_vector(p + 64))
        c = add(c, load_vector(p + 128))
        d = add(d, load_vector(p + 192))
    low = add(multiply(a, a), multiply(b, b))
    squares = lane_sum(add(low, add(multiply(c, c), multiply(d, d))))
    total = load_float(state) + squares / np.float32(64)
    store_float(state, total)
    scales, own = splat(rate / (np.sqrt(total) + epsilon)), splat_word(member * GOLDEN)
    words = drawn
    change_narrow(row, multiply(scales, a), add_words(load_words(words), own), LANES, form)
    change_narrow(
        row + 32, multiply(scales, b), add_words(load_words(words + 64), own), LANES, form
    )
    change_narrow(
        row + 64, multiply(scales, c), add_words(load_words(words + 128), own), LANES, form
    )
    change_narrow(
        row + 96, multiply(scales, d), add_words(load_words(words + 192), own), LANES, form
    )


@compiled
def narrow_rows(job, table, keys, count, shift, thread, out):
    """Update every row of the sorted keys, of 2 bytes a number: summed, changed, rounded once."""
    dim, kind, form = field(job, DIM), field(job, KIND), field(job, FORMAT)
    ahead, step, size = field(job, AHEAD), field(job, STEP), 2 * dim
    w, states = item(field(job, WEIGHTS), table), item(field(job, STATES), table)
    gradients, stride = item(field(job, GRADIENTS), table), item(field(job, STRIDES), table)
    rate, epsilon = load_float(field(job, RATES)), load_float(field(job, RATES) + 4)
    number, update = item(field(job, NUMBERS), table), field(job, UPDATE)
    drawn = field(job, WORDS) + thread * words_bytes(dim)
    state_bytes = 4 * dim if kind == ADAGRAD else 4
    mask, begin, group = (1 << shift) - 1, 0, -1
    while begin < count:
        end = end_of_row(keys, begin, count, shift)
        soon = item(keys, min(end + ahead, count - 1)) >> shift
        warm(w + soon * size, size, step)
        if kind != SGD:
            warm(states + soon * state_bytes, state_bytes, step)
        row = item(keys, begin) >> shift
        if row >> GROUP_BITS != group:
            group = row >> GROUP_BITS
            draw_words(drawn, field(job, SEED), group, number, update, dim)
        member, state = row & ((1 << GROUP_BITS) - 1), states + row * state_bytes
        if kind == ROWWISE and dim == 64:
            rowwise_narrow_64(
                w + row * size, state, keys, begin, end, mask, gradients, stride, rate, epsilon,
                drawn, member, form,
            )  # fmt: skip
            begin = end
            continue
        squares = sum_gradients(keys, begin, end, mask, gradients, stride, dim, out)
        scale = rate
        if kind == ROWWISE:
            total = load_float(state) + squares / np.float32(dim)
            store_float(state, total)
            scale = rate / (np.sqrt(total) + epsilon)
        elif kind == ADAGRAD:
            adagrad_changes(state, out, dim, rate, epsilon)
            scale = np.float32(1)
        change_row(w + row * size, out, scale, dim, drawn, member, form)
        begin = end


@compiled
def sorted_lookups(job, unit, thread, updates):
    """Sort a unit's lookups by row, less those of lone rows where they are many.

    Args:
        updates: whether lone rows are updated meanwhile.

    Returns:
        The sorted keys and their number.
    """
    plan, starts = field(job, PLAN), field(job, STARTS)
    table, mine, slices = item(plan, 3 * unit), item(plan, 3 * unit + 1), item(plan, 3 * unit + 2)
    counters = field(job, SCRATCH) + thread * scratch_bytes(field(job, DIM))
    slots = counters + 8 * (1 << DIGIT_BITS)
    shift, bits = bits_for(field(job, BAGS)), bits_for(item(field(job, ROWS), table))
    base, apart, region = field(job, KEYS), 8 * item(starts, field(job, TABLES)), field(job, REGION)
    if region > 0:
        # the same memory for table after table: it stays in the cache
        base += thread * region - 8 * item(starts, table)
        apart = region // 2
    keys = base + 8 * first_place(job, table, mine, slices)
    low = min(bits, MOST_SLOT_BITS)
    few = field(job, FORMAT) == FLOAT and mark_rows(job, table, mine, slices, slots, low)
    if few and updates:
        out = slots + MAP_BYTES
        count = update_lone_rows(job, table, mine, slices, shift, keys, slots, low, counters, out)
    else:
        count = collect(job, table, mine, slices, shift, keys, few, slots, low)
    return sort_keys(keys, keys + apart, count, shift, bits, counters), count


def adagrad_owned(job):
    """Update every row that was looked up, once; a unit owns rows of a table."""
    dim, units, plan = field(job, DIM), field(job, UNITS), field(job, PLAN)
    ahead, kind, step = field(job, AHEAD), field(job, KIND), field(job, STEP)
    rate, epsilon = load_float(field(job, RATES)), load_float(field(job, RATES) + 4)
    thread = enter(job)
    out = field(job, SCRATCH) + thread * scratch_bytes(dim) + 8 * (1 << DIGIT_BITS) + MAP_BYTES
    shift = bits_for(field(job, BAGS))
    unit = take_unit(job)
    while unit < units:
        table = item(plan, 3 * unit)
        w, s = item(field(job, WEIGHTS), table), item(field(job, STATES), table)
        g, stride = item(field(job, GRADIENTS), table), item(field(job, STRIDES), table)
        keys, n = sorted_lookups(job, unit, thread, True)
        if field(job, FORMAT) != FLOAT:
            narrow_rows(job, table, keys, n, shift, thread, out)
        elif kind == ROWWISE:
            rowwise_rows(w, s, keys, n, shift, g, stride, dim, rate, epsilon, out, ahead, step)
        else:
            adagrad_rows(w, s, keys, n, shift, g, stride, dim, rate, epsilon, out, ahead, step)
        unit = take_unit(job)


def sort_alone(job):
    """Sort as :func:`adagrad_owned` does and update no row: what sorting takes, timed apart."""
    units, thread = field(job, UNITS), enter(job)
    unit = take_unit(job)
    while unit < units:
        sorted_lookups(job, unit, thread, False)
        unit = take_unit(job)
