"""Published weights, ours in this package among them: names, licences, downloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from lambda_det.errors import ConfigError, WeightsError, suggest
from lambda_det.weights.formats import check_address, read_checkpoint
from lambda_det.weights.import_names import import_weights
from lambda_det.weights.provenance import IMAGENET_PIXELS, PixelSettings

# The networks of these libraries that are also here
_TIMM = {
    **{f"resnetrs{n}": f"resnet_rs{n}_se" for n in (50, 101, 152, 200, 270, 350, 420)},
    "mobilenetv2_100": "mobilenet_v2",
    "resnet50": "resnet50",
    **{f"lambda_resnet{n}": f"lambda_resnet{n}" for n in ("26t", "26rpt_256", "50ts")},
}
_TORCHVISION = {
    "ResNet50_Weights": "resnet50",
    "MobileNet_V2_Weights": "mobilenet_v2",
    # Detectors on COCO, with the backbone of this name
    "MaskRCNN_ResNet50_FPN_V2_Weights": "resnet50",
    "FasterRCNN_ResNet50_FPN_V2_Weights": "resnet50",
    "MaskRCNN_ResNet50_FPN_Weights": "resnet50",
    "FasterRCNN_ResNet50_FPN_Weights": "resnet50",
    "RetinaNet_ResNet50_FPN_V2_Weights": "resnet50",
}

# Weights in this package, files/NAME.pth, of which docs/results.md has the card
OWN = {
    "mobilenet_v2_openimages": {
        "model": "mobilenet_v2",
        "license": "Apache-2.0 (Google, MediaPipe; converted)",
        "figures": "trained on boxes of 23 classes of Open Images, in a detector",
    },
    "lambda_resnet26_slim": {
        "model": "lambda_resnet26_slim",
        "license": "Apache-2.0; its photographs, Tiny ImageNet's, are for research",
        "figures": "top-1 41.4 % on Tiny ImageNet",
    },
}
# timm's weights of these networks, the first of a network first
_TIMM_FILES = (
    "resnetrs50.tf_in1k",
    "resnetrs101.tf_in1k",
    "resnetrs152.tf_in1k",
    "resnetrs200.tf_in1k",
    "resnetrs270.tf_in1k",
    "resnetrs350.tf_in1k",
    "resnetrs420.tf_in1k",
    "resnet50.a1_in1k",
    "resnet50.a1h_in1k",
    "resnet50.a2_in1k",
    "resnet50.a3_in1k",
    "resnet50.am_in1k",
    "resnet50.b1k_in1k",
    "resnet50.b2k_in1k",
    "resnet50.bt_in1k",
    "resnet50.c1_in1k",
    "resnet50.c2_in1k",
    "resnet50.d_in1k",
    "resnet50.fb_ssl_yfcc100m_ft_in1k",
    "resnet50.fb_swsl_ig1b_ft_in1k",
    "resnet50.gluon_in1k",
    "resnet50.ra_in1k",
    "resnet50.ram_in1k",
    "resnet50.tv2_in1k",
    "resnet50.tv_in1k",
    "mobilenetv2_100.ra_in1k",
    "lambda_resnet26t.c1_in1k",
    "lambda_resnet26rpt_256.c1_in1k",
    "lambda_resnet50ts.a1h_in1k",
)
# Their licences, where those are not Apache 2.0
_TIMM_LICENSES = {
    "resnet50.fb_ssl_yfcc100m_ft_in1k": "cc-by-nc-4.0",
    "resnet50.fb_swsl_ig1b_ft_in1k": "cc-by-nc-4.0",
    "resnet50.tv2_in1k": "bsd-3-clause",
    "resnet50.tv_in1k": "bsd-3-clause",
}


@dataclass(frozen=True)
class PublicFile:
    """A file of published weights.

    Attributes:
        url: such as "timm://resnetrs101.tf_in1k".
        origin: address to download the file from.
        place: where to put it on a machine that cannot download it.
        download: returns the path of the file, after a download if need be.
        license: as its publisher states it.
        model: our name of the network; None if only the tensors show it.
        pixels: None if only the tensors show them.
        figures: what is known of their accuracy, in words.
    """

    url: str
    origin: str
    place: Path
    download: Callable[[], str]
    license: str
    model: str | None = None
    pixels: PixelSettings | None = None
    figures: str = ""

    def local_path(self) -> str:
        """The path of the file on this machine.

        Raises:
            WeightsError: it cannot be downloaded.
        """
        if self.place.is_file():
            return str(self.place)
        try:
            return self.download()
        except Exception as error:  # each library and its HTTP client have errors of their own
            raise WeightsError(
                f"{self.url} cannot be downloaded ({type(error).__name__}): download {self.origin} "
                f"on another machine and put it at {self.place}. lambda://{next(iter(OWN))} "
                "comes with this package."
            ) from error

    def describe(self) -> str:
        """Source, licence and figures in one line."""
        figures = f", {self.figures}" if self.figures else ""
        return f"{self.url} from {self.origin}, licence {self.license}{figures}"


def is_public(path: str | Path) -> bool:
    """Whether ``path`` is a URL of this module."""
    return str(path).startswith(tuple(SCHEMES))


def fetch(url: str) -> PublicFile:
    """Look up a URL of published weights. Nothing is downloaded yet.

    Args:
        url: "lambda://NAME", "timm://NAME" or "timm://NAME.TAG", "torchvision://ENUM.MEMBER" or
            "hf://OWNER/REPOSITORY/FILE"; without FILE it is model.safetensors.

    Raises:
        ConfigError: there are no such weights, or their network is not in ``list_models()``.
        WeightsError: the file on the Hub is one of ``torch.save``, and PyTorch is older than 2.10.
            Files of torchvision are exempt: the authors of PyTorch publish them.
    """
    scheme = next(scheme for scheme in SCHEMES if url.startswith(scheme))
    return SCHEMES[scheme](url, url.removeprefix(scheme).strip("/"))


def read_public(url: str) -> tuple[dict[str, Any], PublicFile]:
    """Download and read published weights, with the names of our classifiers.

    Returns:
        The content, see :func:`lambda_det.weights.import_names.import_weights`, and its origin. A
        file of lambda_det, in this package or on the Hub, is returned as it is.

    Raises:
        ConfigError: there are no such weights.
        WeightsError: the file cannot be downloaded or read, or holds other names.
    """
    public = fetch(url)
    path = public.local_path()
    content = import_weights(read_checkpoint(path), path)
    imported = "imported" in content.get("meta", {})
    if public.pixels is not None:
        if not imported:
            raise WeightsError(f"{path} does not hold the tensors of {url}; download it again.")
        content["meta"]["model"] = public.model
    if imported:
        content["meta"] |= {"license": public.license, "source": url}
    return content, public


def _own(url: str, name: str) -> PublicFile:
    if name not in OWN:
        raise _no_such(url, name, OWN)
    place = Path(__file__).with_name("files") / f"{name}.pth"
    # there is nothing to download: a file that is missing is named when it is read
    return PublicFile(url, "this package", place, lambda: str(place), **OWN[name])


def _timm(url: str, name: str) -> PublicFile:
    """What timm's own table says, without importing it, which takes seconds."""
    network, _, tag = name.partition(".")
    if not tag:  # timm's first one, as in timm
        name = next((full for full in _TIMM_FILES if full.partition(".")[0] == network), name)
    if name not in _TIMM_FILES:
        raise _no_such(url, name, _TIMM_FILES)
    return PublicFile(
        url,
        *_on_hub(f"timm/{name}", "model.safetensors", f"timm/{name}.safetensors"),
        model=_TIMM[network],
        license=_TIMM_LICENSES.get(name, "apache-2.0"),
        pixels=IMAGENET_PIXELS,
    )


def _torchvision(url: str, name: str) -> PublicFile:
    from torchvision import models

    kinds = {**vars(models.detection), **vars(models)}
    names = [f"{enum}.{member}" for enum in _TORCHVISION for member in kinds[enum].__members__]
    if name not in names:
        raise _no_such(url, name, names)
    weights = models.get_weight(name)
    file = Path(urlparse(weights.url).path).name
    place = Path(torch.hub.get_dir(), "checkpoints", file)  # torchvision's own cache

    def download() -> str:
        # puts the file there
        weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        return str(place)

    ((data, figures),) = weights.meta["_metrics"].items()
    return PublicFile(
        url,
        weights.url,
        place,
        download,
        model=_TORCHVISION[name.partition(".")[0]],
        license="BSD-3-Clause, as torchvision's code",
        pixels=IMAGENET_PIXELS,
        figures=", ".join(f"{key} {n} on {data}" for key, n in figures.items()),
    )


def _hub(url: str, name: str) -> PublicFile:
    words = name.split("/")
    if len(words) == 2:  # of lambda-det push
        words.append("model.safetensors")
    if len(words) < 3:
        raise ConfigError(f"{url} must have the form hf://OWNER/REPOSITORY/FILE.")
    repository, file = "/".join(words[:2]), "/".join(words[2:])
    check_address(f"hf://{repository}/{file}")
    license = f"see https://huggingface.co/{repository}"
    return PublicFile(url, *_on_hub(repository, file, f"hf/{repository}/{file}"), license=license)


def _on_hub(repository: str, file: str, place: str) -> tuple[str, Path, Callable[[], str]]:
    """Address, place and download of a file on the Hugging Face Hub."""

    def download() -> str:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import logging

        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # each of its many attempts warns, and the error says it once
        try:
            return hf_hub_download(repository, file)
        finally:
            logging.set_verbosity(verbosity)

    from iopath.common.file_io import get_cache_dir  # a requirement of Detectron2, not of networks

    origin = f"https://huggingface.co/{repository}/resolve/main/{file}"
    return origin, Path(get_cache_dir(), "lambda_det", place), download


def _no_such(url: str, name: str, known: Sequence[str]) -> ConfigError:
    scheme = url.removesuffix(name)
    hint = suggest(url, [scheme + other for other in known])
    return ConfigError(f"{url} names no weights of a network that lambda_det has{hint}")


SCHEMES: Mapping[str, Callable[[str, str], PublicFile]] = {
    "lambda://": _own,
    "timm://": _timm,
    "torchvision://": _torchvision,
    "hf://": _hub,
}
