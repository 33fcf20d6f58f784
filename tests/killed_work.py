"""What tests/workbook/test_datasets_kills.py and tests/campaigns/kills.py kill; importing it warms
everything up."""

from pathlib import Path

from dlrm_core.data.files.teacher import Law, SampleMaker, TeacherConfig, Variant
from dlrm_workbook.datasets import criteo as preprocessing
from dlrm_workbook.datasets import generate as generating
from dlrm_workbook.datasets import resumable
from dlrm_workbook.datasets.criteo import Request, preprocess
from dlrm_workbook.datasets.generate import generate
from dlrm_workbook.datasets.loops import parser

LAW = Law(Variant("custom", 3, (5000, 40, 7), 1.45), 11, TeacherConfig())
SAMPLES = {"train": 40_000, "test": 5_000}
SYNC_BYTES = 60_000


def make_set(target: Path) -> None:
    """Generate, with a note after every few blocks."""
    resumable.SYNC_BYTES = SYNC_BYTES
    generating.BLOCK = 512
    # seconds of Monte Carlo at the end would hide the short part where files are written
    generating.best_figures = lambda *_: {"bayes_auc": 0.8}
    generate(LAW, SAMPLES, target, threads=2)


def convert_text(target: Path) -> None:
    """Preprocess, with a note after every few pieces, and hash tables that overflow."""
    resumable.SYNC_BYTES = SYNC_BYTES // 3
    preprocessing.PIECE_BYTES = 8_000
    text = target.parent / "text.txt"
    request = Request("kaggle", [text], 2, threads=2, memory=1 << 10)
    preprocess(request, target)


SampleMaker(LAW, "train").block(0, 1)
parser()
