"""``import lambda_det`` with and without Detectron2, in other processes."""

import os
import subprocess
import sys
import textwrap

import pytest

from lambda_det.cli import COMMANDS
from tests import forked

# Detectron2 and what only Detectron2 needs
WITHOUT_DETECTRON2 = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("detectron2", "fvcore", "iopath", "yacs", "omegaconf", "hydra"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
# The package and what it imports first must not import PyTorch before it has decided on threads
USE_OF_DETECTORS = """
import lambda_det, os
assert os.environ["GOMP_SPINCOUNT"] == "1000"
for name in ("Predictor", "detectron2_config", "get_config"):
    try:
        getattr(lambda_det, name)
    except ImportError as error:
        print(error)
"""


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error::FutureWarning", "-c", textwrap.dedent(script)]
    ours = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    process = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
def test_networks_without_detectron2(tmp_path):
    """Layers, classifiers and backbones compute there what they compute here.

    The first use of a detector says what is missing.
    """
    work = f"""
        import torch, torchvision
        import lambda_det
        from lambda_det.modeling.complexity import measure_named

        torch.manual_seed(0)
        maps = torch.randn(2, 3, 32, 32)
        results = [lambda_det.LambdaLayer(16, scope=3)(torch.randn(2, 16, 5, 5))]
        plain = torchvision.models.resnet18(num_classes=3)
        results.append(lambda_det.convert_lambda_layers(plain).eval()(maps))
        for name in ("lambda_resnet26_slim", "lambda_resnet26t", "mobilenet_v2_lambda"):
            results.append(lambda_det.create_classifier(name, num_classes=5)(maps))
        for norm in ("BN", "FrozenBN", ""):
            backbone = lambda_det.create_backbone("resnet14_slim", norm=norm, freeze_at=2)
            weights = {str(tmp_path / "weights.pth")!r}
            torch.save(backbone.state_dict(), weights)
            lambda_det.create_backbone("resnet14_slim", weights=weights, norm=norm)
            results += backbone(maps).values()
            assert backbone.output_shape()["res5"].stride == 32
            assert not any(p.requires_grad for p in backbone.res2.parameters())
        print(len(lambda_det.list_models()), measure_named("resnet50", 224))
        print([float(result.detach().double().square().sum()) for result in results])
    """
    without = textwrap.dedent(WITHOUT_DETECTRON2 + USE_OF_DETECTORS) + textwrap.dedent(work)
    *said, networks, results = run(without).splitlines()
    here = forked.run(["-c", textwrap.dedent(work)], tmp_path / "printed")
    assert here.stdout == f"{networks}\n{results}\n"
    assert len(said) == 3
    for line in said:
        assert "detectron2" in line and "lambda-det doctor --install" in line


@pytest.mark.slow
def test_the_import_changes_nothing_of_pytorch_and_imports_no_wing():
    """Nor does it read the words of the command line. No wing is imported to recognise a file."""
    script = """
        import sys, torch
        before = torch._meta_registrations.div_rtn
        import lambda_det
        lambda_det.Predictor
        assert torch._meta_registrations.div_rtn is before
        assert not {"huggingface_hub", "matplotlib", "scipy", "timm"} & {*sys.modules}
        wings = ("export", "own_data", "report", "hub", "classification")
        print([m for m in sys.modules for wing in wings if m.startswith(f"lambda_det.{wing}")])
        from detectron2.modeling import BACKBONE_REGISTRY, ROI_HEADS_REGISTRY
        assert "build_lambda_resnet_fpn_backbone" in BACKBONE_REGISTRY
        assert "LambdaRes5ROIHeads" in ROI_HEADS_REGISTRY
        print(all(hasattr(lambda_det, name) for name in lambda_det.__all__))
        from lambda_det import cli
        cli.training_parser(cli.named_file(["--config", "mask_rcnn_lambdaresnet50.yaml"]))
        print([m for m in sys.modules for wing in wings if m.startswith(f"lambda_det.{wing}")])
    """
    flags = "['lambda_det.own_data', 'lambda_det.own_data.flags']"
    assert run(script, "-m", "lambda_det.doctor", "--help") == f"[]\nTrue\n{flags}\n"


# Words of a command line, each with its status
AT_ONCE = {
    "": 0,
    "--help": 0,
    "--version": 0,
    "tarin": 2,
    **{f"{name} --flag-that-is-none": 2 for name in COMMANDS},
    **{f"{name} --help": 0 for name in COMMANDS},
    "train nuts": 2,
    "train --data nuts": 2,
    "train --data tests --time 1h --epochs 3": 2,
    "check nuts": 2,
    "convert nuts labels": 2,
    "predict nuts --input a --output b": 2,
    "evaluate tests --part tset": 2,
    "evaluate tests --json nuts": 2,
    "report nuts": 2,
    "export tests run.txt": 2,
    "push nuts me/x": 2,
}


def test_what_needs_no_network_is_answered_without_pytorch():
    script = f"""
        import sys
        from lambda_det.cli import main
        for words in {[*AT_ONCE]}:
            try:
                status = main(words.split())
            except SystemExit as end:
                status = end.code
            heavy = {{"torch", "detectron2", "numpy", "PIL", "cv2"}} & {{*sys.modules}}
            print("status of", words, status, sorted(heavy))
    """
    said = [line for line in run(script).splitlines() if line.startswith("status of")]
    assert said == [f"status of {words} {status} []" for words, status in AT_ONCE.items()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "before"),
    [
        ("engine", True),
        ("modeling.backbone", False),
        ("config, torch", True),
        ("config; __import__('importlib.util').util.find_spec('detectron2.modeling')", False),
    ],
)
def test_backbones_are_registered_by_an_import_before_or_after_detectron2(module, before):
    theirs, ours = f"import detectron2.{module}", "import lambda_det"
    first, second = (theirs, ours) if before else (ours, theirs)
    script = f"""
        import warnings
        warnings.simplefilter("ignore")
        {first}
        {second}
        from detectron2.modeling import BACKBONE_REGISTRY, ROI_HEADS_REGISTRY
        print("build_lambda_resnet_fpn_backbone" in BACKBONE_REGISTRY)
        print("LambdaRes5ROIHeads" in ROI_HEADS_REGISTRY, lambda_det.Predictor.__name__)
    """
    assert run(script).splitlines() == ["True", "True Predictor"]


OTHERS = """
import gc, sys, warnings
warnings.simplefilter("ignore")  # Detectron2 scripts some functions, which PyTorch has deprecated
import detectron2.data, detectron2.engine, detectron2.evaluation
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager
from fvcore.common.registry import Registry

def of_all():
    registries = [one for one in gc.get_objects() if isinstance(one, Registry)]
    parts = {(one._name, name): part.__module__ for one in registries for name, part in one}
    return [*DatasetCatalog], [*MetadataCatalog], {**PathManager._path_handlers}, parts
"""


@pytest.mark.slow
def test_the_import_registers_parts_of_ours_and_nothing_else():
    """A second one, after the modules were dropped, says what happened."""
    script = f"""
        {textwrap.indent(OTHERS, " " * 8).strip()}
        *before, parts_before = of_all()
        import lambda_det
        lambda_det.Predictor, lambda_det.train
        import lambda_det.detection, lambda_det.own_data.prepare
        *after, parts = of_all()
        assert after == before
        print(*sorted({{name for (_, name), module in parts.items() - parts_before.items()}}))
        modules = {{module for _, module in parts.items() - parts_before.items()}}
        assert all(module.startswith("lambda_det.") for module in modules)
        for name in [name for name in sys.modules if name.partition(".")[0] == "lambda_det"]:
            del sys.modules[name]
        import lambda_det
        try:
            lambda_det.Predictor
        except ImportError as error:
            print(error)
    """
    names, error = run(script).splitlines()
    assert "build_lambda_resnet_fpn_backbone" in names and "LambdaRes5ROIHeads" in names
    assert all("ambda" in name or "orchvision" in name for name in names.split()), names
    assert "already registered" in error
