"""Implementations by measured speed, as `python scripts/report.py` writes it: not to be edited."""

from __future__ import annotations

Ranking = tuple[tuple[int | None, int | None, str], ...]
# (compute capability, bits of a dtype, workload, mask) -> (head dim and keys up to, fastest first)
MEASURED: dict[tuple[tuple[int, int], int, str, str], Ranking] = {
    ((9, 0), 16, "training", "causal"): (
        (
            64,
            1024,
            "cuda_fa3 flash4 sdpa_cudnn triton cuda_fa2 flash2 sdpa_flash flex sdpa_efficient cuda_tiled",
        ),
        (
            64,
            None,
            "cuda_fa3 flash4 sdpa_cudnn triton cuda_fa2 flex flash2 sdpa_flash sdpa_efficient cuda_tiled",
        ),
        (
            128,
            1024,
            "cuda_fa3 flash4 sdpa_cudnn triton cuda_fa2 flash2 flex sdpa_flash sdpa_efficient cuda_tiled",
        ),
        (
            128,
            None,
            "cuda_fa3 flash4 sdpa_cudnn triton flex cuda_fa2 flash2 sdpa_flash sdpa_efficient cuda_tiled",
        ),
        (256, 1024, "cuda_fa3 sdpa_cudnn flash4 flash2 sdpa_flash triton flex"),
        (256, None, "cuda_fa3 sdpa_cudnn flash4 flash2 sdpa_flash triton flex"),
    ),
    ((9, 0), 16, "training", "full"): (
        (64, 1024, "cuda_fa3 flash4 sdpa_cudnn triton flex cuda_fa2 flash2 sdpa_flash sdpa_efficient"),
        (64, None, "cuda_fa3 flash4 sdpa_cudnn triton flex cuda_fa2 flash2 sdpa_flash sdpa_efficient"),
        (128, 1024, "cuda_fa3 flash4 sdpa_cudnn triton flex cuda_fa2 flash2 sdpa_flash sdpa_efficient"),
        (128, None, "flash4 cuda_fa3 sdpa_cudnn triton flex cuda_fa2 flash2 sdpa_flash sdpa_efficient"),
        (256, 1024, "cuda_fa3 flash4 sdpa_cudnn triton flash2 sdpa_flash flex"),
        (256, None, "cuda_fa3 sdpa_cudnn flash4 sdpa_flash"),
    ),
    ((9, 0), 16, "forward", "causal"): (
        (
            64,
            1024,
            "cuda_fa3 sdpa_cudnn triton flash4 flex cuda_fa2 flash2 sdpa_flash sdpa_efficient cuda_tiled",
        ),
        (
            64,
            None,
            "cuda_fa3 flash4 sdpa_cudnn triton flex cuda_fa2 flash2 sdpa_flash sdpa_efficient cuda_tiled",
        ),
        (
            128,
            1024,
            "cuda_fa3 sdpa_cudnn flash4 triton cuda_fa2 flash2 flex sdpa_flash sdpa_efficient cuda_tiled",
        ),
        (
            128,
            None,
            "cuda_fa3 flash4 sdpa_cudnn triton cuda_fa2 flex flash2 sdpa_flash sdpa_efficient cuda_tiled",
        ),
        (256, 1024, "flash4 sdpa_cudnn cuda_fa3 triton flash2 sdpa_flash flex"),
        (256, None, "cuda_fa3 flash4 sdpa_cudnn triton flash2 flex sdpa_flash"),
    ),
    ((9, 0), 16, "forward", "full"): (
        (64, 1024, "cuda_fa3 sdpa_cudnn flash4 triton flex cuda_fa2 flash2 sdpa_flash sdpa_efficient"),
        (64, None, "cuda_fa3 flash4 sdpa_cudnn triton flex cuda_fa2 flash2 sdpa_flash sdpa_efficient"),
        (128, 1024, "cuda_fa3 sdpa_cudnn flash4 triton flex cuda_fa2 flash2 sdpa_flash sdpa_efficient"),
        (128, None, "cuda_fa3 flash4 sdpa_cudnn triton flex cuda_fa2 flash2 sdpa_flash sdpa_efficient"),
        (256, 1024, "flash4 cuda_fa3 sdpa_cudnn triton flash2 flex sdpa_flash"),
        (256, None, "cuda_fa3 flash4 sdpa_cudnn triton flex flash2 sdpa_flash"),
    ),
    ((9, 0), 16, "decode", "causal"): (
        (128, 1024, "triton sdpa_cudnn flex flash2 sdpa_flash flash4"),
        (128, None, "triton sdpa_cudnn flash2 sdpa_flash flash4"),
    ),
    ((9, 0), 32, "training", "causal"): (
        (64, 1024, "cuda_tiled triton"),
        (64, None, "cuda_tiled triton"),
        (128, 1024, "cuda_tiled triton"),
        (128, None, "cuda_tiled triton"),
    ),
    ((9, 0), 32, "training", "full"): (
        (64, 1024, "cuda_tiled triton"),
        (64, None, "cuda_tiled"),
        (128, 1024, "cuda_tiled triton"),
        (128, None, "cuda_tiled"),
    ),
    ((9, 0), 32, "forward", "causal"): (
        (64, 1024, "cuda_tiled triton"),
        (64, None, "cuda_tiled triton"),
        (128, 1024, "cuda_tiled triton"),
        (128, None, "cuda_tiled triton"),
    ),
    ((9, 0), 32, "forward", "full"): (
        (64, 1024, "cuda_tiled triton"),
        (64, None, "cuda_tiled"),
        (128, 1024, "cuda_tiled triton"),
        (128, None, "cuda_tiled"),
    ),
}
