"""The subcommands of ``dlrm`` that studies bring: their options, each loaded when it is called.

Nothing but the standard library is imported here: ``dlrm --help`` lists them.
"""

from __future__ import annotations

import argparse

from dlrm_core.base.cli import Subcommand
from dlrm_workbook.ground.options import parameters_file


def _protocols(parser: argparse.ArgumentParser) -> None:
    parameters_file(parser)
    parser.add_argument(
        "--iterations",
        type=int,
        default=500,
        help="training iterations (default: 500, as NVIDIA's)",
    )
    parser.add_argument(
        "--batch-sizes",
        default="1,64,2048",
        metavar="N,...",
        help="batch sizes of inference; '' measures none (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=1000, help="inference steps (default: 1000)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="end inference at a batch size after S seconds (default: %(default)g)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the record there")


def _bench(parser: argparse.ArgumentParser) -> None:
    parameters_file(parser, required=False)
    parser.add_argument(
        "--reference",
        metavar="FILE",
        help="parameters to compare with (default: those of -f without options for speed; "
        "without -f, seed.yaml)",
    )
    parser.add_argument(
        "--peer", metavar="DIR", help="a facebookresearch/dlrm checkout, run as its own process"
    )
    parser.add_argument(
        "--embeddings",
        metavar="GROUP,...",
        nargs="?",
        const="all",
        help="instead of steps: forward, backward and update of the embeddings by every back "
        "end; groups: sgd, rowwise, narrow, reuse, adagrad",
    )
    parser.add_argument(
        "--torchrec", action="store_true", help="TorchRec's DLRM as well, where it is installed"
    )
    parser.add_argument(
        "--no-plain",
        action="store_true",
        help="leave the plain contestant out: a quarter less time; losses are then compared "
        "with the first tuned one's",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--iterations", type=int, default=8, help="counted iterations a run (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        metavar="N,...",
        default="1",
        help="CPU threads; several are measured one after the other (default: %(default)s)",
    )
    parser.add_argument(
        "--cores",
        type=int,
        metavar="N",
        help="confine every contestant to N cores (default: all; a prefetching loader uses a "
        "second one)",
    )
    parser.add_argument(
        "--precision",
        metavar="P,...",
        default="",
        help="also run the tuned parameters in these precisions (bf16, fp16, on a GPU tf32)",
    )
    parser.add_argument(
        "--shape",
        metavar="NAME,...",
        help="shapes to compare: 8x1M-100, 8x1M-10, 26x100k-10, 8x1M-10-b16384, all",
    )
    parser.add_argument(
        "--growth", metavar="WHAT,...", help="how figures grow with: batch, tables, dim, pooling"
    )
    parser.add_argument(
        "--ablation",
        action="store_true",
        help="what each option of the tuned parameters brings: switched off alone, and added "
        "one by one",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the benchmark in --json: what that file contains is not measured again",
    )


def _gpu_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", required=True, metavar="FILE", help="write the results there")
    parser.add_argument(
        "--peer", metavar="DIR", help="a facebookresearch/dlrm checkout, run with --use-gpu"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=450.0,
        metavar="SECONDS",
        help="stages that it leaves no time for are skipped (default: %(default)s)",
    )


def _stability(parser: argparse.ArgumentParser) -> None:
    parameters_file(parser)
    parser.add_argument("--seeds", type=int, default=10, help="runs (default: %(default)s)")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="seed of the first run (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="folder of the runs and of stability.json; runs that finished there are kept",
    )


SUBCOMMANDS = (
    Subcommand(
        "protocols",
        "measure throughput and latency by NVIDIA's, facebook's and DeepSpark's protocols",
        _protocols,
        "dlrm_studies.protocols.measure:protocols",
    ),
    Subcommand(
        "bench",
        "time steps in turns: plain, tuned, and a facebookresearch/dlrm checkout",
        _bench,
        "dlrm_studies.bench.command:bench",
    ),
    Subcommand(
        "gpu-check",
        "on a GPU node, compare the GPU's results with the CPU's, then profile",
        _gpu_check,
        "dlrm_studies.gpu_check.command:gpu_check",
    ),
    Subcommand(
        "stability",
        "repeat a training with N seeds: spread of AUC or loss, power, memory",
        _stability,
        "dlrm_studies.stability.measure:command_stability",
    ),
)
