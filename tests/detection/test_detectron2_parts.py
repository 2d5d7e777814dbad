"""Detectron2 beside our package."""

import json
import subprocess
import sys

import pytest

from tests.detection import detectron2_parts


@pytest.mark.slow
def test_detectron2_is_what_it_is_without_this_package(tmp_path):
    """After so many other tests; only our own names are added."""
    file = tmp_path / "state.json"
    subprocess.run([sys.executable, detectron2_parts.__file__, file], check=True)
    alone, here = json.loads(file.read_text()), json.loads(json.dumps(detectron2_parts.state()))
    assert here["defaults"] == alone["defaults"]
    for name, what in alone["parts"].items():
        found = here["parts"][name]
        if isinstance(what, dict):  # a registry
            found = {key: found[key] for key in what}
        assert found == what, name
