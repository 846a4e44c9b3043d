"""The memory of a step, predicted: against hand counts, what autograd saves, and rows measured on an H200."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.base import Attention, CostsNotDeclared, scores_bytes
from attention.registry import declaration, implementations, shared_instance
from attention.tiled import TiledAttention
from model.costs.gpus import GPUS, gpu_sheet
from model.costs.memory import (
    attention_kept,
    cast_weight_bytes,
    longest_context,
    memory_snapshots,
    peak,
    saved_by_layer,
)
from model.costs.memory_loss import logits_bytes, loss_bytes
from model.costs.run import Run
from model.gpt import GPT, GPTConfig
from scripts.measure.rows import read
from tests.running import ROOT

pytestmark = pytest.mark.sampled(3)

MIB = 2**20
GPT2 = GPTConfig(vocab_size=50304, seq_len=1024, bias=False)
SMALL = {"vocab_size": 100, "seq_len": 48, "n_head": 4, "n_embd": 64}
LLAMA = {
    "position": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "qk_norm": True,
    "n_kv_head": 2,
    "bias": False,
}

WIDER = {**LLAMA, "head_dim": 40, "mlp_hidden": 96, "qkv_bias": True}


def test_a_block_of_gpt2_keeps_36_bytes_a_value_under_autocast() -> None:
    """Residual stream twice in fp32 (8), then in bf16 q, k, v (6), three inputs (6), the hidden layer twice
    (16); and 16 bytes a token of statistics."""
    parts = saved_by_layer(Run(GPT2, 64, shared_instance("triton"), 2))
    N = 64 * 1024
    assert sum(parts.values()) == N * (36 * 768 + 16)
    assert parts == {
        "norms": N * (8 * 768 + 16),
        "qkv": N * 6 * 768,
        "projections": N * 4 * 768,
        "mlp": N * 18 * 768,
        "dropout": 0,
    }


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "extra", [{}, {"fp32_residual": False}, LLAMA, WIDER], ids=["gpt2", "narrow", "llama", "wider"]
)
def test_what_a_block_keeps_is_what_autograd_saves(extra: dict[str, Any], narrow: bool) -> None:
    kept = [_saved(GPTConfig(**SMALL, n_layer=n, **extra), narrow) for n in (1, 2)]
    config = GPTConfig(**SMALL, n_layer=1, **extra)
    run = Run(config, 3, shared_instance("tiled"), 2 if narrow else 4, "cpu")
    expected = sum(saved_by_layer(run).values()) + attention_kept(run)
    if narrow:
        one, two = (
            cast_weight_bytes(Run(replace(config, n_layer=n), 3, shared_instance("tiled"), 2)) for n in (1, 2)
        )
        expected += two - one
    # biases and gains, cast too, are no activations to speak of
    assert kept[1] - kept[0] == pytest.approx(expected, rel=0.005)


def _saved(config: GPTConfig, narrow: bool) -> int:
    """Bytes of the distinct storages that one forward saves for backward, parameters left out."""
    net = GPT(config, TiledAttention()).train()
    parameters = {p.untyped_storage().data_ptr() for p in net.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    tokens = torch.randint(100, (3, config.seq_len))
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        net(tokens, targets=tokens)
    return sum(storage.nbytes() for address, storage in found.items() if address not in parameters)


def test_gpt2_on_an_h200_peaks_where_it_did() -> None:
    rows = read(ROOT / "results/gpt2_124m/h200.jsonl").values()
    row = next(row for row in rows if row["point"]["implementation"].startswith("tilegpt"))
    config = replace(GPT2, seq_len=row["point"]["seq_len"])
    workspace = GPUS["h200"].workspace_bytes
    run = Run(
        config,
        row["point"]["micro_batch"],
        shared_instance("auto"),
        2,
        compiled=True,
        workspace_bytes=workspace,
    )
    assert peak(run).peak / MIB == pytest.approx(row["result"]["peak_mib"], rel=0.05)


@pytest.mark.parametrize(("fp32_residual", "gib"), [(True, 24.04), (False, 21.70)])
def test_a_fused_loss_in_chunks_peaks_on_an_h200_where_it_did(fp32_residual: bool, gib: float) -> None:
    """GPT-2 124M, 64 rows of 1,024 tokens, attention=cuda, measured on 2026-11-23."""
    config = replace(GPT2, loss_chunk=16384, fp32_residual=fp32_residual)
    workspace = GPUS["h200"].workspace_bytes
    run = Run(
        config, 64, shared_instance("cuda_fa3"), 2, arch=(9, 0), compiled=True, workspace_bytes=workspace
    )
    assert peak(run).peak / 2**30 == pytest.approx(gib, rel=0.01)


FUSED = ("triton", "flash2", "flash4", "flex", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "cuda_fa2")


@pytest.mark.parametrize("name", [*FUSED, "naive", "sdpa_math", "tiled"])
def test_attentions_backward_takes_on_an_h200_what_it_took(name: str) -> None:
    rows = [
        row for row in read(ROOT / "results/attention/h200.jsonl").values() if _causal_backward(row, name)
    ]
    assert rows
    for point, result in ((row["point"], row["result"]) for row in rows):
        width, T = point["heads"] * point["head_dim"], point["seq_len"]
        config = GPTConfig(100, T, 1, point["heads"], width, point["kv_heads"])
        run = Run(config, point["batch"], shared_instance(name), 4 if point["dtype"] == "float32" else 2)
        own = run.costs.transient_bytes + (0 if run.costs.writes_scores else run.qkv_bytes)
        assert own / MIB == pytest.approx(result["peak_mib"], rel=0.06), point


def _causal_backward(row: dict[str, Any], name: str) -> bool:
    point = row["point"]
    asked = point["implementation"] == name and point["pass"] == "backward" and point["causal"]
    return asked and not point.get("features") and row["result"]["status"] == "ok"


def test_scores_grow_as_the_square_and_statistics_do_not() -> None:
    def kept(name: str, T: int) -> int:
        return attention_kept(Run(replace(GPT2, seq_len=T), 1, shared_instance(name), 2))

    assert scores_bytes(Run(GPT2, 2, shared_instance("naive")).call) == 4 * 2 * 12 * 1024**2
    assert 3.9 < kept("naive", 32768) / kept("naive", 16384) < 4
    assert kept("triton", 32768) == 2 * kept("triton", 16384) == 4 * 12 * 32768


@pytest.mark.parametrize(
    ("name", "device", "narrow", "quadratic"),
    [
        ("sdpa", "cuda", True, False),
        ("sdpa", "cuda", False, True),
        ("sdpa", "cpu", False, False),
        ("auto", "cuda", True, False),
        ("sdpa_math", "cuda", True, True),
        ("cuda", "cuda", False, False),
    ],
)
def test_who_writes_the_scores_out(name: str, device: str, narrow: bool, quadratic: bool) -> None:
    assert Run(GPT2, 1, shared_instance(name), 2 if narrow else 4, device).costs.writes_scores == quadratic


def test_auto_in_fp32_splits_as_cuda_tiled_does() -> None:
    names = ("auto", "cuda", "triton")
    own = [Run(GPT2, 1, shared_instance(name), 4, "cuda", arch=(9, 0)).costs for name in names]
    assert own[0] == own[1]
    # q, k, v and dout, 1,024 tokens of 768, each as two numbers of 2 bytes
    assert own[0].transient_bytes - own[2].transient_bytes == 4 * 1024 * 768 * 4


def test_dropout_sends_a_cpus_sdpa_to_the_maths() -> None:
    assert Run(replace(GPT2, attn_dropout=0.1), 1, shared_instance("sdpa"), 4, "cpu").costs.writes_scores


@pytest.mark.parametrize("name", implementations())
def test_every_implementation_says_what_it_costs(name: str) -> None:
    attention = shared_instance(name)
    costs = Run(GPT2, 2, attention, 2).costs
    assert declaration(name).kernels
    assert costs.writes_scores == declaration(name).writes_scores
    if attention.capabilities.backward:
        wide = Run(replace(GPT2, seq_len=2048), 2, attention, 2).costs
        growth = 4 if costs.writes_scores else 2
        # scores are kept, or made again in the backward
        held = [each.saved_bytes + each.transient_bytes * each.writes_scores for each in (costs, wide)]
        assert held[1] / held[0] == pytest.approx(growth, rel=0.1)


def test_of_an_implementation_that_says_nothing_nothing_is_predicted() -> None:
    class Mine(Attention):
        pass

    run = Run(GPT2, 1, Mine("mine"), 2)
    with pytest.raises(CostsNotDeclared, match=r"attention=mine does not declare its costs.* Mine a method"):
        peak(run)


@pytest.mark.parametrize(("study", "implementation"), [("speedup_end_to_end", "standard")])
def test_the_baseline_peaks_on_an_h200_where_it_did(study: str, implementation: str) -> None:
    rows = [
        row
        for row in read(ROOT / f"results/{study}/h200.jsonl").values()
        if row["point"]["implementation"] == implementation
        and row["result"]["status"] == "ok"
        and row["point"]["compile"]  # eager, their loss was not yet the kernel that it is
    ]
    assert rows
    workspace, layers = GPUS["h200"].workspace_bytes, {"gpt2": 12, "gpt2_medium": 24}
    for point, result in ((row["point"], row["result"]) for row in rows):
        width, model = point["heads"] * point["head_dim"], point["model"].split()[0]
        sizes = {"n_layer": layers[model], "n_head": point["heads"], "n_embd": width}
        config = GPTConfig(vocab_size=50257, seq_len=point["seq_len"], **sizes)
        batch, how = point["micro_batch"], {"compiled": point["compile"], "workspace_bytes": workspace}
        predicted = peak(Run(config, batch, shared_instance(implementation), 2, **how)).peak
        assert predicted / MIB == pytest.approx(result["peak_mib"], rel=0.05), point


def test_checkpointing_keeps_a_blocks_input_alone() -> None:
    run = Run(GPT2, 64, shared_instance("triton"), 2)
    less = peak(replace(run, checkpointing=True))
    whole, own = sum(saved_by_layer(run).values()), attention_kept(run)
    of_loss = {each.name: each for each in memory_snapshots(run)}["loss"].peak
    less_of_loss = {each.name: each for each in memory_snapshots(replace(run, checkpointing=True))}[
        "loss"
    ].peak
    assert of_loss - less_of_loss == 12 * (whole + own - run.residual_bytes)
    assert less.peak < peak(run).peak


def test_accumulated_gradients_are_there_at_every_moment() -> None:
    run = Run(GPT2, 4, shared_instance("triton"), 2, accumulates=True)
    assert all(each.gradients == each.parameters for each in memory_snapshots(run))


def test_a_step_with_few_tokens_peaks_at_its_weights() -> None:
    few = peak(Run(replace(GPT2, seq_len=16), 1, shared_instance("sdpa")))
    assert few.name == "embedding" and few.gradients == few.parameters
    assert few.optimizer == 2 * few.parameters


def test_logits_are_of_the_padded_vocabulary() -> None:
    assert (
        logits_bytes(Run(replace(GPT2, vocab_size=50257), 1, shared_instance("sdpa"), 2)) == 1024 * 50304 * 2
    )


def test_the_loss_in_chunks_takes_a_chunks_logits_and_the_outputs_gradient() -> None:
    """Under autocast, not compiled, on a CPU: the head's input in fp32, bf16 and its gradient, 8 C a token;
    the output embedding's gradient in fp32 and its copy in bf16, 6 Vp C; bf16 logits, twice in fp32, 10 Vp a
    token of the chunk. On a GPU the logits alone, in chunks or not; there in fp32 the logits twice."""
    N, chunked = 65536, replace(GPT2, seq_len=65536, loss_chunk=2048)
    run = Run(chunked, 1, shared_instance("triton"), 2)
    assert logits_bytes(run) == 2048 * 50304 * 2
    held = N * 768 * 8 + 50304 * 768 * 6
    assert loss_bytes(replace(run, device="cpu")) == held + 2048 * 50304 * 10
    assert loss_bytes(run) == held + 2048 * 50304 * 2
    assert loss_bytes(replace(run, compiled=True)) == loss_bytes(run) - N * 768 * 4
    assert loss_bytes(replace(run, config=replace(chunked, loss_chunk=0))) == held + N * 50304 * 2
    run = replace(run, value_bytes=4)
    assert loss_bytes(run) == N * 768 * 8 + 50304 * 768 * 4 + 2048 * 50304 * 8
    whole = replace(run, config=replace(chunked, loss_chunk=0))
    assert loss_bytes(whole) == N * (768 * 4 + 12 * 50304)
    able = GPUS["h200"].usable_bytes
    assert longest_context(run, able) > 1.9 * longest_context(whole, able)  # in fp32
    assert logits_bytes(replace(run, config=replace(chunked, loss_chunk=10**6))) == logits_bytes(whole)


def test_the_longest_context_fits_and_the_next_does_not() -> None:
    run, able = Run(GPT2, 1, shared_instance("triton"), 2, compiled=True), GPUS["h200"].usable_bytes
    T = longest_context(run, able)
    fits = [peak(replace(run, config=replace(GPT2, seq_len=n))).peak <= able for n in (T, T + 64)]
    assert T % 64 == 0 and fits == [True, False]
    assert longest_context(replace(run, attention=shared_instance("naive")), able) < T / 10
    assert longest_context(run, 2**20) == 0
    short = {"max_positions": 48, "seq_len": 32}
    for changes, most in (({"max_positions": 4100}, 4096), (short, 48), ({"sparsity": "local"}, 2**21)):
        limited = replace(run, config=replace(GPT2, position="rope", **changes))
        assert longest_context(limited, 2**50) == most


@pytest.mark.parametrize(
    ("changes", "said"), [({"batch": 0}, "batch_size=0"), ({"value_bytes": 3}, "32-true")]
)
def test_a_run_that_makes_no_sense_is_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Run(**({"config": GPT2, "batch": 1, "attention": shared_instance("sdpa")} | changes))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h200", "h200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
    ],
)
def test_gpus_are_found_however_written(written: str, name: str) -> None:
    assert gpu_sheet(written).name == name


OTHERS = ["NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 3090 Ti", "RTX 4090 D"]


@pytest.mark.parametrize("name", ["", "h300", "NVIDIA GeForce RTX 4090 Laptop GPU", "l400", *OTHERS])
def test_an_unknown_gpu_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(ValueError, match=r"a100, a100-40gb, .*h200, l4"):
        gpu_sheet(name)


def test_an_h200s_sheet() -> None:
    sheet = GPUS["h200"]
    assert (sheet.bandwidth, sheet.bf16_flops, sheet.fp32_flops) == (4.8e12, 989e12, 67e12)
    assert sheet.shared_bytes == 232_448 and sheet.flops(4) == 67e12
    assert 129 * 2**30 < sheet.usable_bytes < 139 * 2**30


def test_a_compiled_step_that_writes_scores_out_peaks_on_an_h200_where_it_did() -> None:
    rows = read(ROOT / "results/memory_estimate/h200.jsonl").values()
    config = "model=gpt2 data=synthetic seq_len=1024 data.batch_size=8 attention=naive"
    (row,) = (row for row in rows if row["point"]["config"] == config)
    workspace = GPUS["h200"].workspace_bytes
    gpt2 = replace(GPT2, vocab_size=50257, bias=True)
    most = peak(Run(gpt2, 8, shared_instance("naive"), 2, compiled=True, workspace_bytes=workspace))
    assert most.peak / MIB == pytest.approx(row["result"]["memory_split"]["peak"], rel=0.02)


@pytest.mark.parametrize(
    ("narrow", "dropout", "matrices"), [(False, 0.0, 2), (True, 0.0, 1), (True, 0.1, 1.5)]
)
def test_what_compiled_scores_keep_is_what_the_partitioner_saves(
    narrow: bool, dropout: float, matrices: float
) -> None:
    """The forward that AOTAutograd cuts out of the joint graph, under autocast too: its outputs of T^2."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    from attention.naive import NaiveAttention

    kept: list[torch.Tensor] = []

    def forward(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        (outputs,) = (node for node in graph.graph.nodes if node.op == "output")
        kept.extend(n.meta["val"] for n in outputs.args[0] if isinstance(n.meta.get("val"), torch.Tensor))
        return graph

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    config = GPTConfig(vocab_size=64, seq_len=128, n_layer=1, n_head=2, n_embd=64, attn_dropout=dropout)
    net, tokens = GPT(config, NaiveAttention()).train(), torch.zeros(1, 128, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        torch.compile(net, backend=backend, dynamic=False)(tokens, targets=tokens)
    run = Run(config, 1, shared_instance("naive"), 2 if narrow else 4, "cpu", compiled=True)
    squares = sum(x.nbytes for x in kept if x.shape[-2:] == (128, 128))
    assert squares == pytest.approx(matrices * scores_bytes(run.call), rel=0.3)  # masks of a byte beside them
    assert attention_kept(run) > matrices * scores_bytes(run.call)
