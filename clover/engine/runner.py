"""From a plan to events: the passes of one step over the rows that hold a slot.

Prompts are prefilled one by one in chunks, each in a cache of its own, so that a long one neither
pads nor stops the others. Then ONE pass serves all rows that decode, each in its own phase.

Shapes: B rows, T clean tokens, n canvas tokens, P predicted positions, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clover.diffusion.policies import Autoregressive, DiffusionPolicy, Exact, choose_positions
from clover.diffusion.requests import Event
from clover.diffusion.rows import Row, mask_open, predict_rows
from clover.diffusion.sampling import Prediction
from clover.engine.prefix_cache import PrefixCache
from clover.engine.request import Job
from clover.engine.scheduler import Plan
from clover.model.cache import Cache
from clover.model.transformer import CloverForCausalLM


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What one row does in one pass.

    Attributes:
        kind: `fill` previews a canvas, and commits the block before it if that is pending; `draft`
            previews the canvas of `exact`; `verify` checks it; `next` commits one token for the
            next; `wait` does nothing.
        clean: Final tokens to commit, or the draft to verify.
        canvas: Ids to preview.
        known: What is known at the positions that the pass predicts.
    """

    kind: Literal["fill", "draft", "verify", "next", "wait"]
    clean: Sequence[int]
    canvas: Sequence[int]
    known: Sequence[int | None]

    def predicting(self, num_clean: int, last: int, *, shift_logits: bool) -> list[int]:
        """Returns which token of the pass predicts each position.

        Args:
            num_clean: T, where the canvas begins.
            last: The last committed token.
            shift_logits: Whether a token predicts its right neighbour, or itself.
        """
        first, behind = num_clean, num_clean + len(self.canvas)
        match self.kind:
            case "wait":
                return []
            case "next":
                return [last]
            case "verify":
                return list(range(len(self.clean)))
            case "fill" if shift_logits:
                return [last, *range(first, behind - 1)]
            case "fill":
                return list(range(first, behind))
            case "draft":
                return list(range(first, behind - 1) if shift_logits else range(first + 1, behind))


def next_phase(row: Row) -> Phase:
    """Returns what a row does in the next pass."""
    config = row.rules.config
    match row.request.policy:
        case Autoregressive():
            return Phase(kind="next", clean=row.pending, canvas=(), known=(None,))
        case Exact():
            block = mask_open([*row.pending, *row.canvas], config)
            if None in row.canvas:
                return Phase(kind="draft", clean=(), canvas=block, known=row.canvas)
            return Phase(kind="verify", clean=block, canvas=(), known=(*row.canvas, None))
        case _:
            canvas = mask_open(row.canvas, config)
            return Phase(kind="fill", clean=row.pending, canvas=canvas, known=row.canvas)


def align(phases: Sequence[Phase]) -> list[Phase]:
    """Returns the phases with verifications put off while other rows draft.

    A pass that drafts and verifies is as wide for every row as both together. A row that has once
    waited keeps step with the others, so the narrow passes that follow soon repay it. Where a row
    fills, passes are wide in any case.
    """
    kinds = {phase.kind for phase in phases}
    if not {"draft", "verify"} <= kinds or "fill" in kinds:
        return list(phases)
    wait = Phase(kind="wait", clean=(), canvas=(), known=())
    return [wait if phase.kind == "verify" else phase for phase in phases]


class Runner:
    """The model, the cache and the jobs in it.

    Args:
        model: Runs the passes.
        forbidden_ids: int64 [F], never drawn.
        prefix_cache: Where prompts may start from.
        prefill_chunk_size: Most prompt tokens committed in one step.
    """

    def __init__(
        self,
        model: CloverForCausalLM,
        *,
        forbidden_ids: Tensor,
        prefix_cache: PrefixCache,
        prefill_chunk_size: int,
    ) -> None:
        self.model = model
        self.forbidden_ids = forbidden_ids
        self.prefix_cache = prefix_cache
        self.prefill_chunk_size = prefill_chunk_size
        self.cache = model.new_cache(0)
        self.jobs: list[Job] = []  # in the order of the cache's rows
        # [B, D] after each row's last committed token: with the shift it predicts the next position
        self.last_hidden = torch.zeros(
            0, model.config.hidden_size, dtype=model.dtype, device=model.device
        )
        self.num_passes = 0
        self.num_prefill_passes = 0

    def run(self, plan: Plan) -> list[Event]:
        """Returns the events of one step.

        Raises:
            GenerationError: The model's logits are not finite; no row has moved.
        """
        for job in plan.ended:
            self._leave(job)
        self._prefill(plan.active)
        events = self._decode() if self.jobs else []
        for job in [job for job in self.jobs if job.row.is_finished]:
            self._leave(job)
        return events

    def _prefill(self, jobs: Sequence[Job]) -> None:
        """Commits prompts up to the step's budget of tokens; those that are whole join the batch."""
        budget = self.prefill_chunk_size
        for job in jobs:
            if budget > 0 and job not in self.jobs:
                budget -= self._prefill_one(job, budget)

    def _prefill_one(self, job: Job, budget: int) -> int:
        """Commits chunks of one prompt and joins it to the batch when whole; returns tokens spent.

        Chunks end at multiples of the chunk size, wherever the prefix cache let the prompt start:
        from a stored multiple on, it is computed in the same pieces, and to the same bits, as
        without a hit.
        """
        prefix, size = job.prefix, self.prefill_chunk_size
        if job.prefill_cache is None:
            job.prefill_cache = self.model.new_cache(1, capacity=len(prefix))
            job.row.cached_tokens = self.prefix_cache.restore(job.prefill_cache, 0, prefix)
        cache, spent = job.prefill_cache, 0
        while (start := cache.lengths[0]) < len(prefix) and spent < budget:
            stop = min(len(prefix), (start // size + 1) * size)
            input_ids = torch.tensor([prefix[start:stop]], device=self.model.device)
            nothing = input_ids[:, :0]
            _, transaction = self.model.mixed_pass(cache, input_ids, nothing, [stop - start], [0])
            transaction.commit([stop - start])
            self.prefix_cache.store(prefix[:stop], cache, 0)
            self.num_prefill_passes += 1
            spent += stop - start
        if cache.lengths[0] == len(prefix):
            self._join(job, cache)
        return spent

    def _join(self, job: Job, prefilled: Cache) -> None:
        self.cache.extend(prefilled)
        job.prefill_cache = None
        self.jobs.append(job)
        self.last_hidden = F.pad(self.last_hidden, (0, 0, 0, 1))  # unread before the first commit

    def _leave(self, job: Job) -> None:
        """Frees whatever a job holds; what it has committed stays in the prefix cache."""
        job.prefill_cache = None
        if job not in self.jobs:
            return
        row, last = self.jobs.index(job), len(self.jobs) - 1
        final = (*job.row.request.prompt_ids, *job.row.output)
        self.prefix_cache.store(final[: self.cache.lengths[row]], self.cache, row)
        self.cache.remove(row)
        kept = [last if index == row else index for index in range(last)]
        self.jobs = [self.jobs[index] for index in kept]
        self.last_hidden = self.last_hidden[kept]

    @torch.no_grad()
    def _decode(self) -> list[Event]:
        """Runs one pass of all rows and takes each as far as it says."""
        rows = [job.row for job in self.jobs]
        phases = align([next_phase(row) for row in rows])
        input_ids, lengths = self._pad([phase.clean for phase in phases])
        canvas, canvas_lengths = self._pad([phase.canvas for phase in phases])
        hidden_states, transaction = self.model.mixed_pass(
            self.cache,
            input_ids,
            canvas,
            lengths,
            canvas_lengths,
            keep_trace=any(phase.kind == "verify" for phase in phases),
        )
        # A row that commits nothing is still predicted from what it committed last
        sources = torch.cat([hidden_states, self.last_hidden[:, None]], dim=1)
        last = [len(phase.clean) - 1 if phase.clean else sources.shape[1] - 1 for phase in phases]
        prediction = predict_rows(
            rows,
            self.model.logits(self._gather(sources, phases, last, input_ids.shape[1])),
            [phase.known for phase in phases],
            self.forbidden_ids,
        )
        self.last_hidden = sources[torch.arange(len(rows)), last]
        self.num_passes += 1
        accepted, events = self._advance(rows, phases, prediction)
        transaction.commit(accepted)
        return events

    def _gather(
        self, sources: Tensor, phases: Sequence[Phase], last: Sequence[int], num_clean: int
    ) -> Tensor:
        """Returns the hidden states that predict each row's positions, [B, P, D], right-padded."""
        diffusion = self.model.config.diffusion
        is_shifted = diffusion is not None and diffusion.shift_logits
        tokens, _ = self._pad(
            [
                phase.predicting(num_clean, index, shift_logits=is_shifted)
                for phase, index in zip(phases, last, strict=True)
            ]
        )
        return sources[torch.arange(len(tokens), device=tokens.device)[:, None], tokens]

    def _advance(
        self, rows: Sequence[Row], phases: Sequence[Phase], prediction: Prediction
    ) -> tuple[list[int], list[Event]]:
        """Gives each row its predictions; returns how many clean tokens it accepts, and the events."""
        keep = _choose(rows, phases, prediction)
        accepted: list[int] = []
        events: list[Event] = []
        for i, (row, phase, tokens) in enumerate(
            zip(rows, phases, prediction.tokens.tolist(), strict=True)
        ):
            row.passes += phase.kind != "wait"
            row.previews += bool(phase.canvas)
            row.commits += bool(phase.clean)
            num_accepted = len(phase.clean)
            match phase.kind:
                case "next":
                    row.pending = tokens[:1]
                    events += row.append(row.pending)
                case "fill":
                    row.pending = []
                    events += [row.place(tokens, keep[i]), *row.close_block()]
                case "draft":
                    events.append(row.place(tokens, keep[i]))
                case "verify":
                    new_tokens = row.agreed(tokens[: len(phase.known)])
                    row.pending = new_tokens[-1:]
                    row.lay_canvas()
                    events += row.append(new_tokens)
                    # Not past the end of the text, so that a next turn may start from this state
                    num_accepted = min(len(new_tokens), row.num_final - self.cache.lengths[i])
            accepted.append(num_accepted)
        return accepted, events

    def _pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Returns int64 [B, T], right-padded, and the lengths."""
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=self.model.device), lengths


def _choose(
    rows: Sequence[Row], phases: Sequence[Phase], prediction: Prediction
) -> dict[int, list[bool]]:
    """Returns, for the rows with a canvas, which predictions their policies keep.

    Rows that ask for the same are asked about together: a few operations a policy, not a row.
    """
    groups: dict[tuple[DiffusionPolicy, int, int], list[int]] = defaultdict(list)
    for i, (row, phase) in enumerate(zip(rows, phases, strict=True)):
        policy = row.request.policy
        if not isinstance(policy, Autoregressive) and phase.canvas:
            row.num_drafts += 1
            num_passes = row.num_drafts if phase.kind == "draft" else 1
            groups[policy, len(row.canvas), num_passes].append(i)
    keep: dict[int, list[bool]] = {}
    for (policy, num_positions, num_passes), members in groups.items():
        is_open = [rows[i].open_positions() for i in members]
        chosen = choose_positions(
            policy,
            confidence=prediction.confidence[members, :num_positions],
            entropy=prediction.entropy[members, :num_positions],
            is_open=torch.tensor(is_open, device=prediction.confidence.device),
            num_passes=num_passes,
        )
        keep |= zip(members, chosen.tolist(), strict=True)
    return keep
