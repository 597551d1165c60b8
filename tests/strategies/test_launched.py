"""`trainkit launch` chooses strategy and precision of a Trainer that leaves them to "auto"."""

import pytest
from torch import nn

from trainkit import ConfigError
from trainkit.strategies import FSDP
from trainkit.training import arguments


def test_precision_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINKIT_MIXED_PRECISION", raising=False)
    names = {None: "FP32", "no": "FP32", "fp16": "FP16", "bf16": "BF16"}
    for said, name in names.items():
        if said is not None:
            monkeypatch.setenv("TRAINKIT_MIXED_PRECISION", said)
        assert type(arguments.make_precision("auto")).__name__ == name
    assert type(arguments.make_precision("fp32")).__name__ == "FP32"  # what a script says wins
    monkeypatch.setenv("TRAINKIT_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match="fp8"):
        arguments.make_precision("auto")


def test_sharding_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(arguments.make_strategy("auto")).__name__ == "SingleDevice"
    monkeypatch.setenv("TRAINKIT_STRATEGY", "fsdp")
    monkeypatch.setenv("TRAINKIT_FSDP_RESHARD_AFTER_FORWARD", "false")
    monkeypatch.setenv("TRAINKIT_FSDP_WRAP_CLASSES", "Tanh,Linear")
    strategy = arguments.make_strategy("auto")
    assert isinstance(strategy, FSDP)
    assert (strategy.reshard_after_forward, strategy.cpu_offload) == (False, False)
    assert callable(strategy.wrap_policy)
    assert strategy.wrap_policy("0", nn.Linear(1, 1))
    assert not strategy.wrap_policy("1", nn.ReLU())
    monkeypatch.setenv("TRAINKIT_FSDP_CPU_OFFLOAD", "perhaps")
    with pytest.raises(ConfigError, match=r"TRAINKIT_FSDP_CPU_OFFLOAD.*'perhaps'"):
        arguments.make_strategy("auto")
    monkeypatch.setenv("TRAINKIT_STRATEGY", "deepspeed")
    with pytest.raises(ConfigError, match=r"must be fsdp.*'deepspeed'"):
        arguments.make_strategy("auto")
