"""Which batch is under way (rule 19)."""

import pytest

from tests.data.toys import Numbers, Stream, loader_of, prepare, prepare_evaluation
from trainkit.data import ActiveLoaders, BatchInfo
from trainkit.errors import ConfigError


def test_nothing_is_current_before_the_first_batch() -> None:
    active = ActiveLoaders()
    assert active.current() is None
    with pytest.raises(ConfigError, match="a `list`, has no batch under way"):
        active.current([])


def test_the_last_batch_counts_until_its_loader_has_ended() -> None:
    active = ActiveLoaders()
    first, second = (loader_of(Numbers(n), batch_size=2) for n in (3, 4))
    prepared = prepare_evaluation(first, active=active)
    for batch in prepared:
        assert active.current() == BatchInfo((len(batch),), len(batch))
        assert active.current() == active.current(first) == active.current(prepared)
    assert active.current() is None
    for _ in prepare_evaluation(second, active=active):
        break
    assert active.current() is None
    with pytest.raises(ConfigError, match="has no batch under way"):
        active.current(first)


def test_the_loader_that_yielded_last_is_meant() -> None:
    active = ActiveLoaders()
    outer, inner = (loader_of(Numbers(n), batch_size=2) for n in (2, 3))
    for _ in prepare_evaluation(outer, active=active):
        for number, _ in enumerate(prepare_evaluation(inner, active=active)):
            assert active.current() == BatchInfo((2 - number,), 2 - number)
            assert active.current(outer) == BatchInfo((2,), 2)
            assert active.doubts()[0] == ""
        assert active.current() == BatchInfo((2,), 2)
    assert active.current() is None


def test_two_passes_over_one_loader_end_one_by_one() -> None:
    active, loader = ActiveLoaders(), object()
    active.began(loader)
    active.yielded(loader, (3,), 3)
    active.began(loader)
    active.yielded(loader, (1,), 1)
    assert active.current() == BatchInfo((1,), 1)
    active.ended(loader)
    assert active.current() == BatchInfo((3,), 3)


def test_an_iterator_that_somebody_holds_stays_under_way_until_it_is_let_go() -> None:
    active = ActiveLoaders()
    loader = prepare_evaluation(loader_of(Numbers(4), batch_size=2), active=active)
    next(iter(loader))
    assert active.current() is None
    held = iter(loader)
    next(held)
    assert active.current() == BatchInfo((2,), 2)
    for _ in prepare_evaluation(loader_of(Numbers(3), batch_size=3), active=active):
        assert active.current() == BatchInfo((3,), 3)
    del held
    assert active.current() is None


def test_a_zero_weight_repeat_has_the_size_of_what_it_repeats() -> None:
    active = ActiveLoaders()
    sizes = []
    for _ in prepare_evaluation(loader_of(Numbers(4), batch_size=3), 1, 2, active=active):
        info = active.current()
        assert info is not None
        sizes.append((info.counts, info.local_size))
    assert sizes == [((3, 1), 1)]
    for _ in prepare_evaluation(loader_of(Numbers(3), batch_size=2), 2, 3, active=active):
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


def test_a_micro_batch_that_was_read_ahead_is_not_under_way() -> None:
    active = ActiveLoaders()
    loader = prepare(loader_of(Stream(11), batch_size=2), active=active)
    for window in loader.windows(0, accumulation=2, drop_last=True):
        for part in window:
            assert active.current() == BatchInfo((len(part.data),), len(part.data))
    assert active.current() is None
    for window in loader.windows(0, accumulation=3, drop_last=False):
        sizes = [len(part.data) for part in window]
        assert active.current() == BatchInfo((sizes[-1],), sizes[-1])  # until the next is asked for
