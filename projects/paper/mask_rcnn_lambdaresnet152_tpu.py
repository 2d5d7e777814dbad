"""The LazyConfig of mask_rcnn_lambdaresnet152_tpu.yaml; PYTHONPATH=projects/paper is needed."""

from lambda_paper import tpu

from ...configs.mask_rcnn_lambdaresnet152 import dataloader, lr_multiplier, model, optimizer, train  # noqa: F401

fpn, rpn, heads = model.backbone, model.proposal_generator, model.roi_heads
fpn._target_, fpn.image_size = tpu.TPUFPN, "${dataloader.image_size}"
del fpn.top_block
rpn._target_, rpn.smooth_l1_beta, rpn.anchor_generator.offset = tpu.TPURPN, 1 / 9, 0.5
rpn.head.update({"_target_": tpu.TPURPNHead, "norm": "SyncBN", "levels": 5})
heads.box_in_features = heads.mask_in_features = ["p2", "p3", "p4", "p5", "p6"]
for pooler in (heads.box_pooler, heads.mask_pooler):
    pooler.update({"pooler_type": "ROIAlign", "sampling_ratio": 1})
    pooler.scales = [2**-level for level in range(2, 7)]
heads.box_head._target_, heads.box_head.fc_dims = tpu.TPUBoxHead, [1024, 1024]
heads.box_predictor._target_, heads.box_predictor.smooth_l1_beta = tpu.TPUOutputLayers, 1.0
heads.mask_head._target_ = tpu.TPUMaskHead
dataloader.train.dataset.filter_empty = False
optimizer.params.weight_decay_bias = 0.0
train.output_dir = "./output/mask_rcnn_lambdaresnet152_tpu"
