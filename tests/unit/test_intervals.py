"""Intervals cover what they claim to cover."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clover.train.intervals import NORMAL_QUANTILE, T_QUANTILES, t_interval, wilson_interval

ROUNDING = 1e-12
QUADRATURE_TOLERANCE = 1e-5  # quantiles are given to four decimals
# Five standard deviations of the share among 20,000 draws that is covered
COVERAGE_TOLERANCE = 5 * math.sqrt(0.95 * 0.05 / 20_000)


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (3, 7), (7, 7), (120.5, 128)])
def test_wilsons_ends_are_the_probabilities_that_the_share_is_just_compatible_with(
    successes: float, trials: int
) -> None:
    share, interval = successes / trials, wilson_interval(successes, trials)
    for end in (interval.low, interval.high):
        variance = end * (1 - end) / trials
        assert (share - end) ** 2 == pytest.approx(NORMAL_QUANTILE**2 * variance, abs=ROUNDING)
    assert interval.low - ROUNDING <= share <= interval.high + ROUNDING


@pytest.mark.parametrize("degrees", range(1, len(T_QUANTILES) + 1))
def test_students_density_has_95_percent_between_its_quantiles(degrees: int) -> None:
    t = np.linspace(0.0, T_QUANTILES[degrees - 1], 20_001)
    scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(math.pi * degrees)
    density = scale * (1.0 + t * t / degrees) ** (-(degrees + 1) / 2)
    assert 2 * np.trapezoid(density, t) == pytest.approx(0.95, abs=QUADRATURE_TOLERANCE)


def test_the_interval_of_three_values_covers_their_mean_in_95_of_100_cases() -> None:
    draws = np.random.default_rng(0).normal(2.0, 3.0, (20_000, 3))
    intervals = [t_interval(row.tolist()) for row in draws]
    share = np.mean([interval.low <= 2.0 <= interval.high for interval in intervals])
    assert share == pytest.approx(0.95, abs=COVERAGE_TOLERANCE)
