"""Training on real text beside nanoGPT: the same start, batches and rates; how runs end; what rows say."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from scripts.measure.instruments import text_runs
from scripts.measure.instruments.long_documents import gather, own
from scripts.measure.studies import real_text

pytestmark = pytest.mark.usefixtures("on_a_cpu")

# nanoGPT's interface around our own GPT: its weights have the same names.
MODEL = """
from dataclasses import dataclass
import torch.nn.functional as F
from attention.registry import build
from model.gpt import GPT as Ours, GPTConfig as Config

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(Ours):
    def __init__(self, config):
        sizes = {key: getattr(config, key) for key in ("vocab_size", "n_layer", "n_head", "n_embd", "bias")}
        super().__init__(Config(seq_len=config.block_size, **sizes), build("tiled"))

    def forward(self, x, y):
        logits = super().forward(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())
"""


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(200)]
    for i in range(30):
        lines = [" ".join(rng.choices(words, k=8)) for _ in range(40)]
        (folder / f"{i}.txt").write_text("\n".join(lines))
    gather(own(str(folder), "*.txt"), folder / "made", 100, 10**6)
    return folder / "made"


def request(documents: Path, model: str, **more) -> dict:
    words = [
        *real_text.WORDS[model],
        *real_text.TINY,
        "attention=sdpa",
        "compile=false",
        "trainer.max_steps=12",
    ]
    words += [f"data.path={documents / 'training'}", f"data.data_dir={documents / 'prepared'}"]
    until = time.time() + 1000
    return {"words": words, "until": until, "nanogpt": None, "held_out": str(documents / "held_out")} | more


def test_ours_and_nanogpts_learn_alike_from_the_same_start(documents, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    ours = text_runs.child(request(documents, "gpt2"), lambda: None)
    theirs = text_runs.child(request(documents, "gpt2", nanogpt=str(tmp_path / "model.py")), lambda: None)
    for result in (ours, theirs):
        assert (result["status"], result["ended_by"], result["steps_done"]) == ("ok", "steps", 12)
        assert [at["step"] for at in result["held_out"]] == list(range(13)) and len(result["losses"]) == 12
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=2e-4)
    assert ours["losses"][-1] < ours["losses"][0] - 0.3
    for one, other in zip(ours["held_out"], theirs["held_out"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-4)


def test_time_ends_a_run_and_masked_tokens_have_an_accuracy(documents):
    result = text_runs.child(request(documents, "bert_large", until=time.time()), lambda: None)
    assert (result["ended_by"], result["steps_done"]) == ("time", 1)
    assert [at["step"] for at in result["held_out"]] == [0, 1]
    assert all(0 <= at["accuracy"] <= 1 and 5 < at["loss"] < 7 for at in result["held_out"])


def row(model: str, name: str, losses: list[float], ended: str = "steps", **more) -> dict:
    point = {"model": model, "implementation": name, "text": "a", "settings": {}, "steps": 4, "cap_s": 9}
    point |= {"tokens_per_step": 1000, "pass": "train"}
    held_out = [{"step": at, "loss": loss, **more} for at, loss in enumerate(losses)]
    result = {"status": "ok", "reason": None, "held_out": held_out, "losses": losses, "ended_by": ended}
    parts = {"files": 3, "bytes": 10**6, "packages": ["p"]}
    result |= {"steps_done": len(losses) - 1, "parameters": 10**6}
    result |= {"corpus": {"training": parts, "held_out": parts}}
    return {"key": f"{model}{name}", "point": point, "result": result, "machine": {"gpu": "G", "date": "D"}}


def test_the_report_compares_at_the_last_step_that_both_have():
    rows = [
        row("gpt2", "tilegpt attention=triton", [5.0, 4.0, 3.0]),
        row("gpt2", "nanoGPT", [5.0, 4.2], "time"),
    ]
    rows += [row("bert_large", "tilegpt attention=triton", [7.0, 6.0], "time", accuracy=0.25)]
    found = real_text.report(rows)
    assert "after 1 steps (1,000 tokens)" in found.notes[0] and "(-0.2000)" in found.notes[0]
    assert "ended by the cap of 9 s" in found.notes[3] and "25.0% are predicted" in found.notes[3]
    assert found.pictures[""].startswith("<?xml") and found.tables[0].lines[3][-1] == "25.0%"
    alone = real_text.report(rows[2:])
    assert not alone.found and len(alone.notes) == 2
