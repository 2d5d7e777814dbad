"""The packages that lambda_det needs: each is imported and really run."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

UPSTREAM = "git+https://github.com/facebookresearch/detectron2.git"
INSTALL_DETECTRON2 = (
    "python tools/install_detectron2.py in the lambda_det repository installs it; or, with torch "
    f"installed first: pip install --no-build-isolation {UPSTREAM}"
)


@dataclass(frozen=True)
class Finding:
    """A fault of this installation.

    Attributes:
        problem: what is wrong, and what fails because of it.
        mend: what to do about it.
        breaks: whether something cannot run; False where it is only slower or lacks a part.
    """

    problem: str
    mend: str
    breaks: bool = True


@dataclass(frozen=True)
class Part:
    """Something that has to work.

    Attributes:
        name: of the distribution, for its version.
        module: is looked for.
        run: returns what works; what it raises is why it does not.
        install: the mend where the module is absent.
        repair: the mend where ``run`` fails.
        effect: what fails without it.
        needs: modules without which it cannot work; their own rows tell.
        breaks: as in ``Finding``.
    """

    name: str
    module: str
    run: Callable[[], str]
    install: str
    repair: str
    effect: str = ""
    needs: tuple[str, ...] = ()
    breaks: bool = True

    def examine(self) -> tuple[str, Finding | None]:
        """What to print of it, and the fault if there is one."""
        if not is_there(self.module):
            problem = f"{self.name} is not installed. {self.effect}".strip()
            return "not installed", Finding(problem, self.install, self.breaks)
        if missing := [module for module in self.needs if error_of_import(module)]:
            return f"not tried without {missing[0]}", None
        try:
            return self.run(), None
        except Exception as error:  # broken libraries raise RuntimeError, AttributeError, ...
            reason = first_line(error)
        found = f"{self.name} {version(self.name) or ''}".strip()
        problem = f"{found} does not work ({reason}). {self.effect}".strip()
        return f"no: {reason}", Finding(problem, self.repair, self.breaks)


def version(distribution: str) -> str | None:
    """The installed version of a distribution; None where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def error_of_import(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:
        return first_line(error)
    return None


def is_there(module: str) -> bool:
    """Whether a top-level module can be found; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # in sys.modules without a spec, or as None, which forbids its import
        return False


def folder_of(package: str) -> Path | None:
    """The folder of a package's code, found without importing it."""
    spec = importlib.util.find_spec(package) if is_there(package) else None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _import(*modules: str) -> str:
    for module in modules:
        importlib.import_module(module)
    return "can be imported"


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise RuntimeError(f"{what} {found} instead of {expected}")


def _run_numpy() -> str:
    importlib.import_module("torch").zeros(1).numpy()
    return "works with torch"


def _run_torchvision() -> str:
    torch = importlib.import_module("torch")
    ops = importlib.import_module("torchvision").ops
    boxes = torch.tensor([[0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 9.0, 8.0], [20.0, 20.0, 30.0, 30.0]])
    kept = ops.nms(boxes, torch.tensor([0.5, 0.9, 0.1]), 0.5).tolist()
    _expect("nms keeps", kept, [1, 2])
    ramp = torch.arange(8.0).repeat(1, 1, 8, 1)  # the value is x, and the mean of a box its middle
    box = torch.tensor([[2.0, 2.0, 6.0, 6.0]])
    mean = ops.roi_align(ramp, [box], 2, aligned=True).mean().item()
    _expect("roi_align has a mean of", round(mean, 4), 3.5)
    return "nms and roi_align run"


def _run_pycocotools() -> str:
    numpy = importlib.import_module("numpy")
    mask = importlib.import_module("pycocotools.mask")
    area = int(mask.area(mask.encode(numpy.ones((3, 5), numpy.uint8, order="F"))))
    _expect("a mask has an area of", area, 15)
    return "masks run"


def _run_kernel() -> str:
    torch = importlib.import_module("torch")
    compiled = importlib.import_module("lambda_det.layers.local.compiled")
    if reason := compiled.unsupported(*[torch.zeros(1)] * 3):
        raise RuntimeError(reason)
    return "built for this processor, and loads"


PARTS = (
    Part(
        "torch",
        "torch",
        partial(_import, "torch"),
        install="pip install torch torchvision",
        repair="Install it anew: pip install --force-reinstall torch torchvision",
    ),
    Part(
        "numpy",
        "numpy",
        _run_numpy,
        install="pip install numpy",
        repair='Take a PyTorch built for numpy 2 (2.4 or newer), or pip install "numpy<2".',
        effect="No image reaches the model.",
        needs=("torch",),
    ),
    Part(
        "torchvision",
        "torchvision",
        _run_torchvision,
        install="pip install torchvision",
        repair="Install the two that belong together, in one command and from one index: pip "
        "install --force-reinstall torch torchvision (for the CPU only, with --index-url "
        "https://download.pytorch.org/whl/cpu).",
        effect="Detection needs its operators, which have to fit the version of torch.",
        needs=("torch",),
    ),
    Part(
        "shapely",
        "shapely",
        partial(_import, "shapely"),
        install='pip install "shapely>=2"',
        repair='pip install --force-reinstall "shapely>=2"',
        effect="The fixed-size crop of large-scale jitter, and any crop of polygons, imports it in "
        "the middle of the training.",
    ),
    Part(
        "pycocotools",
        "pycocotools",
        _run_pycocotools,
        install="pip install pycocotools",
        repair="pip install --upgrade --force-reinstall --no-cache-dir pycocotools",
        effect="It has to be built for the version of numpy.",
        needs=("numpy",),
    ),
    Part(
        "OpenCV",
        "cv2",
        partial(_import, "cv2"),
        install="pip install opencv-python-headless",
        repair="pip uninstall -y opencv-python opencv-contrib-python; pip install "
        "--force-reinstall opencv-python-headless",
        effect="opencv-python needs libraries of a desktop (libGL, libgthread).",
    ),
    Part(
        "detectron2",
        "detectron2",
        partial(_import, "detectron2.modeling"),
        install=INSTALL_DETECTRON2,
        repair="If a module is missing, install it; else install Detectron2 anew. "
        + INSTALL_DETECTRON2,
        needs=("torch", "torchvision"),
    ),
    Part(
        "lambda_det",
        "lambda_det",
        partial(
            _import, "lambda_det.modeling", "lambda_det.detection", "lambda_det.classification"
        ),
        install="",
        repair="pip install of the lambda_det repository brings what it needs.",
        needs=("torch", "torchvision", "detectron2.modeling"),
    ),
    Part(
        "The lambda layer's CPU kernel",
        "lambda_det",
        _run_kernel,
        install="",
        repair="Install a compiler (Debian and Ubuntu: apt install g++), or name one in CXX.",
        effect="On the CPU the layer takes the slower way through PyTorch's own operators.",
        needs=("torch", "detectron2"),
        breaks=False,
    ),
)
