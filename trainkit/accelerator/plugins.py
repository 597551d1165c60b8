"""Plugins of Accelerate that say what trainkit does by other names."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from typing_extensions import override

from trainkit.accelerator.settings import KwargsHandler
from trainkit.basics.config import checked
from trainkit.basics.launch_environment import (
    SHARDING_STRATEGIES,
    WRAPPING,
    read,
    sharding,
    sharding_strategy,
)
from trainkit.basics.parsing import boolean
from trainkit.basics.setting_readers import text
from trainkit.errors import ConfigError
from trainkit.strategies import FSDP
from trainkit.types import class_name

_INSTEAD = {
    "mixed_precision_policy": "Say `Accelerator(mixed_precision=...)`",
    "ignored_modules": "`FSDP(wrap_policy=...)` says what is sharded on its own",
    "param_init_fn": "Give the modules a `reset_parameters`",
}
"""Settings that would change what happens, and that are refused; and what to do instead."""


@checked
@dataclass
class FullyShardedDataParallelPlugin:
    """Sharding, as FSDP2 does it; `trainkit.strategies.FSDP` under Accelerate's names.

    What is not given is what the `FSDP_*` of a launcher say.

    Args:
        fsdp_version: 1 or 2; both run torch's `fully_shard`.
        sharding_strategy: "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD" or
            "HYBRID_SHARD_ZERO2", or its number; the older name of the next one.
        reshard_after_forward: True or "FULL_SHARD": blocks are given up between forward and
            backward.
        auto_wrap_policy: "transformer_based_wrap", "size_based_wrap", "no_wrap", or torch's
            function for one of them with its arguments in a `functools.partial`. With "no_wrap"
            blocks are chosen as FSDP does by default: that changes the memory, and no result.
        transformer_cls_names_to_wrap: Classes of the blocks, by name.
        min_num_params: With "size_based_wrap": the parameters above which a module is a block.
        cpu_offload: Parameters stay in the memory of the CPU.
        activation_checkpointing: Activations are computed again in backward.
        activation_checkpointing_offload: What they are computed from waits on the host.

    All others are there for scripts that give them: those of the first version, and of how states
    are kept, have no effect on results; what would have one is refused.

    Raises:
        ConfigError: A setting would change what happens, and trainkit does not have it.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Any = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        for name, instead in _INSTEAD.items():
            if getattr(self, name):
                raise ConfigError(
                    f"`FullyShardedDataParallelPlugin({name}=...)` is not there. {instead}."
                )
        self._arguments()  # which looks at the rest

    def strategy(self) -> FSDP:
        """Return the strategy that shards so."""
        return FSDP(**self._arguments())

    def _arguments(self) -> dict[str, Any]:
        offload = self.cpu_offload
        if not isinstance(offload, bool | None):  # torch's: `CPUOffload`, `CPUOffloadPolicy`
            offload = getattr(offload, "offload_params", True)
        how: Any = self.activation_checkpointing
        given = self.reshard_after_forward
        given = self.sharding_strategy if given is None else given
        said = sharding(asked=True) or {}
        try:
            if given is not None:
                chosen = SHARDING_STRATEGIES[sharding_strategy(getattr(given, "name", given))]
                said |= {"reshard_after_forward": True, "replicas": 1, **chosen}
        except ValueError as error:
            raise ConfigError(
                f"`reshard_after_forward` must be {error}, but is {given!r}."
            ) from None
        told = {
            "cpu_offload": offload,
            "activation_checkpointing": (
                how and self.activation_checkpointing_offload and "offload"
            )
            or how,
            "wrap_policy": self._wrap_policy(),
        }
        return said | {name: value for name, value in told.items() if value is not None}

    def _wrap_policy(self) -> Any:
        policy, names = self.auto_wrap_policy, self.transformer_cls_names_to_wrap or ()
        options = policy.keywords if isinstance(policy, partial) else {}
        policy = getattr(getattr(policy, "func", policy), "__name__", policy)
        if "transformer_layer_cls" in options:
            return set(options["transformer_layer_cls"])
        word = str(policy or "NO_WRAP").upper().replace("_AUTO_WRAP_POLICY", "_WRAP")
        word = word.replace("TRANSFORMER_WRAP", "TRANSFORMER_BASED_WRAP")
        if word not in WRAPPING:
            raise ConfigError(
                f"`auto_wrap_policy` must be one of {', '.join(WRAPPING)}, but is {policy!r}. "
                "Pass `Accelerator(strategy=trainkit.strategies.FSDP(wrap_policy=...))`, with "
                "classes of modules, a callable `(name, module) -> bool`, or a size."
            )
        if word == "SIZE_BASED_WRAP":
            return options.get("min_num_params", self.min_num_params) or None
        wanted = set(names.split(",") if isinstance(names, str) else names)

        def is_block(name: str, module: nn.Module) -> bool:
            return class_name(module) in wanted

        return is_block if wanted else None


@checked
@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """The arguments of `torch.compile` for every prepared model; None: as the launcher says.

    Args:
        backend: "inductor", "eager" and so on, in any case; "no": models are not compiled.
        mode: "default", "reduce-overhead" or "max-autotune".
        fullgraph: Whether a break of the graph is an error.
        dynamic: Whether shapes may vary; None: as torch finds out.
        options: Of the back end.
        disable: Compile nothing.
        use_regional_compilation: True, which compiles block by block, is refused.
    """

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        self.backend = self.backend or read("DYNAMO_BACKEND", text, "no")
        self.backend = str(getattr(self.backend, "value", self.backend)).lower()
        self.mode = self.mode or read("DYNAMO_MODE", text, None)
        if self.fullgraph is None:
            self.fullgraph = read("DYNAMO_USE_FULLGRAPH", boolean, False)
        if self.dynamic is None:  # "false" is said by default
            self.dynamic = read("DYNAMO_USE_DYNAMIC", boolean, False) or None
        blocks = self.use_regional_compilation
        if read("DYNAMO_USE_REGIONAL_COMPILATION", boolean, False) if blocks is None else blocks:
            raise ConfigError(
                "`use_regional_compilation=True` is not there. Compile the blocks of the model "
                "before `prepare`: `for block in model.blocks: block.compile()`."
            )

    @override
    def to_kwargs(self) -> dict[str, Any]:
        usual = {"backend": "no", "fullgraph": False, "disable": False}
        given = {name: v for name, v in vars(self).items() if v != usual.get(name)}
        given.pop("use_regional_compilation", None)
        return given
