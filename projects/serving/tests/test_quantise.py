"""What quantise.py does to a graph; AP and time are printed, and in projects/serving/README.md."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.tool import load_tool

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
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


@pytest.mark.parametrize("kept", [[], ["first"]])
def test_eight_bits_but_for_the_nodes_that_are_kept(tool, kept, tmp_path):
    """A convolution and a product of one layer each, calibrated on what they are given."""
    head = '<ir_version: 9, opset_import: ["": 18]> g (float[1, 4, 8, 8] x) => (float[1, 8, 36] y)'
    model = onnx.parser.parse_model(
        head + " { a = Conv(x, w) b = Relu(a) s = Constant<value_ints = [1, 8, 36]>()"
        " c = Reshape(b, s) y = MatMul(c, v) }"
    )
    model.graph.node[0].name, model.graph.node[-1].name = "first", "second"
    rng = np.random.default_rng(0)
    for name, shape in (("w", (8, 4, 3, 3)), ("v", (36, 36))):
        weights = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    source, target = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(model, source)
    images = rng.uniform(size=(4, 1, 4, 8, 8)).astype(np.float32)
    paths = SimpleNamespace(source=source, target=target)
    tool.quantise(paths, iter([{"x": image} for image in images]), kept)
    held = onnx.load(target).graph.initializer
    in_bits = [w for w in held if w.data_type == onnx.TensorProto.INT8 and len(w.dims) > 1]
    runs = [onnxruntime.InferenceSession(path).run for path in (source, target)]
    exact, rounded = (run(None, {"x": images[0]})[0] for run in runs)
    assert len(in_bits) == 2 - len(kept)
    assert 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()
