"""A training loop in several processes on the CPU; it has not heard of us."""

import helper  # lies beside this file
import torch
from detectron2.config import get_cfg
from detectron2.data import build_detection_train_loader
from detectron2.engine import default_argument_parser, launch
from detectron2.modeling import build_model
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch.nn.parallel import DistributedDataParallel


class Doubled(torch.utils.data.Dataset):
    """A class of the script, which a data worker has to find."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return helper.double(index) + (0 if "LAMBDA_RESNET" in get_cfg().MODEL else 100)


def main(args):
    cfg = get_cfg()
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    model = build_model(cfg)
    if comm.get_world_size() > 1:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = iter(build_detection_train_loader(cfg))
    with EventStorage():
        loss = sum(model(next(batches)).values())
        loss.backward()
        optimizer.step()
    weights = sum(p.detach().double().sum() for p in model.parameters()).item()
    everywhere = comm.all_gather(weights)
    if comm.is_main_process():
        print("weights", *everywhere)
        workers = cfg.DATALOADER.NUM_WORKERS
        loader = torch.utils.data.DataLoader(
            Doubled(),
            num_workers=workers,
            multiprocessing_context="spawn" if workers else None,
        )
        print("doubled", *(int(x) for x in loader))
    if torch.distributed.is_initialized():
        # PyTorch may abort the end of a process that leaves its group as it is
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    launch(main, args.num_gpus, dist_url="auto", args=(args,))
