"""The drawing of a model says its shapes, and nothing of a file gets into it as markup."""

from xml.etree import ElementTree

import pytest

from dlrm_core.config import load_parameters
from dlrm_workbook.analysis.training import boxes
from dlrm_workbook.analysis.work import operator_work
from dlrm_workbook.ground.machine import REPOSITORY
from dlrm_workbook.show.drawing import WIDTH, model_drawing


@pytest.mark.parametrize("preset", ["seed", "nvidia_t0", "mlperf_dcn", "wukong", "deepspark"])
def test_boxes_hold_the_models_weights_and_nearly_all_its_arithmetic(preset):
    parameters = load_parameters(preset)
    found, work, model = boxes(parameters), operator_work(parameters), parameters.model
    dense = sum(model.dense_weights.values())
    assert found["weights"].sum() == sum(model.table_rows) * model.embedding_dim + dense
    # without ReLU, loss and the dense update
    assert 0.97 < found["flops"].sum() / (work["flops"] * work["count"]).sum() <= 1
    image = ElementTree.fromstring(svg := model_drawing(found, "<script>alert('&')</script>").svg)
    texts = ["".join(text.itertext()) for text in image.iter()]
    assert "<script" not in svg and "<script>alert('&')</script>" in texts
    drawn = model_drawing(found, parameters.title).svg
    assert preset != "seed" or drawn == (REPOSITORY / "docs/images/model.svg").read_text("utf-8")
    for widths in (model.bottom_widths, model.top_widths):
        assert any(f"{widths[0]:,} → {widths[1]:,}" in text for text in texts)
    for box in image.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, w, h = (float(box.attrib.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert x + w <= WIDTH and 0 <= y <= float(image.attrib["height"]) - h
