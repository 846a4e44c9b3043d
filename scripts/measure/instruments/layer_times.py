"""What studies/prefill_decode.py times: parts of a layer and whole models, beside the ceilings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention.base import Attention
from model.costs.flops import attention_flops
from model.gpt import GPT, GPTConfig
from model.kv_cache import KVCache
from scripts.accuracy import Part as Heads
from scripts.accuracy import Problem, error_ratios, expected
from scripts.measure.instruments.contestants import COLD, MOST_SETS, captured
from scripts.measure.instruments.layer_parts import Call, Layer, Part, attention_inputs, layer_parts
from scripts.measure.instruments.timing import Clock, Contestant, clean_up, copy_gb_per_s, probe, spread
from scripts.measure.instruments.whole_model import implementations, kernels_of
from scripts.measure.runner import failure
from scripts.measure.studies import Point

VOCABULARY = 50257
BUDGET_S = 0.03  # of measured time a part
WHOLE_BUDGET_S = 0.15
CPU_MATRIX = 512


def product_tflops() -> float:
    """What a matrix product reaches: cuBLAS's of 8192^3 in bf16; a small one in fp32 without a GPU."""
    if torch.cuda.is_available():
        from scripts.measure.instruments.ceilings import Ceilings

        return Ceilings().cublas().value
    a = torch.randn(CPU_MATRIX, CPU_MATRIX)
    contestant = Contestant("product", lambda _: a @ a)
    times = Clock(0.02, flush=False).alternate([contestant], [probe(contestant)])[0]
    return 2 * CPU_MATRIX**3 / spread(times)["ms_median"] / 1e9


def rates(flops: float, moved: float, ms: float) -> dict[str, float]:
    return {"tflops": flops / ms / 1e9, "gb_per_s": moved / ms / 1e6}


def random_gpt(layers: int, width: int, heads: int, context: int, attention: Attention, like: Any) -> GPT:
    """Made in its dtype and where it is to be: 13 billion parameters in fp32 would be 52 GB."""
    config = GPTConfig(VOCABULARY, seq_len=context, n_layer=layers, n_head=heads, n_embd=width)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(like["dtype"])
    try:
        with torch.device(like["device"]):
            return GPT(config, attention).eval()
    finally:
        torch.set_default_dtype(usual)


def forward_work(point: Point, layers: int, value_bytes: int) -> dict[str, float]:
    """FLOPs of a forward with logits of the last token alone, and the bytes it has to move: the matrices, and
    the cache, written in prefill and read in decode. Biases, norms and activations are left out."""
    batch, tokens, keys = point["batch"], point["seq_len"], point["kv_len"]
    heads, width = point["heads"], point["heads"] * point["head_dim"]
    head = width * (-(-VOCABULARY // 64) * 64)
    matrices = layers * 12 * width**2
    shape = batch, heads, tokens, keys, point["head_dim"]
    flops = 2.0 * matrices * batch * tokens + 2.0 * head * batch
    flops += layers * attention_flops(*shape, causal=tokens > 1)
    return {
        "flops": flops,
        "bytes": float(value_bytes * (matrices + head + 2 * layers * batch * keys * width)),
    }


class Measuring:
    """Times points; the ceilings are those of this process."""

    def __init__(self, fused: list[str], device: str, context: int):
        self.device, self.cuda, self.context = device, device == "cuda", context
        self.like = {"device": device, "dtype": torch.bfloat16 if self.cuda else torch.float32}
        self.fused = implementations(fused)
        self.ceilings = {"tflops": product_tflops(), "gb_per_s": copy_gb_per_s()}
        clean_up()
        self.l2 = torch.cuda.get_device_properties(0).L2_cache_size if self.cuda else 0
        self.net: tuple[str, GPT] | None = None

    def parts(self, point: Point) -> dict[str, Any]:
        """All parts of a layer in turns."""
        batch, tokens, keys = point["batch"], point["seq_len"], point["kv_len"]
        width = point["heads"] * point["head_dim"]
        layer = Layer(batch, tokens, keys, width, point["heads"], point["causal"])
        generator = torch.Generator(self.device).manual_seed(0)
        like = self.like | {"generator": generator}
        found, timed, value_bytes = {}, [], self.like["dtype"].itemsize
        firsts: list[Call] = []
        for part in layer_parts(layer, self.fused):
            found[part.name] = part.work(value_bytes)
            try:
                if part.kind == "fused":
                    found[part.name] |= self.judged(layer, part.name.split(", ")[1], like)
                contestant, first, cold = self.contestant(part, value_bytes * part.elements, like)
                timed.append((part, contestant, probe(contestant)))
                found[part.name] |= {"status": "ok", "calls": contestant.calls, "cold": cold}
                firsts += [] if part.kind == "fused" else [first]
            except Exception as error:  # the others are worth having without
                found[part.name] |= failure(error)
        clock = Clock(BUDGET_S, flush=False)
        times = clock.alternate([each[1] for each in timed], [each[2] for each in timed])
        for (part, _, _), ms in zip(timed, times, strict=True):
            seen = spread(ms)
            moved = value_bytes * part.elements
            found[part.name] |= seen | rates(part.flops, moved, seen["ms_median"])
        ran = kernels_of("standard", lambda: [first() for first in firsts], self.device)
        return {"status": "ok", "parts": found, "ceilings": self.ceilings} | ran

    def contestant(self, part: Part, moved: int, like: dict[str, Any]) -> tuple[Contestant, Call, bool]:
        """Calls on operands and results of their own, together several L2s, in one CUDA graph; and whether so
        many fit."""
        number = min(MOST_SETS, max(2, -(-COLD * self.l2 // moved))) if self.cuda else 1
        calls = [part.make(like) for _ in range(number)]
        kept: list[Tensor] = []

        def run(_: Any = None) -> None:
            kept.clear()
            kept.extend(call() for call in calls)  # alive, so that each writes to memory of its own

        graph = captured(run) if self.cuda else run
        return Contestant(part.name, graph, calls=number), calls[0], number * moved >= COLD * self.l2

    def judged(self, layer: Layer, name: str, like: dict[str, Any]) -> dict[str, Any]:
        """Error and kernels of a fused attention at this shape; two heads of two rows stand for all."""
        q, k, v = attention_inputs(layer, like)
        attention, options = self.fused[name], {"causal": layer.causal}
        problem = Problem(q, k, v, options)
        some = Heads.of(problem, 2)
        exact, plain = expected(some.of_problem(problem))
        out = attention(q, k, v, **options)
        ratio = error_ratios({"out": some.cut("out", out)}, exact, plain, q.dtype)["out"]
        return {"error_ratio": ratio} | kernels_of(name, lambda: attention(q, k, v, **options), self.device)

    def point(self, point: Point) -> dict[str, Any]:
        return self.parts(point) if point["implementation"] == "parts" else self.whole(point)

    def whole(self, point: Point) -> dict[str, Any]:
        """A prefill into the cache, or a decoding step over one, as one CUDA graph on a GPU."""
        name = point["implementation"]
        net = self.model(point)
        call = (self.prefill if point["pass"] == "prefill" else self.decode)(net, point)
        call()
        contestant = Contestant(name, captured(call) if self.cuda else lambda _: call())
        times = spread(Clock(WHOLE_BUDGET_S).alternate([contestant], [probe(contestant)])[0])
        work = forward_work(point, point["n_layer"], self.like["dtype"].itemsize)
        tokens = point["batch"] * point["seq_len"]
        result = {"status": "ok"} | times | work | rates(work["flops"], work["bytes"], times["ms_median"])
        result |= {"tokens_per_s": 1e3 * tokens / times["ms_median"], "ceilings": self.ceilings}
        return result | kernels_of(name, call, self.device)

    def model(self, point: Point) -> GPT:
        """The point's; of the one before nothing is left."""
        name, layers = point["model"], point["n_layer"]
        if self.net is None or self.net[0] != name:
            self.net = None
            clean_up()
            shape = layers, point["heads"] * point["head_dim"], point["heads"]
            self.net = name, random_gpt(*shape, self.context, self.fused[point["implementation"]], self.like)
        return self.net[1]

    def cache(self, net: GPT, point: Point) -> KVCache:
        config, attention = net.config, self.fused[point["implementation"]]
        shape = config.n_layer, point["batch"], config.kv_heads, point["kv_len"], config.head_size
        return KVCache(*shape, attention=attention, **self.like)

    def prefill(self, net: GPT, point: Point) -> Callable[[], Tensor]:
        batch, tokens = point["batch"], point["seq_len"]
        ids = torch.randint(VOCABULARY, (batch, tokens), device=self.device)
        lengths = torch.full((batch,), tokens, device=self.device)
        last, cache = lengths - 1, self.cache(net, point)

        def call() -> Tensor:
            cache.prefill(lengths)
            return net.forward(ids, cache=cache, last=last)

        return call

    def decode(self, net: GPT, point: Point) -> Callable[[], Tensor]:
        batch, cache = point["batch"], self.cache(net, point)
        for x in (*cache.k, *cache.v):
            x.normal_()  # zeros would draw less power
        ids = torch.randint(VOCABULARY, (batch, 1), device=self.device)
        held = torch.full((batch,), point["kv_len"] - 1, device=self.device)

        def call() -> Tensor:
            cache.set_lengths(held)
            return net.forward(ids, cache=cache)

        return call
