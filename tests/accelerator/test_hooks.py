"""The hooks of `accelerate.hooks`, beside Accelerate's own."""

import copy
import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import trainkit.accelerate_compat as accelerate

BOTH: list[Any] = [accelerate.hooks, importlib.import_module("accelerate.hooks")]
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
