"""Where the memory of a step goes: the ledger by hand, the recorder on known calls, splits of whole steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.costs.flops import parameter_count
from scripts.measure import sweep_points
from scripts.measure.instruments.allocations import (
    PARTS,
    CpuRecorder,
    CudaRecorder,
    Event,
    Halves,
    Ledger,
    recorder_of,
    storages,
)
from scripts.measure.instruments.memory_alone import owned
from scripts.memory import (
    AGREE,
    attention_alone,
    composed,
    disagreement,
    main,
    memory_split,
    table,
    training_step,
    vocabulary,
)

MIB = 2**20
TINY = ("model=tiny", "model.n_layer=2", "data=synthetic", "data.corpus.vocab_size=64", "data.batch_size=2")
CPU = ("trainer.accelerator=cpu", "seq_len=128")


def alloc(address: int, size: int) -> Event:
    return Event("alloc", address, size)


def free(address: int, size: int = 0) -> Event:
    return Event("free", address, size)


def test_the_ledger_tells_what_was_alive_at_the_peak() -> None:
    events = [
        alloc(1, 100),
        Event("begin", kind="attention"),
        alloc(2, 50),
        alloc(3, 30),
        Event("kind", 3, kind="activations"),  # what attention returns
        Event("end", kind="attention"),
        free(2),
        alloc(4, 60),  # the peak: 1, 3, 4
        Event("kind", 4, kind="gradients", counted=True),
        free(1),
    ]
    ledger = Ledger(events, {"parameters": 1000})
    assert ledger.peak == 1000 + 190
    assert ledger.at_peak == dict.fromkeys(PARTS, 0) | {
        "parameters": 1000,
        "activations": 130,
        "gradients": 60,
    }
    assert ledger.counted_at_peak == 1


def test_the_ledger_knows_the_sizes_of_what_nothing_is_said_about() -> None:
    events = [alloc(1, 100), alloc(2, 100), alloc(3, 7), alloc(4, 100), free(1), alloc(5, 5), free(2)]
    events.append(Event("kind", 4, kind="gradients"))
    assert Ledger(events, {}).usual_at_peak == {100: 2, 7: 1}  # before 1 went
    assert Ledger(events[:2], {}).usual_at_peak == {100: 2}


def test_of_a_compiled_step_attention_has_blocks_that_are_there() -> None:
    """Alone it may keep two matrices a layer where the whole step keeps one: the rest is not attention's."""
    there = Counter({384: 12, 8: 50, 3: 100})
    assert owned(there, [384, 384, 8, 8, 8], 12) == 12 * 384 + 36 * 8
    assert owned(there, [384, 16], 2) == 2 * 384 and owned(there, [384], 0) == 0


def test_a_block_that_was_there_before_leaves_the_rest() -> None:
    ledger = Ledger([free(9, 40), alloc(1, 100)], {"other": 50})
    assert ledger.peak == 110 and ledger.at_peak["other"] == 10


def test_an_address_that_is_used_again_is_another_block() -> None:
    events = [alloc(1, 10), Event("kind", 1, kind="gradients"), free(1), alloc(1, 30)]
    assert Ledger(events, {}).at_peak["activations"] == 30


def test_halves_of_a_call() -> None:
    events = [alloc(1, 10), alloc(2, 20), free(1), Event("point"), alloc(3, 5), free(3), free(2)]
    assert Halves.of(events) == Halves(before=30, at=20, after=25)


def test_storages_count_views_once() -> None:
    x = torch.zeros(8, 4)
    assert sum(storages([x, x[2:], x.t(), None, torch.zeros(3)]).values()) == 4 * (32 + 3)


def test_the_profiler_sees_what_an_operator_allocates_inside() -> None:
    x = torch.randn(256, 256)
    with CpuRecorder() as recorder:
        y = torch.nn.functional.softmax(x + 1, dim=-1)
        recorder.mark(Event("point"))
        z = y.t().contiguous() @ x
    halves = Halves.of(recorder.events())
    one = 4 * 256 * 256
    assert halves == Halves(before=2 * one, at=one, after=3 * one)
    assert z.shape == x.shape


def test_a_device_without_a_record_is_refused() -> None:
    with pytest.raises(ValueError, match="mps cannot be recorded"):
        recorder_of(torch.device("mps"))


def test_the_history_of_the_caching_allocator_with_its_marks() -> None:
    """Events as torch.cuda.memory._snapshot gives them, marks by how many came before."""
    recorder = CudaRecorder(torch.device("cuda"))
    recorder.trace = [
        {"action": "segment_alloc", "addr": 0, "size": 2**21},
        {"action": "alloc", "addr": 1, "size": 700},
        {"action": "free_requested", "addr": 1, "size": 700},
        {"action": "free_completed", "addr": 1, "size": 700},
        {"action": "alloc", "addr": 2, "size": 512},
    ]
    recorder.marks = [(1, Event("begin", kind="attention")), (3, Event("kind", 2, kind="gradients"))]
    events = recorder.events()
    assert [event.what for event in events] == ["alloc", "begin", "free", "alloc", "kind"]
    assert [event.size for event in events if event.what == "alloc"] == [1024, 512]


@pytest.mark.parametrize("attention", ["naive", "tiled"])
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_a_split_of_a_step(attention: str, checkpointing: str) -> None:
    cfg = composed([*TINY, *CPU, f"attention={attention}", f"checkpointing={checkpointing}"])
    step = training_step(cfg)
    split = memory_split(step)
    count = sum(parameter_count(step.net.config).values())
    assert list(split) == [*PARTS, "peak"]
    assert disagreement(split) <= AGREE
    assert split["parameters"] * MIB == 4 * count
    assert split["optimizer"] * MIB == pytest.approx(8 * count, rel=0.001)
    assert split["other"] * MIB == pytest.approx(2 * 8 * 2 * 128, abs=100)  # inputs and targets; clipping
    assert 0 <= split["gradients"] <= split["parameters"]
    matrix = 4 * 2 * 4 * 128**2 / MIB
    layers = 1 if checkpointing == "true" else 2
    if attention == "naive":
        assert split["attention"] > 2 * layers * matrix
    else:
        assert split["attention"] < 8 * matrix
    assert all(p.grad is None for p in step.net.parameters())


def test_nothing_watches_the_step_afterwards() -> None:
    step = training_step(composed([*TINY, *CPU, "attention=naive"]))
    memory_split(step)
    attention = step.net.transformer.h[0].attn.attention
    assert not attention._forward_hooks and not attention._forward_pre_hooks
    assert not step.optimizer._optimizer_step_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in step.net.parameters())


def test_a_second_micro_batch_finds_gradients() -> None:
    one, two = (
        memory_split(training_step(composed([*TINY, *CPU, "attention=tiled", f"tokens_per_step={n}"])))
        for n in (256, 512)
    )
    assert two["gradients"] == two["parameters"] > one["gradients"]
    # attention ends with the gradient of q, k and v in one, and what comes after it is none of it
    assert two["attention"] < two["activations"]


def test_attention_by_itself_grows_as_it_should() -> None:
    def kept(name: str, T: int) -> float:
        cfg = composed([*TINY, "trainer.accelerator=cpu", f"attention={name}", f"seq_len={T}"])
        return attention_alone(training_step(cfg))["kept"]

    assert 3.3 < kept("naive", 512) / kept("naive", 256) < 4
    assert kept("tiled", 512) == 2 * kept("tiled", 256) == 4 * 2 * 4 * 512 / MIB


@pytest.mark.long
def test_a_compiled_step_splits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    step = training_step(composed([*TINY, *CPU, "attention=tiled", "compile=false"]))
    step.net.compile(backend="aot_eager", dynamic=False)
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend="aot_eager", **options))
    split = memory_split(step)
    assert disagreement(split) <= AGREE
    assert split["attention"] * MIB in (4 * 2 * 4 * 128 * layers for layers in (1, 2))


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        (["data=synthetic"], 50304),
        (["data=stdlib", "data.tokenizer.vocab_size=999"], 999),
        (["data=stdlib", "data.tokenizer.kind=gpt2"], 50257),
        (["data=stdlib", "data.tokenizer.kind=byte"], 257),
    ],
)
def test_the_vocabulary_before_any_text(overrides: list[str], size: int) -> None:
    assert vocabulary(composed(overrides)) == size


def test_a_vocabulary_that_only_the_corpus_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="once the corpus is read"):
        vocabulary(composed(["data.tokenizer.kind=char"]))


def test_the_table_says_whether_the_parts_are_the_whole() -> None:
    split = dict.fromkeys(PARTS, 10.0) | {"peak": 80.0}
    assert disagreement(split) == pytest.approx(0.25)
    lines = table(split).splitlines()
    assert lines[0].split() == ["parameters", "10.0", "MiB", "12.5%"]
    assert lines[-1] == "the parts sum to the peak within 25.00%"


def test_adapters_have_gradients_and_state_alone() -> None:
    pytest.importorskip("peft")
    whole, adapters = (
        memory_split(training_step(composed([*TINY, *CPU, *more]))) for more in ([], ["finetune=lora"])
    )
    assert adapters["parameters"] > whole["parameters"]
    assert adapters["optimizer"] < whole["optimizer"] / 2
    assert disagreement(adapters) < 0.03


@pytest.mark.parametrize("reader", [composed, lambda words: sweep_points.composed(words)[0]])
def test_a_config_is_read_as_train_py_reads_it(reader: Callable[[list[str]], Any]) -> None:
    """Names that look like numbers, and groups that are left out."""
    cfg = reader(["runs_dir=2025_11", "name=1e3", "data=text", "data.path=007", "callbacks=null"])
    assert (cfg.runs_dir, cfg.name, cfg.data.path) == ("2025_11", "1e3", "007") and "callbacks" not in cfg


def test_a_step_that_devices_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer.devices=2 trainer.num_nodes=1: a step on one device"):
        training_step(composed([*TINY, *CPU, "trainer=fsdp2", "trainer.devices=2"]))


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main([*TINY, *CPU, "attention=tiled"])
    assert "within 0.0" in capsys.readouterr().out.splitlines()[-1]
    main(["--help"])
    assert "overrides of train.py" in capsys.readouterr().out
    for word, said in {
        "seq_length=3": "no key seq_length",
        "--multirun": "--multirun: there are no flags here",
        "seed=1,2": "seed=1,2: one config at a time",
    }.items():
        with pytest.raises(SystemExit):
            main([word])
        assert said in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["false", "true"])
@pytest.mark.parametrize("attention", ["naive", "sdpa_flash", "triton"])
def test_on_a_gpu_the_parts_sum_to_the_allocators_peak(attention: str, compile: str) -> None:
    size = ("model=gpt2", "model.n_layer=4", "data=synthetic", "data.corpus.vocab_size=1000")
    size += ("data.batch_size=4", "seq_len=1024")
    split = memory_split(training_step(composed([*size, f"attention={attention}", f"compile={compile}"])))
    assert disagreement(split) <= AGREE
    assert (split["attention"] > 0.3 * split["peak"]) == (attention == "naive")
