#!/usr/bin/env python
"""Train the networks of one of the paper's ablations on small images, and compare their order.

Each row of a study is trained with the first seed, then each with the next. results.csv in the
study's folder has a line for each training that has ended; it is not trained again. A stopped study
continues where it was.
The paper's figures are of ImageNet at 224x224, so only their order is compared.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import correlation, fmean, stdev

# lambda_det and PyTorch are imported by the trainings alone, so that --help answers at once

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs/quick/cifar10_resnet50.yaml"
ALL = ("MODEL.NAME", "resnet50_lambda_c2345")
LAYER = "MODEL.LAMBDA_RESNET"
LARGER = ("INPUT.SIZE", 64, "INPUT.PADDING", 8)

# for each study and row the paper's top-1, None where it prints none, and the difference from the
# recipe
Study = dict[str, tuple[float | None, tuple[object, ...]]]


def by_name(**figures: float) -> Study:
    """A row for each network."""
    return {name: (top1, ("MODEL.NAME", name)) for name, top1 in figures.items()}


PAIR: Study = {
    "ResNet-50": (84.6, ("MODEL.NAME", "resnet50")),
    "lambda": (
        81.4,
        (*ALL, f"{LAYER}.GLOBAL_CONTEXT", 32, f"{LAYER}.SHARE_POSITIONS", "size"),
    ),
}
STUDIES: dict[str, Study] = {
    # Table 10 has c4 and c5 at 224x224, whose maps are 2x2 and 1x1 here: so all stages, and images
    # of twice the size, with 16x16 positions in c2. 31x31 is the whole map then. No positions at
    # all are from Table 9.
    "scope": {
        "none": (68.8, (*ALL, *LARGER, f"{LAYER}.POSITION", False)),
        **{
            f"{side}x{side}": (top1, (*ALL, *LARGER, f"{LAYER}.SCOPE", side))
            for side, top1 in ((3, 77.6), (7, 78.2), (15, 78.5), (31, 78.5))
        },
    },
    # Table 11
    "normalisation": {
        "softmax on keys": (78.4, ALL),
        "softmax on keys and queries": (78.1, (*ALL, f"{LAYER}.QUERY_SOFTMAX", True)),
        "L2 on keys": (78.0, (*ALL, f"{LAYER}.KEY_NORM", "l2")),
        "nothing on keys": (70.0, (*ALL, f"{LAYER}.KEY_NORM", "none")),
        "no batch norm on queries and values": (76.2, (*ALL, f"{LAYER}.QV_NORM", False)),
    },
    # Table 12
    "placement": by_name(
        resnet50=76.9,
        resnet50_lambda_c2=77.3,
        resnet50_lambda_c23=77.2,
        resnet50_lambda_c234=77.8,
        resnet50_lambda_c2345=78.4,
        resnet50_lambda_c345=78.3,
        resnet50_lambda_c45=78.3,
        resnet50_lambda_c5=77.3,
    ),
    # Table 13 has them with 101 and 152 layers, and the figures are those of 101. On small images
    # 50 layers suffice.
    "hybrid": by_name(
        resnet_rs50=81.3, resnet_rs50_se=81.8, lambda_resnet50=82.3, lambda_resnet50_c4=82.6
    ),
    # The CIFAR-10 reproduction
    "pair": PAIR,
    # with each difference of its public code alone: lambda_paper/reproduction.py
    "reproduction": PAIR
    | {
        row: (None, ("MODEL.NAME", f"resnet50_lambda_{kind}"))
        for row, kind in {
            "an embedding for each pair": "pairs",
            "values' norm over positions": "values",
            "queries' norm over heads": "queries",
            "reshape in place of a transpose": "reshape",
            "all four": "delft",
        }.items()
    },
    # Its Section 9.3: rates of the first epoch, a fifth of the peak
    "learning_rate": {
        f"{kind} at {rate:g}": (None, (*pairs, "SOLVER.BASE_LR", 5 * rate))
        for kind, (_, pairs) in PAIR.items()
        for rate in (0.01, 0.005, 0.001, 0.0005, 0.0001)
    },
}
METRICS = {"raw": "val/raw_top1", "averaged": "val/ema_top1"}  # by what is compared
Evaluations = dict[int, float]  # top-1 in percent by step


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=STUDIES)
    text = "CIFAR-10 or other images as folders of classes, with train and test in it"
    parser.add_argument("--data", type=Path, required=True, help=text)
    parser.add_argument("--output", type=Path, default=Path("output/study"), help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 (%(default)s)")
    text = "of a training (%(default)s): its keys are the size of the study"
    parser.add_argument("--config-file", type=Path, default=RECIPE, help=text)
    text = "in place of resnet50, such as resnet14_slim (%(default)s)"
    parser.add_argument("--network", default="resnet50", help=text)
    text = "compare averaged weights (SOLVER.EMA_DECAY) in place of raw ones"
    parser.add_argument("--averaged", action="store_true", help=text)
    text = "of the study, parted by commas; all if left out"
    parser.add_argument("--rows", type=lambda text: text.split(","), help=text)
    text = "KEY VALUE pairs for every training, such as SOLVER.EPOCHS 90 DATA.FRACTION 1.0"
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help=text)
    args = parser.parse_intermixed_args(argv)
    if args.study == "hybrid" and args.network != "resnet50":
        parser.error("--network: the networks of hybrid are no forms of resnet50")
    if not args.config_file.is_file():
        parser.error(f"--config-file: there is no file {args.config_file}")
    unknown = [row for row in args.rows or () if row not in STUDIES[args.study]]
    if unknown:
        rows = ", ".join(map(repr, STUDIES[args.study]))
        parser.error(f"--rows: {args.study} has no {unknown[0]!r}; it has {rows}")
    return args


def words_of(args: argparse.Namespace, pairs: tuple[object, ...], seed: int) -> list[str]:
    """The configuration of a training, without its folder."""
    where = ("DATA.TRAIN", args.data / "train", "DATA.VAL", args.data / "test")
    pairs = tuple(str(word).replace("resnet50", args.network) for word in pairs)
    words = ("--config-file", args.config_file, *where, *pairs, "SEED", seed, *args.opts)
    return list(map(str, words))


def train(words: list[str], folder: Path) -> dict[str, str]:
    """Train a network, or finish its training; "STEP:TOP1 STEP:TOP1 ..." by METRICS."""
    command = [sys.executable, str(ROOT / "tools/train_imagenet.py"), "--resume", *words]
    # The reproduction's networks are in the package beside this file
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "DETECTRON2_ENV_MODULE": "lambda_paper.reproduction"}
    subprocess.run([*command, "OUTPUT_DIR", str(folder)], check=True, env=os.environ | own)
    lines = (folder / "metrics.json").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return {
        name: " ".join(f"{s['iteration'] + 1}:{s[metric]:.3f}" for s in steps if metric in s)
        for name, metric in METRICS.items()
    }


def check_size(args: argparse.Namespace, folder: Path) -> str:
    """Record the size of a study in its folder; return an error if another one is recorded."""
    from fvcore.common.config import CfgNode

    recipe = CfgNode.load_yaml_with_base(str(args.config_file))
    size = json.dumps({"recipe": recipe, "network": args.network, "opts": args.opts}, indent=1)
    path = folder / "size.json"
    if path.exists() and path.read_text(encoding="utf-8") != size:
        return (
            f"{folder} holds trainings of another --network, --config-file or other keys, see "
            f"{path}; name another folder with --output."
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(size, encoding="utf-8")
    return ""


def table(study: Study, found: dict[str, list[Evaluations]]) -> str:
    """A row for each network with its mean and the standard deviation of its seeds, and how far
    the order is the paper's.
    """
    seeds = min(map(len, found.values()))
    step = max(set.intersection(*(set(one) for row in found.values() for one in row)))
    rows = {name: [one[step] for one in row[:seeds]] for name, row in found.items()}
    lines = [f"| | top-1 after {step} steps: seeds | mean, SD | paper |", "|---|---|---:|---:|"]
    for name, values in rows.items():
        paper = "" if study[name][0] is None else study[name][0]
        spread = f", {stdev(values):.1f}" if seeds > 1 else ""
        every = ", ".join(f"{value:.1f}" for value in values)
        lines.append(f"| {name} | {every} | {fmean(values):.1f}{spread} | {paper} |")
    published = {name: study[name][0] for name in rows if study[name][0] is not None}
    order = rank_correlation([*published.values()], [fmean(rows[name]) for name in published])
    if order is not None:
        lines.append(f"\nRank correlation with the paper (Spearman): {order:.2f}")
    return "\n".join(lines)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's; None where all values of one are equal."""
    if min(len(set(one)), len(set(other))) < 2:
        return None
    return correlation(ranks(one), ranks(other))


def ranks(values: Sequence[float]) -> list[float]:
    """Of each value the number of lower ones, and half of that of equal ones."""
    return [
        sum(v < value for v in values) + sum(v == value for v in values) / 2 for value in values
    ]


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    study = {name: STUDIES[args.study][name] for name in args.rows or STUDIES[args.study]}
    folder = args.output / args.study
    if fault := check_size(args, folder):
        print(f"error: {fault}", file=sys.stderr)
        return 2
    results = folder / "results.csv"
    ended: list[dict[str, str]] = []
    if results.exists():
        with results.open(encoding="utf-8", newline="") as file:
            ended = list(csv.DictReader(file))
    found: dict[str, list[Evaluations]] = {}
    try:
        for seed in range(args.seeds):
            for name, (_, pairs) in study.items():
                words = words_of(args, pairs, seed)
                key = shlex.join(words)
                line = next((line for line in ended if line["configuration"] == key), None)
                if line is None:
                    run = f"{name.replace(' ', '_')}_{seed}"
                    line = {"row": name, "seed": str(seed), "configuration": key}
                    line |= train(words, folder / run)
                    with results.open("a", encoding="utf-8", newline="") as file:
                        writer = csv.DictWriter(file, list(ended[0] if ended else line))
                        if not file.tell():
                            writer.writeheader()
                        writer.writerow(line)
                    ended.append(line)
                by_step = line["averaged" if args.averaged else "raw"].split()
                if not by_step:
                    text = "has no averaged weights; leave it out, or set SOLVER.EMA_DECAY above 0"
                    print(f"error: --averaged: {name} {text}.", file=sys.stderr)
                    return 2
                pairs = (word.split(":") for word in by_step)
                found.setdefault(name, []).append({int(s): float(top1) for s, top1 in pairs})
    except subprocess.CalledProcessError as error:  # it has printed the reason
        return error.returncode
    print(table(study, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
