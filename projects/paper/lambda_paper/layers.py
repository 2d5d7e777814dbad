"""Draw what the lambda layers of a backbone compute from an image."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.data.transforms import AugInput
from detectron2.structures import ImageList
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

from lambda_det.detection.data.records import read_image
from lambda_det.detection.task import DetectionTask
from lambda_det.distributed.devices import check_device
from lambda_det.errors import ConfigError, listed
from lambda_det.files import replace_file
from lambda_det.layers import LambdaLayer
from lambda_det.modeling.norm import convert_sync_norms
from lambda_det.weights.loading import load
from lambda_det.weights.provenance import PixelSettings
from lambda_paper import figures
from lambda_paper.context import Context, receptive_field

Pictures = dict[str, Callable[[], np.ndarray]]
Seen = tuple[tuple[Tensor | None, ...], Tensor]  # the inputs and the output of a layer
logger = logging.getLogger(__name__)


def draw_layers(
    cfg: CfgNode | DictConfig,
    image: str | Path,
    folder: str | Path,
    *,
    overwrite: bool = False,
    weights: str | Path | None = None,
    file_pixels: bool = False,
    layers: Sequence[str] = (),
    position: tuple[float, float] | None = None,
    draws: int = 8,
    seed: int = 0,
) -> tuple[list[str], list[Path]]:
    """Draw what the backbone of a configuration computes from an image.

    Args:
        cfg: of a detector, from YAML or a LazyConfig, or of a backbone alone.
        image: a file.
        folder, overwrite: see :func:`write_pictures`; names are those of :func:`pictures_of`.
        weights, file_pixels: see :func:`load_network`.
        layers: see :func:`choose_layers`.
        position: (y, x), a pixel of the file. None: its centre.
        draws, seed: see :func:`pictures_of`; the seed is also that of random weights.

    Returns:
        The names of the lambda layers that were drawn, and the files.

    Raises:
        UserError: the network, the weights or the image cannot be loaded, or a layer or position
            does not exist.
    """
    torch.manual_seed(seed)
    network, pixels = load_network(cfg, weights, file_pixels=file_pixels)
    chosen = choose_layers(network, layers)
    # Images are padded to multiples of the largest stride, so that cells cover them evenly
    stride = max(spec.stride for spec in network.output_shape().values())
    given = load_image(image, cfg, pixels, stride)
    height, width = (side / scale for side, scale in zip(given.size, given.scale, strict=True))
    if position is None:
        position = (height // 2, width // 2)
    if not (0 <= position[0] < height and 0 <= position[1] < width):
        raise ConfigError(
            f"The position {position[0]:g} {position[1]:g} (row, column) is not in {image} of "
            f"{round(height)} rows and {round(width)} columns; choose a pixel of the image."
        )
    pixel = tuple((p + 0.5) * scale for p, scale in zip(position, given.scale, strict=True))
    state = f"weights of {Path(weights).name}" if weights else f"fresh weights, seed {seed}"
    drawn = pictures_of(network, given, pixel, chosen, state=state, draws=draws, seed=seed)
    files = write_pictures(folder, drawn, overwrite=overwrite)
    if isinstance(cfg, DictConfig):
        in_heads = OmegaConf.select(cfg, "model.roi_heads.res5") is not None
    else:
        in_heads = cfg.MODEL.ROI_HEADS.NAME == "LambdaRes5ROIHeads"
    if in_heads:
        logger.warning(
            "The last stage of this detector, roi_heads.res5, works on regions of interest and not "
            "on the image: its layers are not drawn."
        )
    return chosen, files


def write_pictures(folder: str | Path, drawn: Pictures, *, overwrite: bool = False) -> list[Path]:
    """Draw pictures, and write each to a PNG file once it is complete.

    Args:
        folder: is made.
        drawn: functions by name that make a picture [H, W, 3] of uint8, RGB.
        overwrite: replace existing pictures.

    Raises:
        ConfigError: the folder cannot be written to, or a picture exists and must not be replaced;
            nothing is drawn then.
    """
    files = {name: Path(folder) / f"{name}.png" for name in drawn}
    there = [path for path in files.values() if path.exists()]
    if there and not overwrite:
        raise ConfigError(
            f"{there[0]} exists already, as do {len(there)} of the pictures in all; add "
            "--overwrite to replace them, or give another output folder."
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, path in tqdm(files.items(), unit="picture"):
            content = cv2.imencode(".png", drawn[name]()[:, :, ::-1])[1].tobytes()
            replace_file(path, lambda file, content=content: file.write(content))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error}.") from error
    return list(files.values())


def choose_layers(network: nn.Module, wanted: Sequence[str] = ()) -> list[str]:
    """The names of the chosen lambda layers, in the order of the network.

    Args:
        network: a backbone, with or without lambda layers.
        wanted: names, or patterns such as "res4.*". Empty: the last layer of each stage.

    Raises:
        ConfigError: a name or pattern matches no lambda layer.
    """
    names = [n for n, module in network.named_modules() if isinstance(module, LambdaLayer)]
    for pattern in wanted:
        if not fnmatch.filter(names, pattern):
            there = f"it has {listed(names, 6)}" if names else "it has none"
            raise ConfigError(f"The network has no lambda layer {pattern!r}; {there}.")
    if wanted:
        return [n for n in names if any(fnmatch.fnmatch(n, pattern) for pattern in wanted)]
    return list({name.split(".")[0]: name for name in names}.values())


def pictures_of(
    network: nn.Module,
    given: Input,
    pixel: tuple[float, float],
    layers: Sequence[str],
    *,
    state: str,
    draws: int = 8,
    seed: int = 0,
) -> Pictures:
    """Run a network that returns features by name; return functions that make a picture of each
    part.

    Their names are receptive_field, and for each lambda layer LAYER.embeddings, LAYER.reach and
    LAYER.context, if the layer has these parts.

    Args:
        network: in evaluation mode.
        given: the image.
        pixel: (y, x) in ``given.tensor``.
        layers: names of lambda layers.
        state: description of the weights, for the titles.
        draws: number of random gradients for the receptive fields.
        seed: of these gradients.
    """
    image = given.tensor.clone().requires_grad_()
    with watch(network, list(layers)) as seen:
        features: dict[str, Tensor] = network(image)
    maps = {n: f for n, f in features.items() if f.dim() == 4}
    maps |= {name: output for name, (_, output) in seen.items()}

    def receptive_fields() -> np.ndarray:
        fields = {}
        for name, output in tqdm(maps.items(), desc="receptive fields", unit="map"):
            place = _place(output, pixel, given)
            field = receptive_field(output, image, place, draws=draws, seed=seed)
            fields[name] = figures.Field(field.cpu().numpy(), place, tuple(output.shape[-2:]))
        return figures.receptive_fields(given.picture, fields, pixel, title=state)

    drawn = {"receptive_field": receptive_fields}
    for name in layers:
        inputs, output = seen[name]
        layer, place = network.get_submodule(name), _place(output, pixel, given)
        parts = {"embeddings": layer.position, "reach": layer.content, "context": layer}
        for part in (part for part, has in parts.items() if has is not None):
            drawn[f"{name}.{part}"] = partial(
                _draw_part, part, layer, inputs, given.picture, pixel, place, f"{name}, {state}"
            )
    return drawn


def _draw_part(
    part: str,
    layer: LambdaLayer,
    inputs: tuple[Tensor | None, ...],
    picture: np.ndarray,
    pixel: tuple[float, float],
    place: tuple[int, int],
    title: str,
) -> np.ndarray:
    if part == "embeddings":
        embedding = layer.position.embedding.detach().cpu().double().numpy()
        return figures.embeddings(embedding, title, layer.dilation)
    context = Context(layer, *inputs)
    if part == "reach":
        keys = context.keys[0].cpu()
        return figures.content_reach(picture, keys, title)
    weights = {
        "content": context.content_weights(*place),
        "position": context.position_weights(*place),
    }
    weights = {part: found for part, found in weights.items() if found is not None}
    if len(weights) == 2:
        weights["sum"] = weights["content"] + weights["position"]
    norms = {part: float(context.output(found).norm()) for part, found in weights.items()}
    weights = {part: found[0].cpu().numpy() for part, found in weights.items()}
    return figures.context(picture, weights, norms, pixel, place, title)


def _place(output: Tensor, pixel: tuple[float, float], given: Input) -> tuple[int, int]:
    """The position on a map [1, C, H, W] whose cell contains a pixel of the input."""
    sizes = zip(pixel, output.shape[-2:], given.tensor.shape[-2:], strict=True)
    return tuple(min(int(p * cells / side), cells - 1) for p, cells, side in sizes)


def load_network(
    cfg: CfgNode | DictConfig, weights: str | Path | None = None, *, file_pixels: bool = False
) -> tuple[nn.Module, PixelSettings]:
    """The backbone of a configuration, without an FPN around it, in evaluation mode; its pixels.

    Args:
        cfg: of a detector, from YAML or a LazyConfig. MODEL.WEIGHTS is ignored.
        weights: of the detector, of a classifier, or of the backbone. None: random ones.
        file_pixels: use the pixel settings in ``weights``, if any, instead of those of ``cfg``.

    Raises:
        ConfigError: the device is missing, an option cannot work, or the weights need other pixels.
        WeightsError: the weights cannot be read or do not fit.
    """
    task = DetectionTask(cfg)
    device = task.settings.device
    check_device(device, 1, task.settings.key("device"))
    backbone = task.components.make_backbone()
    network = getattr(backbone, "bottom_up", backbone)
    pixels = task.pixels or PixelSettings.from_config(get_cfg())
    if weights is not None:
        wanted = load(network, weights).pixels
        if file_pixels:
            pixels = wanted or pixels
        pixels.check(wanted, weights)
    network = convert_sync_norms(network, device).to(device)
    # Recomputed blocks would call the hooks of watch() twice
    if hasattr(network, "checkpoint_activations"):
        network.checkpoint_activations = False
    return network.eval().requires_grad_(False), pixels


class Input(NamedTuple):
    """An image as the input of a network."""

    tensor: Tensor  # [1, C, height, width], normalised and padded
    picture: np.ndarray  # [height, width, 3] uint8, RGB, grey where padding is
    size: tuple[int, int]  # (height, width) of the image without padding
    scale: tuple[float, float]  # (y, x), the size relative to that of the file


def load_image(
    path: str | Path, cfg: CfgNode | DictConfig, pixels: PixelSettings, divisibility: int = 0
) -> Input:
    """Read an image as a detector does in evaluation.

    Args:
        path: of the file.
        cfg: gives the size; in a LazyConfig, the mapper of dataloader.test does.
        pixels: the pixel settings of the network.
        divisibility: pad the sides to multiples of this.

    Raises:
        DataError: the image cannot be read, or has more than 8 bits a channel.
    """
    original = read_image({"file_name": str(path)}, "RGB")
    resized = AugInput(original)
    task = DetectionTask(cfg)
    task.components.make_test_augmentations()(resized)
    rgb = resized.image
    channels = torch.from_numpy((rgb if pixels.format == "RGB" else rgb[:, :, ::-1]).copy())
    mean, std = (torch.tensor(v)[:, None, None] for v in (pixels.mean, pixels.std))
    normalised = (channels.permute(2, 0, 1).float() - mean) / std
    tensor = ImageList.from_tensors([normalised], divisibility).tensor
    picture = np.full((*tensor.shape[-2:], 3), 128, np.uint8)
    picture[: rgb.shape[0], : rgb.shape[1]] = rgb
    scale = (rgb.shape[0] / original.shape[0], rgb.shape[1] / original.shape[1])
    return Input(tensor.to(task.settings.device), picture, rgb.shape[:2], scale)


@contextmanager
def watch(network: nn.Module, names: list[str]) -> Iterator[dict[str, Seen]]:
    """Record the inputs and the output of the first call of each named module."""
    seen: dict[str, Seen] = {}

    def keep(name: str):
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor | None:
            if name in seen:
                return None
            seen[name] = (tuple(i if i is None else i.detach() for i in inputs), output)
            return output.clone()  # the next operation may work in place

        return hook

    hooks = [network.get_submodule(n).register_forward_hook(keep(n)) for n in names]
    try:
        yield seen
    finally:
        for handle in hooks:
            handle.remove()
