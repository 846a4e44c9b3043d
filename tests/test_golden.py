"""The first 20 losses of a fixed run: whatever changes them changes what everyone trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import rows, train_here

pytestmark = pytest.mark.sampled(3)

# rope, RMSNorm, SwiGLU, grouped heads and QK-norm on one side, GPT-2's parts on the other.
SETTINGS = {
    "gpt2": ("optim.lr=3e-3",),
    "llama": (
        "model=llama_tiny", "model.n_layer=2", "model.n_embd=32", "model.window=6", "optim.lr=3e-3",
        "tokens_per_step=128",
    ),
}  # fmt: skip
# Of the CPU in fp32 by naive attention, with torch 2.13. Sums differ in their order from BLAS to BLAS.
GOLDEN = {
    "gpt2": [
        5.52336, 5.48027, 5.38873, 5.28992, 5.16691, 5.04141, 4.91695, 4.75568, 4.65057, 4.49492,
        4.37683, 4.27306, 4.16745, 4.10031, 4.03164, 3.93614, 3.93423, 3.88399, 3.84692, 3.82739
    ],
    "llama": [
        5.49903, 5.47103, 5.4221, 5.28075, 5.16017, 5.03009, 4.87499, 4.73402, 4.59149, 4.4571,
        4.34248, 4.22623, 4.11837, 4.03846, 3.95274, 3.9209, 3.8611, 3.82953, 3.81243, 3.78236
    ],
}  # fmt: skip


def losses(folder: Path, settings: str, attention: str) -> list[float]:
    result = train_here(folder, "name=a", *SETTINGS[settings], f"attention={attention}")
    assert result.code == 0, result.err
    return [float(row["train/loss"]) for step, row in rows(folder / "runs" / "a").items() if step]


@pytest.mark.parametrize("attention", ["naive", "sdpa", "tiled"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_first_losses(settings: str, attention: str, tmp_path: Path) -> None:
    assert losses(tmp_path, settings, attention) == pytest.approx(GOLDEN[settings], rel=1e-4)
