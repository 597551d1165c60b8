"""The settings of `Accelerator`, under the names of Hugging Face Accelerate."""

from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from trainkit.accelerator.communication import DDPCommunicationHookType, checked_hooks
from trainkit.basics.config import checked
from trainkit.basics.launch_environment import read
from trainkit.basics.outputs import absolute
from trainkit.basics.parsing import boolean
from trainkit.errors import ConfigError


class DistributedType(str, Enum):  # noqa: UP042  # `str` of a member is Accelerate's
    """How a job shares its work; those that trainkit does not drive are there to compare with."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


class KwargsHandler:
    """Settings that are passed to `Accelerator` in the list `kwargs_handlers`."""

    def to_kwargs(self) -> dict[str, Any]:
        """Return the settings that are not the defaults."""
        default = type(self)()
        values = {name: getattr(self, name) for name in vars(self)}
        return {name: v for name, v in values.items() if v != getattr(default, name)}


@checked
@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated.

    Args:
        num_steps: Micro-batches of one process for each update.
        adjust_scheduler: Accepted; a scheduler steps once for each update in any case, as it does
            in Accelerate for both values.
        sync_with_dataloader: Whether the end of a loader ends a window.
        sync_each_batch: Whether the processes reduce in every micro-batch: less memory, more
            communication.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if type(self.num_steps) is not int or self.num_steps < 1:
            raise ConfigError(
                "The number of accumulation steps must be a whole number from 1 on, but is "
                f"{self.num_steps!r}."
            )


@checked
@dataclass
class DataLoaderConfiguration:
    """How prepared loaders share out their data.

    Args:
        split_batches: A loader's batch size is that of all processes together.
        dispatch_batches: Process 0 reads the data and sends it to the others, for data that only
            one process can read; None: every process reads its own.
        even_batches: Fill up the last batches with samples from the start of the epoch, so that
            all processes have equally many and equally large ones.
        use_seedable_sampler: Shuffle by `epoch + data_seed` alone.
        data_seed: The seed for that; None: the seed that torch's generator started from.
        non_blocking: Accepted; to an accelerator copies never block.
        use_stateful_dataloader: A loader goes on in the middle of an epoch after `load_state`,
            without `skip_first_batches`.
        sample_seeding: What a data set draws is keyed by epoch and sample; with False it comes
            from the generators as they are, bit for bit as under Accelerate, and a resumed pass,
            other workers and other numbers of processes draw something else.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    sample_seeding: bool = field(default_factory=lambda: read("SAMPLE_SEEDING", boolean, True))


@checked
@dataclass
class AORecipeKwargs(KwargsHandler):
    """How `mixed_precision="fp8"` multiplies, by torchao.

    Args:
        config: A `torchao.float8.Float8LinearConfig`; None: one scale for each tensor.
        module_filter_func: `(layer, name) -> bool` says of each layer that can be converted whether
            it is; None: all are but the first and the last linear layer of a model.
        pad_inner_dim: Accepted, as is the next; what must be padded is, without `config`.
        enable_fsdp_float8_all_gather: FSDP gathers in bfloat16, also with `config`.
    """

    config: Any = None
    module_filter_func: Any = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None


@checked
@dataclass
class ProjectConfiguration:
    """Where a project writes.

    Args:
        project_dir: Folder of checkpoints and logs.
        logging_dir: Folder of logs; `project_dir` by default.
        automatic_checkpoint_naming: `save_state()` writes `checkpoints/checkpoint_<iteration>`.
        total_limit: How many of these stay; None: all.
        iteration: Number of the next one.
        save_on_each_node: Accepted; checkpoints need storage that all machines share.
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigError(f"`total_limit` must be at least 1, but is {self.total_limit}.")
        self._folders: dict[str | Path, str | Path] = {}
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Take another project folder, also for logs where they have none of their own."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
        for name in ("project_dir", "logging_dir"):
            self.folder(name)

    def folder(self, name: str) -> str | Path | None:
        """Return a folder for good, wherever the program goes later; a text stays one."""
        given = getattr(self, name)
        if given is not None and given not in self._folders:
            path = absolute(given, name, stored=True)
            self._folders[given] = str(path) if isinstance(given, str) else path
        return self._folders.get(given)


@checked
@dataclass
class GradScalerKwargs(KwargsHandler):
    """The loss scale of fp16; the arguments of `torch.amp.GradScaler`."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@checked
@dataclass
class AutocastKwargs(KwargsHandler):
    """Settings of autocast.

    Args:
        enabled: Whether the code inside runs in the chosen format.
        cache_enabled: Whether converted weights are kept until the end; None: torch's default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@checked
@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """The arguments of `torch.nn.parallel.DistributedDataParallel`, and its communication hook.

    `dim`, `check_reduction` and `gradient_as_bucket_view` are accepted and change no result.

    Args:
        comm_hook: What torch's DDP sends in the place of the gradients.
        comm_wrapper: FP16 or BF16: what the hook sends is made smaller.
        comm_state_option: Of `PowerSGDState`, for the two hooks that have it.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = self.comm_hook, self.comm_wrapper, self.comm_state_option
        self.comm_hook, self.comm_wrapper = checked_hooks(*given)


@checked
@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group is made.

    Args:
        backend: Accepted; the back end is that of the device.
        init_method: Where the processes meet; None: what the launcher says. Refused where the
            process group exists already.
        timeout: How long a collective may wait before it raises, in every group: the default one,
            also where it exists already, and those that trainkit makes; None: torch's default.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None
