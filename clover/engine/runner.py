"""From a plan to events: the passes of one step over the rows that hold a slot.

Prompts are prefilled one by one in chunks, each in a cache of its own, so that a long one neither
pads nor stops the others. Then ONE pass serves all rows that decode, each in its own phase: it
commits a block and previews the next, verifies a draft and previews behind it, or commits one
token. Of a row that is alone it commits the end of the prompt, too.

Shapes: B rows, T clean tokens, n canvas tokens, D hidden width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clover.diffusion.policies import (
    Autoregressive,
    DiffusionPolicy,
    Exact,
    PromptLookup,
    Relaxed,
    SelfVerifiedPolicy,
    VerifiedPolicy,
    choose_positions,
)
from clover.diffusion.requests import Event
from clover.diffusion.rows import Row, mask_open, predict_rows
from clover.diffusion.sampling import Prediction
from clover.engine.prefix_cache import PrefixCache
from clover.engine.request import EngineEvent, Failed, Job
from clover.engine.scheduler import Plan
from clover.model.transformer import CloverForCausalLM, Transaction


def clean_tokens(row: Row) -> list[int]:
    """Returns what the row's next pass reads causally: what is pending, and a draft to verify."""
    is_verified = isinstance(row.request.policy, VerifiedPolicy)
    return [*row.pending, *row.draft()] if is_verified else row.pending


def canvas_tokens(row: Row) -> list[int]:
    """Returns what the row's next pass previews, masks where open."""
    if row.awaits_scores:
        return []
    match row.request.policy:
        case Autoregressive() | PromptLookup():
            return []
        case Exact() | Relaxed():  # the block behind the draft, the token after it included
            num_masks = row.block_size if row.needs_preview() else 0
            return mask_open([None] * num_masks, row.rules.config)
        case _:
            return mask_open(row.canvas, row.rules.config)


class Runner:
    """The model, the cache and the jobs in it.

    Args:
        model: Runs the passes.
        forbidden_ids: int64 [F], never drawn.
        prefix_cache: Where prompts may start from.
        prefill_chunk_size: Most prompt tokens committed in one step.
        preview_tokens: Most positions that rows of `exact` preview in one pass; None: no limit.
    """

    def __init__(
        self,
        model: CloverForCausalLM,
        *,
        forbidden_ids: Tensor,
        prefix_cache: PrefixCache,
        prefill_chunk_size: int,
        preview_tokens: int | None,
    ) -> None:
        self.model = model
        self.forbidden_ids = forbidden_ids
        self.prefix_cache = prefix_cache
        self.prefill_chunk_size = prefill_chunk_size
        self.preview_tokens = preview_tokens
        self.cache = model.new_cache(0)
        self.jobs: list[Job] = []  # in the order of the cache's rows
        self.num_passes = 0
        self.num_prefill_passes = 0

    def run(self, plan: Plan) -> list[EngineEvent]:
        """Returns the events of one step.

        Raises:
            GenerationError: The model's logits are not finite.
        """
        for job in plan.ended:
            self._leave(job)
        events: list[EngineEvent] = []
        for job in self._prefill(plan.active):
            events += job.row.begin()
        events += self._drop_ended()  # a text may be forced from end to end
        if self.jobs:
            events += self._decode()
        events += self._drop_ended()
        failed = {event.row for event in events if isinstance(event, Failed)}
        return [event for event in events if isinstance(event, Failed) or event.row not in failed]

    def _prefill(self, jobs: Sequence[Job]) -> list[Job]:
        """Commits prompts up to the step's budget of tokens; returns those that join the batch."""
        budget = self.prefill_chunk_size
        joined = []
        for job in jobs:
            if budget > 0 and job not in self.jobs:
                budget -= self._prefill_one(job, budget, is_alone=len(jobs) == 1)
                if job in self.jobs:
                    joined.append(job)
        return joined

    def _prefill_one(self, job: Job, budget: int, *, is_alone: bool) -> int:
        """Commits chunks of one prompt and joins it to the batch when whole; returns tokens spent.

        Chunks end at multiples of the chunk size, wherever the prefix cache let the prompt start:
        from a stored multiple on, it is computed in the same pieces, and to the same bits, as
        without a hit. Where nobody else is served, the last chunk is left to the first decoding
        pass: a pass less until the first token, and no row is padded to the chunk's width.
        """
        prefix, size = job.prefix, self.prefill_chunk_size
        if job.prefill_cache is None:
            job.prefill_cache = self.model.new_cache(1, capacity=len(prefix))
            job.row.cached_tokens = self.prefix_cache.restore(job.prefill_cache, 0, prefix)
        cache, spent = job.prefill_cache, 0
        while (start := cache.lengths[0]) < len(prefix) and spent < budget:
            stop = min(len(prefix), (start // size + 1) * size)
            if is_alone and stop % size:
                break
            input_ids = torch.tensor([prefix[start:stop]], device=self.model.device)
            nothing = input_ids[:, :0]
            _, transaction = self.model.mixed_pass(cache, input_ids, nothing, [stop - start], [0])
            transaction.commit([stop - start])
            self.prefix_cache.store(prefix[:stop], cache, 0)
            self.num_prefill_passes += 1
            spent += stop - start
        rest = prefix[start:]
        if not rest or (is_alone and spent < budget):
            self.cache.extend(cache)
            self.jobs.append(job)
            job.prefill_cache = None
            job.row.pending = [*rest, *job.row.pending]
        return spent

    def _drop_ended(self) -> list[Failed]:
        """Lets jobs leave that have finished or failed; returns the failures."""
        failures = [Failed(job.id, job.error) for job in self.jobs if job.error]
        for job in [job for job in self.jobs if job.row.is_finished or job.error]:
            self._leave(job)
        return failures

    def _leave(self, job: Job) -> None:
        """Frees whatever a job holds; what it has committed stays in the prefix cache."""
        job.prefill_cache = None
        if job not in self.jobs:
            return
        index = self.jobs.index(job)
        final = (*job.row.request.prompt_ids, *job.row.output)
        self.prefix_cache.store(final[: self.cache.lengths[index]], self.cache, index)
        self.cache.remove(index)  # the last row takes its place
        self.jobs[index] = self.jobs[-1]
        self.jobs.pop()

    @torch.no_grad()
    def _decode(self) -> list[Event]:
        """Runs one pass of all rows and takes each as far as it says."""
        self._size_blocks()
        rows = [job.row for job in self.jobs]
        prompt_lengths = self._prompt_lengths()
        input_ids, lengths = self._pad([clean_tokens(row) for row in rows])
        canvas, canvas_lengths = self._pad([canvas_tokens(row) for row in rows])
        hidden_states, transaction = self.model.mixed_pass(
            self.cache,
            input_ids,
            canvas,
            lengths,
            canvas_lengths,
            keep_trace=any(isinstance(row.request.policy, VerifiedPolicy) for row in rows)
            or any(prompt_lengths),
        )
        self.num_passes += 1
        if any(prompt_lengths):
            self._store_prompts(transaction, prompt_lengths)
        clean, previewed = hidden_states.tensor_split([input_ids.shape[1]], dim=1)
        for i, (job, length) in enumerate(zip(self.jobs, lengths, strict=True)):
            job.row.passes += 1
            job.row.commits += bool(length)
            job.row.previews += bool(canvas_lengths[i])
            if length:
                job.last_hidden = clean[i, length - 1]
        accepted, events = self._read_commit(clean, lengths, prompt_lengths)
        events += self._score(clean, accepted, prompt_lengths)
        transaction.commit(accepted)
        is_whole = [count == length for count, length in zip(accepted, lengths, strict=True)]
        return events + self._read_preview(previewed, canvas_lengths, is_whole)

    def _prompt_lengths(self) -> list[int]:
        """Returns how many clean tokens of each row's next pass are of the prompt, its last apart."""
        return [
            max(0, len(job.row.request.prompt_ids) - 1 - length)
            for job, length in zip(self.jobs, self.cache.lengths, strict=True)
        ]

    def _store_prompts(self, transaction: Transaction, prompt_lengths: Sequence[int]) -> None:
        """Keeps the states of prompts that a decoding pass has read, as prefilling them would."""
        if not self.prefix_cache.max_bytes:
            return
        history = transaction.peek(prompt_lengths)
        for i, job in enumerate(self.jobs):
            if prompt_lengths[i]:
                self.prefix_cache.store(job.prefix, history, i)

    def _size_blocks(self) -> None:
        """Gives each row of `exact` its share of what one pass previews, and at least a token.

        Of no other policy: what it drafts is in its text. Nor with a constraint, which fills drafts
        for nothing.
        """
        if self.preview_tokens is None:
            return
        drafting = [
            job
            for job in self.jobs
            if isinstance(job.row.request.policy, Exact) and not job.row.constraint
        ]
        for job in drafting:
            share = max(1, self.preview_tokens // len(drafting))
            job.row.block_size = min(job.block_size, share)

    def _read_commit(
        self, clean: Tensor, lengths: Sequence[int], prompt_lengths: Sequence[int]
    ) -> tuple[list[int], list[Event]]:
        """Gives each row what follows its clean tokens.

        Args:
            clean: [B, T, D], hidden states of the clean tokens.
            lengths: How many each row has.
            prompt_lengths: How many of these begin them and are of the prompt, its last apart.

        Returns:
            How many of them each row accepts, and the events.
        """
        accepted = list(lengths)
        events: list[Event] = []
        starts: dict[int, int] = {}  # by row: where what it reads begins
        for i, job in enumerate(self.jobs):
            match job.row.request.policy:
                case Exact() | Relaxed() | PromptLookup():
                    starts[i] = prompt_lengths[i]
                case Autoregressive() if not job.row.awaits_scores:
                    starts[i] = lengths[i] - 1
                case _:
                    job.row.pending = []
        if not starts:
            return accepted, events
        rows = [self.jobs[i].row for i in starts]
        prediction = self._predict(
            rows,
            [clean[i, start : lengths[i]] for i, start in starts.items()],
            [row.draft() for row in rows],
            [row.masks_of_draft() for row in rows],
        )
        for i, row, tokens in zip(starts, rows, prediction.tokens.tolist(), strict=True):
            if isinstance(row.request.policy, Autoregressive):
                events += row.write(tokens[0])
            else:
                num_new, new_events = row.verify(tokens)
                events += new_events
                # Not past the end of the text, so that a next turn may start from this state
                num_accepted = prompt_lengths[i] + num_new
                accepted[i] = min(num_accepted, row.num_final - self.cache.lengths[i])
        return accepted, events

    def _score(
        self, clean: Tensor, accepted: Sequence[int], prompt_lengths: Sequence[int]
    ) -> list[Event]:
        """Scores tokens of the rows that want log-probabilities; returns the events.

        Args:
            clean: [B, T, D], hidden states of the clean tokens.
            accepted: How many of them each row accepts.
            prompt_lengths: How many of these are of the prompt, its last apart: they have no score.
        """
        wanting = [i for i, job in enumerate(self.jobs) if job.row.scorer and accepted[i]]
        if not wanting:
            return []
        hidden_states = [clean[i, prompt_lengths[i] : accepted[i]] for i in wanting]
        logits = self.model.logits(pad_sequence(hidden_states, batch_first=True))
        events: list[Event] = []
        for i, row_logits in zip(wanting, logits, strict=True):
            events += self.jobs[i].row.score(row_logits[: accepted[i] - prompt_lengths[i]])
        return events

    def _read_preview(
        self, previewed: Tensor, canvas_lengths: Sequence[int], is_whole: Sequence[bool]
    ) -> list[Event]:
        """Fills canvases whose rows accepted all that the preview saw; returns the events.

        Args:
            previewed: [B, n, D], hidden states of the canvas tokens.
            canvas_lengths: How many each row has.
            is_whole: Whether it accepted all of its clean tokens.
        """
        filling = [
            i
            for i, job in enumerate(self.jobs)
            if canvas_lengths[i] and is_whole[i]
            if not job.row.is_finished and not job.row.is_resolved()
        ]
        if not filling:
            return []
        rows = [self.jobs[i].row for i in filling]
        prediction = self._predict(
            rows,
            [self._predicting(self.jobs[i], previewed[i, : canvas_lengths[i]]) for i in filling],
            [row.canvas for row in rows],
            [row.masks_of_next() for row in rows],
        )
        events: list[Event] = []
        for row, tokens, keep, confidence in zip(
            rows,
            prediction.tokens.tolist(),
            _choose(rows, prediction),
            prediction.confidence,
            strict=True,
        ):
            update = row.place(tokens, keep, confidence)
            if update.kept:  # a draft may stay empty
                events.append(update)
            if not isinstance(row.request.policy, SelfVerifiedPolicy):
                events += row.close_blocks()
        return events

    def _predicting(self, job: Job, hidden_states: Tensor) -> Tensor:
        """Returns the hidden states that predict each position of a row's canvas.

        Args:
            job: Whose row it is.
            hidden_states: [n, D] of what was previewed; of `exact` and `relaxed` the first token is
                not on the canvas, as the verification has it.
        """
        is_verified = isinstance(job.row.request.policy, SelfVerifiedPolicy)
        diffusion = self.model.config.diffusion
        if diffusion is None or not diffusion.shift_logits:
            return hidden_states[int(is_verified) :]
        if is_verified:
            return hidden_states[:-1]
        assert job.last_hidden is not None
        return torch.cat([job.last_hidden[None], hidden_states[:-1]])

    def _predict(
        self,
        rows: Sequence[Row],
        hidden_states: Sequence[Tensor],
        canvases: Sequence[Sequence[int | None]],
        masks: Sequence[Sequence[tuple[int, Tensor]]],
    ) -> Prediction:
        """Returns what the hidden states of each row, [.., D], predict; see `predict_rows`."""
        logits = self.model.logits(pad_sequence(list(hidden_states), batch_first=True))
        return predict_rows(rows, logits, canvases, masks, self.forbidden_ids)

    def _pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Returns int64 [B, T], right-padded, and the lengths."""
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=self.model.device), lengths


def _choose(rows: Sequence[Row], prediction: Prediction) -> list[list[bool]]:
    """Returns which predictions the rows' policies keep.

    Rows that ask for the same are asked about together: a few operations a policy, not a row.
    """
    groups: dict[tuple[DiffusionPolicy, int], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        assert isinstance(row.request.policy, DiffusionPolicy)
        groups[row.request.policy, len(row.canvas)].append(i)
    keep: list[list[bool]] = [[] for _ in rows]
    for (policy, num_positions), members in groups.items():
        chosen = choose_positions(
            policy,
            confidence=prediction.confidence[members, :num_positions],
            entropy=prediction.entropy[members, :num_positions],
            is_open=torch.tensor(
                [rows[i].open_positions() for i in members], device=prediction.confidence.device
            ),
        )
        for i, row_keep in zip(members, chosen.tolist(), strict=True):
            keep[i] = row_keep
    return keep
