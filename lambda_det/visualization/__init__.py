"""Draw training samples, results beside the ground truth, and what lambda layers compute."""

from lambda_det.visualization.album import Album
from lambda_det.visualization.layers import draw_layers
from lambda_det.visualization.results import draw_results
from lambda_det.visualization.samples import draw_samples

__all__ = ["Album", "draw_layers", "draw_results", "draw_samples"]
