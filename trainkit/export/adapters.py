"""Models of peft: what `PeftModel.from_pretrained` reads, and adapters merged into their base."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor, nn

from trainkit.basics.torch_internals import parameters_of
from trainkit.errors import ConfigError
from trainkit.export.state import tensors_of, whole
from trainkit.types import class_name


def is_adapted(model: nn.Module) -> TypeGuard[Any]:
    """Return whether a model is a `PeftModel`."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"`{class_name(model)}` got its adapter by `add_adapter`, and would be written with "
            "names that no reader knows. Make the model by `peft.get_peft_model(model, config)`."
        )
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_folders(model: Any, directory: Path) -> dict[str, Path]:
    """Return where each adapter goes: the one called "default", or the only one, at the top."""
    names = list(model.peft_config)
    return {n: directory if n == "default" or len(names) == 1 else directory / n for n in names}


def adapter_tensors(model: Any, adapter: str) -> dict[str, Tensor]:
    """Return the tensors of an adapter, under the names that they have in its file."""
    peft: Any = sys.modules["peft"]
    state = peft.get_peft_model_state_dict(model, adapter_name=adapter)
    return {name: tensor.detach() for name, tensor in state.items()}


def write_adapter_config(model: Any, adapter: str, folder: Path) -> None:
    """Write `adapter_config.json` of an adapter."""
    config, base = copy.deepcopy(model.peft_config[adapter]), model.get_base_model()
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path")
    kind = next(c for c in type(base).__mro__ if c.__name__ == class_name(base))
    mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    config.save_pretrained(folder, auto_mapping_dict=None if config.task_type else mapping)


def merged(model: Any) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Return the tensors of the base by name, and what reads one with the active adapter merged.

    One layer is merged at a time, on whole copies of its parameters: the model stays as it is. Of a
    sharded model every process must read the same.

    Raises:
        ConfigError: The adapter cannot be merged so.
    """
    _check_mergeable(model)
    base, adapted = model.get_base_model(), dict[str, tuple[Any, str]]()
    state: dict[str, Any] = {}
    for own_name, tensor in _base_state(model):
        path, found, inner = own_name.partition(".base_layer.")
        name = f"{path}.{inner}" if found else own_name
        state[name] = tensor
        if found and isinstance(tensor, nn.Parameter):
            adapted[name] = base.get_submodule(path), inner
    tensors = tensors_of(base, state)

    def read(name: str) -> Tensor:
        if name not in adapted:
            return whole(tensors[name])
        layer, inner = adapted[name]
        with _whole_copies(layer):
            layer.merge()
            value: Tensor = layer.get_base_layer().get_parameter(inner).detach()
        return value

    return tensors, read


@contextmanager
def _whole_copies(layer: Any) -> Iterator[None]:
    """Let a layer hold whole copies of its parameters inside, which may be merged."""
    was_merged = list(layer.merged_adapters)
    before = [(parameters_of(part), dict(parameters_of(part))) for part in layer.modules()]
    try:
        for present, own in before:
            for name, p in own.items():
                present[name] = None if p is None else nn.Parameter(whole(p).clone(), False)
        yield
    finally:
        layer.merged_adapters[:] = was_merged
        for present, own in before:
            present.update(own)


def _check_mergeable(model: Any) -> None:
    other: Any = sys.modules["peft"].utils.other
    base = model.get_base_model()
    wholes = [m for m in base.modules() if isinstance(m, other.ModulesToSaveWrapper)]
    auxiliary = [m for m in base.modules() if isinstance(m, other.AuxiliaryTrainingWrapper)]
    ties = getattr(getattr(base, "config", None), "tie_word_embeddings", False)
    ends = (base.get_input_embeddings(), base.get_output_embeddings()) if ties else ()
    reasons = {
        "prompts, which are no part of the weights": model.active_peft_config.is_prompt_learning,
        f"one of {len(model.peft_config)} adapters": len(model.peft_config) > 1,
        "trained tokens": len(auxiliary) > len(wholes),
        "one of two tied embeddings": any(e in wholes or hasattr(e, "base_layer") for e in ends),
    }
    if parts := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(
            f"`merge=True` cannot merge {parts[0]}. Leave `merge` out, and let peft put base and "
            "adapter together."
        )


def _base_state(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the state of the base, trained modules in the place of what they were."""
    trained, prefix = f".modules_to_save.{model.active_adapter}.", model.base_model.prefix
    for name, tensor in model.get_base_model().state_dict(keep_vars=True).items():
        parts = name.split(".")
        if "original_module" not in parts and not any(part.startswith(prefix) for part in parts):
            yield name.replace(trained, "."), tensor
