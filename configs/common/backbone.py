"""LambdaResNet as a node: `model.backbone.bottom_up = lambda_resnet` in any LazyConfig."""

from detectron2.config import LazyCall as L

from lambda_det import create_backbone

# `name` is one of lambda_det.list_models(). Any other argument of LambdaResNet, or of its lambda
# layers, may be added: lambda_resnet.scope = 15.
lambda_resnet = L(create_backbone)(
    name="lambda_resnet50",
    out_features=["res2", "res3", "res4", "res5"],
    norm="SyncBN",
    freeze_at=0,  # nothing is pretrained
)
