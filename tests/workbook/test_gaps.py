"""Time of the training thread outside of operators: which part it belongs to."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_workbook.recordings.foreign import PartNames
from dlrm_workbook.recordings.nesting import nest, self_times
from dlrm_workbook.recordings.torch.gaps import GAP, fill_gaps
from dlrm_workbook.recordings.torch.parts import foreign_parts

NODE = "autograd::engine::evaluate_function: "
BACKWARD = "torch/autograd/graph.py(979): _engine_run_backward"


def host_of(*spans: tuple[int, int, str, str]) -> pd.DataFrame:
    """Nested spans of one thread from (start, end, kind, name), as a trace's reader makes them."""
    table = pd.DataFrame(spans, columns=["start", "end", "kind", "name"])
    soft = table["kind"].eq("python").to_numpy()
    start, end, parent, order = nest(table["start"].to_numpy(), table["end"].to_numpy(), soft)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    table["start"], table["end"] = start, end
    table["parent"] = np.where(parent >= 0, place[parent], -1)
    table = table.iloc[order].reset_index(drop=True)
    table["duration"] = table["end"] - table["start"]
    return table.assign(line="1/1", shapes="", profile=0, python_id=-1)


def parts_of(host: pd.DataFrame) -> dict[str, int]:
    """Time of each component and phase that the spans of one iteration take, their own only."""
    iterations = [(0, 1000)]
    component, phase, _ = foreign_parts(host, iterations, PartNames(), pd.DataFrame())
    filled, component, phase = fill_gaps(host, component, phase, iterations)
    own = self_times(*(filled[name].to_numpy() for name in ("start", "end", "parent")))
    assert own.min() >= 0 and own[: len(host)].sum() + own[len(host) :].sum() == 1000
    frame = pd.DataFrame(
        {"part": [f"{c} {p}".strip() for c, p in zip(component, phase, strict=True)]}
    )
    return frame.assign(own=own).groupby("part")["own"].sum().to_dict()


SCRIPT = (0, 1000, "python", "/home/me/train.py(7): <module>")


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        # 50 between the lookups; nothing tells whose the 100 between lookup and loss are
        (
            [(100, 200, "embedding_bag"), (250, 300, "embedding_bag"), (400, 500, "mse_loss")],
            {"embedding forward": 200, "loss forward": 100, "other": 700},
        ),
        # random numbers are data before the model runs only
        (
            [
                *((100, 200, "randint"), (210, 220, "sum"), (230, 300, "rand")),
                *((400, 500, "embedding_bag"), (600, 700, "rand")),
            ],
            {"data forward": 200, "embedding forward": 100, "other": 700},
        ),
        # 75 of 200 between the first two lookups are another operator's, 5 of the next 100
        (
            [
                *((100, 200, "embedding"), (230, 305, "layer_norm"), (400, 500, "embedding")),
                *((505, 510, "empty"), (600, 700, "embedding")),
            ],
            {"embedding forward": 400, "other": 600},
        ),
    ],
)
def test_time_between_two_calls_of_one_part_is_that_parts(operators, expected) -> None:
    spans = [(start, end, "operator", f"aten::{name}") for start, end, name in operators]
    assert parts_of(host_of(SCRIPT, *spans)) == expected


def test_calls_of_two_iterations_have_nothing_between_them() -> None:
    host = host_of(
        SCRIPT,
        (100, 200, "operator", "aten::embedding_bag"),
        (250, 300, "operator", "aten::embedding_bag"),
    )
    component, phase, _ = foreign_parts(host, [(0, 220), (220, 1000)], PartNames(), pd.DataFrame())
    filled, *_ = fill_gaps(host, component, phase, [(0, 220), (220, 1000)])
    assert not filled["name"].eq(GAP).any()


def ddp(reducer: str) -> dict[str, int]:
    return parts_of(
        host_of(
            SCRIPT,
            (100, 150, "operator", "aten::mse_loss"),
            (200, 900, "python", BACKWARD),
            (250, 300, "operator", NODE + "MseLossBackward0"),
            (300, 400, "operator", NODE + "EmbeddingBagBackward0"),
            (320, 330, "operator", reducer),
            (700, 710, "operator", "aten::as_strided"),
        )
    )


def test_the_end_of_a_backward_pass_is_the_exchange_only_where_gradients_are_exchanged() -> None:
    parts = ddp("torch::distributed::reducer::mul_out")
    # from its last node at 400 on, with the copies back, and its own multiplication
    assert parts["communication backward"] == 900 - 400 + 10
    assert parts["loss backward"] == 50 + 50
    parts = ddp("aten::mul")
    assert not any("communication" in part for part in parts)
    assert parts["loss backward"] == 50 + 50
    assert sum(time for part, time in parts.items() if part.startswith("other")) > 500


def test_a_class_of_modules_names_its_forward_method() -> None:
    names = PartNames()
    for name, part in {
        "/site-packages/torchrec/models/dlrm.py(102): SparseArch.forward": "embedding",
        "/home/me/model.py(3): OverArch.forward": "top_mlp",
        "/torch/nn/parallel/distributed.py(1839): DistributedDataParallel._post_forward": (
            "communication"
        ),
    }.items():
        named = names.of("python", name)
        assert named is not None and named.component == part
    for name in (
        "/site-packages/torch/nn/parallel/distributed.py(1): DistributedDataParallel.forward",
        "/home/me/model.py(3): forward",
        "/home/me/model.py(3): Model.forward",
    ):
        assert names.of("python", name) is None


def test_a_sampled_frame_within_a_range_says_nothing_against_it() -> None:
    parts = parts_of(
        host_of(
            SCRIPT,
            (100, 300, "annotation", "## all2all_data:kjt wait ##"),
            (110, 290, "python", "/torchrec/models/dlrm.py(102): SparseArch.forward"),
            (400, 500, "operator", "aten::embedding_bag"),
        )
    )
    assert parts["communication forward"] == 200


@given(
    st.lists(
        st.tuples(
            st.integers(0, 900),
            st.integers(1, 100),
            st.sampled_from(
                [
                    ("operator", "aten::embedding_bag"),
                    ("operator", "aten::mse_loss"),
                    ("operator", NODE + "EmbeddingBagBackward0"),
                    ("operator", "torch::distributed::reducer::mul_out"),
                    ("operator", "aten::rand"),
                    ("annotation", "mine"),
                    ("python", BACKWARD),
                    ("python", "/home/me/train.py(9): run"),
                ]
            ),
        ),
        max_size=12,
    )
)
def test_no_time_is_lost_or_counted_twice(drawn) -> None:
    spans = [(start, start + length, *what) for start, length, what in drawn]
    assert sum(parts_of(host_of(SCRIPT, *spans)).values()) == 1000
