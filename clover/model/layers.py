"""The small parts that every layer shares: norms, rotary embedding, SwiGLU.

Shapes: B rows, L tokens, D hidden width, R rotary width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

L2_NORM_EPS = 1e-6


class RMSNorm(nn.Module):
    """RMSNorm that multiplies by (1 + weight), in fp32, as the parent does."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x` normalised over its last axis, in the dtype of `x`."""
        return rms_norm(x, self.eps, self.weight.float()).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMSNorm that multiplies by weight and is gated by silu(z): the norm inside a GDN layer."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Returns norm(x) * silu(z) in the dtype of `z`. `x` may be fp32 beside a bf16 `z`."""
        # The product with the weight happens in the model's dtype, as in the parent.
        normed = rms_norm(x, self.eps).to(z.dtype)
        return ((self.weight * normed) * F.silu(z.float())).to(z.dtype)


class ParallelLinears:
    """Linear layers of one input: several products, or, once packed, one.

    Packing lays the weights side by side in one tensor of which each is then a view, so that names,
    checkpoints and memory stay as they are. With gradients the layers are called one by one; so they
    are when a weight has been moved away since.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        """Joins layers without biases."""
        self._linears = linears
        self._sizes = [linear.out_features for linear in linears]
        self._packed: Tensor | None = None
        self._addresses: list[int] = []  # where packing left each weight

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Returns each layer's output for `x` [.., D]."""
        if torch.is_grad_enabled() or not self._is_packed():
            return [linear(x) for linear in self._linears]
        assert self._packed is not None
        outputs: tuple[Tensor, ...] = F.linear(x, self._packed).split(self._sizes, dim=-1)
        return outputs

    def pack(self) -> None:
        """Makes one product of all, for passes without gradients."""
        if self._is_packed():
            return
        packed = torch.cat([linear.weight.detach() for linear in self._linears])
        for linear, part in zip(self._linears, packed.split(self._sizes), strict=True):
            linear.weight.data = part
        self._packed, self._addresses = packed, self._weight_addresses()

    def _is_packed(self) -> bool:
        return self._packed is not None and self._addresses == self._weight_addresses()

    def _weight_addresses(self) -> list[int]:
        return [linear.weight.data_ptr() for linear in self._linears]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.projections = ParallelLinears(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the MLP's output, shape of `x`."""
        return self.down(*self.projections(x))

    def down(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns the output from both inner projections [.., I]."""
        output: Tensor = self.down_proj(F.silu(gate) * up)
        return output


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Returns fp32 `x` over the root of its mean square, times 1 + `weight`; over the last axis.

    torch has a kernel for it on CUDA. On a CPU it takes twice the operations that are needed, and a
    decoding pass is bound by their number.
    """
    x = x.float()
    if x.is_cuda:
        scale = None if weight is None else 1.0 + weight
        return F.rms_norm(x, x.shape[-1:], scale, eps)
    normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return normed if weight is None else torch.addcmul(normed, normed, weight)


def l2_norm(x: Tensor) -> Tensor:
    """Returns `x` scaled to unit length over its last axis. The epsilon is under the root, as in FLA."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_NORM_EPS)


def rotary_tables(position_ids: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns fp32 cos and sin tables for absolute positions.

    Args:
        position_ids: [B, L] int64.
        rotary_dim: how many leading dimensions of a head rotate (even).
        theta: base of the geometric frequencies.

    Returns:
        cos and sin, each [B, L, 1, R]: ready to broadcast over heads.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=position_ids.device)
    inverse_frequencies = 1.0 / (theta ** (exponents / rotary_dim))
    angles = position_ids[..., None].float() * inverse_frequencies  # [B, L, R/2]
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(2)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `x` [B, L, heads, head_dim] with its first R dimensions rotated (rotate-half)."""
    rotary_dim = cos.shape[-1]
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)
    return torch.cat([rotated, passed], dim=-1)
