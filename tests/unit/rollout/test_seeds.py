"""Seeds by prompt, generation, step and turn."""

from itertools import product

from grpo_mcore.rollout.trajectory import sample_seed


def test_the_first_turn_has_the_seed_of_a_sample_without_turns() -> None:
    """Runs of one turn draw what they have always drawn."""
    assert sample_seed(42, 3, "data-train:17", 5) == 4175390836498561256
    assert sample_seed(42, 3, "data-train:17", 5, turn=0) == sample_seed(42, 3, "data-train:17", 5)


def test_every_turn_of_every_sample_has_a_seed_of_its_own() -> None:
    cases = list(product((0, 1), (0, 1, 11), ("p:1", "p:11"), (0, 1, 11), range(4)))
    seeds = {sample_seed(*case) for case in cases}
    assert len(seeds) == len(cases) and all(0 <= seed < 2**63 for seed in seeds)
