"""Data parallelism: every process trains on its share of the rows and the gradients are averaged.

Started by `torchrun`. On a CPU, two processes of one thread each train a small model about 1.4 times
as fast as one process of two threads: small operations do not split well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def rank() -> int:
    """Returns this process's number, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Returns the number of processes that train together, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join_process_group() -> None:
    """Joins the group that `torchrun` announces in the environment; alone, does nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def leave_process_group() -> None:
    """Leaves the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def average_gradients(parameters: Sequence[nn.Parameter], *, wants_stop: bool) -> bool:
    """Averages gradients over all processes, in place; returns whether any of them wants to stop.

    The wish to stop travels with the gradients, so that all processes stop after the same step.
    """
    if world_size() == 1:
        return wants_stop
    for parameter in parameters:
        if parameter.grad is None:  # an expert that none of this process's tokens chose
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    wish = gradients[0].new_tensor([float(wants_stop)])
    flat = torch.cat([wish, *(gradient.flatten() for gradient in gradients)])
    dist.all_reduce(flat)
    flat[1:] /= world_size()
    shares = flat[1:].split([gradient.numel() for gradient in gradients])
    for gradient, share in zip(gradients, shares, strict=True):
        gradient.copy_(share.view_as(gradient))
    return bool(flat[0] > 0)
