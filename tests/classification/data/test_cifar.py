from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

from lambda_det.classification.data.cifar import Cifar10Source
from lambda_det.errors import DataError

NAMES = ["airplane", "automobile", "bird"]


@pytest.fixture
def downloaded(tmp_path, monkeypatch):
    """A folder like CIFAR-10's, of 5 batches of 4 training images, and 3 test images."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def write(name, content):
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    def batch(name, first, count):
        pixels = np.arange(3072 * count).reshape(count, 3072) % 251 + first % 5
        labels = [index % 3 for index in range(first, first + count)]
        return write(name, {"data": pixels.astype(np.uint8), "labels": labels})

    train = [batch(f"data_batch_{n}", 4 * n, 4) for n in range(5)]
    _, md5 = write("batches.meta", {"label_names": NAMES})
    monkeypatch.setattr(CIFAR10, "train_list", train)
    monkeypatch.setattr(CIFAR10, "test_list", [batch("test_batch", 20, 3)])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5})
    return tmp_path


@pytest.mark.parametrize(("train", "count"), [(True, 20), (False, 3)])
def test_it_has_torchvisions_images_and_labels(downloaded, train, count):
    source, reference = Cifar10Source(downloaded, train), CIFAR10(downloaded, train)
    assert len(source) == count and source.classes == NAMES
    assert source.labels.dtype == np.int64
    for index, (image, label) in enumerate(reference):
        np.testing.assert_array_equal(source.load(index), np.asarray(image))
        assert source.labels[index] == label
    assert source.load(0).flags.c_contiguous and source.load(0).dtype == np.uint8


def test_names_tell_both_parts_apart(downloaded):
    assert Cifar10Source(downloaded, train=True).name(7) == "train/00007"
    assert Cifar10Source(downloaded, train=False).name(2) == "test/00002"


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_files_that_are_missing_or_changed(downloaded, name):
    file = downloaded / "cifar-10-batches-py" / name
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(DataError, match=str(downloaded)):
        Cifar10Source(downloaded, train=True)
    file.unlink()
    with pytest.raises(DataError, match=str(downloaded)):
        Cifar10Source(downloaded, train=True)


def test_the_command_to_download_it_can_be_pasted(tmp_path, monkeypatch):
    root = tmp_path / "my data"
    with pytest.raises(DataError) as raised:
        Cifar10Source(root, train=True)
    _, command = str(raised.value).split("download it with: ")
    assert command.startswith("python -c ")
    check = "import sys; sys.modules['torchvision.datasets'] = type(sys)('x'); "
    check += "sys.modules['torchvision.datasets'].CIFAR10 = lambda *a, **k: print(a, k); "
    command = command.replace('python -c "', f"'{sys.executable}' -c \"{check}", 1)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"({str(root)!r},) {{'download': True}}"
