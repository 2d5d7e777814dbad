"""Detectron2's own zoo configurations through our task, and Detectron2 beside our package.

With the compiled Detectron2 only, which most users have; the tests elsewhere run without it.
"""

import json
import math
import subprocess
import sys
from importlib.util import find_spec

import pytest

from lambda_det.detection import DetectionTask, load_config, parser, run
from tests.detection.heads import zoo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("detectron2._C"), reason="Detectron2 is not compiled"),
]
RESULTS = {"mask": ["segm/AP"], "cascade": ["segm/AP"], "keypoint": ["keypoints/AP"]}
RESULTS["panoptic"] = ["segm/AP", "sem_seg/mIoU", "panoptic_seg/PQ"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What Detectron2 is and computes in a process that never imports this package."""
    file = tmp_path_factory.mktemp("alone") / "state.json"
    subprocess.run([sys.executable, zoo.__file__, file], check=True)
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", zoo.ZOO)
def test_it_trains_is_evaluated_and_computes_the_same(name, shapes, tmp_path, alone):
    args = parser().parse_args([*zoo.words(name), "OUTPUT_DIR", str(tmp_path)])
    run(args)
    lines = (tmp_path / "metrics.json").read_text().splitlines()
    last = {key: value for line in lines for key, value in json.loads(line).items()}
    assert last["iteration"] == 1 and math.isfinite(last["total_loss"])
    assert all(0 <= last[key] <= 100 for key in ("bbox/AP", *RESULTS.get(name, ())))
    model = DetectionTask(load_config(args)).build_model()
    model.load_state_dict(zoo.plain_model(name).state_dict())
    assert zoo.losses(model.train()) == pytest.approx(alone["losses"][name], rel=1e-3)


def test_detectron2_is_what_it_is_without_this_package(alone):
    """After the trainings above, and so many other tests; only our own names are added."""
    here = json.loads(json.dumps(zoo.state()))
    assert here["losses"] == alone["losses"] and here["defaults"] == alone["defaults"]
    for name, what in alone["parts"].items():
        found = here["parts"][name]
        if isinstance(what, dict):  # a registry
            found = {key: found[key] for key in what}
        assert found == what, name
