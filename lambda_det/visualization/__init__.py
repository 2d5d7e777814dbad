"""Pictures of training samples, of results beside the truth, and of what lambda layers do."""

from lambda_det.visualization.album import Album
from lambda_det.visualization.layers import draw_layers
from lambda_det.visualization.results import draw_results
from lambda_det.visualization.samples import draw_samples

__all__ = ["Album", "draw_layers", "draw_results", "draw_samples"]
