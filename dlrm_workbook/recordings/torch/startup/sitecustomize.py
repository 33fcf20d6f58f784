"""What Python runs at its start in a program that is measured without being edited.

This folder is put on the program's ``PYTHONPATH`` (:mod:`dlrm_workbook.recordings.command`).
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = str(_HERE.parents[3])


def _start() -> None:
    # our packages are found by this path here only: what the program imports stays its own
    sys.path.insert(0, _ROOT)
    try:
        import dlrm_core  # noqa: F401
        from dlrm_workbook.recordings.torch import inject
    finally:
        sys.path.remove(_ROOT)
    inject.install()


def _start_the_hidden_one() -> None:
    """Run the ``sitecustomize`` of the program's own installation, which ours stands before."""
    others = [place for place in sys.path if Path(place).resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_start()
_start_the_hidden_one()
