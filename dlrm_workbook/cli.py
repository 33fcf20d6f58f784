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
from dlrm_workbook import cli_options as options

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


SUBCOMMANDS = (
    Subcommand(
        "run",
        "execute notebooks into dated run folders with HTML pages",
        options.run,
        "dlrm_workbook.runner.run:command_run",
    ),
    Subcommand("train", "train without a notebook", options.train, "dlrm_core.commands:train"),
    Subcommand(
        "evaluate",
        "AUC, log loss and accuracy of a checkpoint on test data",
        options.evaluate,
        "dlrm_core.commands:evaluate",
    ),
    Subcommand(
        "infer",
        "latency of predictions, by batch size",
        options.infer,
        "dlrm_core.commands:infer",
    ),
    Subcommand(
        "protocols",
        "throughput and latency by NVIDIA's, facebook's and DeepSpark's protocols",
        options.protocols,
        "dlrm_workbook.studies.protocols.measure:protocols",
    ),
    Subcommand(
        "record",
        "record a profile with torch.profiler, without a notebook",
        options.record,
        "dlrm_core.commands:record",
    ),
    Subcommand(
        "database",
        "facts of an HPCToolkit database",
        options.database,
        "dlrm_workbook.recordings.hpctoolkit.views:database",
    ),
    Subcommand(
        "bench",
        "interleaved step times: plain, tuned, and a facebookresearch/dlrm checkout",
        options.bench,
        "dlrm_workbook.studies.bench.measure:bench",
    ),
    Subcommand(
        "gpu-check",
        "on a GPU node: the GPU's results against the CPU's, then a profile",
        options.gpu_check,
        "dlrm_workbook.studies.gpu_check.command:gpu_check",
    ),
    Subcommand(
        "capacity",
        "memory that a run would need, item by item, and where it fits; nothing is run",
        options.capacity,
        "dlrm_workbook.studies.capacity:command_capacity",
    ),
    Subcommand(
        "stability",
        "the same training with N seeds: spread of AUC or loss, power, memory",
        options.stability,
        "dlrm_workbook.studies.stability.measure:command_stability",
    ),
    Subcommand(
        "data",
        "data sets: generate, preprocess, inspect",
        options.data,
        "dlrm_core.data.files.command:data",
    ),
    Subcommand(
        "parameters",
        "every parameter, its default and its meaning, as Markdown",
        options.no_arguments,
        "dlrm_core.commands:parameters",
    ),
    Subcommand(
        "doctor",
        "what this machine has, and what each missing part costs",
        options.print_json,
        "dlrm_workbook.doctor:doctor",
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
