"""FSDP2: parameters, gradients and optimiser state sharded over all ranks; context parallelism."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn

from model.context_parallel import ContextParallel, require_ranks
from model.costs.flops import gathered_whole
from model.gpt import GPT
from model.training.checkpoint import read_checkpoint
from model.training.untrusted import require_fit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard(net: GPT, mesh: DeviceMesh, bf16: bool) -> DeviceMesh:
    """Shard `net` over all ranks of `mesh` (data_parallel, tensor_parallel), and spread sequences over
    those of its second dimension; returns all ranks as a mesh of one dimension.

    bf16: the matrices of the blocks, which autocast would cast, are gathered in bf16, half the bytes; their
    gradients are summed over micro-batches and ranks in fp32, and all else stays in fp32.

    Small models are gathered before the forward, so that compiled they are one graph: on two H200s a step of
    GPT-2 124M took 106.2 ms, all in fp32; with a group a block 108.5, in the form of large models 113.1. On
    two H100s 111.9, 112.6 all in fp32. Large models are gathered block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    at_once, nccl = gathered_whole(net.config), dist.get_backend() == "nccl"
    override = {0: _exposed_nccl()} if at_once and nccl else None
    ranks = init_device_mesh(mesh.device_type, (mesh.size(),), backend_override=override)
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    # The norms, whose gains autocast leaves in fp32, are small: gathered once, with the embeddings.
    groups = [[block.attn, block.mlp] for block in net.transformer.h]
    if at_once:
        groups = [[module for group in groups for module in group]]
    for group in groups:
        fully_shard(group, mesh=ranks, mp_policy=policy)
    for group, following in pairwise(groups):
        group[0].set_modules_to_forward_prefetch([following[0]])
    fully_shard(net, mesh=ranks)
    if at_once:
        _gather_before_the_forward(net, groups[0])
    if at_once and nccl:  # two H100s: an all-gather of 498 MB takes 0.71 ms instead of 0.95
        for module in (net, groups[0][0]):
            module.set_allocate_memory_from_process_group_for_comm(True)
    sequence = mesh["tensor_parallel"]
    if sequence.size() > 1:
        net.share_sequences(ContextParallel(sequence.get_group()))
    return ranks


def _gather_before_the_forward(net: GPT, group: list[nn.Module]) -> None:
    """Gather `group` with what `net` itself holds. FSDP2 would at the first call of one of its modules, which
    breaks the graph there; the gradients of a group without hooks it reduces as the backward ends."""
    from torch.distributed.fsdp import fully_shard

    fully_shard.state(group[0])._pre_forward_hook_handle.remove()  # all hooks of all its modules
    net.set_modules_to_forward_prefetch([group[0]])

    @torch.compiler.disable
    def unshard(*_: Any) -> None:
        group[0].unshard()

    net.register_forward_pre_hook(unshard)


def _exposed_nccl() -> Any:
    """Options of NCCL for collectives beside which nothing is computed: 32 SMs are free for them."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = 32
    return options


def replicated(scalar: Tensor, ranks: DeviceMesh | None) -> Tensor:
    """A scalar that all ranks hold, as the optimiser takes it beside sharded parameters."""
    if ranks is None:
        return scalar
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(scalar, ranks, [Replicate()], run_check=False)


def whole(norm: Tensor) -> Tensor:
    """Under FSDP2 a norm is a DTensor."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class FSDP2Strategy(ModelParallelStrategy):
    """FSDP2 over all ranks, full checkpoints in one verified file: Lightning's own loader for this strategy
    goes past `CheckpointIO`, so loading is done here, from the same file format as on one device.

    context_parallel: ranks that share each sequence, a number or all"""

    def __init__(self, context_parallel: int | str = 1, **kwargs: Any):
        require_ranks(context_parallel)
        super().__init__(save_distributed_checkpoint=False, **kwargs)
        self.context_parallel = context_parallel

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share each sequence."""
        everyone = self.num_nodes * self.num_processes
        return everyone if self.context_parallel == "all" else self.context_parallel

    def setup_environment(self) -> None:
        # Lightning's mesh has two dimensions of these names; batches differ along the first alone.
        self._tensor_parallel_size = self.sequence_ranks
        self._data_parallel_size = self.num_nodes * self.num_processes // self.sequence_ranks
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        path = Path(self.broadcast(str(checkpoint_path)))
        checkpoint = read_checkpoint(path, step=getattr(self.checkpoint_io, "step", None))
        require_fit(checkpoint, self.lightning_module)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, checkpoint["state_dict"], options=options)
        if self.optimizers:
            state = _rekeyed(checkpoint["optimizer_states"][0], self._names(self.optimizers[0]))
            set_optimizer_state_dict(self.model, self.optimizers[0], state, options=options)
        return checkpoint

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The full state on the CPU, numbered as on one device, so that a checkpoint fits both."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        optimizer = getattr(optimizer, "optimizer", optimizer)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(self.model, optimizer, options=options)
        if not state:  # every rank but the first
            return {}
        return _rekeyed(state, {name: i for i, name in self._names(optimizer).items()})

    def _names(self, optimizer: torch.optim.Optimizer) -> dict[int, str]:
        """Number of a parameter in the optimiser -> its name."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {i: names[id(parameter)] for i, parameter in enumerate(ordered)}


def _rekeyed(state: dict[str, Any], keys: dict[Any, Any]) -> dict[str, Any]:
    """An optimiser state with its parameters called otherwise."""
    return {
        "state": {keys[key]: value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [keys[key] for key in group["params"]]} for group in state["param_groups"]
        ],
    }
