"""Data sets, their checks, augmentation and loading."""

from lambda_det.first_use import names_of

__getattr__ = names_of(
    __name__,
    {
        "check_coco": "detection.data.annotations",
        "check_datasets": "detection.data.checks",
        "check_detector_data": "detection.data.checks",
        "check_pixels": "detection.data.checks",
        "check_registered": "detection.data.checks",
        "GroundTruth": "detection.data.coco",
        "read_coco": "detection.data.coco",
        "build_augmentation": "detection.data.jitter",
        "large_scale_jitter": "detection.data.jitter",
        "TrainLoader": "detection.data.loader",
        "build_test_loader": "detection.data.loader",
        "build_train_loader": "detection.data.loader",
        "tolerant_test_loader": "detection.data.loader",
        "tolerant_train_loader": "detection.data.loader",
        "TolerantMapper": "detection.data.mapper",
        "register_coco_files": "detection.data.registration",
        "register_json_datasets": "detection.data.registration",
        "Finding": "detection.data.report",
        "Kind": "detection.data.report",
        "Report": "detection.data.report",
        "register_shapes": "detection.data.shapes",
    },
)
