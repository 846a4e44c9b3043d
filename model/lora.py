"""LoRA by peft (Hu et al. 2021): W stays, W + alpha / rank * B A is what computes, A and B train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from conf.values import UserError, number, whole
from model.config import GPTConfig
from model.gpt import GPT, without_storage

TARGETS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
A, B = "lora_A.default.weight", "lora_B.default.weight"  # as peft calls them


@dataclass(frozen=True)
class Adapters:
    """What a checkpoint says of its adapters; `base`: sha256 of the file of weights that stay."""

    rank: int
    alpha: float
    targets: list[str]
    base: str = ""

    def __post_init__(self) -> None:
        whole("finetune.rank", self.rank, 1, 2**16)
        number("finetune.alpha", self.alpha, above=0)
        known = isinstance(self.targets, list) and all(target in TARGETS for target in self.targets)
        if not known or not self.targets or len(set(self.targets)) < len(self.targets):
            raise UserError(
                f"finetune.targets={ascii(self.targets)[:80]}: it needs to be some of {', '.join(TARGETS)}."
            )

    @classmethod
    def of_file(cls, saved: Any) -> Adapters:
        """From a checkpoint, which may be somebody else's."""
        if not isinstance(saved, dict) or saved.keys() != {"rank", "alpha", "targets", "base"}:
            raise UserError("its adapters are not rank, alpha, targets and base")
        if type(saved["base"]) is not str:
            raise UserError(f"its adapters.base is a {type(saved['base']).__name__}")
        return cls(**saved)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def shapes(self, config: GPTConfig) -> dict[str, Tensor]:
        """A and B of all targets of a model, without storage."""
        ends, found = tuple(f".{target}" for target in self.targets), {}
        for name, layer in without_storage(config).named_modules():
            if name.endswith(ends):
                found[f"{name}.{A}"] = torch.empty(self.rank, layer.in_features, device="meta")
                found[f"{name}.{B}"] = torch.empty(layer.out_features, self.rank, device="meta")
        return found

    def merged(self, base: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a plain model: `base`, and what the adapters add to it."""
        plain = dict(base)
        for name in (name for name in adapters if name.endswith(A)):
            layer = name.removesuffix(A)
            added = adapters[layer + B].float() @ adapters[name].float()
            plain[f"{layer}weight"] = base[f"{layer}weight"] + added * (self.alpha / self.rank)
        return plain


def adapter_count(net: torch.nn.Module) -> int | None:
    """Parameters of the adapters, where they alone train; None where all weights do."""
    if all(parameter.requires_grad for parameter in net.parameters()):
        return None
    return sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)


def require_peft(dropout: float) -> None:
    """UserError where it is not installed, or takes no such dropout."""
    number("finetune.dropout", dropout, least=0, below=1)
    try:
        import peft  # noqa: F401
    except ImportError:
        raise UserError("finetune=lora needs peft: pip install -e '.[hf]'.") from None


def add_adapters(net: GPT, adapters: Adapters, dropout: float) -> None:
    """Put A and B beside the targets of `net`; nothing else of it trains from now on."""
    require_peft(dropout)
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,
        lora_dropout=dropout,
        target_modules=list(adapters.targets),
    )
    inject_adapter_in_model(config, net)
