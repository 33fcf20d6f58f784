"""``dlrm database``: what an HPCToolkit database holds."""

from __future__ import annotations

import argparse
import json

from dlrm_core.profiling.database import read_database


def database(arguments: argparse.Namespace) -> int:
    """Print the facts of a database as JSON, or a summary for people."""
    found = read_database(arguments.path)
    if arguments.json:
        print(json.dumps(found.facts(), indent=1, sort_keys=True))
    else:
        print(found.describe())
    return 0
