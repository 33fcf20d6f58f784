"""``dlrm train``: the core's training, beside it what counts its energy and its iterations."""

from __future__ import annotations

import argparse

from dlrm_core import commands
from dlrm_workbook.evidence.counters import IterationCounters
from dlrm_workbook.evidence.power import power_meter


def train(arguments: argparse.Namespace) -> int:
    """``dlrm train``: a JSON line per interval, and a last one with the result."""
    return commands.train(arguments, power_meter, IterationCounters)
