"""Trained detectors on images and videos: results as arrays, pictures and annotation files."""

from lambda_det.prediction.predictor import Prediction, Predictor

__all__ = ["Prediction", "Predictor"]
