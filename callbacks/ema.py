"""Average the weights over the steps, evaluate the average, and export it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.basics.config import check_whole, checked
from trainkit.basics.torch_internals import copy_each, lerp_each
from trainkit.checkpoint.exact import as_parameter, saved_buffers
from trainkit.checkpoint.forms import Only, check_form, tensor_like
from trainkit.errors import CheckpointError, ConfigError
from trainkit.strategies import Strategy
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import Scalars, Size, StepResult

__all__ = ["EMA"]


class EMA(Callback):
    """Keeps an exponential moving average of the weights, and evaluates that instead of them.

    After each update, `average = decay * average + (1 - decay) * weights`, with a smaller `decay`
    at first (`warmup`); a skipped step leaves it as it is. It holds what the optimizer trains; what
    never changes is not held twice. The model holds the average during every evaluation, so that
    its metrics, early stopping and the best checkpoint are those of the average, and its own
    weights again afterwards, to the last bit and also after an error. Training is not changed.

    A checkpoint has both: the weights as the model, for an exact resume, and the average in the
    state of this callback. `EMA.load` puts the average of any checkpoint into a model, and after
    `fit` there are `save_model` and `applied`::

        trainer.fit(model, loaders, ...)
        ema.save_model("export")
        with ema.applied():
            trainer.evaluate(model, test_loader)

    Averages of weights: Polyak and Juditsky, "Acceleration of stochastic approximation by
    averaging", 1992; as an exponential one of a network that is evaluated: Tarvainen and Valpola,
    "Mean teachers are better role models", 2017.

    Args:
        decay: Part of the average that an update keeps, from 0 to below 1; 0.999 looks back over
            about 1,000 updates.
        warmup: As it is by default, `decay` grows to its value: the (n+1)-th update of the average
            keeps `min(decay, (1 + n) / (10 + n))`, so 0.1 at first, 0.55 after 10 updates, and
            0.999 only after some 9,000, as `tf.train.ExponentialMovingAverage` does with
            `num_updates`: else a short training ends with an average of its beginning. False:
            `decay` from the first update on.
        every_n_steps: Steps between two updates of the average.
        average_buffers: Also average buffers of floating point, such as the statistics of batch
            normalisation; else the model's own are used with the average. Others are never
            averaged. On several processes the buffers are those of process 0.
        keep_at_end: Leave the average in the model at the end of a training without error. No
            checkpoint can be saved after that: it would resume from the average.

    Raises:
        ConfigError: An argument makes no sense.
    """

    evaluated_weights = "average"
    per_process = False  # alike, and too large to be compared; buffers are those of process 0

    alike = ("decay", "warmup", "every_n_steps", "average_buffers", "keep_at_end")

    @checked
    def __init__(
        self,
        decay: float = 0.999,
        *,
        warmup: bool = True,
        every_n_steps: int = 1,
        average_buffers: bool = False,
        keep_at_end: bool = False,
    ) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(
                f"`decay` must be a number from 0 to below 1, such as 0.999, but is {decay!r}."
            )
        check_whole("every_n_steps", every_n_steps)
        self.decay = decay
        self.warmup = warmup
        self.every_n_steps = every_n_steps
        self.average_buffers = average_buffers
        self.keep_at_end = keep_at_end
        self.updates = 0
        self._module: nn.Module | None = None
        self._strategy: Strategy | None = None
        self._parameters: dict[str, Tensor] = {}
        self._buffers: dict[str, tuple[nn.Module, str]] = {}  # a module may replace its buffers
        self._average: list[Tensor] = []  # what lies on this process; first of the parameters
        self._loaded: Mapping[str, Tensor] = {}  # by a resume; the model is known only later
        self._own: list[Tensor] | None = None  # weights of the model while it holds the average
        self._failed = self._is_left = self._casts = False

    @override
    def on_fit_start(self, run: Run) -> None:
        self._failed, self._is_left, self._own = False, False, None
        self._module, self._strategy = run.module, run.strategy
        self._parameters = _trained(run)
        self._buffers = _floating_buffers(run.module) if self.average_buffers else {}
        with torch.no_grad():
            if run.checkpoints.resumed_from is None:
                self.updates = 0
                self._average = [_copy(tensor) for tensor in self._tensors()]
            else:  # what a resume has loaded
                loaded = [self._loaded[name] for name in (*self._parameters, *self._buffers)]
                parts = zip(run.strategy.local_parts(loaded), self._tensors(), strict=True)
                self._average = [as_parameter(_copy(p).to(t.device), t) for p, t in parts]
            pairs = zip(self._average, self._tensors(), strict=True)
            self._casts = any(average.dtype != tensor.dtype for average, tensor in pairs)
        self._loaded = {}

    @override
    @torch.no_grad()
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step % self.every_n_steps:
            return
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.updates) / (10 + self.updates))
        tensors = self._tensors()
        if self._casts:
            tensors = [t.to(a.dtype) for t, a in zip(tensors, self._average, strict=True)]
        lerp_each(self._average, tensors, 1 - decay)
        self.updates += 1

    @override
    def on_evaluation_start(self, run: Run) -> None:
        self._apply()
        if self._buffers:
            run.strategy.share_buffers(run.module)

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        self._put_back()

    @override
    def on_exception(self, run: Run, error: BaseException) -> None:
        self._failed = True
        self._put_back()

    @override
    def on_fit_end(self, run: Run) -> None:
        self._put_back()
        if self.keep_at_end and self._average and not self._failed:
            with torch.no_grad():
                copy_each(self._tensors(), self._average)
            self._is_left = True

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._is_left:
            raise CheckpointError(
                f"`{self.name}(keep_at_end=True)` has left the average in the model, so a "
                "checkpoint saved now could not be resumed exactly. Add the callback `Checkpoint`, "
                "which saves the last step before that, or use `save_model` instead."
            )
        if self._loaded or not self._average:
            return {"updates": self.updates, "average": dict(self._loaded)}
        from trainkit.checkpoint.resharding.sharding_spec import ShardingSpec, is_sharded

        names = [*self._parameters, *self._buffers]
        average = dict(zip(names, self._average, strict=True))
        for name, parameter in self._parameters.items():
            if is_sharded(parameter):  # the average lies as it does
                average[name] = ShardingSpec.of(parameter).wrap(average[name])  # type: ignore[arg-type]
        return {"updates": self.updates, "average": average}

    @override
    def state_template(self, run: Run) -> dict[str, Any]:
        return {"average": _trained(run)}

    @override
    def check_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        check_form(state, Only({"updates": int, "average": {}}))
        present: dict[str, Tensor] = dict(_trained(run))
        if self.average_buffers:
            named = _floating_buffers(run.module).items()
            present |= {name: getattr(owner, key) for name, (owner, key) in named}
        odd = sorted(set(present) ^ set(state["average"]))
        if odd:
            raise CheckpointError(
                f"The average of `{self.name}` in the checkpoint holds other tensors than are "
                f"averaged now: {odd[:5]} and {len(odd) - 5 if len(odd) > 5 else 'no'} more. "
                "Resume with the same trainable parameters and `average_buffers`."
            )
        like = {}  # what `_copy` makes, without values
        for name, tensor in present.items():
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            like[name] = tensor_like(torch.empty(tensor.shape, dtype=dtype, device="meta"))
        check_form(state["average"], like, "average")

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates, self._loaded = state["updates"], state["average"]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model hold the average inside the context, and its own weights again after it.

        Every process must enter it.

        Raises:
            ConfigError: There was no `fit` with this callback.
        """
        if self._module is None:
            raise ConfigError(
                f"`{self.name}` has averaged nothing: no `fit` has had it among its callbacks."
            )
        if self._own is not None:  # in an evaluation
            yield
            return
        self._apply()
        try:
            yield
        finally:
            self._put_back()

    def save_model(
        self, directory: str | Path, max_shard_size: Size = "5GB", safe_serialization: bool = True
    ) -> None:
        """Write the model with the average for other programs; see `Trainer.save_model`."""
        from trainkit.export import save_model

        with self.applied():
            assert self._module is not None
            assert self._strategy is not None
            save_model(
                self._module,
                directory,
                max_shard_size,
                safe_serialization,
                processes=self._strategy.processes,
            )

    @staticmethod
    def load(model: nn.Module, checkpoint: str | Path, *, name: str = "EMA") -> None:
        """Put the average of a checkpoint into a model.

        Args:
            model: All its values are replaced, but for those of a base that the checkpoint refers
                to; each process of a sharded one calls this.
            checkpoint: The folder of one checkpoint, such as `FitResult.checkpoint`.
            name: What the callback was called.

        Raises:
            CheckpointError: The checkpoint is broken, or has no such average.
        """
        from trainkit.training.resume.reference import load_onto_base  # on demand

        load_onto_base(model, Path(checkpoint), (name, "average"))

    def _tensors(self) -> list[Tensor]:
        """Return what lies here of all that is averaged, sharing its memory."""
        assert self._strategy is not None
        parameters = self._strategy.local_parts(self._parameters.values())
        return parameters + [getattr(owner, key) for owner, key in self._buffers.values()]

    @torch.no_grad()
    def _apply(self) -> None:
        tensors = self._tensors()
        self._own = [tensor.clone() for tensor in tensors]
        copy_each(tensors, self._average)

    @torch.no_grad()
    def _put_back(self) -> None:
        if self._own is not None:
            copy_each(self._tensors(), self._own)
            self._own = None


def _trained(run: Run) -> dict[str, Tensor]:
    """Return the parameters that the optimizer may change, by name."""
    held = {id(parameter) for parameter in run.parameters}
    return {name: p for name, p in run.module.named_parameters() if id(p) in held}


def _floating_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the module and the key of each buffer of floating point that is saved, by name."""
    return {
        name: (part, key)
        for name, part, key, buffer in saved_buffers(module)
        if buffer is not None and buffer.is_floating_point()
    }


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy in at least fp32: less would round small changes of the average away."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.detach().to(dtype, copy=True)
