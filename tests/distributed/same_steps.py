"""What test_processes.py has each process do: the same step, however it is shared out."""

import copy

import torch
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from detectron2.structures import BitMasks, Boxes, Instances
from detectron2.utils import comm
from torch import Tensor, nn

from lambda_det.config import add_lambda_config
from lambda_det.distributed.connection import distribute
from lambda_det.modeling.norm import SyncBatchNorm2d
from lambda_det.training.precision import Precision
from lambda_det.training.statistics import estimate_statistics
from tests.reliability.runs import DETECTOR
from tests.training.toy import Steps

STEPS = 4
IMAGES = 4  # of a step


def _image(index: int) -> dict:
    """Noise with two boxes of brighter noise in it, of odd sizes."""
    generator = torch.Generator().manual_seed(index)
    height, width = 64 + 8 * (index % 3), 72
    image = torch.randint(0, 200, (3, height, width), generator=generator)
    masks, boxes = torch.zeros(2, height, width, dtype=torch.bool), []
    for number in range(2):
        x, y = torch.randint(0, 30, (2,), generator=generator).tolist()
        side = 20 + 3 * ((index + number) % 5)
        masks[number, y : y + side, x : x + side] = True
        image[number, y : y + side, x : x + side] += 55
        boxes.append([x, y, x + side, y + side])
    instances = Instances((height, width))
    instances.gt_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32))
    instances.gt_classes = torch.tensor([index % 3, (index + 1) % 3])
    instances.gt_masks = BitMasks(masks)
    return {"image": image.to(torch.uint8), "instances": instances}


def _mask_rcnn() -> nn.Module:
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.merge_from_other_cfg(type(cfg).load_cfg(DETECTOR))
    # Nothing that is random, or a norm of one process's images
    cfg.MODEL.LAMBDA_RESNET.NORM, cfg.MODEL.LAMBDA_RESNET.STOCHASTIC_DEPTH = "LN", 0.0
    # Not 1: with it one sampled box is a tie that an Intel processor with AMX decides by rounding
    torch.manual_seed(2)
    return build_model(cfg)


def detection() -> dict:
    """A whole Mask R-CNN: mean losses of some steps, and the weights after them."""
    model, world_size = _mask_rcnn(), comm.get_world_size()
    steps = Steps(
        distribute(model, "cpu"),
        # Batch i of a step is number i * processes + rank
        [[_image(index)] for index in range(comm.get_rank(), STEPS * IMAGES, world_size)],
        torch.optim.SGD(model.parameters(), 0.005, momentum=0.9),
        accumulate=IMAGES // world_size,
        seed=7,
    )
    losses = []
    for step in range(STEPS):
        latest = steps.take(range(step, step + 1)).latest()  # the mean, in the first process
        own = {name: value for name, (value, _) in latest.items() if name.startswith("loss")}
        losses.append(comm.all_gather(own)[0])
    return {"losses": losses, "weights": dict(model.named_parameters())}


# Images of each of four processes; two processes take two shares each
SHARES = [(2, 2, 2, 2), (1, 3, 0, 2), (0, 0, 0, 5), (1, 0, 0, 1), (0, 0, 0, 0)]
CHANNELS = 5


def values(case: int, share: int) -> tuple[Tensor, Tensor]:
    """Input and gradient of the output of one share, [N, C, H, W], far from mean 0."""
    generator = torch.Generator().manual_seed(100 * case + share)
    shape = (SHARES[case][share], CHANNELS, 3, 5)
    x, grad = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return 3 * x + 10 * share, grad


# By the dtype of maps: that of the norm's parameters, which is float32 under autocast, and momentum
NORMS = {"float64": (torch.float64, 0.1), "bfloat16": (torch.float32, None)}


def norm_parameters(kind: str = "float64") -> nn.BatchNorm2d:
    dtype, momentum = NORMS[kind]
    norm = SyncBatchNorm2d(CHANNELS, momentum=momentum).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, CHANNELS))
        norm.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    return norm


def norms(kind: str) -> list[dict]:
    """Each case through one norm, which keeps its running statistics from one to the next."""
    size, rank = comm.get_world_size(), comm.get_rank()
    norm, results = norm_parameters(kind), []
    for case in range(len(SHARES)):
        mine = [values(case, share) for share in range(rank * 4 // size, (rank + 1) * 4 // size)]
        x, grad = (torch.cat(parts).to(getattr(torch, kind)) for parts in zip(*mine, strict=True))
        x.requires_grad_()
        norm.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bfloat16"):
            y = norm(x)
        y.backward(grad)
        state = copy.deepcopy(norm.state_dict())
        grads = [norm.weight.grad.clone(), norm.bias.grad.clone()]
        results.append({"y": y.detach(), "x_grad": x.grad, "grads": grads, "state": state})
    if rank == 0:  # in evaluation no process waits for another
        copy.deepcopy(norm).eval()(values(0, 0)[0].to(norm.weight.dtype))
    return results


def statistics() -> dict[str, dict[str, Tensor]]:
    """Running statistics estimated from the first two cases, of a norm of each kind.

    In the second case a process has no values; a batch norm that is not synchronised refuses that.
    """
    size, rank = comm.get_world_size(), comm.get_rank()
    shares = range(rank * 4 // size, (rank + 1) * 4 // size)
    batches = [torch.cat([values(case, share)[0] for share in shares]).float() for case in (0, 1)]
    estimated = {}
    for norm in (nn.BatchNorm2d(CHANNELS), SyncBatchNorm2d(CHANNELS)):
        batches_of_norm = batches if isinstance(norm, SyncBatchNorm2d) else batches[:1]
        count = len(batches_of_norm)
        estimate_statistics([norm], batches_of_norm, count, Precision("cpu", None))
        estimated[type(norm).__name__] = dict(norm.state_dict())
    return estimated


def everything() -> dict:
    alone = comm.get_world_size() == 1
    return {
        "detection": detection(),
        "norms": {} if alone else {kind: norms(kind) for kind in NORMS},
        "statistics": {} if alone else statistics(),
    }
