"""Tokens per second at batch 1, side by side: the parent, Clover and Clover exact, on this machine.

    python -m benchmarks.speed --items 24

Every item is answered by all contenders before the next one, so that noise hits them alike. Prints
each contender's median rate, its TPF, and the median over items of its ratio to the parent.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice

import torch

from benchmarks.frontier import policy_name
from clover.checkpoint.load import LoadedCheckpoint, load_checkpoint, resolve_checkpoint
from clover.diffusion.policies import Autoregressive, Exact, Policy, Threshold
from clover.train.answers import answer, draw_items


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A model under a policy."""

    name: str
    checkpoint: LoadedCheckpoint
    policy: Policy


def main() -> int:
    """Measures and prints one line per contender."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--split", default="seen")
    options = parser.parse_args()
    parent = load_checkpoint(resolve_checkpoint("clover-nano-parent"))
    clover = load_checkpoint(resolve_checkpoint("clover-nano"))
    contenders = [
        Contender(name="parent", checkpoint=parent, policy=Autoregressive()),
        Contender(name="clover", checkpoint=clover, policy=Autoregressive()),
        Contender(name="clover", checkpoint=clover, policy=Exact()),
        *(
            Contender(name="clover", checkpoint=clover, policy=Threshold(threshold=value))
            for value in (0.5, 0.7, 0.9, 0.99)
        ),
    ]
    rates: dict[int, list[float]] = defaultdict(list)
    tokens: dict[int, int] = defaultdict(int)
    passes: dict[int, int] = defaultdict(int)
    tasks = list(islice(draw_items(options.split), options.items + 1))
    for number, task in enumerate(tasks):
        for index, contender in enumerate(contenders):
            [(_, result)] = answer(contender.checkpoint, contender.policy, [task])
            if number:  # the first item warms up
                rates[index].append(result.stats.tokens / result.stats.seconds)
                tokens[index] += result.stats.tokens
                passes[index] += result.stats.passes
    print(f"{torch.get_num_threads()} CPU threads, fp32, {options.items} {options.split} items")
    for index, contender in enumerate(contenders):
        ratios = [mine / base for mine, base in zip(rates[index], rates[0], strict=True)]
        print(
            f"{contender.name:7} {policy_name(contender.policy):16} "
            f"median {statistics.median(rates[index]):6.1f} tok/s  "
            f"TPF {tokens[index] / passes[index]:5.2f}  "
            f"median ratio to the parent {statistics.median(ratios):5.2f}"
        )
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
