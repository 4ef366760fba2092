"""The small parts that every layer shares: norms, rotary embedding, SwiGLU.

Shapes: B rows, L tokens, D hidden width, R rotary width.
"""

from __future__ import annotations

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
        return rms_norm(x, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMSNorm that multiplies by weight and is gated by silu(z): the norm inside a GDN layer."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Returns norm(x) * silu(z) in the dtype of `z`. `x` may be fp32 beside a bf16 `z`."""
        # The product with the weight happens in the model's dtype, as in the parent.
        normed = rms_norm(x, None, self.eps).to(z.dtype)
        return ((self.weight * normed) * F.silu(z.float())).to(z.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the MLP's output, shape of `x`."""
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns fp32 `x` over the root of its mean square, times `weight`; over the last axis.

    torch has a kernel for it on CUDA. On a CPU it takes twice the operations that are needed, and a
    decoding pass is bound by their number.
    """
    x = x.float()
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    normed = x * torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return normed if weight is None else normed * weight


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
