"""float8 for the products of linear layers, by torchao, under autocast in bfloat16."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.console import put
from trainkit.basics.packages import require
from trainkit.basics.torch_internals import parameters_of
from trainkit.errors import ConfigError, quoted
from trainkit.precision.precision import BF16
from trainkit.types import class_name

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_MULTIPLE = 16  # of both sides of a weight, as the products of devices want it


class FP8(BF16):
    """Multiplies in float8 in linear layers, by torchao; all else is as in `BF16`.

    Each product casts its operands by scales of their present values: there is no loss scale.
    Layers keep class, name, parameters and hooks; their forward is torchao's while a model trains
    or is evaluated, and their own again afterwards.

    Args:
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp", each with `pad_inner_dim=True`, so
            that batches of any size fit; or a `torchao.float8.Float8LinearConfig`. FSDP gathers
            weights in bfloat16, whatever that says.
        convert: `(layer, name) -> bool` says for each layer that can be converted whether it is;
            None: all are. One can be that is an `nn.Linear` itself, of no other class, with an own
            weight in float32 or bfloat16, and both sides multiples of 16.
        emulate: Compute the same by casts, more slowly than in bfloat16. None: on a CPU alone.
    """

    name = "fp8"
    needs_layers: ClassVar[bool] = True  # else a model may have none that is converted

    @checked
    def __init__(
        self,
        recipe: Any = "tensorwise",
        *,
        convert: Callable[[nn.Linear, str], bool] | None = None,
        emulate: bool | None = None,
    ) -> None:
        require("torchao", f'`precision="{self.name}"`')
        from torchao.float8 import Float8LinearConfig

        self.recipe, self.choose, self.emulate = recipe, convert, emulate
        if recipe in RECIPES:
            recipe = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
        if not isinstance(recipe, Float8LinearConfig):
            raise ConfigError(
                f"`recipe` must be {quoted(RECIPES)} or a `Float8LinearConfig`, but is {recipe!r}."
            )
        self._config = replace(recipe, enable_fsdp_float8_all_gather=False)
        self._trained = self._said = ""

    @property
    @override
    def described(self) -> str:
        return self.name + self._trained

    @override
    def setup(self, device: torch.device) -> None:
        super().setup(device)
        self._trained = ""  # what is converted next
        emulate = device.type == "cpu" if self.emulate is None else self.emulate
        self._config = replace(self._config, emulate=emulate or self._config.emulate)
        layer: Any = nn.Linear(_MULTIPLE, _MULTIPLE, device="meta").to_empty(device=device)
        try:  # only a product tells what the device, torch and torchao can do together
            with self.autocast():
                loss = _in_float8(layer, self._config)(nn.init.ones_(layer.weight).detach()).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # each of them has classes of its own
            raise ConfigError(
                f'`precision="{self.name}"` was given, but `{device}` cannot multiply so: '
                f'{str(error).partition(". ")[0]}. Use `precision="bf16"`'
                f"{', or `FP8(emulate=True)`, slower than that' * (not emulate)}."
            ) from error

    def layers(self, model: nn.Module) -> dict[str, nn.Linear]:
        """Return the layers of a model that are to be converted, by name."""
        chosen = self.choose or (lambda layer, name: True)
        return {n: part for n, part in model.named_modules() if _can_be(part) and chosen(part, n)}

    @override
    def convert(self, model: nn.Module) -> Callable[[], object]:
        layers = self.layers(model)
        known = any(map(_is_converted, model.modules()))  # as in an evaluation inside of a training
        if not (layers or known) and self.needs_layers:
            raise ConfigError(
                f'`precision="fp8"` converts no layer of `{class_name(model)}`: no `nn.Linear` has '
                f"sides that {_MULTIPLE} divides, weights in float32 or bfloat16, and the consent "
                'of `FP8(convert=...)`. Use `precision="bf16"`.'
            )
        if not self._trained:
            names = blake2b("\n".join(layers).encode(), digest_size=4).hexdigest()
            self._trained = f" {self.recipe} of {len(layers)} layers (names {names})"
        for layer in layers.values():
            layer.forward = _Forward(layer, _in_float8(layer, self._config))  # type: ignore[method-assign]
        linear = sum(isinstance(part, nn.Linear) for part in model.modules())
        news = f"{len(layers)} of {linear} linear layers multiply in float8 ({quoted([*layers])})"
        if not known and news != self._said and not (dist.is_initialized() and dist.get_rank()):
            self._said = news
            put(f"trainkit: {news}{', emulated' * self._config.emulate}.")
        return partial(restore, layers.values())


def restore(modules: Iterable[nn.Module]) -> None:
    """Let modules that were converted multiply as before."""
    for module in filter(_is_converted, modules):
        del module.forward


def _is_converted(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), _Forward)


class _Forward:
    """The forward of a layer in float8; copies of the layer have their own one."""

    def __init__(self, layer: nn.Linear, multiply: Callable[[Tensor], Tensor]) -> None:
        self._layer, self._multiply = layer, multiply

    def __call__(self, input: Tensor) -> Tensor:
        is_empty = input.numel() == 0  # has no largest value
        return nn.Linear.forward(self._layer, input) if is_empty else self._multiply(input)

    @override
    def __reduce__(self) -> Any:
        return getattr, (self._layer, "forward")


def _in_float8(layer: nn.Linear, config: Any) -> Callable[[Tensor], Tensor]:
    """Return the forward of torchao's layer, which has the parameters of `layer` at any time."""
    from torchao.float8 import convert_to_float8_training

    converted: Any = convert_to_float8_training(layer, config=config)
    vars(converted)["_parameters"] = parameters_of(layer)
    return converted.forward  # type: ignore[no-any-return]


def _can_be(part: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer whose products can be made in float8."""
    if type(part) is not nn.Linear or part.in_features % _MULTIPLE or part.out_features % _MULTIPLE:
        return False
    weight, forward = parameters_of(part).get("weight"), vars(part).get("forward")
    is_plain = type(weight) is nn.Parameter or hasattr(weight, "full_tensor")
    is_own = forward is None or getattr(forward, "__func__", None) is nn.Linear.forward
    return is_plain and is_own and getattr(weight, "dtype", None) in (torch.float32, torch.bfloat16)
