"""The drawing of a model says its shapes, and nothing of a file gets into it as markup."""

from xml.etree import ElementTree

import pytest

from dlrm_core.config import load_parameters
from dlrm_workbook.analysis.training import boxes
from dlrm_workbook.analysis.work import operator_work
from dlrm_workbook.show.drawing import WIDTH, model_drawing


@pytest.mark.parametrize("preset", ["seed", "nvidia_t0", "mlperf_dcn", "wukong", "deepspark"])
def test_boxes_hold_the_models_weights_and_nearly_all_its_arithmetic(preset):
    parameters = load_parameters(preset)
    found, work = boxes(parameters), operator_work(parameters)
    model = parameters.model
    dense = sum(model.dense_weights.values())
    assert found["weights"].sum() == sum(model.table_rows) * model.embedding_dim + dense
    # without ReLU, loss and the dense update
    assert 0.97 < found["flops"].sum() / (work["flops"] * work["count"]).sum() <= 1
    drawing = model_drawing(found, "<script>alert('&')</script>")
    texts = ["".join(text.itertext()) for text in ElementTree.fromstring(drawing.svg).iter()]
    assert "<script" not in drawing.svg and "<script>alert('&')</script>" in texts
    for widths in (model.bottom_widths, model.top_widths):
        assert any(f"{widths[0]:,} → {widths[1]:,}" in text for text in texts)
    image = ElementTree.fromstring(drawing.svg)
    height = float(image.attrib["height"])
    for box in image.iter("{http://www.w3.org/2000/svg}rect"):
        at = {name: float(box.attrib.get(name, 0)) for name in ("x", "y", "width", "height")}
        assert at["x"] + at["width"] <= WIDTH and 0 <= at["y"] <= height - at["height"]
