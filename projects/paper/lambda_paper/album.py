"""A folder of PNG pictures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy as np

from lambda_det.errors import ConfigError
from lambda_det.files import replace_file

__all__ = ["Album"]


class Album:
    """Writes pictures to a folder, and keeps none. After a crash, each is complete or not there.

    Args:
        folder: created with the first picture.
        overwrite: replace existing pictures.

    Attributes:
        written: the files, in the order of writing.
    """

    def __init__(self, folder: str | Path, *, overwrite: bool = False) -> None:
        self.folder = Path(folder)
        self.written: list[Path] = []
        self._overwrite = overwrite

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

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.png"
