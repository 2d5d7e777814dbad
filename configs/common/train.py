"""Settings of a run: those of Detectron2's train.py, and those that our trainer adds.

The comment above a setting is its sentence in docs/keys.md, which .ci/keys.py writes.
"""

train = {
    # The folder of the run
    "output_dir": "./output",
    # Weights to start from; "" for none
    "init_checkpoint": "",
    # Number of optimiser steps
    "max_iter": 130000,
    # Mixed precision. "auto" is bfloat16 where the device has instructions for it and otherwise
    # float32; "float16" has loss scaling. Detectron2's own tool always uses float16
    "amp": {"enabled": True, "dtype": "auto"},
    # Arguments of DistributedDataParallel, and whether gradients are sent in float16
    "ddp": {
        "broadcast_buffers": False,
        "find_unused_parameters": False,
        "fp16_compression": False,
    },
    # Steps between checkpoints, which are not scaled to the workers, and how many are kept
    "checkpointer": {"period": 1000, "max_to_keep": 5},
    # Steps between evaluations; 0 for one at the end
    "eval_period": 10000,
    # The result that selects model_best.pth; "" for the first available of segm/AP, bbox/AP, ...
    "best_metric": "",
    # Stop after this number of evaluations without a better one; 0 trains to the end
    "patience": 0,
    # Steps between lines of the log
    "log_period": 20,
    # Where the numbers go besides metrics.json, by the names of the key EVENT_WRITERS
    "event_writers": ["tensorboard"],
    # "cuda" or "cpu"
    "device": "cuda",
    # Seed of the order of images, of augmentation, initialisation and dropout; below 0 for a random
    # one
    "seed": -1,
    # Let cuDNN choose its algorithms by measurement
    "cudnn_benchmark": False,
    # The precision of float32 products on a GPU: "highest", "high" or "medium"; "" leaves PyTorch's
    "float32_precision": "",
    # Keep the maps channels last in memory; files of weights are the same either way
    "channels_last": True,
    # Compile the backbone for the training by torch.compile: minutes at the start, faster steps
    # after them. All images must have one size, and the backbone no hooks
    "compile": False,
    # The precision of evaluation and prediction: "float32" or "bfloat16"
    "test_precision": "float32",
    # Exponential moving average of the weights, which is evaluated beside the raw weights
    "model_ema": {"enabled": False, "decay": 0.999},
    # Number of batches on which the statistics of batch norms are estimated anew before each
    # evaluation; 0 for none
    "precise_bn_batches": 0,
    # Number of workers for which total_batch_size, lr, max_iter and eval_period are given; the
    # paper has 128 with 2 images each. On fewer workers Detectron2's rule scales these numbers,
    # except those of the command line. 0 disables the scaling
    "reference_world_size": 128,
    # Batches of one optimiser step, which count as workers: 8 GPUs x 16 batches is the paper's run
    "accumulate_gradients": 1,
    # Clip the norm over all gradients, as detrex does
    "clip_grad": {"enabled": False, "params": {"max_norm": 1.0, "norm_type": 2.0}},
}
