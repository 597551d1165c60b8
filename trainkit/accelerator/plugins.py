"""Plugins of Accelerate that say what trainkit does by other names."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from typing_extensions import override

from trainkit.accelerator.settings import KwargsHandler
from trainkit.basics.config import checked
from trainkit.basics.launch_environment import read, reshards, sharding
from trainkit.basics.parsing import boolean
from trainkit.basics.setting_readers import text
from trainkit.errors import ConfigError
from trainkit.strategies import FSDP
from trainkit.types import class_name

_INSTEAD = {
    "mixed_precision_policy": "Say `Accelerator(mixed_precision=...)`",
    "ignored_modules": "`FSDP(wrap_policy=...)` says what is sharded on its own",
    "param_init_fn": "Give the modules a `reset_parameters`",
    "activation_checkpointing_offload": "Pass `activation_checkpointing=True` alone",
    "min_num_params": "Blocks are chosen by class: pass `transformer_cls_names_to_wrap`",
}
"""Settings that would change what happens, and that are refused; and what to do instead."""


@checked
@dataclass
class FullyShardedDataParallelPlugin:
    """Sharding, as FSDP2 does it; `trainkit.strategies.FSDP` under Accelerate's names.

    What is not given is what the `FSDP_*` of a launcher say.

    Args:
        fsdp_version: 1 or 2; both run torch's `fully_shard`.
        sharding_strategy: "FULL_SHARD" or "SHARD_GRAD_OP"; the older name of the next one.
        reshard_after_forward: True or "FULL_SHARD": blocks are given up between forward and
            backward.
        auto_wrap_policy: "transformer_based_wrap", "no_wrap", or `transformer_auto_wrap_policy`
            with its classes in a `functools.partial`. With "no_wrap" blocks are chosen as FSDP
            does by default: that changes the memory, and no result.
        transformer_cls_names_to_wrap: Classes of the blocks, by name.
        cpu_offload: Parameters stay in the memory of the CPU.
        activation_checkpointing: Activations are computed again in backward.

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
        given = {
            "reshard_after_forward": self._reshards(),
            "cpu_offload": offload,
            "activation_checkpointing": self.activation_checkpointing,
            "wrap_policy": self._wrap_policy(),
        }
        said = sharding(asked=True) or {}
        return said | {name: value for name, value in given.items() if value is not None}

    def _reshards(self) -> bool | None:
        given = self.reshard_after_forward
        given = self.sharding_strategy if given is None else given
        try:
            return None if given is None else reshards(getattr(given, "name", given))
        except ValueError:
            raise ConfigError(
                "`reshard_after_forward` must be True, False, FULL_SHARD or SHARD_GRAD_OP, but is "
                f"{given!r}. For whole models on groups of processes pass "
                "`Accelerator(strategy=trainkit.strategies.FSDP(replicas=...))`; for no sharding "
                "leave the plugin out."
            ) from None

    def _wrap_policy(self) -> Any:
        policy, names = self.auto_wrap_policy, self.transformer_cls_names_to_wrap or ()
        options = policy.keywords if isinstance(policy, partial) else {}
        classes = options.get("transformer_layer_cls")
        if classes is not None:
            return set(classes)
        known = (None, "NO_WRAP", "TRANSFORMER_BASED_WRAP")
        if (policy.upper() if isinstance(policy, str) else policy) not in known:
            raise ConfigError(
                f"`auto_wrap_policy` must be transformer_based_wrap or no_wrap, but is {policy!r}. "
                "Pass `Accelerator(strategy=trainkit.strategies.FSDP(wrap_policy=...))`, with "
                "classes of modules or a callable `(name, module) -> bool`."
            )
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
