"""Trained detectors on images and videos: results as arrays, drawings and annotation files."""

from lambda_det.detection.prediction.predictor import Prediction, Predictor

__all__ = ["Prediction", "Predictor"]
