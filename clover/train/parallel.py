"""Several processes that train one model: who they are, what they share, how a model is split.

"ddp": every process holds the whole model and gradients are averaged. "fsdp" (FSDP2): every process
holds a slice of each parameter, of its gradient and of its optimizer state, and layers are gathered
as they are needed. Either way a process takes its share of a step's rows, and all sums run over all
processes: how many there are changes nothing but rounding.

Started by `torchrun`. On a CPU, two processes of one thread each train a small model about 1.4 times
as fast as one process of two threads: small operations do not split well.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from clover.checkpoint.load import read_full_config, save_model
from clover.checkpoint.names import expected_tensors
from clover.checkpoint.source import ModelTensors
from clover.errors import TrainingError
from clover.model.transformer import CloverForCausalLM

Parallelism = Literal["ddp", "fsdp"]


def rank() -> int:
    """Returns this process's number, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Returns the number of processes that train together, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join_process_group() -> None:
    """Joins the group that `torchrun` announces in the environment; alone, does nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not dist.is_initialized():
        if _device_type() == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if _device_type() == "cuda" else "gloo")


def leave_process_group() -> None:
    """Leaves the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def process_group() -> Iterator[None]:
    """Is a member of `torchrun`'s group, if there is one, as long as the block lasts."""
    join_process_group()
    try:
        yield
    finally:
        leave_process_group()


def wait_for_all() -> None:
    """Returns when every process has come here."""
    if world_size() > 1:
        dist.barrier()


def mean_over_processes(values: Tensor) -> Tensor:
    """Returns the mean of each value over all processes, without autograd."""
    if world_size() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total / world_size()


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Averages the gradients of "ddp" over all processes, in place. FSDP does so by itself."""
    if world_size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:  # an expert that none of this process's tokens chose
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = mean_over_processes(torch.cat([gradient.flatten() for gradient in gradients]))
    shares = flat.split([gradient.numel() for gradient in gradients])
    for gradient, share in zip(gradients, shares, strict=True):
        gradient.copy_(share.view_as(gradient))


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scales gradients to a norm of at most `max_norm` over all slices; returns the norm before."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(whole_tensor(norm))


def shard_model(model: CloverForCausalLM, precision: Literal["fp32", "bf16"]) -> None:
    """Splits a model over all processes, in place (FSDP2). One that is split stays as it is.

    Master weights, gradient sums and optimizer state keep the parameters' dtype, fp32. With "bf16"
    layers are gathered and computed in bf16, as a bf16 checkpoint is at inference. Each layer is a
    unit of its own; embedding, last norm and output head form another.

    Raises:
        TrainingError: There is no process group.
    """
    if isinstance(model, FSDPModule):
        return
    if not dist.is_initialized():
        raise TrainingError(
            "parallelism is 'fsdp', found no process group: start the run with torchrun"
        )
    mesh = init_device_mesh(_device_type(), (world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=torch.float32,
        # Rotary tables are fp32 and stay so; hidden states have the weights' dtype already
        cast_forward_inputs=False,
    )
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    # The hooks that gather and free parameters sit on `forward`; training calls this one too
    register_fsdp_forward_method(model, "two_stream")
    # Logits leave the model as views, which is safe as long as nobody writes into them. Nobody does
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def load_sharded(
    folder: Path, *, precision: Literal["fp32", "bf16"], device: torch.device
) -> CloverForCausalLM:
    """Returns the model of a folder, split over all processes, its master weights in fp32.

    Every process reads every tensor, one after the other, and keeps its slice: no process ever
    holds the whole model.

    Raises:
        ConfigError, CheckpointError, TrainingError: As `load_model` and `shard_model` say.
    """
    config = read_full_config(folder)
    source = ModelTensors(folder, config)
    with torch.device("meta"):
        model = CloverForCausalLM(config)
    shard_model(model, precision)
    model.to_empty(device=device)
    if config.tie_word_embeddings:  # to_empty gives each of the two names a tensor of its own
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for name in source.specs:
            slice_ = model.get_parameter(name)
            whole = source.read(name).to(device=device, dtype=torch.float32)
            slice_.copy_(_shard_like(whole, slice_))
    return model


def save_whole(model: CloverForCausalLM, folder: Path, **options: Any) -> None:
    """Writes a model as one checkpoint folder, by `save_model` in the first process.

    Every process must call this: a sharded model is gathered one tensor at a time.
    """
    if rank() == 0:
        save_model(model, folder, gather=whole_tensor, **options)
    elif is_sharded(model):
        parameters = dict(model.named_parameters())
        for name in expected_tensors(model.config):
            whole_tensor(parameters[name].detach())
    wait_for_all()


def is_sharded(model: nn.Module) -> bool:
    """Whether every process holds slices of the parameters."""
    return isinstance(model, FSDPModule)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns a sharded tensor put together (every process must call this), any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_matrices(tensor: Tensor) -> Tensor:
    """Returns the matrices of a parameter or update of which this process needs the whole.

    A stack of matrices [E, rows, columns] is cut between matrices: each process works on its own,
    without communication. A single matrix is cut through its rows: every process gathers all of
    it and does the same work, then keeps its rows of the result.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.dim() > 2 else tensor.full_tensor()


def share_out(function: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """Returns `function(matrices)`, of which each process computes a part and gives it to the others.

    Args:
        function: treats each matrix by itself and keeps shapes and dtype.
        matrices: [..., rows, columns], the same in every process.
    """
    if world_size() == 1:
        return function(matrices)
    flat = matrices.flatten(0, -3)
    result = torch.empty_like(flat)
    parts = result.tensor_split(world_size())
    mine = flat.tensor_split(world_size())[rank()]
    if len(mine):
        parts[rank()].copy_(function(mine))
    for process, part in enumerate(parts):
        if len(part):
            dist.broadcast(part, src=process)
    return result.view_as(matrices)


def local_part(matrices: Tensor, parameter: Tensor) -> Tensor:
    """Returns the slice of `whole_matrices` that lies in this process's part of the parameter."""
    if not isinstance(parameter, DTensor) or parameter.dim() > 2:
        return matrices
    return local_tensor(_shard_like(matrices, parameter))


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this process's slice, which shares the memory of the sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Returns a tensor that every process holds, split as the parameter is."""
    assert isinstance(parameter, DTensor)
    # Without a source rank nothing is sent: each process cuts out its own slice
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _device_type() -> Literal["cuda", "cpu"]:
    return "cuda" if torch.cuda.is_available() else "cpu"
