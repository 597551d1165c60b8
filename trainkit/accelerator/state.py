"""What Accelerate's state classes say: the place of this process, and of what job."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, Self

import torch
from typing_extensions import override

from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.arguments import chosen_device, join
from trainkit.accelerator.settings import (
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from trainkit.basics.device import collective_backend, default_kind
from trainkit.basics.systems import after_fork
from trainkit.distributed import Processes
from trainkit.distributed.active_batches import ActiveLoaders
from trainkit.distributed.communicator import Communicator
from trainkit.distributed.group import Membership
from trainkit.distributed.world import World
from trainkit.errors import ConfigError

_TRAVELS = ("_mixed_precision", "_distributed_type")


class PartialState(Communicator):
    """The processes of a job and the verbs between them, without anything of training.

    Args:
        cpu: Use the CPU also where there is a GPU.
        **kwargs: Of `InitProcessGroupKwargs`.
    """

    initialized = True
    debug = False  # shapes are compared all the same

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        device = chosen_device(None, cpu=cpu)
        join(InitProcessGroupKwargs(**kwargs), device)
        super().__init__(device=device)

    @property
    def distributed_type(self) -> DistributedType:
        """How the job shares its work."""
        return _kind(self)

    @property
    def backend(self) -> str | None:
        """What moves tensors between the processes; None on one."""
        return collective_backend(self.device) if self.use_distributed else None

    @property
    def default_device(self) -> torch.device:
        """The kind of device that this machine has."""
        return torch.device(default_kind())

    def set_device(self) -> None:
        """Do nothing: the device is known from the beginning."""

    def destroy_process_group(self) -> None:
        """Leave the process group, as all processes do at their end."""
        self.processes.close()

    @staticmethod
    def _reset_state() -> None:
        """Do nothing: each `PartialState` looks for itself."""

    @override
    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type!s}{backend}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )

    @override
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Let another process, such as a worker of `datasets`, know the place of this one.

        What arrives there is a copy outside of the job: it can be asked, but a collective raises.
        The bytes are equal in each run, as the cache of `datasets` needs it.
        """
        facts = {name: vars(self)[name] for name in _TRAVELS if name in vars(self)}
        return _copy, (type(self), asdict(self.processes.world), str(self.device), facts)

    def __deepcopy__(self, memo: Any) -> Self:
        """Return this object: what refers to it belongs to this process."""
        return self


class AcceleratorState(PartialState):
    """What the newest `Accelerator` of this process says of the job: `AcceleratorState()`.

    Raises:
        ConfigError: There is no `Accelerator` yet.
    """

    megatron_lm_plugin = torch_tp_plugin = None
    fsdp_plugin: Any = None
    deepspeed_plugin: Any = None
    parallelism_config: Any = None
    device_mesh: Any = None

    _newest: ClassVar["AcceleratorState | None"] = None
    gradients: ClassVar[Accumulation | None] = None
    """The windows of the newest `Accelerator`."""
    _mixed_precision: str
    _distributed_type: DistributedType

    def __new__(cls, *args: Any, **kwargs: Any) -> "AcceleratorState":
        """Return that of the newest `Accelerator`; arguments are those of `Accelerator`."""
        if cls._newest is None:
            raise ConfigError(
                "There is no `Accelerator` yet, whose state this would be. Make one first, or use "
                "`PartialState()`."
            )
        return cls._newest

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Leave it as it is: each `AcceleratorState()` is the same object."""

    @classmethod
    def of(
        cls,
        owner: Communicator,
        gradients: Accumulation,
        *,
        mixed_precision: str,
        fsdp_plugin: Any,
        parallelism: Any,
        deepspeed_plugin: Any,
        sharded: bool,
    ) -> "AcceleratorState":
        """Return the state of an `Accelerator` that is being made, which is now the newest."""
        state = object.__new__(cls)
        Communicator.__init__(state, processes=owner.processes, device=owner.device)
        state._mixed_precision = mixed_precision
        state._distributed_type = DistributedType.FSDP if sharded else _kind(owner)
        state.fsdp_plugin, state.deepspeed_plugin = fsdp_plugin, deepspeed_plugin
        state.parallelism_config = parallelism
        if parallelism is not None:
            state.device_mesh = parallelism.get_device_mesh(owner.device.type)
        if deepspeed_plugin is not None:
            state._distributed_type = DistributedType.DEEPSPEED
        cls._newest, cls.gradients = state, gradients
        return state

    @property
    @override
    def distributed_type(self) -> DistributedType:
        return self._distributed_type

    @property
    def state(self) -> Self:
        """This object: an `Accelerator` arrives in another process as its state."""
        return self

    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16" or "bf16"."""
        return self._mixed_precision

    @staticmethod
    @override
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the newest `Accelerator`, which itself stays as it is."""
        AcceleratorState._newest = AcceleratorState.gradients = None

    @override
    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


UNDER_WAY = ActiveLoaders()
"""Of every `Accelerator`: a metric may be gathered by another one than prepared its loader."""
after_fork(UNDER_WAY.forget)  # a child goes on with no loop


class GradientState:
    """`GradientState()` is `gradient_state` of the newest `Accelerator`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return it; without an `Accelerator`, one with windows of one micro-batch."""
        return AcceleratorState.gradients or Accumulation(GradientAccumulationPlugin(), UNDER_WAY)

    @staticmethod
    def _reset_state() -> None:
        AcceleratorState.gradients = None


def is_initialized() -> bool:
    """Return whether this process has made an `Accelerator`."""
    return AcceleratorState._newest is not None


def _kind(job: Communicator) -> DistributedType:
    if job.num_processes == 1:
        return DistributedType.NO
    name = f"MULTI_{job.device.type.upper()}"
    return DistributedType.__members__.get(name, DistributedType.MULTI_GPU)


def _copy(
    kind: type[PartialState], place: dict[str, int], device: str, facts: dict[str, Any]
) -> PartialState:
    newest = AcceleratorState._newest
    given = (kind, place, device, facts)
    if newest is not None and newest.processes.is_usable() and newest.__reduce__()[1] == given:
        return newest  # it has not left its process
    processes = Processes(Membership(World(**place)), torch.device(device))
    state = object.__new__(kind)
    Communicator.__init__(state, processes=processes, device=processes.device)
    vars(state).update(facts)
    return state
