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
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


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
    narrow = builder.trunc(count, _I32)
    one = builder.insert_element(ir.Constant(_INTS, ir.Undefined), narrow, _I32(0))
    same = ir.Constant(_INTS, [0] * LANES)
    counts = builder.shuffle_vector(one, ir.Constant(_INTS, ir.Undefined), same)
    return builder.icmp_signed("<", ir.Constant(_INTS, list(range(LANES))), counts)


@intrinsic
def load_first(context, address, count):
    """The first ``count`` of sixteen float32, zeros behind them; nothing else is read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(builder, arguments[0], _VECTOR)
        mask = _first_lanes(builder, arguments[1])
        kinds = [pointer.type, _I32, mask.type, _VECTOR]
        kind = ir.FunctionType(_VECTOR, kinds)
        name = "llvm.masked.load.v16f32.p0"
        function = get_or_insert_function(builder.module, kind, name)
        nothing = ir.Constant(_VECTOR, [0.0] * LANES)
        return builder.call(function, [pointer, _I32(4), mask, nothing])

    return vector(types.int64, types.int64), generate


@intrinsic
def store_first(context, address, value, count):
    """The first ``count`` lanes to an address; nothing else is written."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(builder, arguments[0], _VECTOR)
        mask = _first_lanes(builder, arguments[2])
        kind = ir.FunctionType(ir.VoidType(), [_VECTOR, pointer.type, _I32, mask.type])
        name = "llvm.masked.store.v16f32.p0"
        function = get_or_insert_function(builder.module, kind, name)
        builder.call(function, [arguments[1], pointer, _I32(4), mask])
        return context.get_dummy_value()

    return types.void(types.int64, vector, types.int64), generate


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
def enter(job):
    """Number of the calling thread among those that have entered, from 0."""
    return atomic_add_int(job + 8 * ENTERED, 1)
