"""What Accelerate's scripts say of DeepSpeed: the plugin, and what stands for what it makes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

from trainkit.basics.config import checked
from trainkit.basics.launch_environment import read
from trainkit.basics.parsing import boolean
from trainkit.basics.setting_readers import text, whole
from trainkit.errors import ConfigError
from trainkit.strategies.deepspeed import BY_ELEMENT, load
from trainkit.strategies.deepspeed_config import clipping, contradiction, read_config, read_json


class DummyOptim:
    """Stands for the optimizer of DeepSpeed's configuration, which `prepare` makes.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, where the configuration says "auto" or nothing; so are the next ones.
        weight_decay: Of the optimizer.
        **kwargs: More of its arguments.
    """

    def __init__(
        self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params, self.lr, self.weight_decay, self.kwargs = params, lr, weight_decay, kwargs


class DummyScheduler:
    """Stands for the schedule of DeepSpeed's configuration, which `prepare` makes.

    Args:
        optimizer: What it is for.
        total_num_steps: Updates in all, times processes; as in Accelerate they are divided by them.
        warmup_num_steps: Updates until the rate is whole.
        lr_scheduler_callable: Makes a schedule of an optimizer, instead of the configuration.
        **kwargs: More of its arguments.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Any = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer, self.kwargs = optimizer, kwargs
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable


@checked
@dataclass
class DeepSpeedPlugin:
    """DeepSpeed's ZeRO-1 or -2 for `Accelerator`, with the arguments of Accelerate.

    What is not given is what the `ACCELERATE_DEEPSPEED_*` of a launcher say. `deepspeed_config`
    is what comes of it; values that are "auto" are filled in by `Accelerator` and `prepare`.

    Args:
        hf_ds_config: DeepSpeed's configuration: a mapping, or the path of a JSON file with one.
        gradient_accumulation_steps: Micro-batches of one process for each update.
        gradient_clipping: The L2 norm that gradients are clipped to, also where the loop does not.
        zero_stage: 1 or 2, the default.
        is_train_batch_min: Whether the smallest batch size of several loaders, else the largest,
            stands for "auto".
        offload_optimizer_device: "none", as is the next one.

    All others are of ZeRO-3 and there for scripts that give them.

    Raises:
        ConfigError: It asks for what is not driven, or contradicts `hf_ds_config`.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        if self.enable_msamp:
            raise ConfigError(
                "`DeepSpeedPlugin(enable_msamp=True)` is not there. Leave it out, and pass "
                '`Accelerator(mixed_precision="fp8")`, which multiplies by torchao.'
            )
        given = self.hf_ds_config or read("DEEPSPEED_CONFIG_FILE", text, None)
        given = None if given == "none" else getattr(given, "config", given)
        autos = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
        config: dict[str, Any] = deepcopy(autos if given is None else dict(read_json(given)))
        if given is not None and not isinstance(config.get("zero_optimization"), dict):
            raise ConfigError(
                "`hf_ds_config` has no section `zero_optimization`. Write one with a `stage`."
            )
        zero = config.setdefault("zero_optimization", {})
        for name, section, key, default in (
            ("gradient_accumulation_steps", config, "gradient_accumulation_steps", "auto"),
            ("gradient_clipping", config, "gradient_clipping", "auto"),
            ("zero_stage", zero, "stage", 2),
        ):
            asked, said = getattr(self, name), section.get(key, "auto")
            if "auto" not in (said, asked) and asked not in (None, said):
                raise contradiction(key, said, f"`DeepSpeedPlugin({name}=...)`", asked)
            if said == "auto" and asked is None:
                asked = clipping() if name not in _SAID else read(*_SAID[name], default)
                asked = default if asked is None else asked
            section[key] = said if said != "auto" else asked
            setattr(self, name, section[key])
        for name in ("offload_optimizer", "offload_param"):
            asked = getattr(self, f"{name}_device")
            asked = asked or read(f"DEEPSPEED_{name.upper()}_DEVICE", text, "none")
            if asked != "none":
                zero[name] = {"device": asked}
        read_config(config)  # which looks at the rest
        self.zero3_init_flag = False
        self.deepspeed_config: dict[str, Any] = config
        self.hf_ds_config = SimpleNamespace(config=config)
        if self.zero_stage not in (1, 2):
            raise ConfigError(
                f"`zero_stage` must be 1 or 2, but is {self.zero_stage!r}. For ZeRO-3 pass "
                "`Accelerator(strategy=trainkit.strategies.FSDP())`, which shares out the same, "
                "instead of the plugin; for ZeRO-0 pass neither."
            )

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value of the configuration by its key, such as "zero_optimization.stage"."""
        value: Any = self.deepspeed_config
        for key in ds_key_long.split("."):
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether the configuration says "auto" there."""
        return bool(self.get_value(ds_key_long) == "auto")

    def is_zero3_init_enabled(self) -> bool:
        """Return False: there is no ZeRO-3."""
        return False

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Do nothing: there is no ZeRO-3."""
        yield

    def deepspeed_config_process(self, must_match: bool = True, **kwargs: Any) -> None:
        """Fill in values that are "auto", by their keys; refuse others where they `must_match`.

        Raises:
            ConfigError: The configuration says another one.
        """
        for key, value in kwargs.items():
            if self.is_auto(key):
                *sections, last = key.split(".")
                (self.get_value(".".join(sections)) if sections else self.deepspeed_config)[
                    last
                ] = value
            elif must_match and self.get_value(key, value) != value:
                raise contradiction(key, self.get_value(key), "the value of the script", value)

    @property
    def steps(self) -> Any:
        """Micro-batches of a window, or "auto"."""
        return self.deepspeed_config["gradient_accumulation_steps"]

    def precision(self) -> str | None:
        """Return the precision that the configuration asks for; None where it does not."""
        asked = [k for k in ("bf16", "fp16") if self.get_value(f"{k}.enabled") is True]
        return asked[0] if asked else None

    def take(self, precision: str, steps: int) -> None:
        """Fill in the precision, and the micro-batches of a window.

        Raises:
            ConfigError: The configuration says others.
        """
        for kind in ("fp16", "bf16"):
            enabled = precision == kind
            self.deepspeed_config.setdefault(kind, {"enabled": "auto"}).setdefault("enabled", True)
            self.deepspeed_config_process(must_match=False, **{f"{kind}.enabled": enabled})
            if (said := self.get_value(f"{kind}.enabled")) != enabled:
                raise contradiction(f"{kind}.enabled", said, "`mixed_precision`", precision)
        said = self.get_value("gradient_accumulation_steps")
        if said not in ("auto", steps):
            source = "that of `Accelerator`"
            raise contradiction("gradient_accumulation_steps", said, source, steps)
        self.deepspeed_config["gradient_accumulation_steps"] = steps

    def optimizer(self, given: DummyOptim) -> Optimizer:
        """Return the optimizer that the configuration asks for."""
        section = self.deepspeed_config.get("optimizer") or {}
        kind, known = str(section.get("type")), {name.lower(): name for name in BY_ELEMENT}
        if kind.lower() not in known:
            raise ConfigError(
                "`DummyOptim` stands for the `optimizer` of the DeepSpeed configuration, whose "
                f"`type` is {section.get('type')!r}, but must be one of {', '.join(BY_ELEMENT)}. "
                "Write one there, or prepare an optimizer of torch, and leave that section out."
            )
        own = {"lr": given.lr, "weight_decay": given.weight_decay, **given.kwargs}
        said = {key: v for key, v in section.get("params", {}).items() if v != "auto"}
        options = own | said
        options.pop("torch_adam", None)
        if options.pop("adam_w_mode", True) and kind.lower() == "adam":
            kind = "AdamW"  # which `Adam` of DeepSpeed is unless told
        try:
            made: Optimizer = getattr(torch.optim, known[kind.lower()])(given.params, **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"`optimizer.params` of the DeepSpeed configuration: {error}"
            ) from None
        self.deepspeed_config_process(
            must_match=False, **{f"optimizer.params.{key}": v for key, v in made.defaults.items()}
        )
        return made

    def schedule(self, given: DummyScheduler, optimizer: Optimizer, size: int) -> Any:
        """Return the schedule that the configuration, or the placeholder, asks for.

        Args:
            size: What the steps in all are divided by.
        """
        if given.lr_scheduler_callable is not None:
            return given.lr_scheduler_callable(optimizer)
        load(torch.device("cpu"))
        from deepspeed.runtime import lr_schedules

        section = self.deepspeed_config.get("scheduler") or {}
        if (kind := str(section.get("type"))) not in lr_schedules.VALID_LR_SCHEDULES:
            raise ConfigError(
                "`DummyScheduler` stands for the `scheduler` of the DeepSpeed configuration, whose "
                f"`type` is {kind!r}, but must be one of {lr_schedules.VALID_LR_SCHEDULES}. Write "
                "one there, pass `lr_scheduler_callable`, or prepare a schedule of torch."
            )
        told: dict[str, Any] = {"warmup_min_lr": 0, "warmup_max_lr": optimizer.defaults["lr"]}
        told["warmup_num_steps"] = max(1, given.warmup_num_steps)
        if given.total_num_steps is not None:
            told["total_num_steps"] = math.ceil(given.total_num_steps / size)
        filled = {f"scheduler.params.{key}": value for key, value in told.items()}
        self.deepspeed_config_process(must_match=False, **filled)
        params = section.get("params", {})
        if left := [key for key, value in params.items() if value == "auto"]:
            raise ConfigError(
                f"`scheduler.params.{left[0]}` of the DeepSpeed configuration is 'auto', but "
                "`DummyScheduler` does not say it. Write a value there."
            )
        try:
            return getattr(lr_schedules, kind)(optimizer, **params)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"`scheduler.params` of the DeepSpeed configuration: {error}"
            ) from None


_SAID: dict[str, tuple[str, Any]] = {
    "gradient_accumulation_steps": ("GRADIENT_ACCUMULATION_STEPS", whole(1)),
    "zero_stage": ("DEEPSPEED_ZERO_STAGE", whole(0)),
}
"""The variable of a launcher for each argument, and what reads it."""


def chosen_plugin(given: Any, strategy: Any, fsdp_plugin: Any) -> DeepSpeedPlugin | None:
    """Return how DeepSpeed is asked for, by the user or the launcher; None where nobody does."""
    if strategy is not None or fsdp_plugin is not None:
        if given is not None:
            raise ConfigError(
                "Pass `deepspeed_plugin`, or one of `strategy` and `fsdp_plugin`, not both: a "
                "model is shared out in one way."
            )
        return None
    if given is None and read("USE_DEEPSPEED", boolean, False):
        given = DeepSpeedPlugin()
    if given is not None and not isinstance(given, DeepSpeedPlugin):
        raise ConfigError(
            f"`deepspeed_plugin` is a `{type(given).__name__}`, but must be a `DeepSpeedPlugin` of "
            "trainkit: one plugin, as one `Accelerator` trains one model with DeepSpeed."
        )
    plugin: DeepSpeedPlugin | None = given
    return plugin


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Return the plugin of an `AcceleratorState`."""
    plugin: DeepSpeedPlugin | None = state.deepspeed_plugin
    if plugin is None:
        raise ConfigError("There is no DeepSpeed. Pass `Accelerator(deepspeed_plugin=...)`.")
    return plugin
