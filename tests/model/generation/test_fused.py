"""The fused decoding step computes what GPT.forward and the choice do."""

from dataclasses import fields

import pytest
import torch

from attention.auto import AutoAttention
from attention.base import CACHE_DTYPES, raw
from attention.naive import NaiveAttention
from conf.values import UserError
from model.generation import fused
from model.generation.decode import Decoder, Rows, Sampling, dense_cache
from model.generation.engine import Pool
from model.generation.fused import FusedStep, wants_fused
from model.generation.generate import encode_all, generate
from model.generation.serve import serve
from model.generation.view_cache import cached_tensor, write
from model.gpt import GPT, GPTConfig

pytestmark = pytest.mark.sampled(4)

pytest.importorskip("triton")
VOCAB, CONTEXT = 61, 16
PROMPTS = [[1, 2, 3], [4], [5, 6] * 5]  # unequal
SHAPES = {
    "gpt2": {},
    "llama": {"position": "rope", "n_kv_head": 2, "qk_norm": True, "norm": "rmsnorm", "mlp": "swiglu"},
    "alibi_mqa_no_bias": {"position": "alibi", "n_kv_head": 1, "bias": False, "tie_embeddings": True},
    "window": {"position": "rope", "window": 3, "n_embd": 48},
    "t5": {"position": "t5"},  # this too
    "sparse": {"position": "rope", "sparsity": "local"},  # attention between the kernels
    "softcap": {"position": "none", "softcap": 3.0, "window": 5, "norm": "rmsnorm"},
}


def make(device: str = "cpu", attention=None, **changes) -> GPT:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "seq_len": CONTEXT, "n_layer": 2, "n_head": 4, "n_embd": 32}
    shape["tie_embeddings"] = False  # tied, greedy text of random weights only repeats itself
    model = GPT(GPTConfig(**{**shape, **changes}), attention or AutoAttention()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # at GPT-2's initialisation attention hardly matters
                parameter.mul_(6)
            else:  # gains of 1 and biases of 0 would hide that they are left out
                parameter.add_(torch.randn(parameter.shape) / 4)
    return model.to(device)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of every step that hands them over, as one with a cut of the candidates does."""
    steps, append = [], Rows.append

    def record(rows: Rows, logits: torch.Tensor) -> None:
        steps.append(logits[..., :VOCAB].clone())
        append(rows, logits)

    monkeypatch.setattr(Rows, "append", record)
    return steps


def both(model: GPT, prompts: list[list[int]], tokens: int, **options: object) -> tuple[list, list]:
    plain, fused = (
        generate(model, prompts, tokens, fused=fused, seed=1, **options) for fused in (False, True)
    )
    assert fused.tokens == plain.tokens and fused.reencoded == plain.reencoded
    return plain, fused


QUICK = {("gpt2", 8), ("llama", 8), ("window", 8), ("gpt2", 0)}
EACH = [
    pytest.param(shape, rows, marks=[pytest.mark.long] * ((shape, rows) not in QUICK), id=f"{shape}-{name}")
    for shape in SHAPES
    for rows, name in ((8, "own"), (0, "library"))
]


@pytest.mark.parametrize(("shape", "most_rows"), EACH)
def test_logits_and_tokens_are_those_of_the_plain_step(
    shape: str, most_rows: int, recorded: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ops.triton import step

    monkeypatch.setattr(step, "MOST_ROWS", most_rows)
    model = make(**SHAPES[shape])
    _, fused = both(model, PROMPTS, 12, top_k=VOCAB)
    assert fused.reencoded > 0 and len(set(fused.tokens[0])) > 4
    plain, fused = recorded[:12], recorded[12:]
    torch.testing.assert_close(torch.stack(fused), torch.stack(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("temperature", "most_rows"),
    [(0.7, 8), *(pytest.param(*each, marks=pytest.mark.long) for each in ((0, 8), (0, 0), (0.7, 0)))],
)
def test_the_choice_is_that_of_sampling(
    temperature: float, most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cut logits are never handed over; the same seed draws the same tokens."""
    from ops.triton import step

    monkeypatch.setattr(step, "MOST_ROWS", most_rows)
    monkeypatch.setattr(step, "_CHOICES", 16)
    called = []
    choose = step.Choice.__call__
    monkeypatch.setattr(step.Choice, "__call__", lambda self, x: called.append(1) or choose(self, x))
    model = make()
    assert len(set(both(model, PROMPTS, 12, temperature=temperature)[0].tokens[0])) > 2
    assert len(called) == 11  # all but the prefill's


@pytest.mark.long
def test_parts_of_the_keys_are_combined(
    recorded: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part with keys, and parts without."""
    from ops.triton import step

    model = make(n_layer=1)
    for splits in (1, 3, 6):
        monkeypatch.setattr(step, "attention_tile", lambda *a, n=splits: (4, 4, n))
        recorded.clear()
        both(model, [[1, 2, 3], list(range(9))], 6, top_k=VOCAB)
        torch.testing.assert_close(torch.stack(recorded[6:]), torch.stack(recorded[:6]), rtol=1e-4, atol=1e-4)


def test_an_attention_that_is_asked_for_attends() -> None:
    class Counting(NaiveAttention):
        calls = 0

        def attend(self, q: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor | None]:
            Counting.calls += q.shape[2] == 1
            return super().attend(q, *rest)

    model = make(**SHAPES["llama"])
    both(model, [[1, 2, 3], list(range(9))], 5, decode_attention=Counting())
    assert Counting.calls == 2 * 2 * 4  # both ways, layers, tokens behind the prefill's


@pytest.mark.parametrize(
    ("shape", "kind"), [(x, "int8") for x in ("llama", "window", "gpt2")] + [("llama", "int4")]
)
def test_a_quantised_cache(shape: str, kind: str, recorded: list[torch.Tensor]) -> None:
    both(make(**SHAPES[shape]), [[1, 2, 3], list(range(9))], 5, top_k=VOCAB, cache_dtype=kind)
    torch.testing.assert_close(torch.stack(recorded[5:]), torch.stack(recorded[:5]), rtol=1e-2, atol=1e-2)


# fp8 on a GPU alone: the interpreter's conversion to it cuts off
APPENDED = [("cpu", torch.float32, "int8"), ("cpu", torch.float32, "int4")] + [
    pytest.param("cuda", torch.bfloat16, kind, marks=pytest.mark.gpu) for kind in CACHE_DTYPES
]


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize(("device", "dtype", "kind"), APPENDED)
def test_what_is_appended_is_what_quantise_gives(
    device: str, dtype: torch.dtype, block: int | None, kind: str
) -> None:
    """Numbers and scales bit for bit; other tokens as they were; a head of zeros, and one of tiny numbers."""
    from ops.triton import step

    heads, kv_heads, dim, capacity = 4, 2, 24, 12
    torch.manual_seed(0)
    qkv = torch.randn(3, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    qkv[0, heads * dim : (heads + 1) * dim] = 0
    qkv[1, heads * dim : (heads + 1) * dim] *= 1e-30
    lengths = torch.tensor([5, 0, 11], device=device)
    table = None if block is None else torch.randperm(9, device=device).view(3, 3).int()
    shape = (3, kv_heads, capacity, dim) if block is None else (9, kv_heads, block, dim)
    got, expected = ([cached_tensor(shape, kind, dtype, device, table) for _ in "kv"] for _ in range(2))
    q = step.Append(lengths, heads, got[0], None)(qkv, *got, None, None)
    parts = qkv.view(3, -1, 1, dim).split([heads, kv_heads, kv_heads], dim=1)
    torch.testing.assert_close(q, parts[0], rtol=0, atol=0)
    at, rows = lengths.unsqueeze(1), torch.arange(3, device=device).unsqueeze(1)
    places = (rows, at) if block is None else (table.long().gather(1, at // block), at % block)
    for x, to in zip(parts[1:], expected, strict=True):
        write(x, to, kind, *places)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(raw(mine.data), raw(theirs.data)) and torch.equal(mine.scale, theirs.scale)
        assert theirs.scale.count_nonzero() > 0


@pytest.mark.parametrize(("shape", "kind"), [("llama", "auto"), ("window", "auto"), ("llama", "int8")])
def test_a_paged_cache(shape: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by the step's own attention in tiles that cross blocks; a quantised one by another."""
    from ops.triton import step

    monkeypatch.setattr(step, "attention_tile", lambda *a: (4, 4, 2))
    attended = []
    attend = step.Attend.__call__
    monkeypatch.setattr(step.Attend, "__call__", lambda *a: attended.append(1) or attend(*a))
    model, prompts = make(**SHAPES[shape]), [[1, 2, 3], list(range(11)), [4]]
    plain, fused = (
        serve(model, prompts, 5, seed=1, fused=on, cache_dtype=kind, pool=Pool(block=3, slots=2))
        for on in (False, True)
    )
    assert fused.tokens == plain.tokens and len(set(plain.tokens[1])) > 2
    assert bool(attended) == (kind == "auto")


def test_what_cannot_be_fused_is_refused_or_left() -> None:
    model = make().double()
    with pytest.raises(UserError, match=r"fused=true: weights in torch\.float64.*fused=false"):
        generate(model, [[1]], 2, fused=True)
    assert generate(model, [[1]], 2, seed=0).tokens == generate(model, [[1]], 2, seed=0, fused=False).tokens


WIDE = {
    "gpt2": {"n_embd": 192, "n_head": 3},
    "llama": {"n_embd": 320, "n_head": 4, "n_kv_head": 2, "position": "rope", "qk_norm": True}
    | {"mlp": "swiglu", "norm": "rmsnorm", "bias": False},
    "alibi": {"n_embd": 256, "n_head": 2, "position": "alibi", "window": 130, "softcap": 20.0},
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 4, 20])
@pytest.mark.parametrize("shape", WIDE)
def test_logits_on_a_gpu(shape: str, batch: int, dtype: torch.dtype) -> None:
    """Several tiles, unequal lengths: no further from fp32 than the plain step is."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=1000, seq_len=600, n_layer=3, **WIDE[shape])
    model = GPT(config, AutoAttention()).eval().to("cuda", dtype)
    exact = GPT(config, AutoAttention()).eval().cuda()
    exact.load_state_dict(model.state_dict())
    prompts = torch.randint(1000, (batch, 300)).tolist()
    prompts[0] = prompts[0][:5]
    expected, plain, fused = (
        stepped(exact, prompts, False), stepped(model, prompts, False), stepped(model, prompts, True)
    )  # fmt: skip
    errors = [float((got - expected).norm() / expected.norm()) for got in (plain, fused)]
    assert errors[1] <= 1.1 * errors[0] + 1e-5, errors


def stepped(model: GPT, prompts: list[list[int]], fused: bool) -> torch.Tensor:
    """Logits (6, B, V) of six steps that are fed the same tokens."""
    fed = torch.randint(1000, (6, len(prompts), 1), generator=torch.Generator().manual_seed(1)).cuda()
    with torch.inference_mode():
        rows = Rows(prompts, 12, model, Sampling(top_k=1000), 0)
        cache = dense_cache(model, len(prompts), 384, model.transformer.h[0].attn.attention, "auto")
        decoder = Decoder(model, rows, cache, make_step=FusedStep if fused else None)
        encode_all(model, rows, decoder, [len(prompt) for prompt in prompts])
        logits: list[torch.Tensor] = []
        rows.append = lambda x: logits.append(x[:, 0, :1000].clone())
        for token in fed:
            rows.token.copy_(token)
            decoder.advance()
    return torch.stack(logits).float()


def test_an_option_that_the_kernels_do_not_know_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is new: at its default it is off."""
    assert fused.KNOWN <= {each.name for each in fields(GPTConfig)}
    monkeypatch.setattr(fused, "KNOWN", fused.KNOWN - {"softcap"})
    without, capped = make(), make(softcap=5.0)
    assert wants_fused(without, True)
    with pytest.raises(UserError, match=r"the kernels do not compute model\.softcap"):
        wants_fused(capped, True)
