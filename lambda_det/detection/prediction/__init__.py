"""Trained detectors on images and videos: results as arrays, drawings and annotation files."""

from lambda_det.first_use import names_of

DEFAULT_THRESHOLD = 0.5  # of the scores, where an evaluation has recorded none

__getattr__ = names_of(
    __name__,
    {
        "Prediction": "detection.prediction.predictor",
        "Predictor": "detection.prediction.predictor",
    },
)
