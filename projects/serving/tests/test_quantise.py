"""What quantise.py does to a graph; AP and time are printed, and in projects/serving/README.md."""

import numpy as np
import pytest

from tests.tool import load_tool

pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
onnx = pytest.importorskip("onnx", reason="pip install onnx")


@pytest.fixture(scope="module")
def tool():
    return load_tool("quantise", "projects/serving")


def test_halved_weights_compute_nearly_the_same(tool):
    evaluate = pytest.importorskip("onnx.reference").ReferenceEvaluator
    head = '<ir_version: 9, opset_import: ["": 18]> g (float[32, 32] x) => (float[32, 32] y)'
    model = onnx.parser.parse_model(head + " { y = MatMul(x, w) }")
    weights, x = np.random.default_rng(0).normal(size=(2, 32, 32)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(x[0], "few"))
    before = model.ByteSize()
    (found,) = evaluate(model).run(None, {"x": x})
    np.testing.assert_allclose(found, x @ weights, rtol=1e-4, atol=1e-4)
    tool.halve(model.graph)
    (found,) = evaluate(model).run(None, {"x": x})
    assert 0 < np.abs(found - x @ weights).max() < 0.02
    assert before - model.ByteSize() > 0.8 * weights.nbytes / 2
    kinds = {held.data_type for held in model.graph.initializer}
    assert kinds == {onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT}


@pytest.mark.parametrize(
    ("words", "kept"), [([], False), (["roi_heads"], True), (["Conv"], True), (["rpn"], False)]
)
def test_nodes_are_kept_by_operator_and_module(tool, words, kept):
    node = onnx.helper.make_node("Conv", ["a", "b"], ["c"])
    prop = node.metadata_props.add()
    prop.key, prop.value = "pkg.torch.onnx.name_scopes", "['', 'model.roi_heads', 'conv']"
    other = node.metadata_props.add()
    other.key, other.value = "pkg.torch.onnx.stack_trace", "rpn.py"
    assert tool.is_kept(node, words) == kept
