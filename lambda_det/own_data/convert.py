"""``lambda-det convert``: labels of one tool in the format of another."""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

from lambda_det.detection.data import read_coco
from lambda_det.detection.data.coco import coco_content
from lambda_det.detection.data.label_files import write_labels
from lambda_det.detection.data.outputs import mark_output
from lambda_det.detection.data.report import DOUBTFUL, REPAIRED, UNUSABLE
from lambda_det.detection.data.written_formats import WRITTEN
from lambda_det.errors import DataError, printable
from lambda_det.files import refuse_existing
from lambda_det.own_data.labels.findings import NO_IMAGE
from lambda_det.own_data.layouts import as_coco


def convert(arguments: argparse.Namespace) -> int:
    """Write labels in another format, print the file or folder, and return the exit status.

    It is 1 where labels without an image are left out.

    Raises:
        ConfigError: what is to be written is there already.
        DataError: the labels cannot be read, or are refused.
    """
    output, labels = Path(arguments.output), arguments.labels
    is_folder = bool(WRITTEN[arguments.format].ending)
    refuse_existing(output, arguments.overwrite, folder=is_folder)
    with tempfile.TemporaryDirectory(prefix="lambda_det_") as folder:
        ((json_file, images),) = as_coco((labels, arguments.images), folder=Path(folder))
        truth = read_coco(json_file, images)
        if refusal := truth.report.refusal():
            raise DataError(refusal)
        for kind, finding in truth.report.of(UNUSABLE, REPAIRED, DOUBTFUL).items():
            logging.warning(f"{finding.count} x {kind.text}; the first: {finding.first[0]}")
        if is_folder:
            mark_output(output, labels)
        write_labels(coco_content(truth), arguments.format, output, images)
    print(printable(output))
    is_short = NO_IMAGE in truth.report.findings
    if is_short:
        logging.error(f"{output} lacks the labels whose images are not there or cannot be read")
    return int(is_short)
