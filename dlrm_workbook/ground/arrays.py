"""Kinds of numpy arrays, as annotations name them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Names = npt.NDArray[np.object_]
"""Texts, as pandas keeps them."""
