"""Arguments of ``dlrm data``; nothing heavy is imported here."""

from __future__ import annotations

import argparse

from dlrm_core.data.files.generate import VARIANTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``generate``, ``preprocess`` and ``inspect``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _generate(actions.add_parser("generate", help="write a synthetic data set (NVIDIA's layout)"))
    _preprocess(actions.add_parser("preprocess", help="convert Criteo's text (Kaggle, Terabyte)"))
    _inspect(actions.add_parser("inspect", help="look at every value of a data set"))


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variant", required=True, choices=[*VARIANTS, "custom"])
    parser.add_argument("--output", required=True, metavar="DIR", help="the data set's folder")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="share of the rows of tables above 100 rows, and of the default samples (default: 1)",
    )
    parser.add_argument(
        "--samples",
        metavar="TRAIN[/TEST]",
        help="samples to write (default: 33554432 x scale, as NVIDIA's script; TEST: an eighth)",
    )
    parser.add_argument("--seed", type=int, default=12345, help="default: %(default)s")
    parser.add_argument(
        "--labels",
        choices=("random", "teacher"),
        default="random",
        help="a fair coin, as NVIDIA's, or a planted model whose best AUC is noted in the metadata",
    )
    parser.add_argument("--teacher-seed", type=int, default=1, metavar="N")
    parser.add_argument(
        "--teacher-strength",
        type=float,
        default=1.38,
        metavar="S",
        help="standard deviation of the teacher's logit (default: %(default)s, AUC near 0.80)",
    )
    parser.add_argument(
        "--teacher-rows",
        type=int,
        default=64,
        metavar="N",
        help="hot rows of each table that have an effect (default: %(default)s)",
    )
    parser.add_argument("--table-rows", metavar="R,R,...", help="with custom: rows of each table")
    parser.add_argument(
        "--dense-features", type=int, default=13, metavar="D", help="with custom (default: 13)"
    )
    parser.add_argument(
        "--alpha", type=float, default=1.45, help="with custom: the power law (default: 1.45)"
    )
    _threads(parser)


def _preprocess(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", required=True, choices=("kaggle", "terabyte"))
    parser.add_argument(
        "--input", required=True, nargs="+", metavar="FILE", help="text in order, or .gz"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the data set's folder")
    parser.add_argument(
        "--frequency-threshold",
        type=int,
        default=1,
        metavar="N",
        help="categories that came less often become row 0 (default: 1, none; NVIDIA's: 15, 3, 0)",
    )
    parser.add_argument("--max-rows", type=int, metavar="N", help="stop after so many rows")
    parser.add_argument(
        "--test-fraction",
        type=float,
        metavar="F",
        help="share of the rows, from the end, for the test split (default: the last day, "
        "1/7 with kaggle, 1/24 with terabyte)",
    )
    parser.add_argument(
        "--memory-mb",
        type=int,
        default=512,
        metavar="MB",
        help="of hash tables; more disk passes with less, the same result (default: 512)",
    )
    _threads(parser)


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a data set's folder, a .bin, or text")
    parser.add_argument(
        "--format",
        choices=("split_binary", "deepspark_dist", "terabyte"),
        help="needed where the files do not tell (deepspark_dist)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="of a generated data set: make every sample again and compare",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=int, metavar="N", help="default: the cores; they change no byte"
    )
