"""Results beside the ground truth, and the page of a run."""

from lambda_det.report.results import Pictures, draw_results

__all__ = ["Pictures", "draw_results"]
