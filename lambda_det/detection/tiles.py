"""Where the tiles of an image lie: overlapping squares in which small objects keep their pixels.

Training, evaluation, prediction and exported files cut an image by the same :class:`Tiling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lambda_det.detection.merging import MERGE, cuts
from lambda_det.errors import ConfigError
from lambda_det.modeling.specs import STRIDE

if TYPE_CHECKING:
    from detectron2.config import CfgNode


class Tile(NamedTuple):
    """A rectangle of an image, in its pixels; ``x1`` and ``y1`` are not part of it."""

    x0: int
    y0: int
    x1: int
    y1: int


@dataclass(frozen=True)
class Tiling:
    """How images are cut.

    Attributes:
        size: the side of a tile, in pixels of the image as it is read (upright).
        overlap: of neighbouring tiles, in pixels; less than half of ``size``.

    Raises:
        ConfigError: a value cannot be; the message names its key.
    """

    size: int
    overlap: int

    def __post_init__(self) -> None:
        if self.size < STRIDE:
            raise ConfigError(
                f"INPUT.TILE.SIZE is {self.size}; a tile has {STRIDE} pixels or more, and 0 is "
                "for no tiles."
            )
        if not 0 <= self.overlap < self.size / 2:
            raise ConfigError(
                f"INPUT.TILE.OVERLAP is {self.overlap}; it must be at least 0 and less than half "
                f"of INPUT.TILE.SIZE, {self.size}. Take larger tiles for larger objects."
            )

    @classmethod
    def from_config(cls, cfg: CfgNode) -> Tiling | None:
        """The tiling of ``INPUT.TILE``; None where images are not cut.

        Raises:
            ConfigError: a value cannot be, or the configuration has what cannot be cut.
        """
        keys = cfg.INPUT.get("TILE")  # a configuration of Detectron2 alone has none
        if not keys or not keys.SIZE:
            return None
        if why := why_not_cut(cfg):
            raise ConfigError(f"INPUT.TILE.SIZE is {keys.SIZE}, and {why}; set it to 0 (--tile 0).")
        return cls(keys.SIZE, keys.SIZE // 5 if keys.OVERLAP == -1 else keys.OVERLAP)

    @classmethod
    def of_meta(cls, meta: Mapping[str, int] | None) -> Tiling | None:
        """The tiling that :meth:`as_meta` wrote to a file; None for none.

        Raises:
            ConfigError: the file asks for another way to join what is found in tiles.
        """
        if meta is None:
            return None
        if meta["merge"] != MERGE:
            raise ConfigError(
                f"The detections of its tiles are joined by rule {meta['merge']}, and this version "
                f"knows rule {MERGE}; export the run again."
            )
        return cls(meta["size"], meta["overlap"])

    def as_meta(self) -> dict[str, int]:
        """What a file has to say, with the rule by which detections of tiles are joined."""
        return {"size": self.size, "overlap": self.overlap, "merge": MERGE}

    def tiles(self, height: int, width: int) -> list[Tile]:
        """The tiles of an image, row by row.

        The last tile of a row ends at the border of the image, so that it has the full size and
        a larger overlap; the same holds for columns. A side that is not longer than a tile is not
        cut.
        """
        rows, columns = (cuts(side, self.size, self.overlap) for side in (height, width))
        return [Tile(x0, y0, x1, y1) for y0, y1 in rows for x0, x1 in columns]


def why_not_cut(cfg: CfgNode) -> str:
    """What of a configuration does not go with tiles, in words; "" for nothing."""
    # the tables of models need Detectron2, and tiles do not
    from lambda_det.detection.data.predictions import predictions

    model, sampler = cfg.MODEL, cfg.DATALOADER.SAMPLER_TRAIN
    found = {
        "keypoints (MODEL.KEYPOINT_ON) are not cut": model.KEYPOINT_ON,
        f"MODEL.META_ARCHITECTURE {model.META_ARCHITECTURE} predicts more than instances": (
            predictions(model.META_ARCHITECTURE) != ("instances",)
        ),
        "proposals (MODEL.LOAD_PROPOSALS) are of whole images": model.LOAD_PROPOSALS,
        "TEST.AUG.ENABLED averages over whole images": cfg.TEST.AUG.ENABLED,
        f"DATALOADER.SAMPLER_TRAIN {sampler} has weights of whole images": (
            sampler.startswith("Weighted")
        ),
    }
    return next((words for words, is_there in found.items() if is_there), "")
