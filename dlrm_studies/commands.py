"""The subcommands of ``dlrm`` that studies bring: their options, each loaded when it is called.

Nothing but the standard library is imported here: ``dlrm --help`` lists them.
"""

from __future__ import annotations

import argparse
import functools

from dlrm_core.base.cli import Subcommand, listed_options
from dlrm_workbook.ground.options import parameters_file


def _options(command: str, parser: argparse.ArgumentParser) -> None:
    """The options of a command, as ``options.csv`` lists them beside those of parameters."""
    if command != "gpu-check":
        parameters_file(parser, required=command != "bench")
    listed_options(parser, __file__, command)


SUBCOMMANDS = tuple(
    Subcommand(name, help, functools.partial(_options, name), f"dlrm_studies.{handler}")
    for name, help, handler in (
        (
            "protocols",
            "measure throughput and latency by NVIDIA's, facebook's and DeepSpark's protocols",
            "protocols.measure:protocols",
        ),
        (
            "bench",
            "time steps in turns: plain, tuned, and a facebookresearch/dlrm checkout",
            "bench.command:bench",
        ),
        (
            "gpu-check",
            "on a GPU node, compare the GPU's results with the CPU's, then profile",
            "gpu_check.command:gpu_check",
        ),
        (
            "stability",
            "repeat a training with N seeds: spread of AUC or loss, power, memory",
            "stability.measure:command_stability",
        ),
    )
)
