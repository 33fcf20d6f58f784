"""The ``dlrm`` command: a table of subcommands, each loaded only when it is called.

``dlrm train`` must start fast and run on a machine without papermill or plotly,
so nothing but the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dlrm_core import cli as core
from dlrm_core.cli import Subcommand
from dlrm_workbook import cli_options as options

SUBCOMMANDS = (
    Subcommand(
        "run",
        "execute notebooks into dated run folders with HTML pages",
        options.run,
        "dlrm_workbook.runner.command:command_run",
    ),
    replace(core.TRAIN, handler="dlrm_workbook.evidence.training:train"),
    core.EVALUATE,
    core.INFER,
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
        "dlrm_workbook.recordings.torch.recorder:command_record",
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
    core.DATA,
    core.PARAMETERS,
    Subcommand(
        "doctor",
        "what this machine has, and what each missing part costs",
        options.print_json,
        "dlrm_workbook.doctor:doctor",
    ),
)


DESCRIPTION = (
    "Runs a Deep Learning Recommendation Model, profiles it, and says with evidence what holds "
    "it back."
)


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
    """Run one subcommand; its exit code, as :func:`dlrm_core.cli.main` gives it."""
    return core.main(argv, SUBCOMMANDS, DESCRIPTION, _without_grammars)
