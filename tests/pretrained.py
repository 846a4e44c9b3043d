"""Random models of transformers, with a tokenizer, in folders: what the Hub would give, without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
# What each has that the others do not: tied or not, biases of q, k and v, QK-norm, windows, wider heads.
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 96},
    "llama": {**SIZES, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-5},
    "llama2": {**SIZES, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "mistral": {**SIZES, "sliding_window": 9},
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "head_dim": 24},
}
VOCABULARY = 300


def make_model(kind: str, **changes: Any) -> Any:
    """A random model in fp32, with weights larger than usual, so that its logits differ."""
    import transformers

    sizes = {**KINDS[kind], "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, **changes}
    config = transformers.AutoConfig.for_model("llama" if kind == "llama2" else kind, **sizes)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.1 if weight.dim() > 1 else 0.3)
            weight.add_(1 if name.endswith("norm.weight") or (".ln_" in name and "weight" in name) else 0)
    return model


def make_folder(folder: Path, kind: str, shard: str = "5GB", **changes: Any) -> Any:
    """`make_model` saved to `folder`, with a tokenizer; returns the model."""
    model = make_model(kind, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    make_tokenizer(folder)
    return model


def make_tokenizer(folder: Path, more: int = 0) -> None:
    """Bytes, the merges of a few words, <|endoftext|> as token 0, and `more` special ones: 280 and these."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", *(f"<|{i}|>" for i in range(more))]
    trainer = trainers.BpeTrainer(
        vocab_size=280 + more, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    bpe.train_from_iterator(["attention is all you need and some tiles of keys " * 20], trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[0], bos_token=special[0]).save_pretrained(
        folder
    )


def tokens(batch: int = 2, length: int = 70) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
