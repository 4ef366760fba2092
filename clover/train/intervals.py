"""95 % confidence intervals: of a share of right answers, and of a mean over few runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NORMAL_QUANTILE = statistics.NormalDist().inv_cdf(0.975)
# Student's t at 0.975, for 1, 2, ... degrees of freedom: two to ten runs
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


@dataclass(frozen=True, slots=True)
class Interval:
    """Both ends of an interval."""

    low: float
    high: float


def wilson_interval(successes: float, trials: int) -> Interval:
    """Returns the score interval of a success probability.

    Unlike the normal approximation it stays within [0, 1] and has a width at 0 and at all successes.
    Source: Wilson, "Probable inference, the law of succession, and statistical inference", 1927.

    Args:
        successes: 0 to `trials`; not whole where it is itself a mean over runs.
        trials: At least 1.
    """
    share, z = successes / trials, NORMAL_QUANTILE
    center = share + z * z / (2 * trials)
    reach = z * math.sqrt((share * (1.0 - share) + z * z / (4 * trials)) / trials)
    scale = 1.0 + z * z / trials
    return Interval((center - reach) / scale, (center + reach) / scale)


def t_interval(values: Sequence[float]) -> Interval:
    """Returns the interval of the mean that two to ten independent, roughly normal values share.

    With three values it is 2.5 standard deviations to each side: wide, because three values say
    little about their own spread.
    """
    mean, count = statistics.fmean(values), len(values)
    reach = T_QUANTILES[count - 2] * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean - reach, mean + reach)
