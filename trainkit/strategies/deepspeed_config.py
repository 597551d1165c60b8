"""What a configuration of DeepSpeed says, and whether it says what the training does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.basics.launch_environment import read
from trainkit.basics.parsing import boolean
from trainkit.errors import ConfigError, quoted

_OF_ZERO = ("communication_data_type", "prescale_gradients", "gradient_predivide_factor")
_PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
_KNOWN = {*_OF_ZERO, *_PRECISIONS, "zero_optimization", "optimizer", "scheduler"}
_KNOWN |= {"train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"}
_KNOWN |= {"gradient_clipping", "steps_per_print", "wall_clock_breakdown"}
_KNOWN.add("zero_allow_untested_optimizer")
_NOT_DRIVEN = ("offload", "zenflow", "mics_", "hpz_", "quantized_", "muon")


def read_config(given: Any) -> dict[str, Any]:
    """Return the configuration of a mapping or a JSON file, without what is switched off."""
    config = {key: value for key, value in read_json(given).items() if not _is_off(value)}
    zero = dict(config.get("zero_optimization", {}))
    # "auto" leaves what it is to DeepSpeed here.
    zero = {key: value for key, value in zero.items() if value != "auto" and not _is_off(value)}
    if unknown := [key for key in config if key not in _KNOWN]:
        raise ConfigError(
            f"{quoted(unknown)} of the DeepSpeed configuration would have no effect: the loop is "
            "trainkit's, and DeepSpeed reduces gradients. Leave it out."
        )
    if other := [key for key in zero if any(word in key for word in _NOT_DRIVEN)]:
        raise ConfigError(
            f"{quoted(other)} in `zero_optimization` of the DeepSpeed configuration cannot be had: "
            "updates are those of your optimizer, on the device. Leave it out; to keep parameters "
            "and their state in the memory of the CPU, pass `strategy=FSDP(cpu_offload=True)`."
        )
    return config | {"zero_optimization": zero}


def read_json(given: Any) -> dict[str, Any]:
    """Return what a mapping, or a JSON file, says."""
    try:
        if isinstance(given, str | Path):
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        return dict(given)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"`config` must be a mapping, or a JSON file with one: {error}") from None


def clipping() -> float | None:
    """Return the L2 norm that a launcher says gradients are clipped to."""
    return read(
        "GRADIENT_CLIPPING", lambda text: None if text == "none" else float(str(text)), None
    )


def told() -> Any:
    """Return the configuration that a launcher says: its file, or what comes of its keys."""
    if not read("USE_DEEPSPEED", boolean, False):
        return {}
    stage = read("DEEPSPEED_ZERO_STAGE", lambda value: int(str(value)), None)
    keys = {"gradient_clipping": clipping(), "zero_optimization": {"stage": stage}}
    return read("DEEPSPEED_CONFIG_FILE", str, "") or keys


def check_precision(config: Mapping[str, Any], precision: str) -> None:
    """Raise where the configuration asks for another precision than the training."""
    for section in config.keys() & _PRECISIONS:
        asked, name = config[section].get("enabled", False), _PRECISIONS[section]
        if asked is True and name != precision:
            raise contradiction(f"{section}.enabled", asked, "the precision", precision)


def check_settings(config: Mapping[str, Any], known: Mapping[str, Any], size: int) -> None:
    """Raise where the configuration says otherwise than what `Strategy.check_settings` is given."""
    steps, batch_size = known["gradient_accumulation_steps"], known["batch_size"]
    samples = batch_size and batch_size * steps * size
    for key, source, actual in (
        ("train_micro_batch_size_per_gpu", "the batch size of the loader", batch_size),
        ("train_batch_size", "batch size x `gradient_accumulation_steps` x processes", samples),
        ("gradient_accumulation_steps", "`gradient_accumulation_steps`", steps),
        ("gradient_clipping", "`max_grad_norm`", known["max_grad_norm"] or 0),
    ):
        if actual is not None and config.get(key, "auto") not in ("auto", actual):
            raise contradiction(key, config[key], source, actual)
    for kind, source in (("optimizer", "the optimizer"), ("scheduler", "the schedule")):
        used, section = known[kind], config.get(kind, {})
        said, name = section.get("type", "auto"), type(used).__name__
        if said not in ("auto", name) and (used is None or kind == "optimizer"):
            raise contradiction(f"{kind}.type", said, source, name)
        groups = used.param_groups if kind == "optimizer" else [{}]
        for key, said in (section.get("params") or {}).items():
            has = [group.get(f"initial_{key}", group.get(key)) for group in groups]
            if said != "auto" and any(_plain(value) != _plain(said) for value in has):
                raise contradiction(f"{kind}.params.{key}", said, source, has[0])


def for_deepspeed(config: Mapping[str, Any], size: int, most: int) -> dict[str, Any]:
    """Return what DeepSpeed is made with, on `size` processes; no bucket need hold over `most`."""
    bucket = {"reduce_bucket_size": min(500_000_000, most)}
    return {
        **{key: config[key] for key in _OF_ZERO if key in config},
        "zero_optimization": {**bucket, **config["zero_optimization"]},
        # Windows, clipping and updates are made outside.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": size,
        "zero_allow_untested_optimizer": True,
    }


def _plain(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


def _is_off(value: Any) -> bool:
    """Return whether a setting asks for nothing."""
    if isinstance(value, Mapping):
        return value.get("enabled", True) is False or value.get("device") == "none"
    return value is None


def contradiction(key: str, value: Any, source: str, actual: Any) -> ConfigError:
    """Return an error that names what the configuration says, and what the training does."""
    return ConfigError(
        f"`{key}` of the DeepSpeed configuration is {value!r}, but {source} is {actual}. Write "
        '"auto" there, or give both the same.'
    )
