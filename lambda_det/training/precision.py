"""Mixed precision on CUDA and on the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from lambda_det.errors import ConfigError
from lambda_det.training.settings import Settings

AUTO = "auto"
# Newer than PyTorch 2.4
_X86_BFLOAT16 = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
MOST_SKIPPED = 20  # steps that loss scaling may skip one after the other


@dataclass(frozen=True)
class Precision:
    """How the forward pass of training computes.

    Attributes:
        device: "cuda", "cpu", ...
        dtype: of autocast; None means float32 without autocast.
    """

    device: str
    dtype: torch.dtype | None

    @classmethod
    def of(cls, settings: Settings) -> Precision:
        """The precision that ``device`` and ``amp_dtype`` of the settings describe.

        "auto" is bfloat16 where the device has instructions for it, and else float32.

        Raises:
            ConfigError: the dtype cannot be used on the device.
        """
        device = torch.device(settings.device).type
        name = settings.amp_dtype
        if name == AUTO:
            name = "bfloat16" if has_bfloat16(device) else None
        if name is None:
            return cls(device, None)
        if name == "float16" and device != "cuda":
            raise ConfigError(
                f"{settings.option('amp_dtype', 'float16')} needs a CUDA device; set "
                f"{settings.option('amp_dtype', AUTO)}."
            )
        return cls(device, getattr(torch, name))

    def is_emulated(self) -> bool:
        """Whether the device has no instructions for this dtype, which then takes many times as
        long as float32."""
        return self.dtype == torch.bfloat16 and not has_bfloat16(self.device)

    def __str__(self) -> str:
        return str(self.dtype or torch.float32).removeprefix("torch.")

    def autocast(self) -> AbstractContextManager:
        return nullcontext() if self.dtype is None else torch.autocast(self.device, self.dtype)

    def grad_scaler(self) -> LossScaler:
        """Scales the loss in float16; otherwise it does nothing."""
        return LossScaler(self.device, enabled=self.dtype == torch.float16)


def has_bfloat16(device: str) -> bool:
    """Whether the processor, or the GPU of this process, has instructions for bfloat16."""
    if device == "cpu":
        if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
            # oneDNN reports it for AVX-512 alone and emulates it: a step then takes three times as
            # long as in float32
            return any(getattr(torch.cpu, name, bool)() for name in _X86_BFLOAT16)
        return getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)()
    if device == "cuda" and torch.version.cuda and torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= (8, 0)  # Ampere
    return True


class LossScaler(torch.amp.GradScaler):
    """PyTorch's scaler; it is told whether the gradients are finite, and counts the skipped steps.

    Attributes:
        skipped: steps whose gradients left the range of float16.
        skipped_in_row: skipped steps since the last step that was taken.
    """

    skipped = skipped_in_row = 0

    def step_if(self, finite: bool, optimizer: torch.optim.Optimizer) -> None:
        """Take the step or skip it, and set the scale of the next one.

        Args:
            finite: whether the gradients are finite; they must have been unscaled.
        """
        if finite:
            self.step(optimizer)
            self.skipped_in_row = 0
        else:
            self.skipped += 1
            self.skipped_in_row += 1
        self.update()

    @property
    def is_hopeless(self) -> bool:
        """Whether no scale seems to bring the gradients into the range of float16."""
        row = self.skipped_in_row
        return row >= MOST_SKIPPED or (row > 0 and self.get_scale() < 1)
