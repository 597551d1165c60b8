"""Which modules of a model are sharded on their own."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from trainkit.errors import ConfigError
from trainkit.types import class_name

WrapPolicy = Collection[type[nn.Module]] | Callable[[str, nn.Module], bool] | int
"""Classes of the modules to shard on their own, `(name, module) -> bool`, or their size."""


def find_blocks(
    model: nn.Module, policy: WrapPolicy | None = None, also: Collection[nn.Module] = ()
) -> dict[str, nn.Module]:
    """Return the modules to shard on their own by name, inner ones before those around them.

    A module that shares a parameter with something outside of it is left out: the parameter can
    be in one group only, and goes to the module around both.

    Args:
        model: The whole model, which is never among its blocks.
        policy: None: the classes that a transformers model names as its blocks, else the
            repeated children of the largest list of modules. A number: what has more parameters,
            but no lists, which are never called, and no parts of `nn.MultiheadAttention`.
        also: Further ones, where they are in the model.

    Raises:
        ConfigError: Classes or a function match no module.
    """
    chosen = _by_default(model) if policy is None else _by_policy(model, policy)
    chosen |= {name: m for name, m in model.named_modules() if name and m in also}
    names: dict[nn.Parameter, list[str]] = {}  # every name of each parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)

    def is_apart(name: str, module: nn.Module) -> bool:
        used = [alias for parameter in module.parameters() for alias in names[parameter]]
        return bool(used) and all(alias.startswith(f"{name}.") for alias in used)

    return {name: m for name, m in reversed(chosen.items()) if is_apart(name, m)}


def _by_default(model: nn.Module) -> dict[str, nn.Module]:
    """Return what the model says of itself, else what its structure says; may be empty."""
    said = [getattr(module, "_no_split_modules", None) for module in model.modules()]
    listed = [name for names in said if isinstance(names, Iterable) for name in names]
    wanted = {name for name in listed if isinstance(name, str)}
    named = {
        name: module
        for name, module in model.named_modules()
        if name and class_name(module) in wanted
    }
    return named or _repeated(model)


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Return the children of the largest list whose children with parameters are of one class."""
    largest, repeated = 0, {}
    for prefix, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        children = {name: child for name, child in container.named_children() if _size(child)}
        if len(children) < 2 or len({class_name(child) for child in children.values()}) > 1:
            continue
        if _size(container) > largest:
            largest = _size(container)
            repeated = {f"{prefix}.{n}" if prefix else n: child for n, child in children.items()}
    return repeated


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _by_policy(model: nn.Module, policy: WrapPolicy) -> dict[str, nn.Module]:
    inner = {name: module for name, module in model.named_modules() if name}
    if isinstance(policy, int):
        attentions = [each for each in inner.values() if isinstance(each, nn.MultiheadAttention)]
        parts = {part for each in attentions for part in each.children()}
        called = {n: m for n, m in inner.items() if type(m).forward is not nn.Module.forward}
        return {n: m for n, m in called.items() if m not in parts and _size(m) > policy}
    if isinstance(policy, Collection):
        classes = tuple(policy)
        held: tuple[Any, ...] = classes  # by users
        wrong = [c for c in held if not (isinstance(c, type) and issubclass(c, nn.Module))]
        if wrong:
            raise ConfigError(
                f"`wrap_policy` must hold classes of modules, but holds {wrong[0]!r}. Pass for "
                "example `wrap_policy={nn.TransformerEncoderLayer}`, or a callable "
                "`(name, module) -> bool`."
            )
        chosen = {name: module for name, module in inner.items() if isinstance(module, classes)}
    else:
        chosen = {name: module for name, module in inner.items() if policy(name, module)}
    if not chosen:
        counts = Counter(class_name(module) for module in inner.values())
        listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        raise ConfigError(
            "`wrap_policy` matches no module of the model, so nothing would be sharded block by "
            f"block. The model has these classes of modules: {listed or '(none)'}. Name the "
            "class of its repeated blocks, or leave `wrap_policy` out."
        )
    return chosen
