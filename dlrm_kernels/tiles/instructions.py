"""Instructions that numba does not offer: tiles, bf16, the transpose of sixteen vectors.

As in :mod:`dlrm_kernels.vectors`, an address is an ``int64`` and nothing here checks
one. A tile is 16 rows of 64 bytes: 16 x 32 bf16, or 16 x 16 float32. On a processor without
tiles the tile instructions are left out, so that kernels compile everywhere;
:mod:`dlrm_kernels.tiles.machine` says where they may run.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# the type checker sees untyped decorators: numba has no stubs
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from dlrm_core.base.machine import cpu_flags
from dlrm_kernels import vectors as v

ROW_BYTES = 64

HAS_TILES = {"amx_tile", "amx_bf16"} <= cpu_flags()
HAS_BF16 = {"avx512f", "avx512_bf16"} <= cpu_flags()

_ALL_SHORTS = ir.VectorType(v.I16, 2 * v.LANES)


class _Bfloat(ir.Type):
    """LLVM's bfloat, the one floating type that llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


@v.instruction(v.word_vector(v.vector, v.vector))
def halves_of(builder, low, high):
    """32 float32 rounded to the nearest bf16, one behind the other."""
    if HAS_BF16:
        kind = ir.VectorType(_Bfloat(), 2 * v.LANES)
        halves = v.call(builder, "x86.avx512bf16.cvtne2ps2bf16.512", kind, high, low)
        return builder.bitcast(halves, v.INTS)
    halves = [v.to_nearest_bf16(builder, value) for value in (low, high)]
    return builder.bitcast(_chosen(builder, *halves, range(2 * v.LANES)), v.INTS)


def _chosen(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, places: Any) -> ir.Value:
    """Lanes of two vectors, by their places in both."""
    places = list(places)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(v.I32, len(places)), places))


def _floats_of(first: int) -> Any:
    @v.instruction(v.vector(v.word_vector))
    def floats(builder, halves):
        shorts = builder.bitcast(halves, _ALL_SHORTS)
        chosen = _chosen(builder, shorts, shorts, range(first, first + v.LANES))
        return builder.bitcast(builder.shl(builder.zext(chosen, v.INTS), v.same(16)), v.FLOATS)

    return floats


first_floats, last_floats = _floats_of(0), _floats_of(v.LANES)
"""Instructions: the first, the last 16 of 32 bf16 as float32."""


def _paired_from(first: int) -> Any:
    @v.instruction(v.word_vector(v.word_vector, v.word_vector))
    def pairs(builder, even, odd):
        rows = [builder.bitcast(row, _ALL_SHORTS) for row in (even, odd)]
        columns = range(first, first + v.LANES)
        places = [place for c in columns for place in (c, 2 * v.LANES + c)]
        return builder.bitcast(_chosen(builder, *rows, places), v.INTS)

    return pairs


first_pairs, last_pairs = _paired_from(0), _paired_from(v.LANES)
"""Instructions: of the first, the last 16 columns of two rows a pair in one lane."""


@v.instruction(v.vector(v.word_vector))
def lower_halves(builder, value):
    """The bf16 in the lower half of each lane, as float32."""
    return builder.bitcast(builder.shl(value, v.same(16)), v.FLOATS)


@v.instruction(v.vector(v.word_vector))
def upper_halves(builder, value):
    """The bf16 in the upper half of each lane, as float32."""
    return builder.bitcast(builder.and_(value, v.same(-0x10000)), v.FLOATS)


@v.instruction(v.word_vector(types.int64))
def splat_integer(builder, address):
    """The 32-bit integer at an address, sixteen times."""
    return v.spread(builder, builder.load(v.pointer_to(builder, address, v.I32), align=4), v.INTS)


@v.instruction(v.vector(v.vector))
def relu(builder, value):
    """max(x, 0), NaN kept."""
    zero = ir.Constant(v.FLOATS, [0.0] * v.LANES)
    return builder.select(builder.fcmp_ordered("<", value, zero), zero, value)


@v.instruction(v.vector(v.vector, types.int64))
def where_positive(builder, value, address):
    """The lanes for which the bf16 at an address is above zero; 0 elsewhere."""
    shorts = builder.load(v.pointer_to(builder, address, v.SHORTS), align=2)
    positive = builder.icmp_signed(">", shorts, ir.Constant(v.SHORTS, [0] * v.LANES))
    return builder.select(positive, value, ir.Constant(v.FLOATS, [0.0] * v.LANES))


@v.instruction(types.void(types.int64, types.int64))
def transpose_tile(builder, source, target):
    """A tile of 16 x 16 32-bit numbers, transposed, to another place.

    Eklundh's method: blocks of 1, 2, 4 and 8 rows change places with their mirror images.
    """

    def place(base: Any, row: int) -> Any:
        return v.pointer_to(builder, builder.add(base, v.I64(ROW_BYTES * row)), v.INTS)

    rows = [builder.load(place(source, r), align=4) for r in range(v.LANES)]
    for step in (1, 2, 4, 8):
        lanes = range(v.LANES)
        upper = [lane if not lane & step else v.LANES + lane - step for lane in lanes]
        lower = [lane + step if not lane & step else v.LANES + lane for lane in lanes]
        for r in range(v.LANES):
            if not r & step:
                a, b = rows[r], rows[r + step]
                rows[r], rows[r + step] = (
                    _chosen(builder, a, b, upper),
                    _chosen(builder, a, b, lower),
                )
    for r, row in enumerate(rows):
        builder.store(row, place(target, r), align=4)


def _tile_call(builder: ir.IRBuilder, name: str, *arguments: ir.Value) -> None:
    if HAS_TILES:
        v.call(builder, f"x86.{name}", ir.VoidType(), *arguments)


@v.instruction(types.void(types.int64))
def configure_tiles(builder, address):
    """Give this thread's tiles the shapes that the 64 bytes at an address describe."""
    _tile_call(builder, "ldtilecfg", v.pointer_to(builder, address, v.I8))


def _on_tiles(name: str, *numbers: int) -> Any:
    """Instruction () that works on tiles of these numbers."""

    @v.instruction(types.void())
    def work(builder):
        _tile_call(builder, name, *map(v.I8, numbers))

    return work


release_tiles = _on_tiles("tilerelease")
"""Gives this thread's tiles back: a thread that has them takes longer to switch."""


def clear_tile(number: int) -> Any:
    """Instruction: zeros to a tile."""
    return _on_tiles("tilezero", number)


def multiply_tiles(target: int, left: int, right: int) -> Any:
    """Instruction: add the product of two bf16 tiles to a float32 tile (TDPBF16PS)."""
    return _on_tiles("tdpbf16ps", target, left, right)


def _move_tile(name: str, number: int) -> Any:
    @v.instruction(types.void(types.int64, types.int64))
    def move(builder, address, stride):
        _tile_call(builder, name, v.I8(number), v.pointer_to(builder, address, v.I8), stride)

    return move


def load_tile(number: int) -> Any:
    """Instruction (address, bytes between rows): memory to a tile."""
    return _move_tile("tileloadd64", number)


def store_tile(number: int) -> Any:
    """Instruction (address, bytes between rows): a tile to memory."""
    return _move_tile("tilestored64", number)
