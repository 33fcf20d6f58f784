"""Compile the GPU's kernels for a Hopper GPU, as the back ends would ask for them, without one.

Triton's compiler and NVIDIA's assembler need no GPU; the interpreter that the other tests
use checks neither types nor how memory is read. Run in a process of its own: whether
kernels are compiled or interpreted is decided when triton is imported.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton-")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dlrm_kernels import interaction_kernels
from dlrm_kernels.embeddings import kernels_gpu
from dlrm_kernels.embeddings.fused_gpu import tiles_for

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "reference": "*fp32",
    "states": "*fp32",
    "rates": "*fp32",
    "next_sums": "*fp32",
    "keys": "*i32",
    "next_keys": "*i32",
    "sources": "*i32",
    "pooled": "*bf16",
    "gradients": "*bf16",
    "x": "*bf16",
    "z": "*bf16",
    "gradient": "*bf16",
    "x_gradient": "*bf16",
    "pooled_gradient": "*bf16",
}
"""Types of what kernels are given in bf16 training; every other pointer is to int64."""
NUMBERS = ("tables", "bags", "blocks", "count", "limit")
WORDS = ("places", "rows", "indices", "offsets", "extents", "fault", "order", "state_places")


def compiled(function, warps, pointers=None, **constants):
    """PTX of a kernel and the bytes of local memory (spilled registers) a thread needs."""
    signature, attributes = {}, {}
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = (pointers or {}).get(name) or POINTERS.get(name)
        signature[name] = pointer or ("*i64" if name in WORDS else "i32")
        if name not in ("count", "limit", "tables", "bags", "blocks"):
            # the launcher finds tensors and strides to be multiples of 16 and compiles for that
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    kernel = triton.compile(source, target=HOPPER, options={"num_warps": warps})
    return kernel.asm["ptx"], _spilled(kernel.asm["cubin"])


def _spilled(cubin):
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", said)[1]) + int(re.search(r"LOCAL:(\d+)", said)[1])


def check(name, found, *, reads):
    """The kernel spills next to nothing and reads memory as wide as expected."""
    ptx, spilled = found
    wide = set(re.findall(r"ld\.global[.\w]*", ptx))
    print(name, f"{spilled} bytes spilled", *sorted(wide))
    assert spilled <= 16, f"{name} spills {spilled} bytes a thread"
    for read in reads:
        assert any(read in instruction for instruction in wide), f"{name} reads by {wide}"


def check_settle(dim, bag_size, kind, level):
    tiles = tiles_for(dim, bag_size)
    found = compiled(
        kernels_gpu.settle_runs,
        tiles.run_warps,
        {"gradients": "*bf16" if level == 1 else "*fp32"},
        EPSILON=1e-10,
        ROW_BITS=20,
        DIM=dim,
        WIDTH=dim,
        VEC=4,
        TILE=tiles.run,
        KIND=kind,
        LOOKUPS=level == 1,
    )
    check(f"settle_runs {dim}, kind {kind}, level {level}", found, reads=["v4.b32"])


def main():
    for dim, bag_size in ((64, 50.0), (128, 1.0)):
        tiles = tiles_for(dim, bag_size)
        found = compiled(
            kernels_gpu.pool,
            1,
            BAD_INDEX=1,
            BAD_OFFSET=2,
            DIM=dim,
            WIDTH=dim,
            VEC=4,
            BAGS=tiles.bags,
            UNROLL=tiles.unroll,
        )
        check(f"pool {dim}", found, reads=["v4.b32"])  # 16 bytes of a row a thread
        found = compiled(
            kernels_gpu.list_lookups, tiles.listed // 32, ROW_BITS=20, BAGS=tiles.listed
        )
        check(f"list_lookups {tiles.listed}", found, reads=[])
    check_settle(64, 50.0, kernels_gpu.SGD, 1)
    check_settle(128, 1.0, kernels_gpu.ROWWISE, 2)
    check_settle(128, 1.0, kernels_gpu.ADAGRAD, 1)
    # keys of 64 bits, rows that are not aligned
    check(
        "settle_runs, int64 keys, width 30",
        compiled(
            kernels_gpu.settle_runs,
            tiles_for(32, 1.0).run_warps,
            {"keys": "*i64", "next_keys": "*i64", "gradients": "*fp32"},
            EPSILON=1e-10,
            ROW_BITS=31,
            TILE=tiles_for(32, 1.0).run,
            KIND=kernels_gpu.SGD,
            LOOKUPS=True,
            DIM=30,
            WIDTH=32,
            VEC=1,
        ),
        reads=[],
    )
    names = ("x", "z", "pooled", "gradient", "x_gradient", "pooled_gradient")
    for kind, precision in (("*bf16", "ieee"), ("*fp32", "tf32x3")):
        for function in (interaction_kernels.dot_forward, interaction_kernels.dot_backward):
            forward = function is interaction_kernels.dot_forward
            found = compiled(
                function,
                2,
                dict.fromkeys(names, kind),
                **({"USED": 479, "ROOM": 480} if forward else {}),
                FEATURES=27,
                ROWS=32,
                DIM=128,
                WIDTH=128,
                ITSELF=False,
                PRECISION=precision,
            )
            check(f"{function.__name__} {kind} {precision}", found, reads=["v4.b32"])


if __name__ == "__main__":
    main()
