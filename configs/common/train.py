"""The settings of a run: Detectron2's, and those of tools/lazyconfig_train_net.py."""

train = {
    "output_dir": "./output",
    "init_checkpoint": "",
    "max_iter": 130000,
    # "bfloat16", or "float16" with loss scaling; Detectron2's own tool takes the latter in any case
    "amp": {"enabled": True, "dtype": "bfloat16"},
    "ddp": {
        "broadcast_buffers": False,
        "find_unused_parameters": False,
        "fp16_compression": False,
    },
    "checkpointer": {"period": 1000, "max_to_keep": 5},  # the period is not scaled
    "eval_period": 10000,
    # Whose best checkpoint is kept as model_best.pth; "" for the first of segm/AP, bbox/AP, ...
    "best_metric": "",
    "log_period": 20,
    "device": "cuda",
    "seed": -1,
    "cudnn_benchmark": False,
    # Estimate batch norm's statistics afresh before each evaluation, on so many batches
    "precise_bn": {"enabled": False, "num_iter": 200},
    # total_batch_size, lr, max_iter and eval_period are for 128 workers of 2 images. On fewer
    # workers they scale by Detectron2's rule, unless accumulate_gradients makes up for them: 8 GPUs
    # with 16 batches each are the paper's run. 0 means that nothing is scaled.
    "reference_world_size": 128,
    "accumulate_gradients": 1,
    # "value" clips each number of a gradient, "norm" the gradient of each parameter (as in
    # Detectron2), "full_model" the norm of all gradients together
    "clip_gradients": {
        "enabled": False,
        "clip_type": "full_model",
        "clip_value": 1.0,
        "norm_type": 2.0,
    },
}
