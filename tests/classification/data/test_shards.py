import gc
import io
import json
import os
import pickle
import tarfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lambda_det.classification.data import shards
from lambda_det.classification.data.shards import ShardSource
from lambda_det.errors import DataError


def png(number):
    file = io.BytesIO()
    Image.new("RGB", (20, 24), (number, 100, 200)).save(file, "PNG")
    return file.getvalue()


def write_tar(path, members):
    """``members``: content by name; None for a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if content is None:
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def two_shards(tmp_path):
    write_tar(tmp_path / "b.tar", {"owl/2.png": png(2), "ant/3.PNG": png(3)})
    write_tar(tmp_path / "a.tar", {"owl": None, "owl/0.png": png(0), "bee/x/1.png": png(1)})
    return tmp_path


def numbers(source):
    """Which image of ``png`` each of a source's is."""
    images = [source.load(index) for index in range(len(source))]
    assert all(image.shape == (24, 20, 3) and image.dtype == np.uint8 for image in images)
    assert all((image == (image[0, 0, 0], 100, 200)).all() for image in images)
    return [int(image[0, 0, 0]) for image in images]


def test_classes_labels_names_and_pixels(two_shards):
    source = ShardSource(two_shards)
    assert source.classes == ["ant", "bee", "owl"]
    assert source.labels.dtype == np.int64 and source.labels.tolist() == [2, 1, 2, 0]
    names = [source.name(index) for index in range(len(source))]
    assert names == ["a.tar/owl/0.png", "a.tar/bee/x/1.png", "b.tar/owl/2.png", "b.tar/ant/3.PNG"]
    assert numbers(source) == [0, 1, 2, 3]


def test_other_members_and_files_are_ignored(tmp_path):
    members = {"./owl/0.png": png(0), "owl/0.json": b"{}", "readme.txt": b"", "owl/1.png": png(1)}
    members |= {"owl/._0.png": b"of macOS", ".cache/2.png": png(2)}
    write_tar(tmp_path / "empty.tar", {"x/readme": b""})
    write_tar(tmp_path / "deep" / "er" / "a.tar", members)
    write_tar(tmp_path / ".hidden.tar", {"ant/9.png": png(9)})
    (tmp_path / "a.txt").touch()
    source = ShardSource(tmp_path)
    assert source.classes == ["owl"] and numbers(source) == [0, 1]
    assert source.name(1) == "deep/er/a.tar/owl/1.png"


def test_long_and_strange_names(tmp_path):
    """Such take several headers in a tar file."""
    names = ["owl/" + "long " * 60 + ".png", "owl/ü.png", "a\nb/\udcff.png"]
    write_tar(tmp_path / "a.tar", {name: png(n) for n, name in enumerate(names)})
    for _ in range(2):  # without and with an index
        source = ShardSource(tmp_path)
        assert [source.name(index) for index in range(3)] == [f"a.tar/{name}" for name in names]
        assert numbers(source) == [0, 1, 2] and source.classes == ["a\nb", "owl"]


def test_class_names_beside_the_images_as_in_webdataset(tmp_path):
    """The key ends at the first point; the .cls may come first or last."""
    members = {"x/0.jpg.png": png(0), "x/0.cls": b"owl\n", "1.cls": b"ant", "1.png": png(1)}
    write_tar(tmp_path / "a.tar", {**members, "7/2.png": png(2)})  # a folder's name is no number
    source = ShardSource(tmp_path)
    assert source.classes == ["7", "ant", "owl"]
    assert source.labels.tolist() == [2, 1, 0] and numbers(source) == [0, 1, 2]


def test_class_numbers_take_their_names_from_a_file(tmp_path):
    write_tar(tmp_path / "a.tar", {"0.png": png(0), "0.cls": b"2", "1.png": png(1), "1.cls": b"0"})
    with pytest.raises(DataError, match=r"classes\.txt"):
        ShardSource(tmp_path)
    (tmp_path / "classes.txt").write_text("owl\nbee\nant\n")
    source = ShardSource(tmp_path)
    assert source.classes == ["owl", "bee", "ant"] and source.labels.tolist() == [2, 0]
    (tmp_path / "classes.txt").write_text("owl\nbee")
    with pytest.raises(DataError, match=r"a\.tar/0\.png .*class 2.*classes\.txt"):
        ShardSource(tmp_path)


def test_the_file_of_classes_says_their_order(two_shards):
    (two_shards / "classes.txt").write_text("owl\nant\nbee\ncat\n")
    source = ShardSource(two_shards)
    assert source.classes == ["owl", "ant", "bee", "cat"]
    assert source.labels.tolist() == [0, 2, 0, 1]
    (two_shards / "classes.txt").write_text("owl\nant\n")
    with pytest.raises(DataError, match=r"a\.tar/bee/x/1\.png .*'bee'"):
        ShardSource(two_shards)


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_is_not_left_out_in_silence(tmp_path, kind):
    path = write_tar(tmp_path / "a.tar", {"owl/0.png": png(0)})
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo("owl/1.png")
        member.type, member.linkname = kind, "owl/0.png"
        tar.addfile(member)
    with pytest.raises(DataError, match=r"a\.tar/owl/1\.png .*owl/0\.png"):
        ShardSource(tmp_path)


@pytest.mark.parametrize(
    ("shards", "classes", "text"),
    [
        (None, None, r"shards holds no \.tar files"),
        ({"x/readme": b""}, None, "hold no image"),
        ({"owl/0.png": png(0), "1.png": png(1)}, None, r"a\.tar/1\.png .*1\.cls"),
        ({"owl/0.png": png(0)}, "owl\n\nant\n", r"classes\.txt holds ''"),
        ({"owl/0.png": png(0)}, "owl\nant\nowl\n", r"classes\.txt holds 'owl'"),
    ],
)
def test_shards_and_classes_that_cannot_be(tmp_path, shards, classes, text):
    if shards:
        write_tar(tmp_path / "shards/a.tar", shards)
    if classes:
        (tmp_path / "shards/classes.txt").write_text(classes)
    with pytest.raises(DataError, match=text):
        ShardSource(tmp_path / "shards")


@pytest.fixture
def made(monkeypatch):
    """The names of the shards that are read from front to end."""
    made, make = [], shards._make_index

    def record(shard):
        made.append(shard.name)
        return make(shard)

    monkeypatch.setattr(shards, "_make_index", record)
    return made


def test_the_index_is_made_once(two_shards, made):
    first = ShardSource(two_shards)
    assert made == ["a.tar", "b.tar"]
    second = ShardSource(two_shards)
    assert made == ["a.tar", "b.tar"]
    assert numbers(second) == [0, 1, 2, 3] and second.labels.tolist() == first.labels.tolist()
    files = sorted(path.name for path in two_shards.iterdir())
    assert files == ["a.tar", "a.tar.index", "b.tar", "b.tar.index"]


def test_the_index_is_made_again_for_another_shard(two_shards, made):
    ShardSource(two_shards)
    made.clear()
    state = os.stat(two_shards / "a.tar")
    write_tar(two_shards / "a.tar", {"owl/5.png": png(5), "bee/6.png": png(6), "bee/7": b"7" * 999})
    assert os.stat(two_shards / "a.tar").st_size == state.st_size  # of whole records
    os.utime(two_shards / "a.tar", ns=(0, state.st_mtime_ns + 1))
    assert numbers(ShardSource(two_shards)) == [5, 6, 2, 3]
    assert made == ["a.tar"]
    more = {f"owl/{n}.png": png(n) for n in range(30)}
    write_tar(two_shards / "a.tar", more)
    os.utime(two_shards / "a.tar", ns=(0, state.st_mtime_ns + 1))
    assert len(ShardSource(two_shards)) == 32


@pytest.mark.parametrize(
    "change",
    [
        lambda index: "{",
        lambda index: "[]",
        lambda index: json.dumps({**index, "version": 0}),
        lambda index: json.dumps({k: v for k, v in index.items() if k != "offsets"}),
        lambda index: json.dumps({**index, "offsets": index["offsets"][:1]}),
        lambda index: json.dumps({**index, "offsets": [[1], *index["offsets"][1:]]}),
        lambda index: json.dumps({**index, "offsets": [-1, *index["offsets"][1:]]}),
        lambda index: json.dumps({**index, "sizes": [9.5, *index["sizes"][1:]]}),
        lambda index: json.dumps({**index, "sizes": [10**9, *index["sizes"][1:]]}),
        lambda index: json.dumps({**index, "labels": [None, *index["labels"][1:]]}),
        lambda index: json.dumps({**index, "names": ["\ud800", *index["names"][1:]]}),
    ],
)
def test_a_damaged_index_is_made_again(two_shards, made, change):
    ShardSource(two_shards)
    file = two_shards / "a.tar.index"
    good = file.read_text()
    file.write_text(change(json.loads(good)))
    made.clear()
    assert numbers(ShardSource(two_shards)) == [0, 1, 2, 3]
    assert made == ["a.tar"] and file.read_text() == good


def test_a_folder_that_cannot_be_written_to(two_shards, monkeypatch, made):
    """By a user who is not root; root may write anywhere."""

    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    assert numbers(ShardSource(two_shards)) == [0, 1, 2, 3]
    assert sorted(path.name for path in two_shards.iterdir()) == ["a.tar", "b.tar"]


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def overwrite(path, offset, content):
    whole = bytearray(path.read_bytes())
    whole[offset : offset + len(content)] = content
    path.write_bytes(whole)


# One image has a header and a block of content: 1024 bytes. Two images, then zeros.
@pytest.mark.parametrize(
    "damage",
    [
        lambda p: cut(p, 0),
        lambda p: cut(p, 300),
        lambda p: cut(p, 800),
        lambda p: cut(p, 1024),
        lambda p: cut(p, 1300),
        lambda p: cut(p, 2000),
        lambda p: cut(p, 2048),
        lambda p: overwrite(p, 1024, b"\xff" * 300),
        lambda p: overwrite(p, 2048, b"\xff" * 512),
        lambda p: p.write_bytes(b"this is no tar file" * 100),
    ],
)
def test_a_damaged_shard_is_named(tmp_path, damage):
    path = write_tar(tmp_path / "a.tar", {"owl/0.png": png(0), "owl/1.png": png(1)})
    assert len(png(0)) < 512 and path.read_bytes()[1024:1033] == b"owl/1.png"
    damage(path)
    with pytest.raises(DataError, match=r"a\.tar .*(first member|owl)"):
        ShardSource(tmp_path)
    assert not (tmp_path / "a.tar.index").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: os.truncate(path, 520), "cut off"),
        (Path.unlink, "No such file"),
        (lambda path: overwrite(path, 512, b"broken"), "unknown"),
    ],
    ids=["cut off", "vanished", "broken"],
)
def test_what_happens_to_a_shard_during_a_run_is_named(two_shards, change, words):
    source = ShardSource(two_shards)
    change(two_shards / "b.tar")
    assert source.load(1)[0, 0, 0] == 1
    with pytest.raises(DataError, match=rf"b\.tar/owl/2\.png .*{words}"):
        source.load(2)


@pytest.mark.posix
def test_a_few_files_stay_open_in_each_process(tmp_path, monkeypatch):
    for number in range(5):
        write_tar(tmp_path / f"{number}.tar", {"owl/x.png": png(number)})
    source = ShardSource(tmp_path)
    gc.collect()  # what earlier tests left may hold files, too
    before = len(os.listdir("/dev/fd"))
    assert numbers(source) == numbers(pickle.loads(pickle.dumps(source))) == [0, 1, 2, 3, 4]
    assert shards._opened.cache_info().misses == 5
    monkeypatch.setattr(shards, "_opened", lru_cache(2)(shards._opened.__wrapped__))
    assert numbers(source) == [0, 1, 2, 3, 4]
    assert len(os.listdir("/dev/fd")) == before + 5 + 2
