"""FSDP trains as one process does, on any number of processes (rules 6 to 9)."""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.strategies.toys import MODELS, Case, Outcome, train
from trainkit.precision import FP16

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP gains nothing"),
    # Said of the logits of transformers models, which nobody changes in place.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]


@pytest.fixture(autouse=True, scope="module")
def _models_are_imported() -> None:
    """Import once, before processes are forked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make in MODELS.values():
            make()


def deviation(a: Iterable[float], b: Iterable[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def assert_equal(reference: Outcome, other: Outcome, limit: float) -> None:
    assert deviation(reference.losses, other.losses) <= limit
    assert deviation(reference.norms, other.norms) <= limit
    assert reference.figures.keys() == other.figures.keys()
    assert deviation(reference.figures.values(), other.figures.values()) <= limit


def compare(cases: list[Case], runs: list[tuple[str, int]]) -> None:
    """Compare every case on one process with the same on others, and those with one another."""
    single = run_ranks(1, train, 1, [replace(case, strategy="single") for case in cases])[0]
    for strategy, size in runs:
        changed = [replace(case, strategy=strategy) for case in cases]
        by_rank = run_ranks(size, train, size, changed, timeout=240)
        for number, case in enumerate(cases):
            assert len(single[number].losses) == case.steps
            assert_equal(single[number], by_rank[0][number], LIMITS[case.dtype])
            for outcomes in by_rank[1:]:  # bit for bit
                assert outcomes[number].norms == by_rank[0][number].norms
                assert outcomes[number].figures == by_rank[0][number].figures


@pytest.mark.parametrize(
    ("strategy", "size"),
    with_few([("fsdp", 2)], [("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3)]),
)
def test_the_same_training_as_on_one_process(strategy: str, size: int) -> None:
    cases = [Case("", name, steps=4) for name in MODELS]
    larger = "gpt2" if "gpt2" in MODELS else "mlp"
    cases += [Case("", larger, torch.float32, steps=4, accumulation=2)]
    compare(cases, [(strategy, size)])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_fifty_steps_are_the_same_training_as_on_one_process(name: str) -> None:
    cases = [
        Case("", name, dtype, steps=50, accumulation=accumulation)
        for dtype in LIMITS
        for accumulation in (1, 2)
    ]
    compare(cases, [("ddp", 2), ("fsdp", 2), ("fsdp", 3)])


OPTIONS: dict[str, dict[str, Any]] = {
    "kept after forward": {"reshard_after_forward": False},
    "activation checkpointing": {"activation_checkpointing": True},
    "cpu offload": {"cpu_offload": True},
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", MODELS)
def test_options_change_no_figure(name: str) -> None:
    plain = Case("fsdp", name, steps=3, accumulation=2)
    cases = [plain, *(replace(plain, options=options) for options in OPTIONS.values())]
    reference, *others = run_ranks(2, train, 2, cases)[0]
    for other in others:
        assert_equal(reference, other, 1e-12)
        for key, value in reference.weights.items():
            assert torch.allclose(value, other.weights[key], rtol=0, atol=1e-12)


@pytest.mark.e2e
def test_replicas_of_shards_are_the_same_training_as_ddp() -> None:
    cases = [Case("ddp", steps=4), Case("fsdp", steps=4, options={"replicas": 2})]
    for ddp, fsdp in run_ranks(4, train, 4, cases):
        assert_equal(ddp, fsdp, 1e-12)


@pytest.mark.e2e
@pytest.mark.parametrize("name", MODELS)
def test_bf16_learns_as_it_does_under_ddp(name: str) -> None:
    case = Case("ddp", name, torch.float32, steps=8, precision="bf16", accumulation=2)
    for ddp, fsdp in run_ranks(2, train, 2, [case, replace(case, strategy="fsdp")]):
        assert deviation(ddp.losses, fsdp.losses) < 0.02
        assert deviation(ddp.norms, fsdp.norms) < 0.2


@pytest.mark.e2e
def test_fp16_learns_as_it_does_under_ddp() -> None:
    case = Case("ddp", "mlp", torch.float32, steps=8, precision=FP16(init_scale=64.0))
    for ddp, fsdp in run_ranks(2, train, 2, [case, replace(case, strategy="fsdp", fused=True)]):
        assert deviation(ddp.losses, fsdp.losses) < 0.01
