"""Rule 6 for several loaders: each loss counts by the samples of its own loader (rule 17a)."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from trainkit.data import MicroBatch, Window
from trainkit.data.combined import CombinedBatch, CombinedWindow
from trainkit.distributed import Processes
from trainkit.distributed.collectives import require_equal
from trainkit.errors import ConfigError, DataError, by_process, quoted
from trainkit.training.logging import Log
from trainkit.training.weighting import Weighting, check_loss, on_device, parse, scalar
from trainkit.types import StepOutput

__all__ = ["CombinedWeighting"]

_Outputs: TypeAlias = Mapping[str, tuple[Tensor, Tensor | float | None]]


class CombinedWeighting(Weighting):
    """Weighs the losses of several loaders, which a training step returns by their names.

    The applied gradient is the sum of the gradients that each loader would have alone. One loss
    for several is exact where each process has the same share of all of them.

    Args:
        processes: The processes that share a window.
        accumulation: Micro-batches of one process in a full window.
        log: Gets the mean loss of each loader.
        of: Which of several optimizers it is for, which may learn from some of the loaders.
    """

    _window: CombinedWindow

    def __init__(self, processes: Processes, accumulation: int, log: Log, of: str) -> None:
        super().__init__(processes, nominal=None, accumulation=accumulation)
        self._log, self._of = log, of
        self._forms: dict[tuple[str, ...], list[tuple[str, bool]]] = {}  # what steps returned

    @override
    def begin(self, window: Window) -> None:
        assert isinstance(window, CombinedWindow)
        super().begin(window)
        self._window = window

    @override
    def weigh(self, output: object, micro_batch: MicroBatch) -> Tensor:
        assert isinstance(micro_batch, CombinedBatch)
        parts = micro_batch.by_loader
        outputs = self._outputs(output, parts)
        self._check(outputs, tuple(parts))
        if self._log.is_read:
            for name, (loss, weight) in outputs.items():
                if name and parts[name].count:
                    counted = parts[name].count if weight is None else weight
                    key = f"loss/{self._of}/{name}" if self._of else f"loss/{name}"
                    self._log.add({key: loss}, counted, "mean")
        if len(parts) > 1 and "" not in outputs:
            return self._sum(outputs, micro_batch)
        ((loss, weight),) = outputs.values()
        self._by_sample = weight is None
        return super().weigh(StepOutput(loss, weight), micro_batch)

    def _sum(self, outputs: _Outputs, micro_batch: CombinedBatch) -> Tensor:
        """Return the sum of the losses, each times its loader's share of the window here."""
        size, parts = self._processes.size, micro_batch.by_loader
        given = {
            name: on_device(weight, loss) * (parts[name].count > 0)
            for name, (loss, weight) in outputs.items()
            if weight is not None
        }
        shares, terms = dict[str, Tensor](), []
        if given:  # of the only micro-batch
            weights = torch.stack([*given.values()])
            shares = dict(
                zip(
                    given, weights * size / self._processes.all_reduce(weights.clone()), strict=True
                )
            )
        for name, (loss, _) in outputs.items():
            loss = scalar(loss)
            if name in given:  # a mean over no items is NaN
                term = loss * shares[name].to(loss.dtype)
                terms.append(torch.where(given[name] > 0, term, torch.zeros_like(loss)))
            else:
                share = parts[name].count * size / (self._window.windows[name].total or 1)
                terms.append(loss if share == 1 else loss * share)
        total, count = torch.stack(terms).sum(), micro_batch.count
        self.samples += micro_batch.total
        # So that the weighted mean over micro-batches and processes is the loss of the step.
        scale = (self._window.total or 0) / (count * size) if count else 1.0
        self._losses.append((total.detach() * scale, count))
        return total

    def _outputs(self, output: object, parts: Mapping[str, MicroBatch]) -> _Outputs:
        """Return the losses and their weights by loader; the only one for several is called ""."""
        if not isinstance(output, Mapping) or "loss" in output:
            return {next(iter(parts)) if len(parts) == 1 else "": parse(output)}
        names, known = output.keys(), parts.keys()
        if names != known and not (self._of and names and names < known):
            raise ConfigError(
                f"`training_step` returned losses of {quoted(list(map(str, output)))}, but the "
                f"batch is one of {quoted(list(parts))}. Return a mapping with the loss of each."
            )
        return {name: parse(output[name]) for name in parts if name in names}

    def _check(self, outputs: _Outputs, names: tuple[str, ...]) -> None:
        """Raise, on all processes, where the losses cannot be weighed exactly."""
        weighted = [name for name, (_, weight) in outputs.items() if weight is not None]
        form = [(name, name in weighted) for name in outputs]
        if names not in self._forms:
            for loss, weight in outputs.values():
                check_loss(loss, weight)
            require_equal(self._processes, form, _differ)
            self._forms[names] = form
        if form != self._forms[names]:
            raise DataError(
                "`training_step` returned other losses, or losses with other weights, than for the "
                f"first micro-batch of {quoted(names)}. Return the same always."
            )
        is_exact = self._window.is_even or self._processes.size == self._accumulation == 1
        if "" in outputs and not is_exact:
            losses = ", ".join(f'"{name}": loss_{name}' for name in names)
            one = f'`run.optimize("{self._of}", loss, loader="{names[0]}")`'
            raise ConfigError(
                f"`training_step` gave one loss for {quoted(names)}, which do not end with a "
                "full window each: there a process has other shares of one than of another, and "
                f"one loss cannot be weighed exactly. Return `{{{losses}}}`, each a mean over its "
                f"own samples{f', or call {one} for each' if self._of else ''}; or pass "
                "`Trainer(drop_last_window=True)`."
            )
        if "" not in outputs and len(names) > 1 and weighted and self._window.size != 1:
            raise ConfigError(
                f"`training_step` returned losses of several loaders with weights of its own "
                f"({quoted(weighted)}), whose sums over a window are not known before its last "
                "micro-batch. Pass `gradient_accumulation_steps=1`, or leave the weights out: then "
                "each loss counts by the samples of its loader."
            )


def _differ(of_all: Sequence[list[tuple[str, bool]]]) -> DataError:
    told = [", ".join(f"`{name}`{' with a weight' * has}" for name, has in own) for own in of_all]
    of_one = [
        f"of {words}" if own[0][0] else "one" for own, words in zip(of_all, told, strict=True)
    ]
    return DataError(
        f"The processes differ in the losses that a step gave: {by_process(of_one)}. Give losses "
        "of the same loaders on all, with a weight on all or on none."
    )
