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
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, models, register_model

from dlrm_core.base.machine import cpu_flags
from dlrm_kernels.vectors import (
    LANES,
    loading,
    pointer_to,
    storing,
    to_nearest_bf16,
    vector,
)

ROW_BYTES = 64

HAS_TILES = {"amx_tile", "amx_bf16"} <= cpu_flags()
HAS_BF16 = {"avx512f", "avx512_bf16"} <= cpu_flags()

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_INTS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(ir.FloatType(), LANES)
_SHORTS, _ALL_SHORTS = ir.VectorType(_I16, LANES), ir.VectorType(_I16, 2 * LANES)


class Integers(types.Type):
    """Numba's view of sixteen 32-bit integers in registers."""

    def __init__(self) -> None:
        super().__init__(name="int32x16")


integers = Integers()


@register_model(Integers)
class IntegersModel(models.PrimitiveModel):
    """Kept as one LLVM vector, so that the optimiser puts it in registers."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _INTS)


def _constant(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [value] * LANES)


class _Bfloat(ir.Type):
    """LLVM's bfloat, the one floating type that llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


@intrinsic
def halves_of(context, a, b):
    """32 float32 rounded to the nearest bf16, one behind the other."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        low, high = arguments
        if HAS_BF16:
            kind = ir.FunctionType(ir.VectorType(_Bfloat(), 2 * LANES), [_FLOATS, _FLOATS])
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            function = get_or_insert_function(builder.module, kind, name)
            return builder.bitcast(builder.call(function, [high, low]), _INTS)
        halves = [to_nearest_bf16(builder, value) for value in (low, high)]
        order = ir.Constant(ir.VectorType(_I32, 2 * LANES), list(range(2 * LANES)))
        return builder.bitcast(builder.shuffle_vector(*halves, order), _INTS)

    return integers(vector, vector), generate


def _floats_of(first: int) -> Any:
    @intrinsic
    def floats(context, halves):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            shorts = builder.bitcast(arguments[0], _ALL_SHORTS)
            places = ir.Constant(_INTS, list(range(first, first + LANES)))
            chosen = builder.shuffle_vector(shorts, shorts, places)
            wide = builder.shl(builder.zext(chosen, _INTS), _constant(16))
            return builder.bitcast(wide, _FLOATS)

        return vector(integers), generate

    return floats


first_floats, last_floats = _floats_of(0), _floats_of(LANES)
"""Instructions: the first, the last 16 of 32 bf16 as float32."""


def _paired_from(first: int) -> Any:
    @intrinsic
    def pairs(context, even, odd):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows = [builder.bitcast(row, _ALL_SHORTS) for row in arguments]
            columns = range(first, first + LANES)
            order = [place for c in columns for place in (c, 2 * LANES + c)]
            places = ir.Constant(ir.VectorType(_I32, 2 * LANES), order)
            return builder.bitcast(builder.shuffle_vector(*rows, places), _INTS)

        return integers(integers, integers), generate

    return pairs


first_pairs, last_pairs = _paired_from(0), _paired_from(LANES)
"""Instructions: of the first, the last 16 columns of two rows a pair in one lane."""


@intrinsic
def lower_halves(context, value):
    """The bf16 in the lower half of each lane, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.shl(arguments[0], _constant(16)), _FLOATS)

    return vector(integers), generate


@intrinsic
def upper_halves(context, value):
    """The bf16 in the upper half of each lane, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kept = builder.and_(arguments[0], _constant(-0x10000))
        return builder.bitcast(kept, _FLOATS)

    return vector(integers), generate


@intrinsic
def load_integers(context, address):
    """Sixteen 32-bit integers."""
    return integers(types.int64), loading(_INTS, 4)


@intrinsic
def store_integers(context, address, value):
    """Sixteen 32-bit integers."""
    return types.void(types.int64, integers), storing(_INTS, 4)


@intrinsic
def splat_integer(context, address):
    """The 32-bit integer at an address, sixteen times."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one = builder.load(pointer_to(builder, arguments[0], _I32), align=4)
        first = builder.insert_element(ir.Constant(_INTS, ir.Undefined), one, _I32(0))
        return builder.shuffle_vector(first, ir.Constant(_INTS, ir.Undefined), _constant(0))

    return integers(types.int64), generate


@intrinsic
def relu(context, value):
    """max(x, 0), NaN kept."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        negative = builder.fcmp_ordered("<", arguments[0], zero)
        return builder.select(negative, zero, arguments[0])

    return vector(vector), generate


@intrinsic
def where_positive(context, value, address):
    """The lanes for which the bf16 at an address is above zero; 0 elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        shorts = builder.load(pointer_to(builder, arguments[1], _SHORTS), align=2)
        positive = builder.icmp_signed(">", shorts, ir.Constant(_SHORTS, [0] * LANES))
        return builder.select(positive, arguments[0], ir.Constant(_FLOATS, [0.0] * LANES))

    return vector(vector, types.int64), generate


@intrinsic
def transpose_tile(context, source, target):
    """A tile of 16 x 16 32-bit numbers, transposed, to another place.

    Eklundh's method: blocks of 1, 2, 4 and 8 rows change places with their mirror images.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def place(base: Any, row: int) -> Any:
            return pointer_to(builder, builder.add(base, _I64(ROW_BYTES * row)), _INTS)

        rows = [builder.load(place(arguments[0], r), align=4) for r in range(LANES)]
        for step in (1, 2, 4, 8):
            lanes = range(LANES)
            upper = [lane if not lane & step else LANES + lane - step for lane in lanes]
            lower = [lane + step if not lane & step else LANES + lane for lane in lanes]
            for r in range(LANES):
                if not r & step:
                    a, b = rows[r], rows[r + step]
                    for k, chosen in ((r, upper), (r + step, lower)):
                        rows[k] = builder.shuffle_vector(a, b, ir.Constant(_INTS, chosen))
        for r, row in enumerate(rows):
            builder.store(row, place(arguments[1], r), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _call(builder: ir.IRBuilder, name: str, *arguments: ir.Value) -> None:
    if HAS_TILES:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        function = get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
        builder.call(function, arguments)


@intrinsic
def configure_tiles(context, address):
    """Give this thread's tiles the shapes that the 64 bytes at an address describe."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "ldtilecfg", pointer_to(builder, arguments[0], _I8))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release_tiles(context):
    """Give this thread's tiles back: a thread that has them takes longer to switch."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def clear_tile(number: int) -> Any:
    """Instruction: zeros to a tile."""

    @intrinsic
    def clear(context):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _call(builder, "tilezero", _I8(number))
            return context.get_dummy_value()

        return types.void(), generate

    return clear


def _move_tile(name: str, number: int) -> Any:
    @intrinsic
    def move(context, address, stride):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = pointer_to(builder, arguments[0], _I8)
            _call(builder, name, _I8(number), pointer, arguments[1])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return move


def load_tile(number: int) -> Any:
    """Instruction (address, bytes between rows): memory to a tile."""
    return _move_tile("tileloadd64", number)


def store_tile(number: int) -> Any:
    """Instruction (address, bytes between rows): a tile to memory."""
    return _move_tile("tilestored64", number)


def multiply_tiles(target: int, left: int, right: int) -> Any:
    """Instruction: add the product of two bf16 tiles to a float32 tile (TDPBF16PS)."""

    @intrinsic
    def multiply(context):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _call(builder, "tdpbf16ps", _I8(target), _I8(left), _I8(right))
            return context.get_dummy_value()

        return types.void(), generate

    return multiply
