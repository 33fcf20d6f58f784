"""The ``dlrm`` command: a table of subcommands, each loaded only when it is called.

``dlrm train`` must start fast and run on a machine without papermill or plotly,
so nothing but the standard library is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dlrm_core.errors import InputError

Arguments = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Subcommand:
    """One row of the table.

    ``handler`` is ``module:function``; the function takes the parsed arguments and
    returns an exit code (None is 0). It raises InputError for what the user must mend.
    """

    name: str
    help: str
    add_arguments: Arguments
    handler: str


def _parameters(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument(
        "-f", "--file", required=required, metavar="FILE", help="parameters file (YAML)"
    )
    parser.add_argument(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override one parameter, such as training.batch_size=4096 (repeatable)",
    )


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "notebook", metavar="NOTEBOOK|all", help="a notebook's name (train, profile, ...), or all"
    )
    _parameters(parser)
    parser.add_argument(
        "--output-root", metavar="DIR", help="where dated run folders go (default: outputs/)"
    )
    parser.add_argument(
        "--resume",
        metavar="FOLDER",
        help="go on with an unfinished sweep or comparison: what finished is not run again",
    )
    parser.add_argument(
        "--cell-timeout",
        type=float,
        default=7200.0,
        metavar="S",
        help="end a cell that takes longer than S seconds (default: %(default)g; 0: never)",
    )


def _train(parser: argparse.ArgumentParser) -> None:
    _parameters(parser)
    parser.add_argument(
        "--output", metavar="DIR", help="folder for metrics.jsonl (default: none is written)"
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help="go on from a checkpoint, a folder of checkpoints, or 'latest' (of the run's own "
        "folder); the same as -p training.resume=DIR",
    )
    parser.add_argument(
        "--spans",
        action="store_true",
        help="add to the last line when each part began and ended (ns since the epoch)",
    )


def _evaluate(parser: argparse.ArgumentParser) -> None:
    _parameters(parser)
    _checkpoint(parser)


def _infer(parser: argparse.ArgumentParser) -> None:
    _parameters(parser)
    _checkpoint(parser)
    parser.add_argument(
        "--batch-sizes",
        metavar="N,...",
        help="measure each of these batch sizes (default: training.batch_size)",
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="of each batch size (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="end a batch size's steps after S seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--protocol",
        choices=("steady", "nvidia"),
        default="steady",
        help="'steady': warm-up is found in the latencies; 'nvidia': NVIDIA's benchmark, which "
        "leaves out the first 10 of 1000 steps (default: %(default)s)",
    )


def _protocols(parser: argparse.ArgumentParser) -> None:
    _parameters(parser)
    parser.add_argument(
        "--iterations", type=int, default=500, help="of training, as NVIDIA's (default: 500)"
    )
    parser.add_argument(
        "--batch-sizes",
        default="1,64,2048",
        metavar="N,...",
        help="of inference; '' measures none (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=1000, help="of inference (default: 1000)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="of inference at most, a batch size (default: %(default)g)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the record there")


def _checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="a checkpoint or a folder of them, its newest (default: initial weights)",
    )


def _record(parser: argparse.ArgumentParser) -> None:
    _parameters(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the recording")


def _bench(parser: argparse.ArgumentParser) -> None:
    _parameters(parser, required=False)
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
        "end, and the contention study; groups: sgd, rowwise, adagrad, contention",
    )
    parser.add_argument(
        "--torchrec", action="store_true", help="TorchRec's DLRM as well, where it is installed"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
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
        help="also run the tuned parameters in these precisions (bf16, fp16)",
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
    parser.add_argument(
        "--roofline",
        action="store_true",
        help="the share of this machine's measured limits that the tuned parameters reach",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the benchmark in --json: what it holds is not measured again",
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


def _capacity(parser: argparse.ArgumentParser) -> None:
    _parameters(parser)
    _json(parser)


def _stability(parser: argparse.ArgumentParser) -> None:
    _parameters(parser)
    parser.add_argument("--seeds", type=int, default=10, help="runs (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="folder of the runs and of stability.json; runs that finished there are kept",
    )


def _data(parser: argparse.ArgumentParser) -> None:
    from dlrm_core.datasets.command_line import add_arguments

    add_arguments(parser)


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """For a subcommand that takes none."""


def _database(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="an HPCToolkit database (hpcprof's -o)")
    _json(parser)


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


SUBCOMMANDS = (
    Subcommand(
        "run",
        "execute notebooks into dated run folders with HTML pages",
        _run,
        "dlrm_core.workbook:command_run",
    ),
    Subcommand("train", "train without a notebook", _train, "dlrm_core.commands:train"),
    Subcommand(
        "evaluate",
        "AUC, log loss and accuracy of a checkpoint on test data",
        _evaluate,
        "dlrm_core.evaluation_commands:evaluate",
    ),
    Subcommand(
        "infer",
        "latency of predictions, by batch size",
        _infer,
        "dlrm_core.evaluation_commands:infer",
    ),
    Subcommand(
        "protocols",
        "throughput and latency by NVIDIA's, facebook's and DeepSpark's protocols",
        _protocols,
        "dlrm_core.protocols_command:protocols",
    ),
    Subcommand(
        "record",
        "record a profile with torch.profiler, without a notebook",
        _record,
        "dlrm_core.commands:record",
    ),
    Subcommand(
        "database",
        "facts of an HPCToolkit database",
        _database,
        "dlrm_core.profiling.command:database",
    ),
    Subcommand(
        "bench",
        "interleaved step times: plain, tuned, and a facebookresearch/dlrm checkout",
        _bench,
        "dlrm_core.bench:bench",
    ),
    Subcommand(
        "gpu-check",
        "on a GPU node: the GPU's results against the CPU's, then a profile",
        _gpu_check,
        "dlrm_core.gpu_check:gpu_check",
    ),
    Subcommand(
        "capacity",
        "memory that a run would need, item by item, and where it fits; nothing is run",
        _capacity,
        "dlrm_core.capacity_command:command_capacity",
    ),
    Subcommand(
        "stability",
        "the same training with N seeds: spread of AUC or loss, power, memory",
        _stability,
        "dlrm_core.stability_command:command_stability",
    ),
    Subcommand(
        "data",
        "data sets: generate, preprocess, inspect",
        _data,
        "dlrm_core.datasets.command:data",
    ),
    Subcommand(
        "parameters",
        "every parameter, its default and its meaning, as Markdown",
        _no_arguments,
        "dlrm_core.commands:parameters",
    ),
    Subcommand(
        "doctor",
        "what this machine has, and what each missing part costs",
        _json,
        "dlrm_core.doctor:doctor",
    ),
)


def parser() -> argparse.ArgumentParser:
    """The command line, built from the table."""
    main_parser = argparse.ArgumentParser(
        prog="dlrm",
        description="Runs a Deep Learning Recommendation Model, profiles it, and says with "
        "evidence what holds it back.",
    )
    subparsers = main_parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for row in SUBCOMMANDS:
        sub = subparsers.add_parser(row.name, help=row.help, description=row.help)
        row.add_arguments(sub)
        sub.set_defaults(handler=row.handler)
    return main_parser


@contextlib.contextmanager
def _without_grammars() -> Iterator[None]:
    """Import what the block imports without the grammars of internationalised addresses.

    nbformat imports jsonschema, which builds 39 parsers for formats of strings that no
    notebook has, if a package is there that Jupyter brings along: a second of every run.
    """
    name = "rfc3987_syntax"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        0 when it did what was asked; 1 when it failed; 2 when what the user gave
        cannot be used (one sentence on standard error); 130 after Ctrl-C.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(given)
    arguments.argv = ["dlrm", *given]
    module, _, function = arguments.handler.partition(":")
    try:
        with _without_grammars():
            handler = getattr(importlib.import_module(module), function)
        return int(handler(arguments) or 0)
    except InputError as error:
        print(f"dlrm {arguments.subcommand}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dlrm {arguments.subcommand}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # the reader of our output (head, less) has gone: not an error of ours.
        # Python would flush again at exit and complain, so give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
