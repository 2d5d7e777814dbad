from __future__ import annotations

import cv2
import numpy as np
import pytest

from lambda_det.errors import ConfigError
from lambda_paper.album import Album


@pytest.fixture
def picture():
    """Red at the left and blue at the right."""
    picture = np.zeros((4, 6, 3), np.uint8)
    picture[:, :3, 0] = picture[:, 3:, 2] = 255
    return picture


def test_pictures_keep_their_colours(tmp_path, picture):
    album = Album(tmp_path / "new" / "folder")
    album.add("a", picture)
    assert album.written == [tmp_path / "new" / "folder" / "a.png"]
    assert np.array_equal(cv2.imread(str(album.written[0]))[:, :, ::-1], picture)
    assert [path.name for path in album.folder.iterdir()] == ["a.png"]


def test_what_is_there_is_not_replaced_without_leave(tmp_path, picture):
    Album(tmp_path).add("b", picture)
    with pytest.raises(ConfigError, match=r"b\.png.*--overwrite"):
        Album(tmp_path).check(["a", "b"])
    Album(tmp_path).check(["a"])
    Album(tmp_path, overwrite=True).check(["a", "b"])


def test_a_file_in_place_of_the_folder_is_refused(tmp_path, picture):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match="file"):
        Album(tmp_path / "file").check([])
    with pytest.raises(ConfigError, match=r"a\.png"):
        Album(tmp_path / "file").add("a", picture)
