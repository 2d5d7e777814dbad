"""``lambda-det check``: a data set before a long run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from lambda_det.detection.data.annotations import check_coco
from lambda_det.detection.data.checks import unlearnt_classes
from lambda_det.detection.data.classes import refuse_others
from lambda_det.detection.data.copies import REMEDY, shared_copies
from lambda_det.detection.data.registration import registered_files
from lambda_det.detection.data.report import (
    DOUBTFUL,
    NOTED,
    REFUSED,
    REPAIRED,
    UNUSABLE,
    Report,
)
from lambda_det.errors import DataError, counted, listed, printable, printable_text
from lambda_det.own_data import fit
from lambda_det.own_data.held_out import films
from lambda_det.own_data.labels.conversion import as_single_class
from lambda_det.own_data.layouts import as_coco, find_parts

_HEADINGS = {
    REFUSED: "Problems that training and evaluation refuse",
    UNUSABLE: "Left out or used in part; more than 1 % of them are refused",
    REPAIRED: "Repaired: used as described",
    DOUBTFUL: "To be looked at: used as it is, unless it says otherwise",
    NOTED: "For information",
}


def print_report(report: Report) -> None:
    print(f"{printable(report.json_file)}\nimages in {printable(report.image_root)}\n")
    print(f"{report.images:9,} images")
    print(f"{report.annotations:9,} annotations, {report.crowds:,} of them crowds")
    print(f"{report.usable:9,} can be trained on, at most {report.most:,} in an image")
    print(f"{report.masks:9,} with a mask")
    print(f"{len(report.categories):9,} in the list of categories:")
    for number, count in report.counts.items():
        print(f"{count:9,} {printable(report.categories[number])}")
    for severity, heading in _HEADINGS.items():
        if findings := report.of(severity):
            print(f"\n{heading}:")
        for kind, finding in findings.items():
            print(f"{finding.count:9,} x {kind.text}")
            for case in finding.first:
                print(f"{'':10}- {case}")
    if report.refusal():
        print("\nTraining and evaluation refuse these labels as they are.")
    print()


def print_other_classes(report: Report, train: Report) -> bool:
    """Print what training says about the classes of another part; whether it refuses them."""
    try:
        refuse_others("classes", report.json_file, report.classes, train.json_file, train.classes)
        unlearnt = unlearnt_classes(report, [train], train.json_file)
    except DataError as error:
        print(f"{printable_text(str(error))}\n")
        return True
    if unlearnt:
        print(
            f"{printable(report.json_file)}: {counted(len(unlearnt), 'class')} without an object "
            f"to train on, so that AP counts 0 for {listed(unlearnt, 5)}\n"
        )
    return False


def print_copies(parts: Mapping[str, list[str]]) -> bool:
    """Print which images two parts share; return whether there are any."""
    pairs, kinds = shared_copies(parts)
    if pairs:
        print(f"{counted(len(pairs), 'image')} in two parts, {kinds}:")
        print(f"{listed(f'{copy} as {image}' for copy, image in pairs.items())}\n{REMEDY}\n")
    return bool(pairs)


def check_data(arguments: argparse.Namespace, folder: Path) -> int:
    """Print what is wrong with a data set, and return the exit status.

    Args:
        arguments: of the command line.
        folder: for labels that are converted, which is temporary.

    Raises:
        DataError: the data cannot be read at all.
    """
    unread = []
    if arguments.dataset:
        parts = [registered_files(arguments.dataset)]
    elif arguments.images:
        parts = as_coco((arguments.json, arguments.images), folder=folder)
    else:
        kind, found, unread = find_parts(arguments.json, folder=folder)
        print(f"{printable(arguments.json)}: labels of {kind}\n")
        parts = [(part.labels, part.images) for part in found.values()]
    if arguments.single_class:
        parts = [(as_single_class(file, folder), images) for file, images in parts]
    files = "none" if arguments.no_images else "all"
    reports = [check_coco(*part, files=files, progress=True) for part in parts]
    status = int(bool(unread))
    first, *others = reports
    for report in others:  # of labels that were read together, whose findings the first one says
        report.findings = {
            kind: finding
            for kind, finding in report.findings.items()
            if finding != first.findings.get(kind)
        }
    for report in reports:
        print_report(report)
        if not report.usable:
            print("No object can be trained on. Are the labels where their format has them?\n")
        status |= bool(report.of(REFUSED, UNUSABLE, DOUBTFUL)) or not report.usable
    for report in reports[1:]:
        # whose classes a fault may have hidden
        status |= not reports[0].refusal() and print_other_classes(report, reports[0])
    if not arguments.no_images:
        status |= print_copies({report.json_file: report.paths for report in reports})
    for _, _, why in fit.background(reports[0]):
        print(f"lambda-det train: {why}.\n")
    # of parts that are given nothing is held out
    if not (arguments.no_images or reports[1:]) and (hint := films(reports[0].paths)):
        print(f"{printable(hint)}.\n")
    if status:
        print("Problems were found.")
    elif any(report.of(REPAIRED) for report in reports):
        print("Nothing has to be corrected; what is repaired is listed above.")
    else:
        print("No problem was found.")
    return status
