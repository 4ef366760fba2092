"""Which parameter is updated how: Muon for matrices, AdamW for the rest; and the weights' average.

E: experts; matrices of equal shape are updated together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clover.errors import TrainingError
from clover.train.parallel import local_part, local_tensor, share_out, whole_matrices
from clover.train.precision import emulates_bf16

OptimizerName = Literal["muon", "adamw"]

# Quintic whose iteration drives singular values to about 1 (Keller Jordan, "Muon", 2024)
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
# Scales an orthogonal update to the RMS of an AdamW update (Liu et al., arXiv 2502.16982), so that
# both optimizers share one learning rate
MUON_RMS = 0.2
# Matrices of one shape are orthogonalised together, up to so many numbers (1 GiB in fp32): enough to
# hide the overhead of small ones, few enough that large ones need little memory beside the weights
MAX_STACKED_ELEMENTS = 2**28

# What conversion adds to a parent: starts from nothing, so it may want to move faster
DIFFUSION_NAMES = (
    "conv_right_weight",
    "bd_softmax_logit_scale",
    "bd_softmax_history_bias",
    "bd_softmax_history_c",
)
# Two-dimensional, but look-up tables or a handful of rows, not maps between wide spaces
NOT_A_MATRIX = (
    "embed_tokens.weight",
    "lm_head.weight",
    "conv1d.weight",
    "mlp.gate.weight",
    "shared_expert_gate.weight",
    "in_proj_a.weight",
    "in_proj_b.weight",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizer and its constants. Learning rates are the peak of the schedule."""

    name: OptimizerName = "muon"
    learning_rate: float = 3e-3
    diffusion_lr_multiplier: float = 1.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10
    momentum: float = 0.95


def newton_schulz(matrices: Tensor) -> Tensor:
    """Returns nearly orthogonal matrices with the singular vectors of [..., rows, columns].

    Singular values end between about 0.7 and 1.2, which is good enough and cheap, also in bf16. A
    CPU that has to emulate bf16 computes in fp32.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrices.float() if emulates_bf16(matrices.device) else matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        # x <- (a + b gram + c gram^2) x
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.reshape(shape)
    result: Tensor = x.mT if is_tall else x
    return result.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; for matrices and stacks of matrices [E, rows, columns].

    Sharded parameters give the update of whole ones: see `whole_matrices`.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        """Takes parameters of two or three dimensions."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                count = max(1, MAX_STACKED_ELEMENTS // shape.numel())
                for start in range(0, len(parameters), count):
                    self._update(
                        parameters[start : start + count],
                        lr=group["lr"],
                        momentum=group["momentum"],
                        weight_decay=group["weight_decay"],
                    )

    def _update(
        self, parameters: list[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        updates = []
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            updates.append(whole_matrices(gradient.lerp(buffer, momentum)))
        scale = MUON_RMS * max(parameters[0].shape[-2:]) ** 0.5
        stacked, is_replicated = torch.stack(updates), local_tensor(parameters[0]) is parameters[0]
        directions = share_out(newton_schulz, stacked) if is_replicated else newton_schulz(stacked)
        for parameter, direction in zip(parameters, directions, strict=True):
            weights = local_tensor(parameter)
            weights.mul_(1 - lr * weight_decay)
            weights.add_(local_part(direction, parameter), alpha=-lr * scale)


def classify(name: str, parameter: Tensor) -> Literal["diffusion", "matrix", "other"]:
    """Returns how a parameter is treated: by Muon ("matrix"), or by AdamW without decay."""
    if name.endswith(DIFFUSION_NAMES):
        return "diffusion"
    if parameter.dim() < 2 or name.endswith(NOT_A_MATRIX):
        return "other"
    return "matrix"


class Optimizers:
    """All optimizers of a model behind one step, with their state as named tensors."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        """Assigns every trainable parameter to exactly one optimizer.

        Weight decay acts on matrices alone: on norms, gates, decays and embeddings it is a bias
        towards values that mean something.
        """
        self._names: dict[Tensor, str] = {
            parameter: name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        groups: dict[str, list[nn.Parameter]] = {"diffusion": [], "matrix": [], "other": []}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                groups[classify(name, parameter)].append(parameter)
        lr = config.learning_rate
        adam_groups = [
            {"params": groups["other"], "lr": lr, "weight_decay": 0.0},
            {
                "params": groups["diffusion"],
                "lr": lr * config.diffusion_lr_multiplier,
                "weight_decay": 0.0,
            },
        ]
        matrices = {"params": groups["matrix"], "lr": lr, "weight_decay": config.weight_decay}
        self._optimizers: list[torch.optim.Optimizer] = []
        if config.name == "muon" and groups["matrix"]:
            muon = Muon(
                groups["matrix"],
                lr=lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
            )
            self._optimizers.append(muon)
        elif groups["matrix"]:
            adam_groups.append(matrices)
        adam_groups = [group for group in adam_groups if group["params"]]
        if adam_groups:
            adam = torch.optim.AdamW(adam_groups, betas=config.betas, eps=config.eps, fused=True)
            self._optimizers.append(adam)
        for group in self._groups():
            group["peak_lr"] = group["lr"]

    def step(self, factor: float) -> None:
        """Updates all parameters at `factor` times their peak learning rate; clears gradients."""
        for group in self._groups():
            group["lr"] = group["peak_lr"] * factor
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns the state, named "parameter:moment"."""
        return {
            f"{self._names[parameter]}:{key}": value
            for optimizer in self._optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the state of `state_tensors`.

        Raises:
            TrainingError: The state is of other parameters.
        """
        states: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in tensors.items():
            name, _, moment = key.rpartition(":")
            states[name][moment] = tensor
        unknown = sorted(set(states) - set(self._names.values()))
        if unknown:
            raise TrainingError(f"the saved optimizer state is of other parameters: {unknown[:3]}")
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if self._names[parameter] in states:
                        optimizer.state[parameter] = states[self._names[parameter]]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


class WeightAverage:
    """The exponential moving average of a model's weights over the steps, in fp32.

    A step keeps min(decay, (1 + t) / (10 + t)) of the average, t steps done: while few steps are
    done, the weights that training started from must not weigh more than what it has found.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Starts at the model's weights. A tied weight is averaged once."""
        self._parameters = dict(model.named_parameters())
        self._decay = decay
        self.tensors = {name: p.detach().float().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the model's weights after `step` finished steps."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, parameter in self._parameters.items():
            self.tensors[name].lerp_(parameter.float(), 1.0 - decay)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over a saved average of the same model."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Puts the average in the place of the model's weights."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.tensors[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the average in the place of the model's weights, and these back at the end."""
        kept = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self.copy_to_model()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(kept[name])
