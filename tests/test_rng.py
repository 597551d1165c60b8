"""Random streams are named by keys (rule 12)."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from trainkit.basics import rng


def draws() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(), float(np.random.rand()), float(torch.rand(()))


def test_seeding_the_host_is_what_the_libraries_do() -> None:
    state = rng.save_host()
    rng.seed_host(123)
    ours = draws()
    random.seed(123)
    np.random.seed(123)
    torch.manual_seed(123)
    assert draws() == ours
    rng.restore_host(state)


def test_preserved_puts_every_generator_back() -> None:
    state = rng.save_host()
    expected = draws()
    rng.restore_host(state)
    with rng.preserved():
        rng.seed_all(1, torch.device("cpu"))
        draws()
    assert draws() == expected


@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("between", [0, 1])
def test_the_generators_come_back_inside_one_another(before: int, between: int) -> None:
    def main_program(nest: bool) -> list[float]:
        rng.seed_host(5)
        drawn = []
        for _ in range(3):
            drawn += [float(np.random.randn()) for _ in range(before)]  # odd: half a pair waits
            for value in range(2) if nest else ():
                with rng.preserved():
                    rng.seed_host(value)
                    drawn_inside.append((*draws(), float(np.random.randn())))
                    with rng.preserved():
                        rng.seed_host(9)
                        draws()
            drawn += [number for _ in range(between) for number in draws()]
        return [*drawn, *draws()]

    state = rng.save_host()
    drawn_inside: list[tuple[float, ...]] = []
    assert main_program(nest=True) == main_program(nest=False)
    for value in range(2):
        rng.seed_host(value)
        expected = (*draws(), float(np.random.randn()))
        assert drawn_inside[value::2] == [expected] * 3
    rng.restore_host(state)


def test_streams_do_not_collide() -> None:
    seeds = {
        rng.sample_seed(seed, epoch, index)
        for seed in range(3)
        for epoch in range(3)
        for index in range(2000)
    }
    seeds |= {rng.order_seed(s, e) for s in range(50) for e in range(50)}
    seeds |= {rng.device_seed(s, r) for s in range(50) for r in range(50)}
    assert len(seeds) == 3 * 3 * 2000 + 2 * 50 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_for_ever() -> None:
    # A change of these changes the data order of every user's run.
    assert rng.derive(0, "order", 0) == rng.order_seed(0, 0) == ORDER
    assert rng.sample_seed(0, 0, 0) == SAMPLE
    assert rng.sample_seed(0, 0, "name") == rng.derive(rng.sample_stream(0, 0), "name")


ORDER = 2094333682667709378
SAMPLE = 1094569409595171448


def test_the_state_of_another_kind_of_device_is_left_out() -> None:
    cpu = torch.device("cpu")
    before = torch.get_rng_state()
    state = rng.state_dict(cpu)
    assert state["device"] is None
    state["device"] = torch.zeros(16, dtype=torch.uint8)  # as a checkpoint of a GPU has it
    rng.load_state_dict(state, cpu)
    assert torch.equal(before, torch.get_rng_state())


def test_numpys_generator_comes_back_whatever_a_program_does_with_it() -> None:
    """Compared with NumPy's own functions: draws, pairs of which half waits, states put back."""
    numpy_random: Any = np.random

    def program(save: Any, restore: Any, chance: random.Random) -> list[float]:
        np.random.seed(3)
        kept, own, drawn = np.random.get_state(), list[Any](), list[float]()
        for _ in range(300):
            act = chance.randrange(9)
            if act == 0:
                drawn.append(float(np.random.randn()))
            elif act == 1:
                drawn.append(float(np.random.binomial(9, chance.random())))
            elif act == 2:
                kept = np.random.get_state()
            elif act == 3:
                np.random.set_state(kept)
            elif act == 4:
                np.random.seed(chance.randrange(5))
            elif act == 5 and not own:
                numpy_random.set_bit_generator(np.random.MT19937(chance.randrange(5)))
            elif act == 6:
                own.append(save())
            elif own:
                restore(own.pop())
            drawn.append(float(np.random.rand()) if chance.random() < 0.3 else 0.0)
        return drawn

    generator, state = numpy_random.get_bit_generator(), np.random.get_state()
    try:
        for seed in range(60):
            chances = random.Random(seed), random.Random(seed)
            ours = program(rng.save_host, rng.restore_host, chances[0])
            assert ours == program(np.random.get_state, np.random.set_state, chances[1])
    finally:
        numpy_random.set_bit_generator(generator)
        np.random.set_state(state)
