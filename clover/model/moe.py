"""Mixture of experts: fp32 softmax router, top-k renormalised, a shared expert behind a sigmoid gate.

In a preview the tokens of one block share a coreset of experts: weights read per pass decide the
speed at batch 1, and a block that may use every expert reads nearly all of them.

Shapes: X tokens, D hidden width, E experts, A experts per token, I expert width, n block tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clover.config import MoeConfig
from clover.model.layers import ParallelLinears, SwiGLU
from clover.model.streams import Streams


class Experts(nn.Module):
    """The routed experts' weights, fused: gate rows first in `gate_up_proj`."""

    def __init__(self, config: MoeConfig, hidden_size: int) -> None:
        super().__init__()
        num_experts, width = config.num_experts, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, width))

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Returns the weighted sum of the chosen experts' outputs.

        Args:
            x: [X, D].
            weights, indices: [X, A], the router's choice.
        """
        if torch.is_grad_enabled():
            return self._forward_sorted(x, weights, indices)
        if x.shape[0] == 1 and not x.is_cuda:
            return self._forward_one(x, weights, indices)
        if not self._can_group():
            return self._forward_sorted(x, weights, indices)
        return self._forward_grouped(x, weights, indices)

    def _can_group(self) -> bool:
        """Whether torch's grouped product takes these weights: rows of 16 bytes and no fp64."""
        itemsize, widths = self.down_proj.element_size(), self.down_proj.shape[1:]
        return itemsize <= 4 and all(width * itemsize % 16 == 0 for width in widths)

    def forward_reference(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Returns the same, token by token and expert by expert: the truth the others must equal."""
        output = torch.zeros_like(x)
        for token in range(x.shape[0]):
            for weight, expert in zip(weights[token], indices[token], strict=True):
                gate, up = (self.gate_up_proj[expert] @ x[token]).chunk(2)
                output[token] += weight * (self.down_proj[expert] @ (F.silu(gate) * up))
        return output

    def _forward_one(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Reads one token's experts, and no others: an autoregressive step is bound by that."""
        x, gate_up_proj, down_proj = _autocast(x, self.gate_up_proj, self.down_proj)
        outputs = [_swiglu(x, gate_up_proj[i], down_proj[i]) for i in indices[0].tolist()]
        return weights.to(x.dtype) @ torch.cat(outputs)

    def _forward_sorted(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Sorts the token-expert pairs by expert: two products per expert that is used."""
        x, gate_up_proj, down_proj = _autocast(x, self.gate_up_proj, self.down_proj)
        experts, order = indices.flatten().sort(stable=True)
        counts = experts.bincount(minlength=gate_up_proj.shape[0]).tolist()
        tokens = order // indices.shape[1]
        # Unbound once: the gradient of an index per expert would fill a whole tensor for each of them
        has_gradients = torch.is_grad_enabled()
        gate_up = gate_up_proj.unbind() if has_gradients else gate_up_proj
        down = down_proj.unbind() if has_gradients else down_proj
        outputs = [
            _swiglu(rows, gate_up[expert], down[expert])
            for expert, rows in enumerate(x[tokens].split(counts))
            if counts[expert]
        ]
        chosen = torch.cat(outputs) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, tokens, chosen.to(x.dtype))

    def _forward_grouped(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Sorts the pairs as `_forward_sorted` does, then two grouped products over all experts.

        The experts' counts stay on the device, so that nothing waits and a CUDA graph can hold it:
        in bf16 on compute capability 9.0 and 10.0. Elsewhere torch reads the offsets on the host; on
        a CPU it then takes the experts one by one like `_forward_sorted`, in one operation.
        For passes without gradients: the weights' gradient wants each count to be a multiple of 8.
        Source: `GroupedBlas.cpp` and `GroupMMCommon.cuh` of torch.
        """
        x, gate_up_proj, down_proj = _autocast(x, self.gate_up_proj, self.down_proj)
        num_experts, per_token = gate_up_proj.shape[0], indices.shape[1]
        experts, order = indices.flatten().sort(stable=True)
        every_expert = torch.arange(num_experts, device=x.device)
        ends = torch.searchsorted(experts, every_expert, right=True, out_int32=True)  # [E]
        rows = x[order // per_token]  # [X A, D]
        gate, up = F.grouped_mm(rows, gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        rows = F.grouped_mm(F.silu(gate) * up, down_proj.transpose(1, 2), offs=ends)
        # Back in the tokens' order; a sum per token, which unlike index_add has one order of terms.
        rows = torch.empty_like(rows).index_copy_(0, order, rows).unflatten(0, (-1, per_token))
        output: Tensor = (rows * weights.unsqueeze(-1).to(rows.dtype)).sum(1)
        return output


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Returns one expert's output for rows `x` [.., D]; its weights are [2 I, D] and [D, I]."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Returns tensors in autocast's dtype, if it is on: once here, instead of in every product."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


class SparseMoe(nn.Module):
    """Router, routed experts and the shared expert."""

    def __init__(self, config: MoeConfig, hidden_size: int, coreset_size: int | None) -> None:
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.coreset_size = coreset_size
        self.gate = nn.Linear(hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config, hidden_size)
        self.shared_expert = SwiGLU(hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)
        shared = self.shared_expert
        self.projections = ParallelLinears(
            self.gate, self.shared_expert_gate, shared.gate_proj, shared.up_proj
        )

    def forward(self, hidden_states: Tensor, streams: Streams) -> Tensor:
        """Returns the layer's output, shape of `hidden_states` [B, L, D]."""
        x = hidden_states.flatten(0, 1)  # [X, D]: a product over two axes takes fewer operations
        router, shared_gate, gate, up = self.projections(x)
        probabilities = router.float().softmax(dim=-1)  # [X, E]
        coreset_size = self.coreset_size if streams.coreset_size is None else streams.coreset_size
        if coreset_size is not None and streams.num_blocks:
            rows = probabilities.unflatten(0, hidden_states.shape[:2])
            clean, canvas = rows.split(
                [streams.num_clean, streams.num_blocks * streams.block_size], dim=1
            )
            blocks = canvas.unflatten(1, (streams.num_blocks, streams.block_size))
            blocks = restrict_to_coreset(blocks, coreset_size, streams.canvas_mask)
            probabilities = torch.cat([clean, blocks.flatten(1, 2)], dim=1).flatten(0, 1)
        weights, indices = probabilities.topk(self.num_experts_per_tok, dim=-1)
        # A token may give every admitted expert a probability of 0 in fp32: it then has none.
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / total.clamp_min(torch.finfo(total.dtype).tiny)
        routed = self.experts(x, weights.to(x.dtype), indices)
        shared = self.shared_expert.down(gate, up)
        output = torch.addcmul(routed, torch.sigmoid(shared_gate), shared)
        return output.view_as(hidden_states)


@contextmanager
def record_router_logits(model: nn.Module, *, enabled: bool = True) -> Iterator[list[Tensor]]:
    """Gives a list that receives each MoE layer's router logits [X, E] in the passes inside.

    For a training loss. Forward hooks do it, so that a pass that nobody records costs nothing more.
    Packed projections, which passes without gradients use, call no router: there is nothing to record.
    """
    records: list[Tensor] = []

    def record(gate: nn.Module, inputs: tuple[Tensor], logits: Tensor) -> None:
        records.append(logits)

    layers = [layer for layer in model.modules() if isinstance(layer, SparseMoe) and enabled]
    with _removed_at_the_end([layer.gate.register_forward_hook(record) for layer in layers]):
        yield records


@contextmanager
def record_expert_choices(model: nn.Module) -> Iterator[list[Tensor]]:
    """Gives a list that receives each MoE layer's choice of experts [X, A] in the passes inside."""
    records: list[Tensor] = []

    def record(experts: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        records.append(inputs[2])

    layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
    with _removed_at_the_end([layer.register_forward_pre_hook(record) for layer in layers]):
        yield records


@contextmanager
def _removed_at_the_end(hooks: Sequence[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def restrict_to_coreset(
    probabilities: Tensor, coreset_size: int, mask: Tensor | None = None
) -> Tensor:
    """Returns the router's probabilities with every expert outside the block's coreset at zero.

    An expert's score is its highest probability over the tokens of the block; the `coreset_size`
    best are admitted. The rule is our reading of what was announced, kept in this one place.

    Args:
        probabilities: [..., n, E].
        coreset_size: experts admitted, at least the experts per token.
        mask: [B, n] bool, False for right padding, which has no say; probabilities [B, 1, n, E].
    """
    if coreset_size >= probabilities.shape[-1]:
        return probabilities
    voters = probabilities if mask is None else probabilities * mask[:, None, :, None]
    scores = voters.amax(dim=-2, keepdim=True)  # [..., 1, E]
    admitted = torch.zeros_like(scores, dtype=torch.bool)
    admitted = admitted.scatter(-1, scores.topk(coreset_size, dim=-1).indices, True)
    return probabilities.masked_fill(~admitted, 0.0)
