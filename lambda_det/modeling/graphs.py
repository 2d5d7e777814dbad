"""The passes of a backbone as CUDA graphs (``SOLVER.CUDA_GRAPHS``).

With few images in a step a GPU waits for the host, which starts hundreds of operators one by one. A
graph starts them all at once. On an H200, 2 images of 1024x1024, bfloat16, forward and backward
pass of LambdaResNet-50 took 40.3 ms, and 18.0 ms by graphs; with 8 images 63.3 and 59.2 ms. That
was measured with PyTorch's ``make_graphed_callables`` alone. The use of it in a training, which is
what this file adds, never ran on a GPU. So nothing here is believed:

- A graph is used only after its maps, all its gradients and the running statistics were compared
  with the backbone's, on images of the run. A second comparison follows when the optimiser
  and the heads have used the memory for a while. One that fails ends the training, because the
  steps before it were wrong.
- At each step the graph must be of this situation: the same parameters, buffers and modes, no
  gradient that is left from before, no hook. Otherwise the backbone computes.
- A comparison needs the memory of a second set of maps. Where it is not there, neither are graphs,
  and their memory is given back.

What is changed in place between two steps (weights, running statistics, the scale of float16) is
read by a graph as it is then. What Python decides at a step is not: so graphs that nobody asked for
are of modules whose code is known.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lambda_det.errors import ConfigError
from lambda_det.modeling.common import kept_statistics
from lambda_det.modeling.padding import PaddingMask
from lambda_det.native.calls import is_hooked

logger = logging.getLogger(__name__)

Maps = dict[str, Tensor]
# Largest difference between the results of a graph and of the backbone, as a share of the norm of a
# tensor; and of a gradient also as a share of the largest one, because the gradients of some
# parameters are nothing but rounding. Atomic additions in 16 bits differ by less, a wrong tensor by
# more.
_OF_TENSOR, _OF_LARGEST = 0.05, 0.002
_RESULTS = "map", "gradient", "running statistic"
_SEED = 1  # of the random numbers in a comparison
_AGAIN = 20  # replays before the second comparison
_KNOWN = "lambda_det", "detectron2", "torch", "torchvision", "fvcore"  # packages


def why_not(
    backbone: nn.Module | None,
    *,
    device: str,
    processes: int = 1,
    accumulate: int = 1,
    one_size: bool | None = True,
    is_asked: bool = True,
) -> str:
    """Why the passes of a backbone cannot be graphs in a training; "" if they can.

    Stochastic depth is no reason: PyTorch's own generator is seeded anew before a graph is
    replayed, and the comparison after the capture covers it.

    Args:
        backbone: what would be captured; None for a model that has none.
        device: of the training.
        processes: of the training.
        accumulate: batches of a step. The second one would overwrite the gradients of the first.
        one_size: whether all images of the training have one size; None if unknown.
        is_asked: whether the user asks for graphs, and so knows what the code of the backbone does
            and the sizes of images.
    """
    modules = [*backbone.modules()] if backbone is not None else []
    packages = {type(module).__module__.partition(".")[0] for module in modules}
    reasons = {
        "the device is not a GPU": torch.device(device).type != "cuda",
        "the model has no backbone": backbone is None,
        "several processes train, which nobody has tried": processes > 1,
        "a step has several batches (ACCUMULATE_GRADIENTS)": accumulate > 1,
        "images have several sizes (INPUT.LSJ.ENABLED makes them one)": one_size is False,
        "CHECKPOINT_ACTIVATIONS is on": any(_of(modules, "checkpoint_activations")),
        "MASK_PADDING is on": any(isinstance(x, PaddingMask) for x in _of(modules, "padding")),
        "hooks in the backbone would not be called": any(map(is_hooked, modules[1:])),
        "the backbone has a forward of its own": any("forward" in vars(x) for x in modules[:1]),
        "the sizes of images are unknown": one_size is None and not is_asked,
        "modules of the backbone are not known to compute the same at each step": not (
            is_asked or packages <= {*_KNOWN}
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _of(modules: Iterable[nn.Module], attribute: str) -> Iterator[Any]:
    return (getattr(module, attribute, None) for module in modules)


class BackboneGraphs:
    """The backbone of a detector, whose calls within :meth:`in_use` are replayed.

    The first call captures. A call with images of another size, in evaluation mode, without
    gradients, with other parameters or with hooks is computed as without graphs, and so is each
    call outside of :meth:`in_use`, and each after a capture that failed. The backbone keeps its
    names and its state.

    Args:
        backbone: maps images [B, C, H, W] to maps by name. :func:`why_not` has no reason against
            it.
    """

    def __init__(self, backbone: nn.Module) -> None:
        self._backbone = backbone
        self._inner = [*backbone.modules()][1:]
        self._situation: tuple | None = None  # of the capture, also of one that failed
        self._passes: _Passes | None = None
        self._replay: Callable[[Tensor], Sequence[Tensor]] | None = None
        self._replays = 0
        self._is_replayed = False  # in this forward pass of the detector

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Around the forward pass of a detector in training."""
        self._backbone.forward = self._forward
        self._is_replayed = False
        try:
            yield
        finally:
            del self._backbone.forward

    def _forward(self, x: Tensor) -> Maps:
        situation = self._found(x)
        if situation and self._situation is None:
            if wrong := self._capture(x):
                self._give_up(
                    "CUDA graphs are not used, and the backbone is computed as without them: "
                    f"{wrong}"
                )
            self._situation = self._found(x)
        if situation and self._replay is not None and situation == self._situation:
            if self._replays == _AGAIN:
                self._compare_again(x)
            if self._replay is not None:
                self._replays += 1
                self._is_replayed = True
                return dict(zip(self._passes.names, self._replay(x), strict=True))
        return type(self._backbone).forward(self._backbone, x)

    def _found(self, x: Tensor) -> tuple | None:
        """What a graph holds for; None where none may be captured or replayed."""
        if not torch.is_grad_enabled() or any(map(is_hooked, self._inner)):
            return None
        if self._is_replayed:
            return None  # it would write over the maps of the first call
        backbone = self._backbone
        if not backbone.training:
            return None
        parameters = [*backbone.parameters()]
        if any(one.grad is not None for one in parameters):
            return None  # it may lie where a graph writes the next one
        tensors = (*parameters, *backbone.buffers())
        return (
            *(x.shape, x.stride(), x.dtype, x.device, x.requires_grad, _autocast(x)),
            *(module.training for module in self._inner),
            *((one.data_ptr(), one.requires_grad) for one in tensors),
        )

    def _capture(self, x: Tensor) -> str:
        """Make a graph for such images; why there is none, or ""."""
        passes = _Passes(self._backbone, *_autocast(x))
        try:
            with self._untouched(x):
                replay = torch.cuda.make_graphed_callables(
                    passes, (x.detach().clone(),), allow_unused_input=True
                )
                if x.is_cuda:
                    torch.cuda.empty_cache()  # of the runs before the capture
            wrong = self._difference(passes, replay, x)
        except (RuntimeError, AssertionError) as error:
            return _first_line(error)
        if not wrong:
            self._passes, self._replay = passes, replay
            logger.info(f"The backbone's passes are CUDA graphs for batches of {tuple(x.shape)}")
        return wrong

    def _give_up(self, words: str) -> None:
        """Go on without graphs and without their memory, which only the collector of cycles frees:
        PyTorch's function for a graph is a class, and a class refers to itself.
        """
        logger.warning(words)
        self._passes = self._replay = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _compare_again(self, x: Tensor) -> None:
        """
        Raises:
            ConfigError: results differ from the backbone's.
        """
        try:
            wrong, why = self._difference(self._passes, self._replay, x), ""
        except RuntimeError as error:  # such as no memory for a second set of maps
            wrong, why = "", _first_line(error)
        if why:
            self._give_up(
                "CUDA graphs could not be compared once more, so the backbone is computed without "
                f"them from here on: {why}"
            )
        elif wrong:
            raise ConfigError(
                f"CUDA graphs: {wrong}, after {self._replays} steps that are to be repeated: start "
                "again without them, by SOLVER.CUDA_GRAPHS never (train.cuda_graphs=never)."
            )
        else:
            self._replays += 1

    @contextmanager
    def _untouched(self, x: Tensor) -> Iterator[None]:
        """Keep statistics and random numbers; autocast is as in :class:`_Passes`.

        PyTorch refuses to capture under autocast that keeps weights, and graphs cast them
        themselves.
        """
        with (
            kept_statistics(self._backbone),
            torch.random.fork_rng([x.device] if x.is_cuda else []),
            torch.autocast(x.device.type, enabled=False, cache_enabled=False),
        ):
            yield

    def _difference(self, passes: _Passes, replay: Callable[..., Any], x: Tensor) -> str:
        """What of a graph is not as of the backbone; "" if all is.

        Raises:
            RuntimeError: they cannot be compared.
        """
        other = x.flip(3)  # a graph that kept something of the captured images would differ
        grads: list[Tensor] = []
        with self._untouched(x), _all_branches(self._backbone):
            found = [self._results(call, other, grads) for call in (passes.compute, replay)]
        for what, expected, results in zip(_RESULTS, *found, strict=True):
            norms = [one.norm() for one in expected]
            errors = [(a - b).norm() for a, b in zip(expected, results, strict=True)]
            least = _OF_LARGEST * max(norms) if what == "gradient" else 0.0
            for norm, error in zip(norms, errors, strict=True):
                if not norm.isfinite():  # float16 may overflow, as nothing scales these gradients
                    raise RuntimeError(f"a {what} of the backbone itself is not finite")
                if not error <= _OF_TENSOR * norm + least:
                    return f"a {what} of the graph differs from the backbone's"
        return ""

    def _results(
        self, call: Callable[[Tensor], Sequence[Tensor]], x: Tensor, grads: list[Tensor]
    ) -> tuple[list[Tensor], ...]:
        """Maps, gradients of parameters and running statistics, all in float32 at least.

        Args:
            call: the backbone, or its graph.
            x: images.
            grads: of the outputs; filled by the first call.
        """
        trained = [one for one in self._backbone.parameters() if one.requires_grad]
        torch.manual_seed(_SEED)
        with kept_statistics(self._backbone):
            outputs = call(x)
            if not grads:
                grads.extend(map(torch.randn_like, outputs))
            # the maps of frozen stages have no gradient
            ends = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if y.requires_grad]
            if not ends:
                raise RuntimeError("its maps have no gradient")
            of_maps, of_ends = zip(*ends, strict=True)
            gradients = torch.autograd.grad(of_maps, trained, of_ends, allow_unused=True)
            results = outputs, gradients, [*self._backbone.buffers()]
            # copies: a graph writes into the same memory again
            return tuple(
                [one.detach().clone().to(_wide(one)) for one in kind if one is not None]
                for kind in results
            )


@contextmanager
def _all_branches(backbone: nn.Module) -> Iterator[None]:
    """Give norms whose weight is 0 another one for a while.

    At the start of a training the last norm of each residual branch is 0, and so are all gradients
    of the branch, whatever a graph computes.
    """
    norms = [module for module in backbone.modules() if hasattr(module, "running_mean")]
    weights = [norm.weight for norm in norms if isinstance(norm.weight, Tensor)]
    closed = [weight for weight in weights if not weight.any()]
    with torch.no_grad():
        for weight in closed:
            weight.fill_(1)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight in closed:
                weight.zero_()


class _Passes(nn.Module):
    """A backbone as ``make_graphed_callables`` takes it.

    Args:
        backbone: may have another ``forward`` of its own, which is not called.
        enabled, dtype: of autocast.
    """

    names: tuple[str, ...] = ()

    def __init__(self, backbone: nn.Module, enabled: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.backbone, self.enabled, self.dtype = backbone, enabled, dtype

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.compute(x)

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        """The maps of the backbone; ``forward`` is replaced by the graph."""
        with torch.autocast(x.device.type, self.dtype, self.enabled, cache_enabled=False):
            maps = type(self.backbone).forward(self.backbone, x)
        self.names = tuple(maps)
        return tuple(maps.values())


def _autocast(x: Tensor) -> tuple[bool, torch.dtype]:
    kind = x.device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
