"""What numba does not offer and a gather needs: prefetch, 16-float vectors, atomics; and jobs.

Each function is one LLVM instruction (or a few) on raw addresses: an address is an
``int64``, a vector sixteen float32 side by side (one AVX-512 register, two AVX2 or
four NEON registers). They work inside ``numba.njit`` code only, and nothing here
checks an address: :mod:`dlrm_kernels.embeddings.fused_cpu` does, before any is used.

A kernel is one C function ``void kernel(int64 job)``: ``job`` is the address of a block of
int64 fields, so that any thread pool can run it. Every thread that enters takes units of
work by an atomic counter until none is left.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# the type checker sees untyped decorators: numba has no stubs
from __future__ import annotations

from typing import Any

from dlrm_kernels.native import require_numba

require_numba()

# ruff: noqa: E402 (only now: what is missing was said in one sentence)
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, models, register_model

LANES = 16
"""float32 numbers in a vector."""

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_I16, _HALF = ir.IntType(16), ir.HalfType()
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_SHORTS, _HALVES = ir.VectorType(_I16, LANES), ir.VectorType(_HALF, LANES)
_LONGS = ir.VectorType(_I64, LANES)


compiled = njit(error_model="numpy")
"""Decorates what kernels call. Division by zero gives inf, as in C: nothing here can raise."""


class Vector(types.Type):
    """Numba's view of sixteen float32 in registers."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """Kept as one LLVM vector, so that the optimiser puts it in registers."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


class Words(types.Type):
    """Numba's view of sixteen words of 32 bits in registers."""

    def __init__(self) -> None:
        super().__init__(name="int32x16")


word_vector = Words()


@register_model(Words)
class WordsModel(models.PrimitiveModel):
    """Kept as one LLVM vector of int32."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _INTS)


class Shorts(types.Type):
    """Numba's view of the bits of sixteen bf16 or fp16 numbers in registers."""

    def __init__(self) -> None:
        super().__init__(name="int16x16")


short_vector = Shorts()


@register_model(Shorts)
class ShortsModel(models.PrimitiveModel):
    """Kept as one LLVM vector of int16."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _SHORTS)


def pointer_to(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """An address as LLVM's pointer to a value of that type."""
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def prefetch(context, address):
    """Begin to load the cache line at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(builder, arguments[0], _I8)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # 0: to read; locality 3: into every cache level; 1: data, not instructions
        builder.call(function, [pointer, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def loading(kind: ir.Type, alignment: int) -> Any:
    """Code of an intrinsic (address): a value of that type from memory."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(pointer_to(builder, arguments[0], kind), align=alignment)

    return generate


def storing(kind: ir.Type, alignment: int) -> Any:
    """Code of an intrinsic (address, value): the value to memory."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], pointer_to(builder, arguments[0], kind), align=alignment)
        return context.get_dummy_value()

    return generate


@intrinsic
def load_vector(context, address):
    """Sixteen float32 from an address that need not be aligned to more than a float."""
    return vector(types.int64), loading(_VECTOR, 4)


@intrinsic
def store_vector(context, address, value):
    """Sixteen float32 to an address that need not be aligned to more than a float."""
    return types.void(types.int64, vector), storing(_VECTOR, 4)


def _first_lanes(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Lanes 0 to count - 1, as a mask."""
    counts = _same_lanes(builder, builder.trunc(count, _I32))
    return builder.icmp_signed("<", ir.Constant(_INTS, list(range(LANES))), counts)


def _same_lanes(builder: ir.IRBuilder, word: ir.Value) -> ir.Value:
    """The same word of 32 bits in all lanes."""
    one = builder.insert_element(ir.Constant(_INTS, ir.Undefined), word, _I32(0))
    same = ir.Constant(_INTS, [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(_INTS, ir.Undefined), same)


def _loading_first(kind: ir.VectorType, name: str, alignment: int) -> Any:
    """Code of an intrinsic (address, count): the first lanes from memory, zeros behind them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(builder, arguments[0], kind)
        mask = _first_lanes(builder, arguments[1])
        call = ir.FunctionType(kind, [pointer.type, _I32, mask.type, kind])
        function = get_or_insert_function(builder.module, call, f"llvm.masked.load.{name}.p0")
        nothing = ir.Constant(kind, [0] * LANES)
        return builder.call(function, [pointer, _I32(alignment), mask, nothing])

    return generate


def _storing_first(kind: ir.VectorType, name: str, alignment: int) -> Any:
    """Code of an intrinsic (address, value, count): the first lanes to memory."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(builder, arguments[0], kind)
        mask = _first_lanes(builder, arguments[2])
        call = ir.FunctionType(ir.VoidType(), [kind, pointer.type, _I32, mask.type])
        function = get_or_insert_function(builder.module, call, f"llvm.masked.store.{name}.p0")
        builder.call(function, [arguments[1], pointer, _I32(alignment), mask])
        return context.get_dummy_value()

    return generate


@intrinsic
def load_first(context, address, count):
    """The first ``count`` of sixteen float32, zeros behind them; nothing else is read."""
    return vector(types.int64, types.int64), _loading_first(_VECTOR, "v16f32", 4)


@intrinsic
def store_first(context, address, value, count):
    """The first ``count`` lanes to an address; nothing else is written."""
    return types.void(types.int64, vector, types.int64), _storing_first(_VECTOR, "v16f32", 4)


@intrinsic
def load_float(context, address):
    """One float32."""
    return types.float32(types.int64), loading(_F32, 4)


@intrinsic
def store_float(context, address, value):
    """One float32."""
    return types.void(types.int64, types.float32), storing(_F32, 4)


@intrinsic
def load_int(context, address):
    """One int64."""
    return types.int64(types.int64), loading(_I64, 8)


@intrinsic
def store_int(context, address, value):
    """One int64."""
    return types.void(types.int64, types.int64), storing(_I64, 8)


@intrinsic
def zeros(context):
    """Sixteen zeros."""
    return vector(), lambda context, builder, signature, arguments: ir.Constant(
        _VECTOR, [0.0] * LANES
    )


@intrinsic
def splat(context, value):
    """Sixteen times the same float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), arguments[0], _I32(0))
        lanes = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
        return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), lanes)

    return vector(types.float32), generate


def _arithmetic(operation: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return getattr(builder, operation)(*arguments)

    return generate


@intrinsic
def add(context, a, b):
    """a + b, lane by lane."""
    return vector(vector, vector), _arithmetic("fadd")


@intrinsic
def subtract(context, a, b):
    """a - b, lane by lane."""
    return vector(vector, vector), _arithmetic("fsub")


@intrinsic
def multiply(context, a, b):
    """a b, lane by lane."""
    return vector(vector, vector), _arithmetic("fmul")


@intrinsic
def divide(context, a, b):
    """a / b, lane by lane."""
    return vector(vector, vector), _arithmetic("fdiv")


@intrinsic
def square_root(context, a):
    """The square root of each lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR])
        name = f"llvm.sqrt.v{LANES}f32"
        return builder.call(get_or_insert_function(builder.module, kind, name), arguments)

    return vector(vector), generate


# Words of 32 bits, and numbers of 2 bytes.


@intrinsic
def load_words(context, address):
    """Sixteen words of 32 bits."""
    return word_vector(types.int64), loading(_INTS, 4)


@intrinsic
def store_words(context, address, value):
    """Sixteen words of 32 bits."""
    return types.void(types.int64, word_vector), storing(_INTS, 4)


@intrinsic
def splat_word(context, value):
    """Sixteen times the low 32 bits of an integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _same_lanes(builder, builder.trunc(arguments[0], _I32))

    return word_vector(types.int64), generate


@intrinsic
def lane_numbers(context):
    """The words 0 to 15."""
    return word_vector(), lambda context, builder, signature, arguments: ir.Constant(
        _INTS, list(range(LANES))
    )


@intrinsic
def add_words(context, a, b):
    """a + b modulo 2^32, lane by lane."""
    return word_vector(word_vector, word_vector), _arithmetic("add")


@intrinsic
def xor_words(context, a, b):
    """Bits that differ, lane by lane."""
    return word_vector(word_vector, word_vector), _arithmetic("xor")


@intrinsic
def multiply_low(context, a, b):
    """The low 32 bits of a b, lane by lane."""
    return word_vector(word_vector, word_vector), _arithmetic("mul")


@intrinsic
def multiply_high(context, a, b):
    """The high 32 bits of a b without signs, lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = [builder.zext(argument, _LONGS) for argument in arguments]
        shift = ir.Constant(_LONGS, [32] * LANES)
        return builder.trunc(builder.lshr(builder.mul(*wide), shift), _INTS)

    return word_vector(word_vector, word_vector), generate


@intrinsic
def load_shorts(context, address):
    """The bits of sixteen numbers of 2 bytes."""
    return short_vector(types.int64), loading(_SHORTS, 2)


@intrinsic
def store_shorts(context, address, value):
    """The bits of sixteen numbers of 2 bytes."""
    return types.void(types.int64, short_vector), storing(_SHORTS, 2)


@intrinsic
def load_first_shorts(context, address, count):
    """The first ``count`` of sixteen numbers of 2 bytes; nothing else is read."""
    return short_vector(types.int64, types.int64), _loading_first(_SHORTS, "v16i16", 2)


@intrinsic
def store_first_shorts(context, address, value, count):
    """The first ``count`` lanes to an address; nothing else is written."""
    return types.void(types.int64, short_vector, types.int64), _storing_first(_SHORTS, "v16i16", 2)


@intrinsic
def from_bf16(context, shorts):
    """Sixteen bf16 numbers as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.shl(builder.zext(arguments[0], _INTS), ir.Constant(_INTS, [16] * LANES))
        return builder.bitcast(wide, _VECTOR)

    return vector(short_vector), generate


def to_nearest_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Sixteen float32 to the nearest bf16 (ties to even), by integer arithmetic."""
    bits = builder.bitcast(value, _INTS)
    odd = builder.and_(builder.lshr(bits, _same(16)), _same(1))
    near = builder.add(builder.add(bits, _same(0x7FFF)), odd)
    # a NaN must not be carried over into infinity or zero
    is_nan = builder.fcmp_unordered("uno", value, value)
    near = builder.select(is_nan, builder.or_(bits, _same(1 << 22)), near)
    return builder.trunc(builder.lshr(near, _same(16)), _SHORTS)


@intrinsic
def nearest_bf16(context, value):
    """Sixteen float32 to the nearest bf16, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return to_nearest_bf16(builder, arguments[0])

    return short_vector(vector), generate


@intrinsic
def from_half(context, shorts):
    """Sixteen fp16 numbers as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], _HALVES), _VECTOR)

    return vector(short_vector), generate


def _same(number: int) -> ir.Constant:
    return ir.Constant(_INTS, [number] * LANES)


def _with_sign(builder: ir.IRBuilder, bits: ir.Value, kept: ir.Value) -> ir.Value:
    """Words ``kept`` of 15 bits as shorts, with the signs of float32 ``bits``."""
    sign = builder.and_(builder.lshr(bits, _same(16)), _same(0x8000))
    return builder.trunc(builder.or_(kept, sign), _SHORTS)


@intrinsic
def round_to_bf16(context, value, drawn):
    """float32 as bf16, up or down by words of 32 bits: the law of dlrm_kernels.rounding."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], _INTS)
        moved = builder.add(bits, builder.lshr(arguments[1], _same(16)))
        kept = builder.lshr(moved, _same(16))
        number = builder.fcmp_ordered("ord", arguments[0], arguments[0])
        return builder.trunc(builder.select(number, kept, _same(0x7FC0)), _SHORTS)

    return short_vector(vector, word_vector), generate


@intrinsic
def round_to_half(context, value, drawn):
    """float32 as fp16, up or down by words of 32 bits: the law of dlrm_kernels.rounding."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def least(a: ir.Value, b: ir.Value) -> ir.Value:
            return builder.select(builder.icmp_signed("<", a, b), a, b)

        def most(a: ir.Value, b: ir.Value) -> ir.Value:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        bits = builder.bitcast(arguments[0], _INTS)
        size = builder.and_(bits, _same(0x7FFFFFFF))
        exponent = builder.lshr(size, _same(23))
        dropped = most(builder.sub(_same(126), exponent), _same(13))
        beyond = least(most(builder.sub(dropped, _same(31)), _same(0)), _same(31))
        digits = builder.or_(builder.and_(size, _same(0x7FFFFF)), _same(0x800000))
        below = builder.icmp_signed("<", exponent, _same(113))
        normal = builder.sub(size, _same(112 << 23))
        mantissa = builder.select(below, builder.lshr(digits, beyond), normal)
        dropped = least(dropped, _same(31))
        random = builder.lshr(arguments[1], builder.sub(_same(32), dropped))
        kept = least(builder.lshr(builder.add(mantissa, random), dropped), _same(0x7C00))
        number = builder.fcmp_ordered("ord", arguments[0], arguments[0])
        return _with_sign(builder, bits, builder.select(number, kept, _same(0x7E00)))

    return short_vector(vector, word_vector), generate


@intrinsic
def lane_sum(context, a):
    """The sum of the lanes, always in the same order: neighbours first, as a tree."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = [builder.extract_element(arguments[0], _I32(i)) for i in range(LANES)]
        while len(lanes) > 1:
            lanes = [builder.fadd(a, b) for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
        return lanes[0]

    return types.float32(vector), generate


@intrinsic
def atomic_add_int(context, address, value):
    """Add to an int64 that other threads add to as well; its value before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(builder, arguments[0], _I64)
        return builder.atomic_rmw("add", pointer, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_add_float(context, address, value):
    """Add to a float32 that other threads add to as well (a compare-and-swap loop on x86)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(builder, arguments[0], _F32)
        builder.atomic_rmw("fadd", pointer, arguments[1], "monotonic")
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def try_lock(context, address):
    """Set an int64 to 1; its value before: 0 means that the lock is now ours."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(builder, arguments[0], _I64)
        return builder.atomic_rmw("xchg", pointer, _I64(1), "acquire")

    return types.int64(types.int64), generate


@intrinsic
def peek_lock(context, address):
    """What a lock holds just now."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(builder, arguments[0], _I64)
        return builder.load_atomic(pointer, "monotonic", 8)

    return types.int64(types.int64), generate


@intrinsic
def unlock(context, address):
    """Give a lock back: what was written under it is seen by the next holder."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(builder, arguments[0], _I64)
        builder.store_atomic(_I64(0), pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64), generate


# The fields that every job has, and how threads share its work.

NEXT_UNIT = 0  # number of units taken so far
UNITS = 1  # number of units
ENTERED = 2  # number of threads that have entered

_HASH = 0x9E3779B1  # 2^32 / golden ratio: spreads neighbouring rows over the owners


@compiled
def item(array, place):
    """One int64 of an array."""
    return load_int(array + 8 * place)


@compiled
def field(job, number):
    """One field of a job."""
    return item(job, number)


@compiled
def take_unit(job):
    """The next unit of work, or one past the last."""
    return atomic_add_int(job + 8 * NEXT_UNIT, 1)


@compiled
def owner(row, slices):
    """Which of ``slices`` owns a row: a hash, so that hot neighbours are spread."""
    if slices == 1:
        return 0
    return (((row * _HASH) & 0xFFFFFFFF) * slices) >> 32


@compiled
def warm(address, size, step):
    """Prefetch ``size`` bytes (to be written as well: prefetching for writing is slower)."""
    for line in range(0, size, step):
        prefetch(address + line)


@compiled
def enter(job):
    """Number of the calling thread among those that have entered, from 0."""
    return atomic_add_int(job + 8 * ENTERED, 1)
