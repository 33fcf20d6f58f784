"""Joining calls of an operator that differ only in sizes which change all the time.

With random pooling every bag, and so every embedding lookup, has another length. A
context for each would cut one hot operator into hundreds of cold ones.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

ANY = "*"
"""Stands for a size that differs from call to call."""

_NUMBER = re.compile(r"\d+")


def join_unsteady(names: pd.Series, shapes: pd.Series, iterations: int) -> pd.Series:
    """Shapes in which sizes that change between iterations are written ``*``.

    A shape seen at least once an iteration is steady and stays as it is. The others of
    an operator, where they have the same number of inputs and dimensions, are joined.

    Args:
        names: (n,) operator of each span.
        shapes: (n,) its input shapes as text, "" where unknown.
        iterations: how many were recorded; below 2 nothing is joined.

    Returns:
        (n,) shapes to tell contexts apart by.
    """
    if iterations < 2:
        return shapes
    pairs = pd.DataFrame({"name": names.to_numpy(), "shapes": shapes.to_numpy()})
    counts = pairs[pairs["shapes"] != ""].value_counts(["name", "shapes"])
    rare = counts[counts < iterations].index.to_frame(index=False)
    if rare.empty:
        return shapes
    rare["form"] = [_NUMBER.sub("#", text) for text in rare["shapes"]]
    joined: dict[tuple[str, str], str] = {}
    for (name, form), group in rare.groupby(["name", "form"], sort=False):
        if len(group) < 2:
            continue
        texts = group["shapes"].tolist()
        sizes = np.array([_NUMBER.findall(text) for text in texts])
        same = (sizes == sizes[0]).all(axis=0)
        filling = iter(np.where(same, sizes[0], ANY).tolist())
        text = "".join(next(filling) if piece == "#" else piece for piece in str(form))
        joined.update(((str(name), old), text) for old in texts)
    if not joined:
        return shapes
    keys = zip(pairs["name"], pairs["shapes"], strict=True)
    return pd.Series([joined.get(key, key[1]) for key in keys], index=shapes.index)
