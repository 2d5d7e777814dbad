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
}
