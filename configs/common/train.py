"""Settings of a run: those of Detectron2's train.py, and those that our trainer adds."""

train = {
    "output_dir": "./output",
    "init_checkpoint": "",
    "max_iter": 130000,
    # "auto" is bfloat16 where the device has instructions for it and otherwise float32; "float16"
    # has loss scaling. Detectron2's own tool always uses float16.
    "amp": {"enabled": True, "dtype": "auto"},
    "ddp": {
        "broadcast_buffers": False,
        "find_unused_parameters": False,
        "fp16_compression": False,
    },
    "checkpointer": {"period": 1000, "max_to_keep": 5},  # the period is not scaled to the workers
    "eval_period": 10000,
    # Metric that selects model_best.pth; "" takes the first available of segm/AP, bbox/AP, ...
    "best_metric": "",
    # Stop after this number of evaluations without a better one; 0: train to the end
    "patience": 0,
    "log_period": 20,
    # Where the numbers go besides metrics.json; EVENT_WRITERS in lambda_det/config.py has the names
    "event_writers": ["tensorboard"],
    "device": "cuda",
    "seed": -1,
    "cudnn_benchmark": False,
    "float32_precision": "",
    # Layout in memory of the maps; files of weights are the same either way
    "channels_last": True,
    # The precision of evaluation and prediction: "float32" or "bfloat16"
    "test_precision": "float32",
    # Exponential moving average of the weights, which is evaluated beside the raw weights
    "model_ema": {"enabled": False, "decay": 0.999},
    # Estimate batch norm's statistics anew before each evaluation, on this number of batches
    "precise_bn_batches": 0,
    # total_batch_size, lr, max_iter and eval_period are for the paper's 128 workers with 2 images
    # each. On fewer workers Detectron2's rule scales them, except those of the command line.
    # accumulate_gradients counts as workers: 8 GPUs x 16 batches is the paper's run. 0 disables the
    # scaling.
    "reference_world_size": 128,
    "accumulate_gradients": 1,
    # Clip the norm over all gradients, as detrex does
    "clip_grad": {"enabled": False, "params": {"max_norm": 1.0, "norm_type": 2.0}},
}
