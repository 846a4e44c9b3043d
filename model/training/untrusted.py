"""What is taken from a checkpoint: plain values and tensors, under the keys and of the kinds that this
program has there itself. Everything else is refused by a UserError of one line. (The config: conf/saved.py.)

torch's `weights_only` loading, which comes before, keeps code out of the file; this keeps out what plain
values could do, as attributes, arguments, paths and sizes, to those who take them for their own.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from conf.values import UserError

if TYPE_CHECKING:
    import torch

SCALARS = (str, int, float, bool, type(None))
# Entries of a checkpoint and their kinds; what is in them is held to the values of the run that takes them.
ENTRIES: dict[str, tuple[type, ...]] = {
    "epoch": (int,),
    "global_step": (int,),
    "pytorch-lightning_version": (str,),
    "state_dict": (dict, OrderedDict),
    "loops": (dict,),
    "callbacks": (dict,),
    "optimizer_states": (list,),
    "lr_schedulers": (list,),
    "TokenDataModule": (dict,),
    "tilegpt": (dict,),
}
SCHEMA = 1  # of the entry "tilegpt"
METADATA: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "choices": (dict,),
    "config": (dict,),
    "model": (dict,),
    "tokenizer": (dict, type(None)),
}
DEPTH = 16  # of containers in each other; a checkpoint has nine
MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # of AdamW
MUON = {"momentum_buffer"}
POSITION = ("consumed", "fingerprint", "seed", "seq_len")  # of the data module's state


def printable(name: Any) -> str:
    """A word out of a file, fit for a message: short, and without what a terminal would obey."""
    text = name if type(name) is str else f"<{type(name).__name__}>"
    return text if re.fullmatch(r"[\w.+@/<>-]{1,80}", text, re.ASCII) else ascii(text[:60])


def is_plain(value: Any) -> bool:
    """Whether it is a string, a number of at most 64 bits, a bool or None, and no subclass of these."""
    return type(value) in SCALARS and (type(value) is not int or -(2**63) <= value < 2**64)


def require_plain(content: Any) -> None:
    """UserError unless all of it is plain values and dense tensors in containers that are not nested deeper
    than DEPTH. Level by level: a structure that holds itself, or one part a thousand times, costs no more."""
    from torch import Tensor

    level = [content]
    for _ in range(DEPTH):
        inner: dict[int, Any] = {}
        for container in level:
            values: Iterable[Any] = container
            if isinstance(container, dict):
                if type(container) is OrderedDict:
                    vars(container).clear()  # attributes, in front of its methods
                values = container.values()
                for key in container:
                    if type(key) not in (str, int):
                        raise UserError(f"it has a key that is a {type(key).__name__}")
            for value in values:
                if type(value) in (dict, OrderedDict, list, tuple):
                    inner[id(value)] = value
                elif type(value) is Tensor:
                    _require_dense(value)
                elif not is_plain(value):
                    raise UserError(f"it holds a {type(value).__name__} that is no plain value of 64 bits")
        if not inner:
            return
        level = list(inner.values())
    raise UserError(f"its values are nested deeper than {DEPTH}")


def _require_dense(tensor: torch.Tensor) -> None:
    import torch

    dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not dense or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise UserError("it holds a tensor that is not dense")


def require_keys(content: Any, keys: Iterable[str], name: str) -> None:
    """UserError unless `content` is a dictionary with these keys and no others."""
    if not isinstance(content, dict):
        raise UserError(f"its {name} is a {type(content).__name__}")
    if missing := [key for key in keys if key not in content]:
        raise UserError(f"its {name} lacks {missing[0]}")
    if unknown := [key for key in content if key not in keys]:
        raise UserError(f"its {name} has {printable(unknown[0])}, which this version does not know")


def require_checkpoint(checkpoint: dict[Any, Any]) -> None:
    """UserError unless this is the dictionary that a checkpoint of this project holds.

    Further entries, of plain values and tensors, are those of callbacks named on the command line."""
    metadata = checkpoint["tilegpt"]
    if type(metadata) is dict and metadata.get("schema") != SCHEMA:
        schema = metadata.get("schema")
        raise UserError(
            f"it has schema {schema if type(schema) is int else printable(schema)}, and this version of "
            f"tilegpt reads {SCHEMA}: use the one that wrote it"
        )
    require_plain(checkpoint)
    known = {key: value for key, value in checkpoint.items() if key in ENTRIES}
    ours = METADATA | ({"adapters": (dict,)} if type(metadata) is dict and "adapters" in metadata else {})
    for name, content, entries in (("content", known, ENTRIES), ("entry tilegpt", metadata, ours)):
        require_keys(content, entries, name)
        for key, kinds in entries.items():
            if type(content[key]) not in kinds:
                raise UserError(f"its {key} is a {type(content[key]).__name__}")
    version = checkpoint["pytorch-lightning_version"]
    if not re.fullmatch(r"2(\.\d{1,4}){1,2}(\.?(a|b|rc|dev|post)\d{1,9})?(\+\w{1,20})?", version, re.ASCII):
        raise UserError(f"it was written by Lightning {printable(version)}, and 2 is needed")
    if checkpoint["global_step"] < 0:
        raise UserError(f"its step is {checkpoint['global_step']}")
    require_model(metadata["model"], checkpoint["state_dict"], metadata.get("adapters"))


def require_like(value: Any, own: Any, name: str) -> None:
    """UserError unless `value` has the keys of `own` and their kinds; where `own` is None, a number."""
    if isinstance(own, dict):
        require_keys(value, own, name)
        for key, inner in own.items():
            require_like(value[key], inner, f"{name}.{key}")
    elif type(value) is not type(own) and not (own is None and type(value) in (int, float)):
        raise UserError(f"its {name} is a {type(value).__name__} and not a {type(own).__name__}")


def require_weights(weights: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> None:
    """UserError unless `weights` has the names and shapes of `own`."""
    from torch import Tensor

    for what, names in (("lack", own.keys() - weights.keys()), ("have", weights.keys() - own.keys())):
        if names:
            first, more = min(map(printable, names)), f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(
                f"its weights {what} {first}{more}, {'which' if what == 'lack' else 'not as'} "
                "the model of its config has"
            )
    for name, tensor in own.items():
        found = weights[name]
        if not isinstance(found, Tensor) or not found.is_floating_point():
            raise UserError(f"its {name} is no tensor of floating-point numbers")
        if found.shape != tensor.shape:
            raise UserError(
                f"its {name} has the shape {tuple(found.shape)}, and {tuple(tensor.shape)} is needed"
            )


def require_model(fields: dict[str, Any], weights: Mapping[str, Any], adapters: Any = None) -> None:
    """UserError unless these are the fields of a `GPTConfig` and the weights those of its model, of which
    nothing is built before that is known; or of its `adapters` alone, where there are some."""
    import torch

    from model.config import GPTConfig
    from model.gpt import without_storage
    from model.lora import Adapters

    require_keys(fields, fields.keys() & vars(GPTConfig(vocab_size=1)) | {"vocab_size"}, "model")
    config = GPTConfig(**fields)
    numbers = sum(weight.numel() for weight in weights.values() if isinstance(weight, torch.Tensor))
    too_wide = adapters is None and config.n_embd * max(config.padded_vocab_size, config.n_head) > numbers
    if config.n_layer > len(weights) or too_wide:
        raise UserError(
            f"its weights are not those of {config.n_layer} layers, width {config.n_embd} and vocabulary "
            f"{config.vocab_size}"
        )
    if adapters is not None:
        own = Adapters.of_file(adapters).shapes(config)
    else:
        own = without_storage(config).state_dict()
    require_weights(weights, {f"net.{name}": tensor for name, tensor in own.items()})


def require_optimizer(states: list[Any], shapes: list[torch.Size], step: int, muon: int = 0) -> None:
    """UserError unless it is the state of one AdamW, or of Muon with one, over groups of parameters of these
    shapes, of which the first `muon` are Muon's."""
    from torch import Tensor

    if len(states) != 1:
        raise UserError(f"it holds the state of {len(states)} optimisers, and 1 is needed")
    require_keys(states[0], ("state", "param_groups"), "optimizer_states")
    state, groups = states[0]["state"], states[0]["param_groups"]
    if type(groups) is not list or not all(type(g) is dict and type(g.get("params")) is list for g in groups):
        raise UserError("its optimizer_states.param_groups are no list of groups of parameters")
    settings = [value for group in groups for key, value in group.items() if key != "params"]
    if not all(type(v) in SCALARS or (type(v) in (list, tuple) and all(map(is_plain, v))) for v in settings):
        raise UserError("its optimizer_states.param_groups hold more than plain values")
    if [i for group in groups for i in group["params"]] != list(range(len(shapes))):
        raise UserError(f"its optimiser is not one of {len(shapes)} parameters")
    if type(state) is not dict or (state.keys() != set(range(len(shapes))) and (state or step)):
        raise UserError(f"its optimiser does not have the state of {len(shapes)} parameters")
    for i, moments in state.items():
        needed = MOMENTS | ({"max_exp_avg_sq"} & moments.keys() if type(moments) is dict else set())
        needed = MUON if i < muon else needed
        require_keys(moments, needed, f"optimizer_states.state.{i}")
        for name, moment in moments.items():
            shape = () if name == "step" else shapes[i]
            if not isinstance(moment, Tensor) or moment.shape != shape or not moment.is_floating_point():
                raise UserError(
                    f"its optimiser's {name} of parameter {i} is no tensor of shape {tuple(shape)}"
                )


def require_fit(checkpoint: dict[str, Any], lit: Any) -> None:
    """UserError unless the weights and the optimiser's state are of the shapes of this `LitGPT`."""
    require_weights(checkpoint["state_dict"], lit.state_dict())
    groups = lit.parameter_groups()
    shapes = [parameter.shape for group in groups for parameter in group["params"]]
    muon = sum(len(group["params"]) for group in groups if group.get("muon"))
    require_optimizer(checkpoint["optimizer_states"], shapes, checkpoint["global_step"], muon)
    own, found = (
        [len(group["params"]) for group in of]
        for of in (groups, checkpoint["optimizer_states"][0]["param_groups"])
    )
    if own != found:
        raise UserError(f"its optimiser has groups of {found} parameters and not of {own}: optim= differs")


def require_run(checkpoint: dict[str, Any], lit: Any) -> None:
    """UserError unless a checkpoint fits the run that is to take its weights, optimiser, loops, position in
    the data and callbacks: what each of these has itself says which keys and kinds there are.

    A callback that is not of model/ was named on the command line: its state is plain values, and its own."""
    trainer = lit.trainer
    require_fit(checkpoint, lit)
    loops = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
    require_like(checkpoint["loops"], {name: getattr(trainer, name).state_dict() for name in loops}, "loops")
    if trainer.datamodule is not None:
        own, state = trainer.datamodule.state_dict(), checkpoint["TokenDataModule"]
        kept = {key: own[key] for key in own if key in state or key in POSITION}  # others are younger
        require_like(state, kept, "TokenDataModule")
        if state["consumed"] < 0:
            raise UserError(f"its TokenDataModule.consumed is {state['consumed']}")
    for callback in trainer.callbacks:
        if type(callback).__module__.startswith("model."):
            name, own = callback.state_key, callback.state_dict()
            state = checkpoint["callbacks"].get(name, {})
            require_keys(state, own.keys() & state if type(state) is dict else (), f"callbacks.{name}")
            checkpoint["callbacks"][name] = state = {**own, **state}  # a key may be younger than the file
            require_like(state, own, f"callbacks.{name}")
