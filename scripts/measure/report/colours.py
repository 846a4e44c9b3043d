"""A colour for each implementation, the same in every picture: as dark as a name has to be that is read on
white, and none of scripts/plot.py's, which stand for anything else."""

from __future__ import annotations

import re
import zlib

# The formula in reds and browns, ours in blues, green and orange, libraries in purples, teal and black.
OF_NAME = {
    "naive": "#C0392B",
    "naive_checkpointed": "#E57373",
    "standard": "#7B241C",
    "standard_compiled": "#CA6F1E",
    "sdpa_math": "#B7950B",
    "tiled": "#D81B60",
    "cuda_plain": "#37474F",
    "cuda_naive": "#607D8B",
    "cuda_rowwise": "#26A0DA",
    "cuda_tiled": "#2874A6",
    "cuda_fa1": "#5C7CFA",
    "cuda_fa2": "#1F3FBF",
    "cuda_fa3": "#E65100",
    "cuda": "#3F51B5",
    "triton": "#1E8449",
    "sdpa": "#7D6608",
    "sdpa_cudnn": "#8E44AD",
    "sdpa_flash": "#C060C0",
    "sdpa_efficient": "#A1887F",
    "flash2": "#148F8F",
    "flash3": "#4A235A",
    "flash4": "#111111",
    "flex": "#6B8E23",
    "nanoGPT": "#7F7F7F",
    "transformers": "#9E9E9E",
}
SPARE = ("#AD1457", "#00695C", "#4E342E", "#558B2F", "#006064")  # of those that came later


def colour_of(name: str) -> str:
    """Of the implementation that a line's name begins with: "triton, compiled"."""
    first = re.split(r"[ ,]", name)[0]
    return OF_NAME.get(first) or SPARE[zlib.crc32(first.encode()) % len(SPARE)]
