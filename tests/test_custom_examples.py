"""The examples of parts of one's own run on one process and two, and keep the contracts."""

import re

import pytest
import torch

from tests.helpers.needs import late
from tests.helpers.scripts import ROOT, run_forked
from tests.helpers.tiers import with_few
from trainkit.testing import check_callback, check_precision, check_strategy

custom_callback, custom_precision = late("custom_callback"), late("custom_precision")
custom_strategy = late("custom_strategy")

PRINTED = {
    "custom_callback.py": r"stopped by: \w.*\njumps: \d+, accuracy 0\.\d+\n",
    "custom_precision.py": r"rounded to nearest: accuracy 0\.\d+\n"
    r"rounded at random: accuracy 0\.\d+\n",
    "custom_strategy.py": r"gradients in fp32: accuracy 0\.\d+\n"
    r"gradients in bfloat16: accuracy 0\.\d+\n",
}


@pytest.mark.parametrize("processes", with_few([1], [1, 2]))
@pytest.mark.parametrize("name", sorted(PRINTED))
def test_the_example_runs(name: str, processes: int) -> None:
    printed = run_forked(ROOT / "examples" / name, "--tiny", size=processes).output
    assert re.fullmatch(PRINTED[name], printed), printed


@pytest.mark.e2e
@pytest.mark.parametrize("processes", [2, 3])
def test_the_strategy_keeps_the_contract(processes: int) -> None:
    check_strategy(custom_strategy.CompressedDDP, processes=processes, exact=False)


def test_the_strategy_is_another_algorithm() -> None:
    with pytest.raises(AssertionError, match="not those of one device"):
        check_strategy(custom_strategy.CompressedDDP, tolerance=1e-4)


@pytest.mark.e2e
def test_the_precision_keeps_the_contract() -> None:
    check_precision(custom_precision.StochasticBF16)


@pytest.mark.e2e
def test_the_callback_keeps_the_contract() -> None:
    check_callback(custom_callback.BackOff)


def test_rounding_is_right_on_average_and_gives_bfloat16() -> None:
    precision = custom_precision.StochasticBF16()
    precision.setup(torch.device("cpu"))
    value = torch.full((40_000,), 1 + 2**-9)  # a quarter of the way from 1 to the next number
    rounded = precision.rounded(value)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    share = float((rounded > 1).double().mean())
    assert abs(share - 0.25) < 0.011  # five standard deviations
    assert torch.equal(precision.rounded(rounded), rounded)
    assert torch.equal(precision.rounded(-rounded), -rounded)
