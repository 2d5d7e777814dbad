#!/usr/bin/env python
"""Write the first images of a COCO-format annotation file, with their annotations, to another file.

A detector that cannot fit twenty images will not learn from a hundred thousand: train and evaluate
on such a file before a long run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="annotation file in COCO's format")
    parser.add_argument("target", type=Path, help="file to write; it must not exist")
    parser.add_argument("--images", type=int, default=20, help="how many (%(default)s)")
    args = parser.parse_args(argv)
    if args.target.exists():
        print(f"error: {args.target} exists already; name another file.", file=sys.stderr)
        return 2
    try:
        content = json.loads(args.source.read_text())
        content["images"] = content["images"][: args.images]
        kept = {image["id"] for image in content["images"]}
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] in kept]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {args.source} is not in COCO format ({error!r}).", file=sys.stderr)
        return 2
    args.target.write_text(json.dumps(content))
    print(f"{len(kept)} images, {len(content['annotations'])} annotations in {args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
