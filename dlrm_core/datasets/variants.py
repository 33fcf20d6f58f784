"""Shapes of NVIDIA's synthetic Criteo data sets, and smaller ones of the same form."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_core.errors import InputError

SMALL_TABLE = 100
"""Tables of at most so many rows keep them when a variant is scaled down."""


@dataclass(frozen=True)
class Variant:
    """Tables and dense features of a data set whose rows follow one power law.

    Attributes:
        name: as on the command line.
        dense_features: numerical columns.
        table_rows: cardinality of each categorical column.
        alpha: exponent of P(row i) ~ (i+1)^-alpha, row 0 hottest.
    """

    name: str
    dense_features: int
    table_rows: tuple[int, ...]
    alpha: float = 1.45

    def scaled(self, scale: float) -> Variant:
        """The same variant with ``scale`` times the rows in every table above 100 rows.

        Raises:
            InputError: the scale is not in (0, 1].
        """
        if not 0.0 < scale <= 1.0:
            raise InputError(f"--scale is {scale:g}, expected a number above 0 and at most 1")
        rows = tuple(
            r if r <= SMALL_TABLE else max(SMALL_TABLE, round(r * scale)) for r in self.table_rows
        )
        return Variant(self.name, self.dense_features, rows, self.alpha)


def _rows(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split())


# Cardinalities as NVIDIA published them (DeepLearningExamples, DLRM_and_DCNv2,
# generate_feature_spec): Criteo Terabyte with frequency thresholds of 15, 3 and none.
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(
            "criteo_t15_synthetic",
            13,
            _rows(
                "7912889 33823 17139 7339 20046 4 7105 1382 63 5554114 582469 245828 11 2209 "
                "10667 104 4 968 15 8165896 2675940 7156453 302516 12022 97 35"
            ),
        ),
        Variant(
            "criteo_t3_synthetic",
            13,
            _rows(
                "45833188 36747 1572176 345139 11 2209 11268 128 4 975 15 48937457 17246 11316796 "
                "40094537 452104 12607 105 36 7414 20244 4 7115 1442 63 29275261"
            ),
        ),
        Variant(
            "criteo_t0_synthetic",
            13,
            _rows(
                "227605432 39061 3067956 405283 11 2209 11939 155 4 977 15 292775614 17296 "
                "40790948 187188510 590152 12974 109 37 7425 20266 4 7123 1544 64 130229467"
            ),
        ),
        # DeepSpark's official_config.json: MLPerf's Terabyte of 2020 with its own limit
        Variant(
            "deepspark_synthetic",
            13,
            _rows(
                "932209 18814 13624 6862 18488 3 6242 1229 49 654428 96850 69004 10 2134 7345 60 "
                "4 918 14 984280 320932 838408 76380 8906 74 33"
            ),
        ),
    )
}


def find_variant(name: str) -> Variant:
    """The variant of that name.

    Raises:
        InputError: there is none.
    """
    if name not in VARIANTS:
        raise InputError(f"--variant is {name!r}, expected one of {', '.join(VARIANTS)}")
    return VARIANTS[name]
