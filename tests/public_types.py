"""The types of the public names, as a user's type checker sees them: mypy tests/public_types.py.

Nothing here is run. A name that lost its type would be Any, which assert_type does not take.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import assert_type

    import torch
    from PIL.Image import Image
    from torch import nn

    import lambda_det

    def layer(maps: torch.Tensor, mask: torch.Tensor) -> None:
        made = lambda_det.LambdaLayer(64, query_depth=16, heads=4, scope=23, implementation="auto")
        assert_type(made, lambda_det.LambdaLayer)
        assert_type(made.forward(maps, mask), torch.Tensor)
        assert_type(lambda_det.convert_lambda_layers(made), nn.Module)

    def networks(maps: torch.Tensor) -> None:
        assert_type(lambda_det.list_models(), list[str])
        name = lambda_det.list_models()[0]
        classifier = lambda_det.create_classifier(name, num_classes=10, heads=8)
        assert isinstance(classifier, lambda_det.LambdaResNet)
        weights = Path("backbone.pth")
        lambda_det.create_backbone(name, out_features=["res4", "res5"], weights=weights)
        lambda_det.create_backbone(3)  # type: ignore[arg-type]

    def runs(data: Path) -> None:
        run = lambda_det.train(data, output="output/mine", epochs=3, batch=8)
        assert_type(run, lambda_det.Run)
        assert_type(run.metrics, list[dict[str, float]])
        assert_type(run.evaluations, list[dict[str, float]])
        assert_type(run.report(), Path)
        assert_type(run.plot_worst(2), Image)
        assert_type(run.evaluate("val").to_dict(), dict[str, float])
        assert_type(lambda_det.check(data), bool)
        lambda_det.train(data)  # type: ignore[call-arg]

    def configurations() -> None:
        lambda_det.get_config("mask_rcnn_lambdaresnet50.yaml")
        lambda_det.detectron2_config("common/optim.py")
        lambda_det.get_config(3)  # type: ignore[arg-type]
