"""Our attentions inside transformers' models: importing this module registers them all.

    import attention.for_transformers
    model = AutoModelForCausalLM.from_pretrained("gpt2", attn_implementation="tilegpt-triton")

Each name in conf/attention is registered under its `registered_name`. transformers calls `encode_mask` once
per forward pass, with the lengths, mask pattern, padding and cache, and `attend` in each layer, with the mask
that `encode_mask` returned. That mask is not a Tq x Tk matrix: it encodes the options of our contract that
padding, packed documents, sliding windows and caches correspond to. What they cannot express is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attention import registry
from attention.call import UnsupportedAttention
from ops.options import AttentionOptions

if TYPE_CHECKING:
    from attention.base import Attention

# Flags of a mask. Their sum plus 1 is its second dimension's size: reading a shape does not synchronise.
# AHEAD: the window has no end to the right.
CAUSAL, WINDOW, DOCUMENTS, LENGTHS, AHEAD = 1, 2, 4, 8, 16
# A row has as many entries more as a window reaches to the left. This number modulo REMAINDERS, plus 1, is
# the third dimension's size, by which a mask of other lengths is told. Not all of it: where a mask is copied
# to another GPU, it takes all the memory that its shape says.
REMAINDERS = 13
# Arguments of a layer that change the result of attention, and that our contract cannot express.
REFUSED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "choice of keys",
    "block_indices": "choice of blocks of keys",
    "head_mask": "mask of heads",
    "cache": "paged cache",
    "output_attentions": "attention weights as an output",
}


def registered_name(name: str) -> str:
    """For example tilegpt-triton, or tilegpt-sdpa-fa for sdpa_flash: transformers treats any name with
    "flash" in it as one of its own libraries."""
    return f"tilegpt-{name.replace('_', '-').replace('flash', 'fa')}"


class Pattern(NamedTuple):
    """What a mask function of transformers lets a query see."""

    causal: bool = False
    window: tuple[int, int] | None = None  # keys before and after the query's own; -1: all
    document_ids: Tensor | None = None  # (B, T)


def pattern_of(mask_function: Callable[..., Any], name: str) -> Pattern:
    """The pattern that `mask_function` was made for: a tree of closures of transformers.masking_utils.
    UnsupportedAttention, for the implementation `name`, where it is something else."""
    from_transformers = getattr(mask_function, "__module__", "") == "transformers.masking_utils"
    maker = mask_function.__qualname__.partition(".")[0] if from_transformers else None
    cells = (
        zip(mask_function.__code__.co_freevars, mask_function.__closure__ or (), strict=True)
        if from_transformers
        else ()
    )
    inside = {variable: cell.cell_contents for variable, cell in cells}
    if maker == "and_masks":
        parts = [pattern_of(part, name) for part in inside["mask_functions"]]
        ids = [part.document_ids for part in parts if part.document_ids is not None]
        windows = [part.window for part in parts if part.window is not None]
        if len(ids) < 2 and len(windows) < 2:
            causal = any(part.causal for part in parts)
            return Pattern(causal, windows[0] if windows else None, ids[0] if ids else None)
    if maker == "causal_mask_function":
        return Pattern(causal=True)
    if maker == "bidirectional_mask_function":
        return Pattern()
    if maker == "sliding_window_overlay":  # its size counts the query's own key
        return Pattern(window=(inside["sliding_window"] - 1, -1))
    if maker == "sliding_window_bidirectional_overlay":  # its size does not
        return Pattern(window=(inside["sliding_window"],) * 2)
    if maker == "packed_sequence_mask_function":
        return Pattern(document_ids=inside["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":  # within a document, places differ as positions do
        return pattern_of(inside["mask_function"], name)
    what = getattr(mask_function, "__qualname__", repr(mask_function))
    raise UnsupportedAttention(
        name, [f"a mask of the pattern {what}: needs causal, full, windows or documents"]
    )


@torch.compiler.disable
def encode_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    name: str,
    **others: Any,
) -> Tensor | None:
    """What `attend` reads, (B or 1, 1 + flags, 1 + window % REMAINDERS, n) int32; None: causal, aligned
    bottom-right, nothing else.

    q_offset, kv_offset: positions of the first query and the first key.
    attention_mask: (B, positions) bool, False where padded.
    mask_function: who sees whom, by positions; `others` say the same for those who write the mask out.
    """
    causal, window, documents = pattern_of(mask_function, name)
    parts: list[Tensor] = []
    if documents is not None:
        parts = [documents, documents]
    elif attention_mask is not None and not attention_mask.all():
        keys = attention_mask[:, kv_offset : kv_offset + kv_length]
        keys = torch.nn.functional.pad(keys, (0, kv_length - keys.shape[1]))  # of a cache that is not full
        parts = [keys.new_ones(batch_size, q_length), keys]
    left, right = window or (0, 0)
    flags = CAUSAL * causal + WINDOW * (window is not None) + DOCUMENTS * bool(parts)
    flags += AHEAD * (right < 0 and not causal)
    # Rows of a cache that was allocated whole count up to the last query, which is where our diagonal ends.
    end = q_offset - kv_offset + q_length
    if causal and (isinstance(end, Tensor) or end != kv_length):
        flags += LENGTHS
        parts.append(torch.as_tensor(end, device=device).reshape(-1, 1).expand(batch_size, 1))
    if flags == CAUSAL:
        return None
    empty = torch.empty(1, 0, dtype=torch.int32, device=device)
    row = torch.cat([part.to(device, torch.int32) for part in parts], dim=1) if parts else empty
    row = torch.nn.functional.pad(row, (0, left))
    return row[:, None, None].expand(-1, 1 + flags, 1 + left % REMAINDERS, -1)


def options_of(mask: Tensor | None, tq: int, tk: int, window: int | None, name: str) -> AttentionOptions:
    """The options that `encode_mask` has encoded. window: the layer's; its size is not read,
    as models pass that of their mask, or one more where a library counts the query's own key."""
    if mask is None:
        flags, encoded = CAUSAL, None
    else:
        if mask.ndim != 4 or mask.dtype != torch.int32:
            raise UnsupportedAttention(name, ["a mask of your own: needs one of two dimensions, (B, tokens)"])
        flags, encoded = mask.shape[1] - 1, mask[:, 0, 0]
    if bool(flags & WINDOW) != (window is not None):
        raise UnsupportedAttention(
            name, [f"a layer with sliding_window={window} and a mask that says otherwise"]
        )
    options = AttentionOptions(causal=bool(flags & CAUSAL))
    width = (flags & DOCUMENTS > 0) * (tq + tk) + (flags & LENGTHS > 0)
    left = encoded.shape[1] - width if encoded is not None else 0
    if left < 0 or (left and window is None) or (mask is not None and mask.shape[2] != 1 + left % REMAINDERS):
        raise UnsupportedAttention(name, [f"a mask for other lengths than {tq} queries and {tk} keys"])
    if window is not None:
        right = 0 if options.causal else -1 if flags & AHEAD else left
        options = options._replace(window=(left, right))
    if flags & DOCUMENTS:
        options = options._replace(document_ids=(encoded[:, :tq], encoded[:, tq : tq + tk]))
    if flags & LENGTHS:
        options = options._replace(kv_lengths=encoded[:, width - 1].contiguous())
    return options


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    *,
    attention: Attention,
    **others: Any,
) -> tuple[Tensor, None]:
    """Runs `attention` for a layer of transformers, whose interface the parameters follow.

    query is (B, H, Tq, D), key and value are (B, Hkv, Tk, D); returns (B, Tq, H, D), and None in place of the
    attention weights."""
    refused = [f"no {what}" for argument, what in REFUSED.items() if not _is_off(others.get(argument))]
    tq, tk = query.shape[2], key.shape[2]
    options = options_of(attention_mask, tq, tk, sliding_window, attention.name)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options = options._replace(causal=causal)
    if (starts := others.get("cu_seq_lens_q")) is not None and options.document_ids is None:
        if query.shape[0] > 1 or not _are_equal(others.get("cu_seq_lens_k"), starts):
            refused.append("no packed rows of several lengths: needs one row, with queries as its keys")
        at = torch.arange(tq, dtype=starts.dtype, device=query.device)
        options = options._replace(document_ids=torch.bucketize(at, starts, out_int32=True, right=True)[None])
    if refused:
        raise UnsupportedAttention(attention.name, refused)
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary under autocast may leave fp32
    options = options._replace(scale=scaling, softcap=softcap, bias=position_bias, dropout_p=dropout)
    return attention(query, key, value, **options._asdict()).transpose(1, 2).contiguous(), None


def _are_equal(ends: Tensor | None, starts: Tensor) -> bool:
    """One tensor, as a rule; two where a batch was copied to a GPU, which are compared there."""
    if ends is None or ends is starts:
        return ends is starts
    if ends.is_inference() or starts.is_inference():  # which do not count how often they were written
        return torch.equal(ends, starts)
    return _were_equal(ends, starts, ends._version, starts._version)


@functools.lru_cache(maxsize=1)
def _were_equal(ends: Tensor, starts: Tensor, *_: int) -> bool:
    """Once for all layers, as the host waits for it."""
    return torch.equal(ends, starts)


def _is_off(value: Any) -> bool:
    return value is None or value is False


def register() -> None:
    """Both halves of each name: without a mask function transformers would hand on no mask at all."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in registry.names():
        try:
            attention = registry.build(name)
        except ImportError:  # ours import libraries in a call; one of the user's own may not
            continue
        registered = registered_name(name)
        AttentionInterface.register(registered, functools.partial(attend, attention=attention))
        AttentionMaskInterface.register(registered, functools.partial(encode_mask, name=name))


register()
