"""What a request may demand of its text, as the decoding loops see it: ids in, ids out.

`clover/engine/grammar.py` has the implementation; nothing here knows text or grammars.

V vocabulary entries of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Constraint(Protocol):
    """Which tokens may come next in one text under way.

    It starts before the first token of the answer, is advanced from the left by `commit`, and goes
    back by `rollback`. What it says is a function of the tokens committed and of nothing else, so
    that two decoders that write the same tokens are given the same choices. EOS is a token like the
    others, allowed where the text may end; nothing follows it.
    """

    def allowed(self) -> Tensor:
        """Returns the ids that may come next, bool [V] on the CPU.

        Raises:
            ConstraintError: The grammar has become too complex to go on.
        """
        ...

    def forced(self) -> list[int]:
        """Returns tokens that come next whatever the model predicts; empty where it may choose.

        While there are any, `allowed` names the first of them alone.
        """
        ...

    def validate(self, tokens: Sequence[int]) -> int:
        """Returns how many of `tokens`, from the left, may come next. Nothing changes."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes tokens as written.

        Raises:
            ConstraintError: One of them may not come where it stands.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last `num_tokens` committed tokens."""
        ...


class ConstraintFactory(Protocol):
    """A compiled grammar, from which any number of texts may start."""

    @property
    def vocab_size(self) -> int:
        """V, the length of the masks."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text; at least one."""
        ...

    def start(self) -> Constraint:
        """Returns the constraint of a new text."""
        ...
