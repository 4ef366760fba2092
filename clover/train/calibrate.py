"""Fits the preview operator to the causal one before training, one GDN layer at a time.

On blocks whose canvas is the true text, a preview should give what the commit gives. How near it
comes depends on three numbers per head: tau, b and c. They are fitted by least squares on the
layer's output, with the parent's hidden states as input, so that layers do not wait for each other.

`conv_right_weight` stays at zero: the causal operator never looks to the right, so on true text the
taps have nothing to teach.

Shapes: B rows, T clean tokens, N blocks of n tokens, L = T + N n, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover.model.delta_net import DeltaNet
from clover.model.streams import Streams, two_stream_streams
from clover.model.transformer import CloverForCausalLM
from clover.train.packing import Batch, cut_blocks

FITTED = ("bd_softmax_logit_scale", "bd_softmax_history_bias", "bd_softmax_history_c")
# The numbers start a few units from where they end; Adam moves each by at most this a step
LEARNING_RATE = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFit:
    """A layer's squared error of preview against commit, as a share of the commit's square."""

    layer: int
    error_before: float
    error_after: float


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the blocks of one size lie beside their clean tokens."""

    streams: Streams
    index: Tensor  # [B, N n], the clean token that each canvas position repeats
    is_token: Tensor  # [B, N n] bool: inside its document


def calibrate(
    model: CloverForCausalLM,
    batch: Batch,
    *,
    block_sizes: Sequence[int] = (4, 8, 16, 32),
    steps: int = 40,
    on_fit: Callable[[LayerFit], None] = lambda fit: None,
) -> list[LayerFit]:
    """Fits tau, b and c of every GDN layer in place, and returns each layer's error.

    Nothing that the causal path reads is touched. There is no randomness.

    Args:
        model: A converted model.
        batch: Text; its responses are cut into blocks, each starting with a history.
        block_sizes: Several, because one alone cannot tell b from c log n.
        steps: Of Adam for each layer, all blocks of all sizes in each.
        on_fit: Is told of each layer when it is done.
    """
    layouts = [_lay_out(batch, size) for size in block_sizes]
    inputs = _record_inputs(model, batch)
    fits = []
    for number, (layer, hidden_states) in inputs.items():
        before, after = _fit(layer, hidden_states, layouts, steps)
        fits.append(LayerFit(layer=number, error_before=before, error_after=after))
        on_fit(fits[-1])
    return fits


def _lay_out(batch: Batch, block_size: int) -> _Layout:
    blocks = cut_blocks(batch, block_size)
    streams = two_stream_streams(batch.input_ids, batch.document_ids, blocks.targets, blocks.starts)
    # Right of its document's end a block repeats the last token, as its targets do
    last = blocks.is_token.sum(dim=-1, keepdim=True) - 1
    offsets = torch.arange(block_size, device=batch.input_ids.device).minimum(last)
    index = (blocks.starts.unsqueeze(-1) + offsets).clamp(min=0)
    return _Layout(streams, index.flatten(1), blocks.is_token.flatten(1))


@torch.no_grad()
def _record_inputs(model: CloverForCausalLM, batch: Batch) -> dict[int, tuple[DeltaNet, Tensor]]:
    """Returns each GDN layer by its number, with its input [B, T, D] on the causal path."""
    mixers = {
        mixer: number
        for number, layer in enumerate(model.model.layers)
        for mixer in layer.children()
        if isinstance(mixer, DeltaNet)
    }
    inputs: dict[int, tuple[DeltaNet, Tensor]] = {}

    def record(mixer: DeltaNet, args: tuple[Tensor, ...]) -> None:
        inputs[mixers[mixer]] = mixer, args[0]

    hooks = [mixer.register_forward_pre_hook(record) for mixer in mixers]
    try:
        model(batch.input_ids, document_ids=batch.document_ids)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def _fit(
    layer: DeltaNet, hidden_states: Tensor, layouts: Sequence[_Layout], steps: int
) -> tuple[float, float]:
    """Fits one layer in place; returns its error before and after."""
    frozen = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    fitted = {name: frozen[name].clone().requires_grad_() for name in FITTED}

    def error() -> Tensor:
        errors = [_error(layer, frozen | fitted, hidden_states, layout) for layout in layouts]
        return torch.stack(errors).mean()

    optimizer = torch.optim.Adam(fitted.values(), lr=LEARNING_RATE)
    before = 0.0
    for step in range(steps):
        optimizer.zero_grad()
        loss = error()
        before = float(loss.detach()) if step == 0 else before
        loss.backward()
        # Linear decay: the last steps settle what the first ones found
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - step / steps)
        optimizer.step()
    with torch.no_grad():
        after = float(error())
        for name, tensor in fitted.items():
            layer.get_parameter(name).copy_(tensor)
    return before, after


def _error(
    layer: DeltaNet, parameters: dict[str, Tensor], hidden_states: Tensor, layout: _Layout
) -> Tensor:
    """Returns the squared error of the layer's preview as a share of its commit's square."""
    rows = torch.arange(len(hidden_states), device=hidden_states.device).unsqueeze(-1)
    both = torch.cat([hidden_states, hidden_states[rows, layout.index]], dim=1)  # [B, L, D]
    output, _ = torch.func.functional_call(layer, parameters, (both, layout.streams, None))
    commit, preview = output.split([hidden_states.shape[1], layout.index.shape[1]], dim=1)
    wanted = commit[rows, layout.index][layout.is_token]
    found = preview[layout.is_token]
    error: Tensor = (found - wanted).square().sum() / wanted.square().sum()
    return error
