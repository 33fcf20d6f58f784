"""The small data set that several test files read."""

import random
from pathlib import Path

from dlrm_core.data.files.teacher import Law, Variant

ROWS = (1000, 3, 40000, 126, 127, 1)
SMALL = Law(Variant("custom", 5, ROWS, 1.45), 7)


def write_text(folder: Path, rows: int = 1500) -> None:
    """``text.txt`` as Criteo writes it, with categories that repeat."""
    draw = random.Random(3)
    lines = []
    for _ in range(rows):
        numbers = [str(draw.randrange(100)) if draw.random() < 0.9 else "" for _ in range(13)]
        hashes = [f"{draw.randrange(1000) * 4_000_037:08x}" for _ in range(26)]
        lines.append("\t".join([str(draw.randrange(2)), *numbers, *hashes]))
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
