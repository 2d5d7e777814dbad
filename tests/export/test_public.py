"""Published weights in detectors: by Detectron2's own checkpointer, and as exported files."""

import hashlib

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler
from safetensors.torch import save_file
from torch import nn

import lambda_det
from lambda_det.errors import WeightsError
from lambda_det.export.backbone import extract_backbone, read_source
from lambda_det.weights.addresses import PublicWeights, register_public_weights
from lambda_det.weights.backbone_file import read_backbone, save_backbone
from lambda_det.weights.public import OWN, fetch
from tests.weights.public_networks import make

URL = "timm://mobilenetv2_100.ra_in1k"


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """Those that Detectron2 has, and ours."""
    others = {k: v for k, v in PathManager._path_handlers.items() if type(v) is not PublicWeights}
    monkeypatch.setattr(PathManager, "_path_handlers", others)
    register_public_weights()


def test_an_address_of_another_project_keeps_its_handler():
    class Theirs(PathHandler):
        def _get_supported_prefixes(self):
            return ["hf://"]

    theirs = Theirs()
    PathManager._path_handlers = {}
    PathManager.register_handler(theirs)
    for _ in range(2):
        register_public_weights()
    handlers = PathManager._path_handlers
    assert handlers["hf://"] is theirs and type(handlers["timm://"]) is PublicWeights


@pytest.fixture(scope="module")
def network():
    return make("timm", "mobilenetv2_100")


@pytest.fixture
def placed(network, tmp_path, monkeypatch):
    """The file of ``URL`` where a download would be; returns the cache."""
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    place = fetch(URL).place
    place.parent.mkdir(parents=True)
    save_file(network.state_dict(), place)
    return tmp_path / "cache" / "lambda_det"


@pytest.mark.slow
def test_the_conversion_for_detectron2_is_kept(placed):
    """tests/weights have its features, and that Detectron2's own checkpointer loads such a file."""
    PathManager.get_local_path(URL)
    (converted,) = placed.glob(f"*_{lambda_det.__version__}.pth")
    meta = read_backbone(converted)["meta"]
    assert (meta["source"], meta["license"]) == (URL, "apache-2.0")
    time = converted.stat().st_mtime_ns
    PathManager.get_local_path(URL)
    assert converted.stat().st_mtime_ns == time
    converted.write_bytes(b"cut short")
    read_backbone(PathManager.get_local_path(URL))


def test_plain_weights_need_a_classifier_and_a_name(network, tmp_path):
    file, state = tmp_path / "plain.pth", network.state_dict()
    torch.save(state, file)
    with pytest.raises(WeightsError, match=r"plain\.pth .*--model"):
        read_source(str(file))
    recipe = read_source(str(file), "mobilenet_v2")["recipe"]
    assert (recipe["model"], recipe["source"]) == ("mobilenet_v2", "MobileNet-v2 of timm")
    torch.save({n: t for n, t in state.items() if "classifier" not in n}, file)
    with pytest.raises(WeightsError, match=r"plain\.pth .*no classifier"):
        read_source(str(file), "mobilenet_v2")


# Of the files, as they are in this repository
SUMS = {
    "mobilenet_v2_openimages": "d443a77c8012075ecfd4bdda7080eb6dcdfe6cf1c819734df13f937330c24d9c",
    "lambda_resnet26_slim": "af778b6d9b722019246520c46d2fe44651348731512410324592e3f5527d7178",
}


@pytest.mark.parametrize("url", [f"lambda://{name}" for name in OWN])
def test_weights_of_this_package_need_no_connection(url, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", None)
    content, name = read_backbone(fetch(url).place), fetch(url).model
    assert hashlib.sha256(fetch(url).place.read_bytes()).hexdigest() == SUMS[fetch(url).place.stem]
    assert content["meta"]["model"] == name and fetch(url).license.startswith("Apache-2.0")
    assert content["meta"]["half"] and fetch(url).place.stat().st_size < 5e6
    backbone = lambda_det.create_backbone(name, weights=url)
    other = lambda_det.create_backbone(name)
    DetectionCheckpointer(nn.ModuleDict({"backbone": other})).load(url)
    state = backbone.state_dict()
    for part, tensor in content["model"].items():
        assert state[part].dtype == torch.float32 and torch.equal(state[part], tensor.float())
        assert torch.equal(other.state_dict()[part], state[part])
    assert fetch(url).figures in fetch(url).describe()
    assert PathManager.isfile(url)


def test_a_file_of_ours_on_the_hub_stays_as_it_is(placed):
    # PyTorch before 2.10 takes no .pth from an address
    url = "hf://owner/name/backbone.safetensors"
    place = fetch(url).place
    place.parent.mkdir(parents=True)
    save_backbone(extract_backbone(read_source(URL)), place)
    assert PathManager.get_local_path(url) == str(place)
    backbone = lambda_det.create_backbone("mobilenet_v2", weights=url)
    assert backbone.pixel_settings.format == "BGR"
