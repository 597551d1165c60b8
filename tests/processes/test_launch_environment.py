"""What a launcher says by environment variables is read alike by both faces."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
from torch import nn

from trainkit import Accelerator, ConfigError
from trainkit.distributed import Processes
from trainkit.precision import Precision
from trainkit.strategies import FSDP, DeepSpeed, SingleDevice, Strategy, single_process_group
from trainkit.training.setup import arguments

pytestmark = pytest.mark.filterwarnings("ignore:FSDP gains nothing")

UNKNOWN = {
    "TRAINKIT_STRATEGY": "zero",
    "TRAINKIT_MIXED_PRECISION": "int8",
    "ACCELERATE_MIXED_PRECISION": "fp32",
    "TRAINKIT_USE_CPU": "perhaps",
    "ACCELERATE_USE_FSDP": "2",
}
UNKNOWN_SHARDING = {
    "FSDP_RESHARD_AFTER_FORWARD": "full",
    "FSDP_OFFLOAD_PARAMS": "perhaps",
    "FSDP_ACTIVATION_CHECKPOINTING": "-1",
    "FSDP_SHARDING_STRATEGY": "6",
    "FSDP_AUTO_WRAP_POLICY": "BY_SIZE",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "perhaps",
}


def of_trainer() -> tuple[Strategy, Precision]:
    return arguments.make_strategy("auto"), arguments.make_precision("auto")


def of_accelerator() -> tuple[Strategy, Precision]:
    accelerator = Accelerator()
    return accelerator._strategy, accelerator._preparer.precision


Face = Callable[[], tuple[Strategy, Precision]]


@pytest.fixture(autouse=True)
def _processes_are_left() -> Iterator[None]:
    yield
    Processes.start().close()
    single_process_group.leave()


FACES = (of_trainer, of_accelerator)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra `deepspeed`")
@pytest.mark.parametrize("face", FACES)
def test_deepspeed_is_what_the_launcher_says(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    strategy = face()[0]
    assert isinstance(strategy, DeepSpeed)
    assert (strategy.stage, strategy.config["gradient_clipping"]) == (1, 0.5)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("prefix", ["TRAINKIT", "ACCELERATE"])
def test_precision_is_what_the_launcher_says(
    face: Face, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"": "FP32", "no": "FP32", "fp16": "FP16", "BF16": "BF16"}
    for said, name in names.items():
        monkeypatch.setenv(f"{prefix}_MIXED_PRECISION", said)
        assert type(face()[1]).__name__ == name
    assert type(arguments.make_precision("fp32")).__name__ == "FP32"  # what a script says wins
    assert Accelerator(mixed_precision="no").mixed_precision == "no"


@pytest.mark.parametrize("face", FACES)
def test_sharding_is_what_the_launcher_says(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(face()[0], SingleDevice)
    monkeypatch.setenv("TRAINKIT_STRATEGY", "fsdp")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "0")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "Yes")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Tanh,Linear")
    strategy = face()[0]
    assert isinstance(strategy, FSDP)
    assert (strategy.reshard_after_forward, strategy.cpu_offload) == (False, False)
    assert strategy.activation_checkpointing is True
    assert callable(strategy.wrap_policy)
    assert strategy.wrap_policy("0", nn.Linear(1, 1))
    assert not strategy.wrap_policy("1", nn.ReLU())
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "HYBRID_SHARD")
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP")
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "7")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true")
    strategy = face()[0]
    assert isinstance(strategy, FSDP)
    assert strategy.replicas in ("machines", 1)  # 1 where it was set up
    assert strategy.wrap_policy == 7
    assert strategy.activation_checkpointing == "offload"
    assert not strategy.reshard_after_forward


@pytest.mark.parametrize("face", FACES)
def test_groups_are_as_many_as_the_launcher_says(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINKIT_STRATEGY", "fsdp")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    assert getattr(face()[0], "replicas", None) == 1  # nobody asks for groups
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    if face is of_accelerator:
        with pytest.raises(ConfigError, match="is 2 times 1 on 1"):
            face()
        return
    assert getattr(face()[0], "replicas", None) == 2


@pytest.mark.parametrize("face", FACES)
def test_a_launcher_may_ask_for_the_cpu_or_for_sharding_alone(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.basics.device.accelerator_kind", lambda: "xpu")  # unused
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    strategy = face()[0]
    strategy.setup()
    assert strategy.device.type == "cpu"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert isinstance(face()[0], FSDP)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("variable", "value"), [*UNKNOWN.items(), *UNKNOWN_SHARDING.items()])
def test_an_unknown_value_is_an_error_that_names_it(
    face: Face, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable in UNKNOWN_SHARDING:
        monkeypatch.setenv("TRAINKIT_STRATEGY", "fsdp")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=rf"`{variable}` must be .*'{value}'"):
        face()
