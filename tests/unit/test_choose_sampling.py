from __future__ import annotations

from clover.backends.local import choose_sampling
from clover.checkpoint.load import GenerationDefaults
from clover.diffusion.sampling import SamplingParams

RECOMMENDED = GenerationDefaults(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)


def test_without_a_recommendation_text_is_greedy() -> None:
    assert choose_sampling({}, GenerationDefaults()) == SamplingParams()
    assert choose_sampling({}, GenerationDefaults(do_sample=False, temperature=0.6)) == (
        SamplingParams()
    )


def test_what_the_authors_recommend_fills_up_what_was_not_asked() -> None:
    assert choose_sampling({"top_k": 5, "seed": 3}, RECOMMENDED) == SamplingParams(
        temperature=0.6, top_k=5, top_p=0.95, seed=3
    )


def test_asking_for_greedy_text_wins() -> None:
    assert choose_sampling({"temperature": 0.0}, RECOMMENDED).temperature == 0.0


def test_sampling_recommended_without_a_temperature_means_one() -> None:
    assert choose_sampling({}, GenerationDefaults(do_sample=True)).temperature == 1.0
