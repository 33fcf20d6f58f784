"""What numba does not offer and a gather needs: prefetch, 16-float vectors, atomics; and jobs.

Each instruction is one of LLVM (or a few) on raw addresses: an address is an ``int64``, a
vector sixteen float32 side by side (one AVX-512 register, two AVX2 or four NEON registers).
They work inside ``numba.njit`` code only, and nothing here checks an address:
:mod:`dlrm_kernels.embeddings.fused_cpu` does, before any is used.

A kernel is one C function ``void kernel(int64 job)``: ``job`` is the address of a block of
int64 fields, so that any thread pool can run it. Every thread that enters takes units of
work by an atomic counter until none is left.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# the type checker sees untyped decorators: numba has no stubs
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dlrm_kernels.native import compile_kernel, require_numba

require_numba()

# ruff: noqa: E402 (only now: what is missing was said in one sentence)
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, models, register_model

LANES = 16
"""float32 numbers in a vector."""

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
SHORTS = ir.VectorType(I16, LANES)
"""LLVM's types."""

_LONGS, _HALVES = ir.VectorType(I64, LANES), ir.VectorType(ir.HalfType(), LANES)

compiled = njit(error_model="numpy")
"""Decorates what kernels call. Division by zero gives inf, as in C: nothing here can raise."""

inlined = njit(error_model="numpy", forceinline=True)
"""The same for what LLVM is to write into each caller, however long it is."""


class Lanes(types.Type):
    """Numba's view of sixteen numbers in a register, or in each of several that make one value."""

    def __init__(self, register: ir.VectorType, registers: int = 1) -> None:
        self.register, self.registers = register, registers
        self.bytes = LANES * (2 if register == SHORTS else 4)
        super().__init__(name=f"{registers} x {register}")


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    """Kept as LLVM's vectors, so that the optimiser puts them in registers."""

    def __init__(self, manager: Any, kind: Lanes) -> None:
        several = ir.ArrayType(kind.register, kind.registers)
        super().__init__(manager, kind, several if kind.registers > 1 else kind.register)


vector, word_vector, short_vector = Lanes(FLOATS), Lanes(INTS), Lanes(SHORTS)
"""Sixteen float32; words of 32 bits; bits of bf16 or fp16 numbers."""


def instruction(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate ``emit(builder, *values)``, which writes an instruction in LLVM's language.

    Where a value has several registers it is written for each of them: values of one register
    are the same for all, and the address that is loaded from or stored to moves on.

    Args:
        signature: numba's types, of one register.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)
        def typing(context: Any, *kinds: Any) -> Any:
            given, result = list(signature.args), signature.return_type
            lanes = [kind for kind in (result, *kinds) if isinstance(kind, Lanes)]
            registers = max([kind.registers for kind in lanes], default=1)
            for place, kind in enumerate(kinds):
                if isinstance(kind, Lanes):
                    given[place] = kind
            if isinstance(result, Lanes):
                result = Lanes(result.register, registers)
            step = lanes[0].bytes if lanes else 0

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                results = []
                for number in range(registers):
                    each = zip(given, values, strict=True)
                    one = (_in_register(builder, *pair, number, step) for pair in each)
                    results.append(emit(builder, *one))
                if results[0] is None:
                    return context.get_dummy_value()
                return results[0] if registers == 1 else _in_one(builder, results)

            return result(*given), generate

        return intrinsic(typing)

    return decorate


def _in_register(
    builder: ir.IRBuilder, kind: Any, value: ir.Value, number: int, step: int
) -> ir.Value:
    """What stands for a value where an instruction is written for one of several registers."""
    if isinstance(kind, Lanes) and kind.registers > 1:
        return builder.extract_value(value, number)
    return builder.add(value, I64(number * step)) if kind == types.int64 and number else value


def _in_one(builder: ir.IRBuilder, results: list[ir.Value]) -> ir.Value:
    """Registers as one value."""
    whole = ir.Constant(ir.ArrayType(results[0].type, len(results)), ir.Undefined)
    for number, result in enumerate(results):
        whole = builder.insert_value(whole, result, number)
    return whole


def pointer_to(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """An address as LLVM's pointer to a value of that type."""
    return builder.inttoptr(address, kind.as_pointer())


def same(number: int) -> ir.Constant:
    """The same word of 32 bits in all lanes."""
    return ir.Constant(INTS, [number] * LANES)


def spread(builder: ir.IRBuilder, number: ir.Value, kind: ir.VectorType) -> ir.Value:
    """The same number in all lanes of a vector."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, I32(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), same(0))


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(get_or_insert_function(builder.module, kind, f"llvm.{name}"), arguments)


# Memory.


@instruction(types.void(types.int64))
def prefetch(builder, address):
    """Begin to load the cache line at an address."""
    # 0: to read; locality 3: into every cache level; 1: data, not instructions
    place = pointer_to(builder, address, I8)
    call(builder, "prefetch.p0", ir.VoidType(), place, I32(0), I32(3), I32(1))


def loading(kind: Any, llvm: ir.Type, alignment: int) -> Any:
    """Instruction (address): a value, which need not be aligned to more than ``alignment``."""

    @instruction(kind(types.int64))
    def load(builder, address):
        return builder.load(pointer_to(builder, address, llvm), align=alignment)

    return load


def storing(kind: Any, llvm: ir.Type, alignment: int) -> Any:
    """Instruction (address, value): the value to memory."""

    @instruction(types.void(types.int64, kind))
    def store(builder, address, value):
        builder.store(value, pointer_to(builder, address, llvm), align=alignment)

    return store


_MEMORY = {
    types.int64: (I64, 8),
    types.float32: (F32, 4),
    vector: (FLOATS, 4),
    word_vector: (INTS, 4),
    short_vector: (SHORTS, 2),
}
"""LLVM's type of a value in memory, and the bytes to which it is aligned at least."""

_SUFFIXES = {FLOATS: "v16f32", SHORTS: "v16i16"}
"""LLVM's names of vectors in those of its functions."""

load_int, load_float, load_vector, load_words, _ = (
    loading(kind, *_MEMORY[kind]) for kind in _MEMORY
)
store_int, store_float, store_vector, store_words, store_shorts = (
    storing(kind, *_MEMORY[kind]) for kind in _MEMORY
)


def loads(kind: Lanes, registers: int) -> Any:
    """Instruction (address): so many registers from memory."""
    return loading(Lanes(kind.register, registers), *_MEMORY[kind])


def _first_lanes(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Lanes 0 to count - 1, as a mask."""
    counts = spread(builder, builder.trunc(count, I32), INTS)
    return builder.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), counts)


def _loading_first(kind: Lanes) -> Any:
    llvm, alignment = _MEMORY[kind]

    @instruction(kind(types.int64, types.int64))
    def load_first(builder, address, count):
        place, mask = pointer_to(builder, address, llvm), _first_lanes(builder, count)
        nothing = ir.Constant(llvm, [0] * LANES)
        arguments = (place, I32(alignment), mask, nothing)
        return call(builder, f"masked.load.{_SUFFIXES[llvm]}.p0", llvm, *arguments)

    return load_first


def _storing_first(kind: Lanes) -> Any:
    llvm, alignment = _MEMORY[kind]

    @instruction(types.void(types.int64, kind, types.int64))
    def store_first(builder, address, value, count):
        place, mask = pointer_to(builder, address, llvm), _first_lanes(builder, count)
        arguments = (value, place, I32(alignment), mask)
        call(builder, f"masked.store.{_SUFFIXES[llvm]}.p0", ir.VoidType(), *arguments)

    return store_first


load_first, load_first_shorts = map(_loading_first, (vector, short_vector))
"""(address, count): the first ``count`` lanes, zeros behind them; nothing else is read."""

store_first, store_first_shorts = map(_storing_first, (vector, short_vector))
"""(address, value, count): the first ``count`` lanes; nothing else is written."""

# Vectors of float32, and of words of 32 bits.


def zeros_in(registers: int) -> Any:
    """Instruction (): zeros in so many registers."""

    @instruction(Lanes(FLOATS, registers)())
    def zeros(builder):
        return ir.Constant(FLOATS, [0.0] * LANES)

    return zeros


zeros = zeros_in(1)


@instruction(word_vector())
def lane_numbers(builder):
    """The words 0 to 15."""
    return ir.Constant(INTS, list(range(LANES)))


@instruction(vector(types.float32))
def splat(builder, value):
    return spread(builder, value, FLOATS)


@instruction(word_vector(types.int64))
def splat_word(builder, value):
    return spread(builder, builder.trunc(value, I32), INTS)


def _by_lanes(kind: Lanes, operation: str) -> Any:
    @instruction(kind(kind, kind))
    def operate(builder, a, b):
        return getattr(builder, operation)(a, b)

    return operate


add, subtract, multiply, divide = (
    _by_lanes(vector, operation) for operation in ("fadd", "fsub", "fmul", "fdiv")
)
"""a + b, a - b, a b and a / b, lane by lane."""

add_words, xor_words, multiply_low = (
    _by_lanes(word_vector, operation) for operation in ("add", "xor", "mul")
)
"""a + b and a b modulo 2^32 and the bits that differ, lane by lane."""


@instruction(word_vector(word_vector, word_vector))
def multiply_high(builder, a, b):
    """The high 32 bits of a b without signs, lane by lane."""
    product = builder.mul(builder.zext(a, _LONGS), builder.zext(b, _LONGS))
    return builder.trunc(builder.lshr(product, ir.Constant(_LONGS, [32] * LANES)), INTS)


@instruction(vector(vector))
def square_root(builder, a):
    return call(builder, "sqrt.v16f32", FLOATS, a)


@instruction(types.float32(vector))
def lane_sum(builder, a):
    """The sum of the lanes, always in the same order: neighbours first, as a tree."""
    return _tree_sum(builder, [builder.extract_element(a, I32(i)) for i in range(LANES)])


def _tree_sum(builder: ir.IRBuilder, terms: list[ir.Value]) -> ir.Value:
    while len(terms) > 1:
        terms = [builder.fadd(a, b) for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


@intrinsic
def register_sum(context, whole):
    """The sum of a value's registers, lane by lane: neighbours first, as a tree."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if whole.registers == 1:
            return values[0]
        terms = [builder.extract_value(values[0], i) for i in range(whole.registers)]
        return _tree_sum(builder, terms)

    return vector(whole), generate


# Numbers of 2 bytes.


@instruction(vector(short_vector))
def from_bf16(builder, shorts):
    """Sixteen bf16 numbers as float32."""
    return builder.bitcast(builder.shl(builder.zext(shorts, INTS), same(16)), FLOATS)


@instruction(vector(short_vector))
def from_half(builder, shorts):
    """Sixteen fp16 numbers as float32."""
    return builder.fpext(builder.bitcast(shorts, _HALVES), FLOATS)


def to_nearest_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Sixteen float32 to the nearest bf16 (ties to even), by integer arithmetic."""
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, same(16)), same(1))
    near = builder.add(builder.add(bits, same(0x7FFF)), odd)
    # a NaN must not be carried over into infinity or zero
    is_nan = builder.fcmp_unordered("uno", value, value)
    near = builder.select(is_nan, builder.or_(bits, same(1 << 22)), near)
    return builder.trunc(builder.lshr(near, same(16)), SHORTS)


nearest_bf16 = instruction(short_vector(vector))(to_nearest_bf16)


@instruction(short_vector(vector, word_vector))
def round_to_bf16(builder, value, drawn):
    """float32 as bf16, up or down by words of 32 bits: the law of dlrm_kernels.rounding."""
    moved = builder.add(builder.bitcast(value, INTS), builder.lshr(drawn, same(16)))
    kept = builder.lshr(moved, same(16))
    number = builder.fcmp_ordered("ord", value, value)
    return builder.trunc(builder.select(number, kept, same(0x7FC0)), SHORTS)


@instruction(short_vector(vector, word_vector))
def round_to_half(builder, value, drawn):
    """float32 as fp16, up or down by words of 32 bits: the law of dlrm_kernels.rounding."""

    def least(a: ir.Value, b: ir.Value) -> ir.Value:
        return builder.select(builder.icmp_signed("<", a, b), a, b)

    def most(a: ir.Value, b: ir.Value) -> ir.Value:
        return builder.select(builder.icmp_signed(">", a, b), a, b)

    bits = builder.bitcast(value, INTS)
    size = builder.and_(bits, same(0x7FFFFFFF))
    exponent = builder.lshr(size, same(23))
    dropped = most(builder.sub(same(126), exponent), same(13))
    beyond = least(most(builder.sub(dropped, same(31)), same(0)), same(31))
    digits = builder.or_(builder.and_(size, same(0x7FFFFF)), same(0x800000))
    below = builder.icmp_signed("<", exponent, same(113))
    normal = builder.sub(size, same(112 << 23))
    mantissa = builder.select(below, builder.lshr(digits, beyond), normal)
    dropped = least(dropped, same(31))
    random = builder.lshr(drawn, builder.sub(same(32), dropped))
    kept = least(builder.lshr(builder.add(mantissa, random), dropped), same(0x7C00))
    number = builder.fcmp_ordered("ord", value, value)
    kept = builder.select(number, kept, same(0x7E00))
    sign = builder.and_(builder.lshr(bits, same(16)), same(0x8000))
    return builder.trunc(builder.or_(kept, sign), SHORTS)


# What threads share.


@instruction(types.int64(types.int64, types.int64))
def atomic_add_int(builder, address, value):
    """Add to an int64 that other threads add to as well; its value before."""
    return builder.atomic_rmw("add", pointer_to(builder, address, I64), value, "monotonic")


# The fields that every job has, and how threads share its work.

NEXT_UNIT = 0  # number of units taken so far
UNITS = 1  # number of units
ENTERED = 2  # number of threads that have entered


class Job:
    """The block of fields that a kernel reads, and the arrays whose addresses it holds."""

    def __init__(self, fields: int) -> None:
        self.fields = np.zeros(fields, np.int64)
        self._kept: list[np.ndarray] = []

    def array(self, values: np.ndarray) -> np.ndarray:
        self._kept.append(values)
        return values

    def integers(self, values: Any) -> int:
        """Address of whole numbers laid out as int64."""
        return self.array(np.array(values, np.int64)).ctypes.data

    def set_rows(self, places: int, strides: int, tensors: Sequence[torch.Tensor]) -> None:
        """Fill in two fields: addresses of tensors (B, n), and bytes from row to row of each."""
        self.fields[places] = self.integers([tensor.data_ptr() for tensor in tensors])
        steps = [tensor.element_size() * tensor.stride(0) for tensor in tensors]
        self.fields[strides] = self.integers(steps)

    def run(self, kernel: Callable[[int], None], units: int, threads: int) -> None:
        """Do all units on at most so many of torch's threads."""
        self.fields[[NEXT_UNIT, ENTERED]] = 0  # a job may be run more than once
        self.fields[UNITS] = units
        compile_kernel(kernel)[0](self.fields.ctypes.data, max(1, min(threads, units)))


_HASH = 0x9E3779B1  # 2^32 / golden ratio: spreads neighbouring rows over the owners


@compiled
def item(array, place):
    """One int64 of an array."""
    return load_int(array + 8 * place)


field = item
"""One field of a job."""


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
