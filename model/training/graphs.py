"""A training step as one CUDA graph: for a small model, and with products in fp8, the host takes longer to
launch the kernels of a step than the GPU to run them.

The first steps run as they are, which compiles, tunes and makes the optimiser's state; the next is captured,
and from then on a step is one launch. What differs between steps is in tensors: the batch, the learning rates
and, kept by torch, the random numbers' seed. So the same bits come out as without a graph, and a run resumes
as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conf.values import UserError
from model.config import GPTConfig
from model.costs.flops import flops_per_token

WARM_UP = 3  # steps, after which nothing compiles, and the allocator has seen all sizes
# Model FLOPs of a step below which `auto` captures it: some 20 ms of an H200. GPT-2 124M with 65,536 tokens
# has 56 TFLOP and gaps of 1% of its time between kernels, the character model 1 and gaps of 72%. In fp8 a
# step has more kernels, and shorter ones: GPT-2 XL on an H100 takes 514 ms captured, 598 ms otherwise.
SMALL = 1e13


def wanted(
    asked: bool | str,
    device: torch.device,
    devices: int,
    config: GPTConfig,
    rows: int,
    precision: str,
) -> bool:
    """Whether steps of so many rows are to be captured: `auto` captures short ones and those of
    precision=fp8. UserError where they are asked to be and cannot."""
    able = device.type == "cuda" and devices == 1
    if asked is True and not able:
        raise UserError(
            f"cuda_graphs=true: a step is captured on one CUDA device, and here it runs on {devices} "
            f"({device.type}). Use cuda_graphs=auto or false."
        )
    launch_bound = precision == "fp8" or small(config, rows)
    return able and (asked is True or (asked == "auto" and launch_bound))


def small(config: GPTConfig, rows: int) -> bool:
    """Whether a step of so many rows takes some 20 ms at most."""
    return flops_per_token(config) * rows * config.seq_len < SMALL


class StepGraph:
    """Calls `step(batch)`, which gives scalars on the device; captured, the same tensor each time.

    optimizer: whose param_groups' `lr` is set before each call, and whose step is part of `step`."""

    def __init__(self, step: Callable[[dict[str, Tensor]], Tensor], optimizer: torch.optim.Optimizer):
        self.step, self.optimizer = step, optimizer
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream()  # one for all calls: libraries have a workspace a stream
        self.batch: dict[str, Tensor] = {}

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls <= WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                scalars = self.step(batch)
            torch.cuda.current_stream().wait_stream(self.stream)
            return scalars
        if self.graph is None:
            self._capture(batch)
        for key, tensor in batch.items():
            self.batch[key].copy_(tensor, non_blocking=True)
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self.graph.replay()
        return self.scalars

    def _capture(self, batch: dict[str, Tensor]) -> None:
        """While it is captured, the optimiser reads learning rates from tensors; its own settings, which
        checkpoints hold, stay numbers."""
        self.batch = {key: tensor.clone() for key, tensor in batch.items()}
        groups = self.optimizer.param_groups
        settings: list[dict[str, Any]] = [{key: g[key] for key in ("lr", "capturable")} for g in groups]
        self.rates = [torch.tensor(group["lr"], device="cuda") for group in groups]
        graph = torch.cuda.CUDAGraph()
        try:
            for group, rate in zip(groups, self.rates, strict=True):
                group.update(lr=rate, capturable=True)
            with torch.cuda.graph(graph, stream=self.stream):
                self.scalars = self.step(self.batch)
        except torch.OutOfMemoryError:
            raise  # which is told with what takes less
        except RuntimeError as error:
            raise UserError(f"The step cannot be captured ({error}): use cuda_graphs=false.") from error
        finally:
            for group, own in zip(groups, settings, strict=True):
                group.update(own)
        self.graph = graph
