"""What a training step and an evaluation step do unless they are overridden."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.basics.device import move_module
from trainkit.containers.tree import map_leaves
from trainkit.data import PreparedLoader
from trainkit.errors import ConfigError
from trainkit.types import IGNORED, Batch, LossFn, StepOutput, class_name

T = TypeVar("T", bound=Callable[..., Any])

# Means over labels: some may be left out, or count more than others.
_OVER_LABELS = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward, F.cross_entropy, F.nll_loss)


def training_step(
    model: nn.Module,
    module: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None,
    is_first: Callable[[], bool] = bool,
) -> StepOutput:
    """Return the loss of `batch`: that of `loss_fn`, or the model's own.

    Args:
        model: What is called.
        module: The user's module behind it.
        batch: `(inputs, targets)` with `loss_fn`; else keyword arguments of the model.
        loss_fn: `(outputs, targets) -> loss`, a mean over the samples, or torch's over labels.
        is_first: Whether there is time to look at what may not fit the loss; never by default.
    """
    if loss_fn is not None:
        if not isinstance(batch, tuple | list | Sequence) or len(batch) != 2:
            raise ConfigError(
                "`loss_fn` was given, so the loader must yield pairs `(inputs, targets)`, but it "
                f"yields {type(batch).__name__!r}. Override `training_step` for anything else."
            )
        return _mean_loss(loss_fn, model(batch[0]), batch[1], is_first)
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"The loader yields {type(batch).__name__!r}, and no `loss_fn` was given. Pass "
            "`loss_fn=` to `fit` for batches `(inputs, targets)`, yield mappings for models that "
            "compute their own loss, or override `training_step`."
        )
    loss = _get(_outputs(model, module, batch), "loss")
    if loss is None:
        raise ConfigError(
            f"`{class_name(module)}` returned no `loss` for a batch with the keys "
            f"{sorted(map(str, batch))}. Models of transformers need `labels`; for others pass "
            "`loss_fn=` to `fit` or override `training_step`."
        )
    return StepOutput(loss, item_count(module, batch))


def default(step: T) -> T:
    """Mark a step as one that no user has written."""
    step.is_default = True  # type: ignore[attr-defined]
    return step


def is_default(step: Callable[..., Any]) -> bool:
    """Return whether a step is one of `Trainer` itself."""
    step = step.args[0] if isinstance(step, partial) else step  # for each of several loaders
    return getattr(step, "is_default", False)


def for_loader(step: Callable[..., Any], loader: PreparedLoader) -> Callable[..., Any]:
    """Return a trainer's step; that of `Trainer` itself takes several loaders one by one."""
    return partial(_for_each_loader, step) if loader.parts and is_default(step) else step


def _for_each_loader(step: Callable[..., Any], model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return what a step for one loader gives for the batch of each of several, by name."""
    return {name: step(model, each) for name, each in batch.items()}


def evaluation_step(
    model: nn.Module,
    module: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None,
    is_first: Callable[[], bool] = bool,
) -> dict[str, Any]:
    """Return `scores`, which is what the model returns, and `references`, `loss`, its `weight`.

    Of a mapping, `scores` are the `logits`, where the model returns any. Where its loss compares
    each position with the next label, `references` are the next labels, and none for the last.
    """
    if isinstance(batch, Mapping):
        outputs = _outputs(model, module, batch)
        loss, logits = _get(outputs, "loss"), _get(outputs, "logits")
        references = batch.get("labels")
        result = {"loss": loss, "weight": item_count(module, batch) if loss is not None else None}
        scores = outputs if logits is None else logits
        if isinstance(references, Tensor) and _shifts_labels(module):
            references = nn.functional.pad(references[..., 1:], (0, 1), value=IGNORED)
    elif isinstance(batch, Sequence) and len(batch) == 2:
        inputs, references = batch
        scores = model(inputs)
        result = {}
        if loss_fn is not None:
            output = _mean_loss(loss_fn, scores, references, is_first)
            result = {"loss": output.loss, "weight": output.weight}
    else:
        inputs = batch[0] if isinstance(batch, Sequence) and len(batch) == 1 else batch
        scores, references, result = model(inputs), None, {}
    result |= {"scores": scores, "references": references}
    return {name: value for name, value in result.items() if value is not None}


def make_loss_fn(loss_fn: LossFn, device: torch.device) -> LossFn:
    """Return `loss_fn` with its tensors, such as class weights, on the device of the outputs."""
    if isinstance(loss_fn, type) or not callable(loss_fn):
        raise ConfigError(
            "`loss_fn` must be a callable `(outputs, targets) -> loss`, but is "
            f"{loss_fn!r}. Pass for example `nn.CrossEntropyLoss()`, with the brackets."
        )
    if isinstance(loss_fn, nn.Module):
        return move_module(loss_fn, device)
    if type(loss_fn) is partial:
        given = loss_fn.args, loss_fn.keywords
        args, kwargs = map_leaves(given, lambda x: x.to(device) if isinstance(x, Tensor) else x)
        return partial(make_loss_fn(loss_fn.func, device), *args, **kwargs)
    return loss_fn


def _mean_loss(
    loss_fn: Any, outputs: Any, targets: Any, is_first: Callable[[], bool]
) -> StepOutput:
    """Return a loss, with what its mean divides by where that is not the number of samples."""
    bound = loss_fn.__class__ is partial
    get = loss_fn.keywords.get if bound else partial(getattr, loss_fn)
    if (reduction := get("reduction", "mean")) != "mean":
        _refuse_reduction("loss_fn", reduction)
    try:
        loss = loss_fn(outputs, targets)
    except Exception as error:
        from trainkit.training.setup.loss_shapes import note_given  # on demand

        note_given(error, outputs, targets)
        raise
    try:
        ours, theirs = outputs.shape, targets.shape
    except AttributeError:
        ours = theirs = ()
    if ours != theirs and (ours == (*theirs, 1) or theirs == (*ours, 1)) and is_first():
        from trainkit.training.setup.loss_shapes import refuse_all_pairs  # few programs look so

        refuse_all_pairs(loss_fn, outputs, targets)
    computes = loss_fn.func if bound else getattr(type(loss_fn), "forward", loss_fn)
    if computes not in _OVER_LABELS or targets.is_floating_point():
        return StepOutput(loss)
    weight, ignored = get("weight", None), get("ignore_index", IGNORED)
    said = ignored != IGNORED or (bound and "ignore_index" in loss_fn.keywords)
    if weight is None and not said and targets.dim() < 2:
        return StepOutput(loss)  # one label for each sample, and nobody said that some are left out
    counted = targets != ignored
    items = counted if weight is None else weight[targets.where(counted, 0)] * counted
    return StepOutput(loss, items.sum())


def _refuse_reduction(name: str, reduction: object) -> None:
    if reduction in ("sum", "none"):
        raise ConfigError(
            f'`{name}` has `reduction="{reduction}"`, but the default steps need a mean, which '
            'does not depend on how a step is split. Set `reduction="mean"`; for the gradient of '
            "the sum over a step, multiply the learning rate by its samples. To put losses of "
            "single samples together, override `training_step` and `evaluation_step`. If it "
            "returns a mean all the same, pass `lambda outputs, targets: loss(outputs, targets)`."
        )


def _outputs(model: nn.Module, module: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Return what a model returns for a batch of keyword arguments.

    By positions alone a causal model of transformers keeps the documents of a row apart only where
    it makes no cache, and silently mixes them where it does.
    """
    if "position_ids" in batch and "attention_mask" not in batch and _shifts_labels(module):
        batch = {"use_cache": False, **batch}
    return model(**batch)


def _get(outputs: Any, name: str) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get(name)
    return getattr(outputs, name, None)


def item_count(module: nn.Module, batch: Mapping[str, Any]) -> Tensor | float | None:
    """Return how many items the loss of a transformers model averages, on the device.

    None, which means the number of samples, for models and batches that are not of that kind.
    """
    module = _adapted(module)
    if not hasattr(module, "loss_function"):  # not a model of transformers
        return None
    if "start_positions" in batch and "input_ids" in batch:  # ends outside of the text are ignored
        ends = torch.stack([batch["start_positions"], batch["end_positions"]])
        return torch.sum(ends < batch["input_ids"].shape[1]) / 2
    labels = batch.get("labels")
    if "bool_masked_pos" in batch and labels is None:
        return torch.sum(batch["bool_masked_pos"])
    if isinstance(labels, list | tuple) and labels:
        first = labels[0]
        if isinstance(first, Mapping) and "class_labels" in first:  # of objects
            return max(1, sum(len(each["class_labels"]) for each in labels))
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    config: Any = getattr(module, "config", None)
    names = _names_in(type(module).forward)
    if "ctc_loss_reduction" in names:
        _refuse_reduction("ctc_loss", config.ctc_loss_reduction)
        return None
    # Segmentation models have an ignored label of their own.
    counted = labels != getattr(config, "semantic_loss_ignore_index", IGNORED)
    if "active_loss" in names and "attention_mask" in batch:
        attended = batch["attention_mask"] == 1
        counted = attended if "BCEWithLogitsLoss" in names else counted & attended
    if _shifts_labels(module):
        counted = counted[..., 1:]
    return counted.sum()


def _adapted(module: nn.Module) -> nn.Module:
    """Return the model of transformers that one of peft adapts; others as they are.

    One that puts virtual tokens before the labels is left: it predicts the first label too.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel):
        return module
    config: Any = module.active_peft_config
    is_kept = config.is_prompt_learning and config.peft_type != "PREFIX_TUNING"
    base: nn.Module = module if is_kept else module.get_base_model()
    return base


def _shifts_labels(module: nn.Module) -> bool:
    """Whether the loss of a transformers model compares each position with the next label.

    The shift is in `ForCausalLMLoss`, which models reach by `self.loss_function` where their
    `loss_type` names it or nothing at all; a few shift by themselves. Others, such as XLNet, have
    a loss of their own that does not; encoders with a decoder shift what the decoder is given.
    """
    module = _adapted(module)
    if not hasattr(module, "loss_function") or getattr(module.config, "is_encoder_decoder", False):
        return False
    names = _names_in(type(module).forward)
    by_name = getattr(module, "loss_type", None) in _SHIFTING and "loss_function" in names
    return by_name or "shift_labels" in names


_SHIFTING = (None, "ForCausalLM", "ForConditionalGeneration")


@cache
def _names_in(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names that the code of a forward uses."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names + code.co_varnames)
