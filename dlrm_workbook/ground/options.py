"""Options that say the parameters of a run."""

from __future__ import annotations

import argparse
import sys

from dlrm_core.base import cli


def parameters_file(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """``-f`` or ``--like``, and ``-p``: the parameters of a run."""
    source = parser.add_mutually_exclusive_group(required=required)
    cli.listed_options(source, cli.__file__, "file")
    like_option(source)
    cli.listed_options(parser, cli.__file__, "parameter")


def like_option(parser: argparse._ActionsContainer) -> None:
    """``--like``: the parameters that a command of another DLRM program stands for."""
    parser.add_argument(
        "--like",
        metavar="COMMAND",
        help="instead of a file: a command of facebookresearch/dlrm, such as "
        "'dlrm_s_pytorch.py --mini-batch-size=2048 ...', of NVIDIA's dlrm.py or of DeepSpark's "
        "train.py, whose flags are translated",
    )


def read_like(arguments: argparse.Namespace) -> None:
    """Put the parameters of ``--like`` in the file's place, and print what had no effect.

    So are those of ``-f``, where that is a model configuration of DeepSpark's.
    """
    if getattr(arguments, "like", None) is None:
        if str(getattr(arguments, "file", None)).endswith(".json"):
            from dlrm_workbook.ground.vendors import model_configuration

            arguments.file = model_configuration(arguments.file) or arguments.file
        return
    from dlrm_workbook.ground.like import translated
    from dlrm_workbook.ground.vendors import SCRIPTS

    arguments.file, notes = translated(arguments.like, SCRIPTS)
    for note in notes:
        print(f"dlrm {arguments.subcommand}: --like: {note}", file=sys.stderr)
