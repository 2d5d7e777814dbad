"""A training script for LazyConfigs, in the manner of Detectron2's; it has not heard of us."""

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyConfig, instantiate
from detectron2.engine import (
    SimpleTrainer,
    default_argument_parser,
    default_setup,
    default_writers,
    hooks,
    launch,
)
from detectron2.engine.defaults import create_ddp_model


def main(args):
    cfg = LazyConfig.load(args.config_file)
    cfg = LazyConfig.apply_overrides(cfg, args.opts)
    default_setup(cfg, args)
    model = instantiate(cfg.model).to(cfg.train.device)
    cfg.optimizer.params.model = model
    optimizer = instantiate(cfg.optimizer)
    loader = instantiate(cfg.dataloader.train)
    trainer = SimpleTrainer(create_ddp_model(model), loader, optimizer)
    checkpointer = DetectionCheckpointer(model, cfg.train.output_dir, trainer=trainer)
    trainer.register_hooks(
        [
            hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
            hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer),
            hooks.PeriodicWriter(default_writers(cfg.train.output_dir), period=1),
        ]
    )
    trainer.train(0, cfg.train.max_iter)


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    launch(main, args.num_gpus, dist_url=args.dist_url, args=(args,))
