#!/usr/bin/env python
"""Pack a folder of class folders into shuffled tar files, which a network disk reads faster."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tarfile
import time
from pathlib import Path

# lambda_det is imported in functions, so that --help answers at once

EXAMPLES = """examples:
  python datasets/make_shards.py imagenet/train shards/train
  python datasets/make_shards.py imagenet/val shards/val --images-per-shard 2000

Train on them with DATA.FORMAT shards DATA.TRAIN shards/train DATA.VAL shards/val. The files are
copied as they are, in an order that the seed decides.
"""


def make(folder: Path, out: Path, images_per_shard: int, seed: int) -> None:
    import numpy as np

    from lambda_det.classification.data import FolderSource, write_list
    from lambda_det.errors import ConfigError, DataError

    if images_per_shard < 1:
        raise ConfigError(f"--images-per-shard is {images_per_shard}; give 1 or more.")
    if seed < 0:
        raise ConfigError(f"--seed is {seed}; give 0 or more.")
    if out.exists():
        raise DataError(f"{out} exists already; name another folder.")
    source = FolderSource(folder)
    # The folder is renamed when it is complete: half of the shards would look like all of them.
    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise DataError(
            f"{partial} is being written by another process, or was left by one; remove it."
        ) from None
    except OSError as error:
        raise DataError(f"{out} cannot be made: {error}") from error
    try:
        write_list(partial / "classes.txt", source.classes)
        order = np.random.default_rng(seed).permutation(len(source))
        shards = -(-len(order) // images_per_shard)
        began = time.monotonic()
        for number in range(shards):
            indices = order[number * images_per_shard : (number + 1) * images_per_shard]
            write_shard(partial / f"{number:06d}.tar", folder, [source.name(i) for i in indices])
            seconds = time.monotonic() - began
            print(f"shard {number + 1} of {shards}, {seconds:.0f} s", flush=True)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial)
        raise
    print(f"{len(source)} images of {len(source.classes)} classes in {out}")


def write_shard(path: Path, folder: Path, names: list[str]) -> None:
    from lambda_det.errors import DataError

    try:
        with tarfile.open(path, "w") as tar:
            for name in names:
                # No owner and no date, so that the same images give the same bytes.
                member = tarfile.TarInfo(name)
                with open(folder / name, "rb") as file:
                    member.size = os.fstat(file.fileno()).st_size
                    tar.addfile(member, file)
    except OSError as error:
        raise DataError(f"The shard {path} cannot be written: {error}") from error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="holds one folder of images for each class")
    parser.add_argument("out", type=Path, help="folder for the shards; it must not exist")
    parser.add_argument(
        "--images-per-shard",
        type=int,
        default=5000,
        help="(%(default)s, half a gigabyte of ImageNet)",
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed, another order (0)")
    arguments = parser.parse_args(argv)
    from lambda_det.errors import exit_status

    return exit_status(lambda: make(**vars(arguments)))


if __name__ == "__main__":
    sys.exit(main())
