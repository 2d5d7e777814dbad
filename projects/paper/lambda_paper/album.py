"""A folder of PNG pictures, optionally also written for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import cv2
import numpy as np

from lambda_det.errors import ConfigError
from lambda_det.files import replace_file
from lambda_det.report import Pictures

__all__ = ["Album"]


class Album(Pictures):
    """Writes pictures to a folder, and keeps none. After a crash, each is complete or not there.

    Args:
        folder: created with the first picture.
        overwrite: replace existing pictures.
        tensorboard: also write the pictures to an event file in the folder.
        group: of the pictures in TensorBoard.

    Attributes:
        written: the files, in the order of writing.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        overwrite: bool = False,
        tensorboard: bool = False,
        group: str = "pictures",
    ) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.written: list[Path] = []
        self._overwrite, self._tensorboard, self._group = overwrite, tensorboard, group
        self._writer = None

    def check(self, names: Iterable[str]) -> None:
        """Check that pictures of these names can be written. Writes nothing.

        Raises:
            ConfigError: the folder is a file, or a picture exists and must not be replaced.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; give a folder for the pictures.")
        there = [path for path in map(self._path, names) if path.exists()]
        if there and not self._overwrite:
            raise ConfigError(
                f"{there[0]} exists already, as do {len(there)} of the pictures in all; add "
                "--overwrite to replace them, or give another output folder."
            )

    def add(self, name: str, picture: np.ndarray) -> None:
        """Write a picture [H, W, 3] of uint8, RGB.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        path = self._path(name)
        content = cv2.imencode(".png", picture[:, :, ::-1])[1].tobytes()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda file: file.write(content))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}.") from error
        self.written.append(path)
        if self._tensorboard:
            self._events().add_image(f"{self._group}/{name}", picture, dataformats="HWC")

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.png"

    def _events(self):
        if self._writer is None:
            # Imported on use, because the import takes a second
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder))
        return self._writer

    def __enter__(self) -> Album:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()
