"""The hooks of `accelerate.hooks`, beside Accelerate's own."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import trainkit.accelerate_compat as accelerate
from tests.helpers.needs import late

THEIRS = late("accelerate.hooks")
BOTH: list[Any] = [accelerate.hooks, THEIRS]
both = pytest.mark.parametrize("hooks", BOTH, ids=["trainkit", "accelerate"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return both layers of `x`."""
        y: torch.Tensor = self.norm(self.first(x))
        return y


def adding(hooks: Any, before: float, after: float) -> Any:
    class Adding(hooks.ModelHook):  # type: ignore[misc]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] + before, *args[1:]), kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output + after

    return Adding()


@both
def test_a_hook_acts_around_the_forward_until_it_goes(hooks: Any) -> None:
    model, x = Model().eval(), torch.rand(3, 2)
    plain, moved = model(x), model(x + 1) + 2
    hook = adding(hooks, 1, 2)
    assert hooks.add_hook_to_module(model, hook) is model
    assert model._hf_hook is hook
    assert torch.equal(model(x), moved)
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    hooks.add_hook_to_module(model, adding(hooks, 1, 2))  # in the place of the first
    assert torch.equal(model(x), moved)
    hooks.add_hook_to_module(model, adding(hooks, 0, 1), append=True)
    assert isinstance(model._hf_hook, hooks.SequentialHook)
    assert torch.equal(model(x), moved + 1)
    twin = copy.deepcopy(model)
    nn.init.zeros_(model.first.weight)
    assert torch.equal(twin(x), moved + 1)
    twin._hf_hook.no_grad = True
    assert not twin(x).requires_grad
    hooks.remove_hook_from_module(twin)
    assert torch.equal(twin(x), plain)
    assert not {"_hf_hook", "_old_forward"} & vars(twin).keys()


@both
def test_a_traced_model_can_be_changed_after_its_hook_is_gone(hooks: Any) -> None:
    traced, x = symbolic_trace(Model().eval()), torch.rand(3, 2)
    before = traced(x)
    hooks.add_hook_to_module(traced, hooks.ModelHook())
    hooks.remove_hook_from_module(traced, recurse=True)
    (last,) = (node for node in traced.graph.nodes if node.op == "output")
    with traced.graph.inserting_before(last):
        last.args = (traced.graph.call_function(torch.neg, last.args),)
    traced.recompile()
    assert torch.equal(traced(x), -before)


class Reading(nn.Module):
    """Says on what devices it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.norm.register_buffer("scratch", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the devices of all, and a tensor of the host."""
        held = (x, self.norm.weight, self.norm.running_mean, self.norm.scratch)
        found = [str(tensor.device) for tensor in held if isinstance(tensor, torch.Tensor)]
        return {"where": found, "out": torch.ones(2), "stays": torch.ones(2)}


def _places(module: nn.Module) -> dict[str, str]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: f"{type(tensor).__name__} {tensor.device}" for name, tensor in named}


@both
@pytest.mark.parametrize("buffers", [False, True])
def test_weights_come_for_a_forward_alone(hooks: Any, buffers: bool) -> None:
    model, x = Model().eval(), torch.rand(3, 2)
    plain, before = model(x), _places(model)
    saved = {f"norm.{name}" for name, _ in model.norm.named_buffers()}
    options = {"offload": True, "offload_buffers": buffers}
    hook = hooks.AlignDevicesHook("cpu", **options)
    hooks.add_hook_to_module(model.first, hooks.AlignDevicesHook("cpu", **options))
    hooks.add_hook_to_module(model.norm, hook)
    for _ in range(2):
        assert torch.equal(model(x), plain)
        away = {name for name, place in _places(model).items() if place.endswith("meta")}
        assert away - saved == {"first.weight", "first.bias", "norm.weight", "norm.bias"}
        assert away & saved == (saved if buffers else set())
    assert hook.original_devices.keys() == model.norm.state_dict().keys()
    hooks.remove_hook_from_submodules(model)
    assert torch.equal(model(x), plain)
    assert _places(model) == before


@both
def test_weights_may_come_from_a_map_for_all_inside(hooks: Any) -> None:
    model, x = Model().eval(), torch.rand(3, 2)
    kept = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    options = {"offload": True, "offload_buffers": True, "place_submodules": True}
    hook = hooks.AlignDevicesHook("cpu", weights_map=kept, **options)
    hooks.add_hook_to_module(model, hook)
    wanted = Model().eval()
    wanted.load_state_dict(kept)
    assert torch.equal(model(x), wanted(x))


@both
def test_inputs_come_to_the_module_and_outputs_go_back(hooks: Any) -> None:
    x = torch.rand(2, 2)
    for skipped, stays in ((None, "meta"), ("stays", "cpu"), (["stays"], "cpu")):
        hook = hooks.AlignDevicesHook("meta", place_submodules=True, skip_keys=skipped)
        model = hooks.add_hook_to_module(Reading(), hook)
        assert model(x)["where"] == ["meta"] * 4
        args, kwargs = hook.pre_forward(model, x, stays=x, other=x)
        assert [args[0].device.type, kwargs["other"].device.type] == ["meta", "meta"]
        assert kwargs["stays"].device.type == stays
    for skipped, stays in ((None, "meta"), ("stays", "cpu")):
        hook = hooks.AlignDevicesHook(io_same_device=True, skip_keys=skipped)
        model = hooks.add_hook_to_module(Reading(), hook)
        found = model(x.to("meta"))
        assert found["where"] == ["meta", "cpu", "cpu", "cpu"]
        assert (found["out"].device.type, found["stays"].device.type) == ("meta", stays)
        assert hook.input_device == torch.device("meta")
        assert model.forward.__name__ == "forward"
