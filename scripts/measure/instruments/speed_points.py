"""The points of attention_speed, by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attention import registry
from scripts.measure.instruments.bench_points import Shape

STUDY = "attention_speed"
PARTS = ("claims", "curve", "short", "windows")
TOKENS, HEADS = 16384, 32  # of the FlashAttention papers' benchmarks: tokens in all, heads of 64
SHORT = 512  # up to here the host's time is measured too
WINDOWS = (256, 1024, 4096)
# What compiles a kernel for each shape, in seconds, takes part at these lengths of the curve, and of the
# short ones at batch 1.
EACH_COMPILED = (1024, 4096, 16384)


@dataclass(frozen=True)
class Asked:
    """A shape and who runs each of its passes."""

    part: str
    shape: Shape
    passes: dict[str, list[str]]


def asked(parts: list[str], names: list[str], cuda: bool, longest: int | None = None) -> list[Asked]:
    """The points with those of `names` that take part in them; up to `longest` tokens."""
    made = {"claims": claims, "curve": curve, "short": short, "windows": windows}
    if not cuda:
        made = {"curve": small}
    found = []
    for part in parts:
        for shape, passes, whose in made[part]() if part in made else ():
            mine = [name for name in names if whose(name) and allowed(part, shape, name)]
            if mine and shape.tokens <= (longest or shape.tokens):
                found.append(Asked(part, shape, dict.fromkeys(passes, mine)))
    return found


def allowed(part: str, shape: Shape, name: str) -> bool:
    """Whether it may cost its compilation."""
    if not compiles_each_shape(name) or shape.dtype == "fp32":
        return True
    if part == "short":
        return shape.batch == 1 and shape.tokens < SHORT
    return part == "windows" or (part == "curve" and shape.tokens in EACH_COMPILED)


SLOWER = ("sdpa_efficient",)  # at every point than PyTorch's other kernels: only where all are measured


def compiles_each_shape(name: str) -> bool:
    how = registry.declaration(name).compilation
    return how is not None and how.each == "shape"


def fused(name: str) -> bool:
    """Among the fused kernels that are compared with each other: one that multiplies on tensor cores in 16
    bits, and does not choose among those that are here by themselves."""
    made = registry.declaration(name)
    apart = made.writes_scores or made.launches_each_tile or made.dispatches_to or compiles_each_shape(name)
    return made.tensor_cores and not apart and name not in SLOWER


def compared(name: str) -> bool:
    """Fused, or standard attention in some form."""
    return fused(name) or registry.declaration(name).writes_scores


def everyone(name: str) -> bool:
    return True


Points = Iterator[tuple[Shape, tuple[str, ...], Callable[[str], bool]]]  # shape, passes, who takes part


def shape(tokens: int, head_dim: int, causal: bool, dtype: str = "bf16", window: int | None = None) -> Shape:
    """As in the papers: 16,384 tokens or one long sequence, 2,048 wide."""
    heads = TOKENS // 8 // head_dim
    batch = max(1, TOKENS // tokens)
    return Shape(batch, heads, heads, tokens, head_dim, causal, dtype, window=window, study=STUDY)


def claims() -> Points:
    """8: FlashAttention-2 over 1; 9: Hopper; 12: tiles in PyTorch; 24: the traffic of the scores."""
    for causal in (False, True):
        yield shape(2048, 128, causal), ("forward",), compared
        yield shape(16384, 128, causal, "fp16"), ("forward", "backward"), fused
    yield shape(16384, 256, False, "fp16"), ("forward",), fused
    in_pytorch = Shape(1, 8, 8, 2048, 64, True, "fp16", study=STUDY)
    yield in_pytorch, ("forward", "both"), {"standard", "naive", "tiled", "sdpa_flash"}.__contains__
    yield Shape(1, 32, 32, 8192, 128, True, "fp16", study=STUDY), ("forward",), compared


def curve() -> Points:
    """N = 512 to 64k causal, at 1k and 2k both passes in one call as well; some of it without a mask."""
    for n in (2**power for power in range(9, 17)):
        passes = ("forward", "backward") + (("both",) if n in (1024, 2048) else ())
        yield shape(n, 64, True), passes, everyone
        if n in (1024, 2048, 4096, 16384):
            yield shape(n, 64, False), ("forward", "backward") if n > 2048 else ("forward",), everyone


def short() -> Points:
    """N = 32 to 512: one sequence, where the host decides, and 16,384 tokens, where the device does."""
    for n in (2**power for power in range(5, 10)):
        for batch, passes in ((1, ("forward", "both")), (TOKENS // n, ("forward",))):
            yield Shape(batch, HEADS, HEADS, n, 64, True, "bf16", study=STUDY), passes, everyone


def windows() -> Points:
    """A causal window of N = 16k; what takes it as a mask computes all tiles."""
    for window in WINDOWS:
        point = shape(16384, 64, True, window=window)
        yield (
            point,
            ("forward", "backward"),
            lambda name: fused(name) or compiles_each_shape(name) or name in SLOWER,
        )


def small() -> Points:
    """For a CPU: both masks at short N."""
    for n in (2**power for power in range(5, 10)):
        for causal in (True, False):
            point = Shape(1, 4, 4, n, 32, causal, "fp32", study=STUDY)
            yield point, ("forward", "both") if causal else ("forward",), everyone
