"""Rule 6 for several loaders: each has sums of its own, over its own samples (rule 17a).

sum over the loaders a:  sum(w * gradient of l) / T_a,  where  T_a = sum(w) over the samples of a
"""

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from trainkit.data import MicroBatch
from trainkit.data.combined import CombinedBatch, CombinedWindow
from trainkit.errors import ConfigError, DataError, quoted
from trainkit.training.weighting import Term, Weighting, terms_of


class CombinedWeighting(Weighting):
    """Weighs the losses of several loaders, which a training step returns by their names.

    One loss for several is exact where each process has the same share of all of them. An
    optimizer may learn from some of the loaders.
    """

    _window: CombinedWindow

    @override
    def _terms(self, output: object, micro_batch: MicroBatch) -> list[Term]:
        assert isinstance(micro_batch, CombinedBatch)
        parts = micro_batch.by_loader
        outputs: Mapping[Any, object]
        if isinstance(output, Mapping) and "loss" not in output:
            outputs, names, known = output, output.keys(), parts.keys()
            if names != known and not (self._of and names and names < known):
                raise ConfigError(
                    f"`training_step` returned losses of {quoted(list(map(str, output)))}, but the "
                    f"batch is one of {quoted(list(parts))}. Return a mapping with the loss of "
                    "each."
                )
        elif len(parts) == 1:
            outputs = dict.fromkeys(parts, output)
        else:
            self._check_one_loss([*parts])
            return terms_of(output, micro_batch)
        terms = [
            term
            for name, batch in parts.items()
            if name in outputs
            for term in terms_of(outputs[name], batch, name, name)
        ]
        if self._rows_vary and len(terms) > 1:
            self._check_rows(terms)
        return terms

    @override
    def _known_total(self, loader: str) -> int | None:
        return (self._window.windows[loader] if loader else self._window).total

    def _check_rows(self, terms: list[Term]) -> None:
        """Raise where a loss counts by samples, and has other rows than were asked for."""
        for name, _, weight, batch, _ in terms:
            asked = batch.counts[self._processes.rank]
            if weight is None and batch.count != asked:
                raise DataError(
                    f"The collate function of the training loader `{name}` made {batch.count} rows "
                    f"of {asked} samples. Among several loaders the rows of a step must be known "
                    f'ahead, or said: return `{{"{name}": StepOutput(loss, weight=rows), ...}}`.'
                )

    def _check_one_loss(self, names: list[str]) -> None:
        """Raise where one loss for several loaders cannot be weighed exactly."""
        if self._window.is_even or self._processes.size == self._accumulation == 1:
            return
        losses = ", ".join(f'"{name}": loss_{name}' for name in names)
        one = f'`run.optimize("{self._of}", loss, loader="{names[0]}")`'
        raise ConfigError(
            f"`training_step` gave one loss for {quoted(names)}, which do not end with a full "
            "window each: there a process has other shares of one than of another, and one loss "
            f"cannot be weighed exactly. Return `{{{losses}}}`, each a mean over its own "
            f"samples{f', or call {one} for each' if self._of else ''}; or pass "
            "`Trainer(drop_last_window=True)`."
        )
