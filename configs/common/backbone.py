"""LambdaResNet as a node for any LazyConfig: ``model.backbone.bottom_up = lambda_resnet``."""

from detectron2.config import LazyCall as L

from lambda_det import create_backbone

# ``name`` is one of lambda_det.list_models(). Any argument of LambdaResNet or of its lambda layers
# can be added, for example ``lambda_resnet.scope = 15``.
lambda_resnet = L(create_backbone)(
    name="lambda_resnet50",
    out_features=["res2", "res3", "res4", "res5"],
    norm="SyncBN",
    freeze_at=0,  # from scratch
)
