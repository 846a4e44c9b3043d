"""The architectures of transformers that this GPT can be: their config.json as ours, and ours as theirs.

config.json comes from others: of it, plain values under known keys are read, each held to what `GPTConfig`
takes. What our model has no option for is refused by its name, and so the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from conf.values import UserError, shown
from model.config import GPTConfig
from model.training.untrusted import printable

Values = dict[str, Any]
NEEDED = object()  # in place of a default


@dataclass(frozen=True)
class Architecture:
    """model_type and cls, as config.json has them.

    keys: ours -> (theirs, their default).
    theirs: keys with one function in our model -> the values that mean it, their default first.
    ours: options as `effective` has them -> what they have to be."""

    model_type: str
    cls: str
    keys: dict[str, tuple[str, Any]]
    theirs: dict[str, tuple[Any, ...]]
    ours: dict[str, Any] = field(default_factory=dict)


GPT2_KEYS = {
    "vocab_size": ("vocab_size", NEEDED),
    "n_layer": ("n_layer", NEEDED),
    "n_head": ("n_head", NEEDED),
    "n_embd": ("n_embd", NEEDED),
    "max_positions": ("n_positions", NEEDED),
    "mlp_hidden": ("n_inner", None),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "tie_embeddings": ("tie_word_embeddings", True),
}
LLAMA_KEYS = {
    "vocab_size": ("vocab_size", NEEDED),
    "n_layer": ("num_hidden_layers", NEEDED),
    "n_head": ("num_attention_heads", NEEDED),
    "n_kv_head": ("num_key_value_heads", None),
    "n_embd": ("hidden_size", NEEDED),
    "head_dim": ("head_dim", None),
    "max_positions": ("max_position_embeddings", NEEDED),
    "mlp_hidden": ("intermediate_size", NEEDED),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
}
# Options that an architecture has, or says in `ours`, or that change no function of trained weights. Any
# other, a new one too, has to be off: transformers would compute another function of the same weights.
ELSEWHERE = {
    *GPT2_KEYS, *LLAMA_KEYS, "seq_len", "rope_base", "rope_scaling", "dropout", "attn_dropout", "loss_chunk",
    "fp32_residual", "position", "norm", "mlp", "bias", "qkv_bias", "qk_norm", "window",
    "relative_buckets", "relative_distance", "sparsity_blocks",
}  # fmt: skip
# GPT-2's own, in place of what a preset or an experiment sets.
OF_THE_RUN = {"vocab_size", "seq_len", *GPTConfig.TRAINING}
DEFAULTS: Values = {each.name: each.default for each in fields(GPTConfig) if each.name not in OF_THE_RUN}
EVERY = {each.name: each.default for each in fields(GPTConfig) if each.name not in ELSEWHERE}
GPT2 = EVERY | {
    "position": "learned", "norm": "layernorm", "mlp": "gelu", "qk_norm": False, "window": False,
    "n_kv_head": "n_head", "head_dim": "n_embd / n_head",
}  # fmt: skip
LLAMA = EVERY | {
    "position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "qkv_bias": False,
    "qk_norm": False, "window": False, "n_embd": "a multiple of n_head",
}  # fmt: skip
ACTIVATION = {"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0,)}
ARCHITECTURES = {
    each.model_type: each
    for each in (
        Architecture(
            "gpt2",
            "GPT2LMHeadModel",
            GPT2_KEYS,
            {
                "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
            },
            GPT2,
        ),
        Architecture(
            "llama",
            "LlamaForCausalLM",
            LLAMA_KEYS,
            ACTIVATION | {"attention_bias": (False,), "mlp_bias": (False,)},
            LLAMA,
        ),
        Architecture(
            "mistral",
            "MistralForCausalLM",
            LLAMA_KEYS,
            ACTIVATION,
            {key: value for key, value in LLAMA.items() if key != "n_embd"} | {"window": True},
        ),
        Architecture(
            "qwen2", "Qwen2ForCausalLM", LLAMA_KEYS, ACTIVATION, LLAMA | {"qkv_bias": True, "window": any}
        ),
        Architecture(
            "qwen3",
            "Qwen3ForCausalLM",
            LLAMA_KEYS | {"head_dim": ("head_dim", 128)},
            ACTIVATION | {"attention_bias": (False,)},
            {key: value for key, value in LLAMA.items() if key != "n_embd"}
            | {"qk_norm": True, "window": any},
        ),
    )
}


def effective(config: GPTConfig) -> Values:
    """The options that architectures differ in, nulls replaced by what they come to."""
    own = {key: getattr(config, key) for key in (*EVERY, "position", "norm", "mlp", "bias", "qk_norm")}
    fits, whole = config.head_size * config.n_head == config.n_embd, config.n_embd % config.n_head == 0
    return own | {
        "qkv_bias": config.with_qkv_bias,
        "window": config.window is not None,
        "n_kv_head": "n_head" if config.kv_heads == config.n_head else config.kv_heads,
        "head_dim": "n_embd / n_head" if fits else config.head_size,
        "n_embd": "a multiple of n_head" if whole else config.n_embd,
    }


def misfits(architecture: Architecture, config: GPTConfig) -> list[str]:
    """Which of our options this architecture does not have, and what it has."""
    have = effective(config)
    return [
        f"model.{key}={shown(have[key])} (needs {shown(need)})"
        for key, need in architecture.ours.items()
        if need is not any and have[key] != need
    ]


def architecture_of(config: GPTConfig) -> Architecture:
    """The one that computes what our config says. UserError, with the options that the closest lacks."""
    wrong = {each: misfits(ARCHITECTURES[each], config) for each in ARCHITECTURES}
    closest = min(wrong, key=lambda each: len(wrong[each]))
    if wrong[closest]:
        raise UserError(
            f"No architecture of transformers computes this model; the closest, {closest}, does not fit "
            f"{', '.join(wrong[closest])}."
        )
    return ARCHITECTURES[closest]


def from_theirs(theirs: Any) -> tuple[Architecture, Values]:
    """The architecture of a config.json, and the fields of its `GPTConfig` but for seq_len. UserError for
    what they cannot express."""
    if not isinstance(theirs, dict):
        raise UserError("its config.json is no mapping")
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UserError(f"its model_type is {printable(kind)}, and {', '.join(ARCHITECTURES)} can be loaded")
    architecture = ARCHITECTURES[kind]
    named = theirs.get("architectures") or [architecture.cls]
    if named != [architecture.cls]:
        raise UserError(f"its architectures are {_said(named)}, and {architecture.cls} can be loaded")
    for key, (first, *others) in {
        **architecture.theirs,
        "quantization_config": (None,),
        "auto_map": (None,),
    }.items():
        value = theirs.get(key, first)
        # JSON's 1 is 1.0, but not true
        same = (
            value == able and isinstance(value, bool) == isinstance(able, bool) for able in (first, *others)
        )
        if not any(same):
            raise UserError(f"its {key} is {_said(value)}, and our model can only be {_said(first)} there")
    fields = dict(DEFAULTS)
    for ours, (key, default) in architecture.keys.items():
        fields[ours] = theirs.get(key, default)
        if fields[ours] is NEEDED:
            raise UserError(f"its config.json lacks {key}")
    if kind != "gpt2":
        fields |= {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}
        fields |= {"qkv_bias": kind == "qwen2", "qk_norm": kind == "qwen3", "window": _window(theirs, kind)}
        fields |= _rope(theirs)
    GPTConfig(**fields, seq_len=1)  # says what no model can have
    return architecture, fields


def _window(theirs: Mapping[str, Any], kind: str) -> Any:
    """Keys that a query sees besides its own, in all layers; None: all of them."""
    # the default of transformers' classes, where a config.json leaves it out; null is none
    size = theirs.get("sliding_window", 4096)
    layers = theirs.get("num_hidden_layers")
    on = size is not None and (
        kind == "mistral" or (kind != "llama" and theirs.get("use_sliding_window") is True)
    )
    kinds = theirs.get("layer_types")
    if kinds is not None:
        windowed = {each == "sliding_attention" for each in kinds} if isinstance(kinds, list) else set()
    elif on and kind != "mistral":
        first = theirs.get("max_window_layers", 28)
        windowed = (
            {first <= 0, first < layers} if isinstance(first, int) and isinstance(layers, int) else set()
        )
    else:
        windowed = {on}
    if len(windowed) != 1 or (windowed == {True} and not on):
        raise UserError(
            "its layer_types, or max_window_layers, give some layers a sliding window and others none"
        )
    if windowed == {False}:
        return None
    return size - 1 if isinstance(size, int) else size


def _rope(theirs: Mapping[str, Any]) -> Values:
    """rope_base and rope_scaling, of today's rope_parameters or of what these were, which transformers takes
    where a config.json has both."""
    said = theirs.get("rope_scaling") or theirs.get("rope_parameters")
    said = {} if said is None else said
    if not isinstance(said, dict):
        raise UserError(f"its rope parameters are {_said(said)}, and a mapping is needed")
    kind = said.get("rope_type", said.get("type", "default"))
    base = said.get("rope_theta", theirs.get("rope_theta", 10_000.0))
    names = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if not isinstance(kind, str) or kind not in names:
        raise UserError(f"its rope_type is {printable(kind)}, and {', '.join(names)} can be loaded")
    if said.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("its partial_rotary_factor is not 1: our model turns all of a head")
    trained = "original_max_position_embeddings"  # outside of the mapping it counts more
    said = {trained: theirs.get("max_position_embeddings")} | said
    said |= {trained: theirs[trained]} if trained in theirs else {}
    scaling = None if kind == "default" else [kind, *(said.get(name) for name in names[kind])]
    return {"rope_base": base, "rope_scaling": scaling}


def to_theirs(config: GPTConfig, bos: int | None, eos: int | None) -> Values:
    """The config.json of the architecture that fits, weights in fp32. UserError where none does."""
    architecture = architecture_of(config)
    own = {
        "n_kv_head": config.kv_heads, "head_dim": config.head_size, "max_positions": config.positions,
        "mlp_hidden": config.mlp_size, "norm_eps": float(config.eps(config.norm)),
    }  # fmt: skip
    theirs: Values = {"architectures": [architecture.cls], "model_type": architecture.model_type}
    theirs |= {key: own.get(ours, getattr(config, ours)) for ours, (key, _) in architecture.keys.items()}
    theirs |= {"dtype": "float32", "bos_token_id": bos, "eos_token_id": eos}
    if architecture.model_type == "gpt2":
        pdrop = dict.fromkeys(("resid_pdrop", "embd_pdrop"), config.dropout)
        return theirs | pdrop | {"attn_pdrop": config.attn_dropout, "activation_function": "gelu_new"}
    rope: Values = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rope_scaling is not None:
        kind, factor, *rest = config.rope_scaling
        rope |= {"rope_type": kind, "factor": float(factor)}
        if rest:
            low, high, trained = float(rest[0]), float(rest[1]), int(rest[2])
            if trained != rest[2]:
                raise UserError(
                    f"model.rope_scaling={shown(config.rope_scaling)}: transformers' config.json has a whole "
                    "number as the trained context"
                )
            rope |= {
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": trained,
            }
    theirs |= {"rope_parameters": rope, "attention_dropout": config.attn_dropout, "hidden_act": "silu"}
    if architecture.model_type == "llama":
        return theirs
    window = None if config.window is None else config.window + 1
    theirs["sliding_window"] = window
    if architecture.model_type != "mistral":
        theirs |= {
            "use_sliding_window": window is not None,
            "max_window_layers": 0 if window else config.n_layer,
        }
    return theirs


def _said(value: Any) -> str:
    return (
        printable(shown(value)) if isinstance(value, str | int | float | bool | None) else ascii(value)[:60]
    )
