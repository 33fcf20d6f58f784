"""The ``dlrm`` command: a table of subcommands, each loaded only when it is called.

``dlrm train`` must start fast and run on a machine without papermill or plotly,
so nothing but the standard library is imported here. Studies bring their own subcommands
(:mod:`dlrm_workbook.ground.studies`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence

from dlrm_core.base import cli as core
from dlrm_core.base.cli import Subcommand
from dlrm_workbook.ground import studies
from dlrm_workbook.ground.options import like_option, parameters_file, read_like

SUBCOMMANDS: list[Subcommand] = []
"""Filled from the top down by :func:`_subcommand`, and at the end by the studies."""

Options = Callable[[argparse.ArgumentParser], None]


def _subcommand(handler: str, name: str = "", help: str = "") -> Callable[[Options], Options]:
    """Add a subcommand, whose options the function below adds.

    Args:
        handler: ``module:function`` in this package.
        name: the subcommand's; left out, the function's.
        help: what it does; left out, the function's docstring.
    """

    def add(options: Options) -> Options:
        words = " ".join((options.__doc__ or "").split())
        about = help or words[:1].lower() + words[1:].rstrip(".")
        called = name or options.__name__.strip("_")
        SUBCOMMANDS.append(Subcommand(called, about, options, f"dlrm_workbook.{handler}"))
        return options

    return add


def _print_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _recording(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="RECORDING",
        help="a run folder, a recording, an HPCToolkit database, a Chrome trace of "
        "torch.profiler, a folder or archive of the traces of several ranks, or latest: the newest "
        "profile run",
    )


@_subcommand("runner.command:command_run")
def _run(parser: argparse.ArgumentParser) -> None:
    """Execute notebooks into dated run folders with HTML pages."""
    parser.add_argument(
        "notebook",
        metavar="NOTEBOOK|all",
        help="train, profile, bottlenecks, compare, sweep, scaling, benchmark, experiment or "
        "explore; all: the first three (with -- COMMAND ... after everything else: profile and "
        "bottlenecks of that program)",
    )
    parameters_file(parser, required=False)
    parser.add_argument(
        "--output-root", metavar="DIR", help="where dated run folders go (default: outputs/)"
    )
    parser.add_argument(
        "--resume",
        metavar="FOLDER",
        help="continue an unfinished sweep, comparison or scaling measurement (its folder, or "
        "latest): what finished is not run again; give the same -f and -p",
    )
    parser.add_argument(
        "--cell-timeout",
        type=float,
        default=7200.0,
        metavar="S",
        help="end a cell that takes longer than S seconds (default: %(default)g; 0: never)",
    )


@_subcommand("ground.runs:command_new")
def _new(parser: argparse.ArgumentParser) -> None:
    """Copy the notebooks and parameters files into a folder of yours, to edit and run there."""
    parser.add_argument("folder", metavar="DIR", help="a new folder, or an empty one")


@_subcommand("evidence.training:command_train", help=core.TRAIN.help)
def _train(parser: argparse.ArgumentParser) -> None:
    parameters_file(parser)
    core.train_options(parser)
    parser.add_argument(
        "--mllog", metavar="FILE", help="write MLPerf's log of the run, ':::MLLOG' lines"
    )


@_subcommand("evidence.training:command_evaluate", help=core.EVALUATE.help)
def _evaluate(parser: argparse.ArgumentParser) -> None:
    parameters_file(parser)
    core.checkpoint_option(parser)


@_subcommand("evidence.latency:command_infer", "infer", core.INFER.help)
def infer_options(parser: argparse.ArgumentParser) -> None:
    parameters_file(parser)
    core.checkpoint_option(parser)
    parser.add_argument(
        "--batch-sizes",
        metavar="N,...",
        help="measure each of these batch sizes (default: training.batch_size)",
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="steps at each batch size (default: %(default)s)"
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


@_subcommand("recordings.torch.recorder:command_record")
def _record(parser: argparse.ArgumentParser) -> None:
    """Record a profile with torch.profiler, without a notebook."""
    parameters_file(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the recording")
    # for the process that reads the recording while this one waits
    parser.add_argument("--together", nargs=2, default=(), help=argparse.SUPPRESS)


@_subcommand("recordings.hpctoolkit.views:database")
def _database(parser: argparse.ArgumentParser) -> None:
    """Print the facts of an HPCToolkit database."""
    parser.add_argument("path", metavar="PATH", help="an HPCToolkit database (hpcprof's -o)")
    _print_json(parser)


@_subcommand("analysis.inspect:command_inspect")
def _inspect(parser: argparse.ArgumentParser) -> None:
    """Print what a recording of any kind contains."""
    _recording(parser)
    _print_json(parser)


@_subcommand("report:command_explain")
def _explain(parser: argparse.ArgumentParser) -> None:
    """Print what holds a recording of any kind back, as Markdown; no run folder is written."""
    _recording(parser)


@_subcommand("analysis.export:command_export")
def _export(parser: argparse.ArgumentParser) -> None:
    """Convert a recording of any kind for ui.perfetto.dev or www.speedscope.app."""
    parser.add_argument(
        "path",
        metavar="RECORDING",
        help="anything that dlrm inspect opens; latest: the newest profile run",
    )
    parser.add_argument(
        "--to",
        choices=("perfetto", "speedscope"),
        required=True,
        help="perfetto: the timeline, for ui.perfetto.dev; speedscope: the call tree, for "
        "www.speedscope.app",
    )
    parser.add_argument("output", metavar="FILE", help="a file that ends in .json or .json.gz")


@_subcommand("trials.capacity:command_capacity")
def _capacity(parser: argparse.ArgumentParser) -> None:
    """List the memory that a run would need, and where it fits; nothing is run."""
    parameters_file(parser)
    _print_json(parser)


@_subcommand("datasets.command:data")
def _data(parser: argparse.ArgumentParser) -> None:
    """Generate, preprocess, inspect or convert data sets; list published ones."""
    from dlrm_workbook.datasets.command import add_arguments

    add_arguments(parser)


@_subcommand("help:command_help")
def _help(parser: argparse.ArgumentParser) -> None:
    """Describe columns, parameters, findings, commands, flags, presets or GPUs, as Markdown."""
    parser.add_argument(
        "topic", nargs="?", default="", metavar="TOPIC", help="left out: the topics are listed"
    )
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="NAME",
        help="only what is called so: a table, a column, a parameter, a rule, a command",
    )


@_subcommand("analysis.changes:parameters")
def _parameters(parser: argparse.ArgumentParser) -> None:
    """Print every parameter, its default and its meaning, as Markdown; with --like, a parameters
    file."""
    like_option(parser)


@_subcommand("doctor:doctor")
def _doctor(parser: argparse.ArgumentParser) -> None:
    """Print what this machine has, and what cannot be measured or run without each missing part."""
    _print_json(parser)


SUBCOMMANDS += studies.subcommands()


DESCRIPTION = (
    "Runs a Deep Learning Recommendation Model, profiles it, and says with evidence what limits "
    "its speed."
)


@contextlib.contextmanager
def _opened(arguments: argparse.Namespace) -> Iterator[None]:
    """Read ``--like``, then import what the block imports without grammars that nothing reads."""
    with _without_grammars():
        yield
    read_like(arguments)


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


def with_command(given: Sequence[str]) -> list[str]:
    """The words of ``dlrm run``, with what follows ``--`` as the parameter that it stands for."""
    if given[:1] != ["run"] or "--" not in given:
        return list(given)
    place = list(given).index("--")
    command = json.dumps(given[place + 1 :], ensure_ascii=False)
    return [*given[:place], "-p", f"profiling.command={command}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit code, as :func:`dlrm_core.base.cli.main` gives it."""
    given = with_command(sys.argv[1:] if argv is None else argv)
    return core.main(given, SUBCOMMANDS, DESCRIPTION, _opened)
