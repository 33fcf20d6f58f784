"""The small data set that several test files read."""

from dlrm_core.data.files.teacher import Law, Variant

ROWS = (1000, 3, 40000, 126, 127, 1)
SMALL = Law(Variant("custom", 5, ROWS, 1.45), 7)
