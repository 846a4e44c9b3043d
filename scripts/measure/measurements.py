"""What measures the rows of results/, a folder each: the commands, and what they take of one H200.

A study says it itself: GPU_S, seconds of its usual run (0: a CPU does), and ESTIMATED where that was not
timed as a whole; what other commands measure is here.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

from conf.values import UserError


@dataclass(frozen=True)
class Measurement:
    """commands: with <gpu> where a file of rows is named after the GPU."""

    commands: tuple[str, ...]
    gpu_s: int
    estimated: bool = True

    @property
    def takes(self) -> str:
        """ "13 min of one H200", with "about" where that is estimated."""
        if not self.gpu_s:
            return "no GPU"
        time = f"{self.gpu_s} s" if self.gpu_s < 600 else f"{round(self.gpu_s / 60)} min"
        return f"{'about ' * self.estimated}{time} of one H200"


BENCH, FA3 = "python scripts/bench_attention.py", "cuda_fa3 flash4 sdpa_cudnn sdpa_flash"
OTHERS = {
    "attention": Measurement(
        (BENCH, f"{BENCH} --pass decode", f"{BENCH} --dtype fp32 --attention cuda_tiled triton sdpa_math"),
        600,
    ),
    "hopper": Measurement(
        (
            f"{BENCH} --attention {FA3} --head-dim 64 128 --seq-len 1024 2048 4096 8192 16384 "
            "--out results/hopper/<gpu>.jsonl",
            *(
                f"{BENCH} --attention {FA3}{more} --out results/hopper/<gpu>.jsonl"
                for more in (
                    " --head-dim 96 192 256 --seq-len 4096 16384",
                    " --head-dim 128 --heads 32 --kv-heads 8 --seq-len 4096 16384",
                    " flex --head-dim 64 128 --seq-len 16384 --causal --window 1024",
                    " flex --head-dim 64 128 --seq-len 16384 --causal --documents 1024",
                )
            ),
        ),
        350,
    ),
    "cuda_ladder": Measurement(("python scripts/bench_ladder.py",), 120),
    "roofline": Measurement(("python scripts/roofline.py", "python scripts/roofline.py --tiles"), 300),
    "gpt2_124m": Measurement(("python scripts/bench_train.py --nanogpt nanoGPT/model.py",), 300),
    "parity": Measurement(("python scripts/parity.py",), 600),
    "generate": Measurement(("python scripts/bench_generate.py --batch 1 32",), 120),
    "serve": Measurement(("python scripts/bench_serve.py",), 120),
    "shakespeare_char": Measurement(("python train.py experiment=shakespeare_char",), 58, estimated=False),
}


def measurement(name: str) -> Measurement:
    """Of a folder of results/. Raises ModuleNotFoundError for what nothing measures, UserError for a study
    that does not say what it takes."""
    if name in OTHERS:
        return OTHERS[name]
    study = importlib.import_module(f"scripts.measure.studies.{name}")
    if not hasattr(study, "GPU_S"):
        raise UserError(f"{study.__name__} has no GPU_S: its seconds on one H200, 0 if it needs no GPU.")
    return Measurement((f"python scripts/study.py {name}",), study.GPU_S, getattr(study, "ESTIMATED", False))


def measurements() -> dict[str, Measurement]:
    """All of them, by name."""
    from scripts.measure import studies

    names = [*OTHERS, *(module.name for module in pkgutil.iter_modules(studies.__path__))]
    return {name: measurement(name) for name in names}


def command_of(name: str) -> str:
    """The first that measures these rows."""
    return OTHERS[name].commands[0] if name in OTHERS else f"python scripts/study.py {name}"
