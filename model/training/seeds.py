"""The random numbers of a step."""

from __future__ import annotations

import torch


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of everything random in one optimiser step of one rank, a pure function of three numbers: a
    resumed run draws what the first one drew with no generator state to save, whatever happened between the
    steps."""
    mixed = seed
    for value in (step, rank):
        mixed = (mixed * 0x9E3779B97F4A7C15 + value + 1) & (2**63 - 1)
        mixed ^= mixed >> 29
    return mixed


def seed_generators(seed: int, device: torch.device) -> None:
    """torch.manual_seed, for the generators of the CPU and of `device` alone: for each kind of device that is
    not in use that one formats the stack of its caller, which takes longer than all else the host does in a
    step."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
