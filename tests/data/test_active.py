"""Which batch is under way (DESIGN 2.19)."""

import pytest

from tests.data.toys import Numbers, loader_of, prepare_evaluation
from trainkit.data import ActiveLoaders, BatchInfo
from trainkit.errors import ConfigError


def test_nothing_is_current_before_the_first_batch() -> None:
    active = ActiveLoaders()
    assert active.current() is None
    with pytest.raises(ConfigError, match="a `list`, has no batch under way"):
        active.current([])


def test_the_last_batch_counts_until_another_loader_begins() -> None:
    active = ActiveLoaders()
    first, second = (loader_of(Numbers(n), batch_size=2) for n in (3, 4))
    prepared = prepare_evaluation(first, active=active)
    for batch in prepared:
        assert active.current() == BatchInfo((len(batch),), len(batch))
    assert active.current() == active.current(first) == active.current(prepared)
    assert active.current() == BatchInfo((1,), 1)
    for _ in prepare_evaluation(second, active=active):
        break
    assert active.current() == BatchInfo((2,), 2)
    with pytest.raises(ConfigError, match="has no batch under way"):
        active.current(first)


def test_loaders_with_other_counts_must_be_named() -> None:
    active = ActiveLoaders()
    outer, inner = (loader_of(Numbers(n), batch_size=2) for n in (2, 3))
    for _ in prepare_evaluation(outer, active=active):
        for number, _ in enumerate(prepare_evaluation(inner, active=active)):
            if number == 0:
                assert active.current() == BatchInfo((2,), 2)
                continue
            with pytest.raises(ConfigError, match=r"2 loaders .* \(\[1\], \[2\] by process\)"):
                active.current()
            assert active.current(inner) == BatchInfo((1,), 1)
            assert active.current(outer) == BatchInfo((2,), 2)
        assert active.current() == BatchInfo((2,), 2)


def test_a_zero_weight_repeat_has_the_size_of_what_it_repeats() -> None:
    active = ActiveLoaders()
    sizes = []
    for _ in prepare_evaluation(loader_of(Numbers(4), batch_size=3), 1, 2, active=active):
        info = active.current()
        assert info is not None
        sizes.append((info.counts, info.local_size))
    assert sizes == [((3, 1), 1)]
    (_,) = prepare_evaluation(loader_of(Numbers(3), batch_size=2), 2, 3, active=active)
    assert active.current() == BatchInfo((2, 1, 0), 2)


def test_a_loader_that_raised_is_no_longer_under_way() -> None:
    active = ActiveLoaders()
    for _ in prepare_evaluation(loader_of(Numbers(2)), active=active):
        break
    parts = prepare_evaluation(loader_of([1], sampler=[0, 5]), active=active).batches(0)
    next(parts)
    with pytest.raises(IndexError):
        next(parts)
    for _ in prepare_evaluation(loader_of(Numbers(3), batch_size=3), active=active):
        assert active.current() == BatchInfo((3,), 3)
