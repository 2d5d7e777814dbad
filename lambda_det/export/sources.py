"""Read the network to export from a run, a backbone file or published weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lambda_det.detection.saved_run import open_run, run_of_checkpoint
from lambda_det.errors import ConfigError, UserError
from lambda_det.export import MOST
from lambda_det.export.networks import Network, backbone_network, detector_network
from lambda_det.export.proof import validation_images
from lambda_det.modeling import create_backbone
from lambda_det.weights.loading import read_weights
from lambda_det.weights.provenance import Origin, recorded_network


def network_to_export(
    source: str | os.PathLike,
    *,
    checkpoint: str = "best",
    raw: bool = False,
    opts: Sequence[str] = (),
    backbone_only: bool = False,
    proof: int = 100,
    apart: float = MOST,
    batch: int = 1,
    fixed: tuple[int, int] | None = None,
) -> Network:
    """The detector of a run, its backbone with FPN, or the backbone of another file.

    Args:
        source: the folder of a run or one of its checkpoints; or a backbone: a file that records
            its network, or the URL of published weights.
        checkpoint, raw, opts: see :func:`lambda_det.detection.saved_run.open_run`.
        backbone_only: leave out proposals and heads.
        proof: number of validation images that the file of a detector is compared on; 0 for none,
            and then it may be written without any comparison.
        apart: by which AP may differ on them.
        batch: of a detector, images that the file takes at once; 0 for any number.
        fixed: of a detector, height and width of its images; None for any.

    Raises:
        ConfigError: a value cannot be, the device is not there, or the network cannot be exported.
        WeightsError: there are no weights, they do not fit, or nothing says which network they
            belong to.
    """
    of_detector = batch != 1 or fixed
    if Path(source).is_dir():
        run = open_run(source, checkpoint, raw=raw, opts=opts)
    else:
        file = str(source)
        content = read_weights(file)
        if "recipe" in content or "model" in content.get("meta", {}):
            # the weights of a backbone are its averaged ones, if there are any
            if backbone_only or raw or opts or of_detector:
                raise ConfigError(
                    f"{file} is a backbone; leave backbone_only, raw, batch, fixed and keys out."
                )
            return _network_of_file(file, content)
        run = run_of_checkpoint(file, content, raw=raw, opts=opts)
    model = run.detector(precision="float32")
    digest = hashlib.sha256(Path(run.origin.file).read_bytes()).hexdigest()
    about = {"sha256": digest, **run.about()}
    if backbone_only:
        if of_detector:
            raise ConfigError("batch and fixed are for whole detectors; leave them out.")
        return backbone_network(model.backbone, about)
    network = detector_network(model, about, batch=batch, fixed=fixed)
    try:
        validation = validation_images(run, proof, apart) if proof > 0 else None
    except UserError as error:
        return replace(network, why_none=str(error))
    return replace(network, validation=validation, why_none="")


def _network_of_file(file: str, content: Mapping[str, Any]) -> Network:
    """The backbone of a file that records its network."""
    name, options = recorded_network(content)
    name = name or content["meta"]["model"]
    backbone = create_backbone(name, weights=file, **options)
    pixels = backbone.pixel_settings.as_meta() if backbone.pixel_settings else {}
    return backbone_network(
        backbone, {"model": name, **Origin.of(file, content).as_meta(), **pixels}
    )
