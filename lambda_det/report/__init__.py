"""Draw training samples, results beside the ground truth, and the page of a run."""

from lambda_det.report.album import Album
from lambda_det.report.results import draw_results
from lambda_det.report.samples import draw_samples

__all__ = ["Album", "draw_results", "draw_samples"]
