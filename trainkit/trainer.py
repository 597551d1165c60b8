"""Trainer: the face for people who want the loop to be there."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.basics import rng
from trainkit.basics.config import TrainConfig, Watchdog, check_argument, names_checked
from trainkit.basics.outputs import absolute
from trainkit.data import PreparedLoader, evaluation_loader
from trainkit.data.prepare import training_loaders
from trainkit.distributed import check_called_by_all
from trainkit.distributed.collectives import first_with
from trainkit.distributed.communicator import Communicator
from trainkit.errors import ConfigError
from trainkit.lazy import ask
from trainkit.metrics.metric import Metric
from trainkit.precision import Precision
from trainkit.strategies import Strategy
from trainkit.training import default_steps, loop
from trainkit.training.callback import Callback
from trainkit.training.callback_list import CallbackList
from trainkit.training.evaluation import Evaluator, RunEvaluation
from trainkit.training.logging import Log, NoRun
from trainkit.training.lr_schedule import LRSchedule, LRSchedules, by_name, make_lr_schedule
from trainkit.training.objectives import Objectives
from trainkit.training.run import Run
from trainkit.training.run_parts import FitResult, RunCheckpoints
from trainkit.training.setup import arguments
from trainkit.training.setup.fit_context import (
    Calls,
    Course,
    close,
    compiling,
    conditions,
    course_of,
    make_weighting,
    watched,
)
from trainkit.types import (
    Alternating,
    AnyScheduler,
    Batch,
    ByName,
    LossFn,
    OptimizerFactory,
    Scalars,
    SchedulerFactory,
    Size,
    Stateful,
    StepOutput,
)

if TYPE_CHECKING:
    from trainkit.inspect.replay import Replay, Replayed

_ALIKE = ("output_dir", "new_run", "strategy", "precision", "training_step", "loss_fn")


class Trainer:
    """Trains a model. Subclass it, or pass callbacks; both are good ways in.

    Args:
        max_epochs: Passes over the training data. Give this or `max_steps`, not both.
        max_steps: Updates to apply.
        strategy: "single", "ddp", "fsdp", "model_parallel", "deepspeed" or a `Strategy`; "auto" is
            what `trainkit launch` asks for, else DDP for several processes, else the single device.
        precision: "fp32", "bf16", "fp16", "fp8" or a `Precision`; "auto" is what `trainkit launch
            --mixed_precision` says, else "fp32".
        gradient_accumulation_steps: Micro-batches of one process for each update.
        max_grad_norm: L2 norm to which the gradients are clipped; None: not clipped.
        max_grad_value: Absolute value to which each gradient element is clipped; None: not.
        callbacks: In the order in which they run. None: a progress bar and a summary, and with
            `output_dir` a `JSONLLogger` and a `Journal`. []: none.
        hparams: Hyperparameters, to be recorded: a mapping, a dataclass or a namespace, nested as
            one likes. They go into checkpoints and to all loggers, and change nothing.
        output_dir: Where loggers write; on storage that all machines share. A relative path is
            that of the working directory now. An address such as `s3://bucket/run`: a folder of
            the machine, which is mirrored there.
        new_run: Give each `fit` a folder of its own in `output_dir`, such as `2026-11-22_1`;
            `resume="auto"` goes on with the newest of them. `run.output_dir` says which it is.
        seed: The one seed of the run: order of the data, augmentation, dropout.
        deterministic: Ask torch for deterministic algorithms while `fit` runs.
        log_every_n_steps: Updates between two logs.
        drop_last_window: Drop the smaller last window of an epoch instead of applying it.
        split_batches: The training loader's batch size is that of all processes together; that
            of a loader to evaluate is each process's.
        sample_seeding: Seed the global generators while samples are fetched (rule 13).
        max_consecutive_skips: Skipped updates in a row after which training gives up.
        compile: Run the model through `torch.compile`, with every strategy: True, or a mapping of
            its options. In place, and undone after each call: no saved key changes.
        gradient_checkpointing: Compute activations again in backward instead of keeping them, with
            every strategy and the same gradients. "selective" keeps the results of matrix products
            and attention, "offload" the inputs of blocks on the host (docs/how-to/fine-tuning.md).
        limit_train_batches: An epoch is its first so many micro-batches of each process; a float
            such as 0.1 is a fraction of them. All that is planned follows.
        limit_eval_batches: The same for each evaluation of `fit`, not for `evaluate`.
        overfit_batches: Both limits, and every epoch has the batches of the first one.
        dry_run: A try that ends after one update, or so many, and as many batches of each
            evaluation. All callbacks run; what anything writes is gone when the program ends.
        watchdog: How long several processes may stand still before the job is ended, and how long
            a collective may wait before it raises.

    Raises:
        ConfigError: Where a setting cannot work.
    """

    processes: Communicator
    """The processes of the job: who am I, gather, reduce, print; from construction on."""
    run: Run | None = None
    """The parts of the latest `fit`."""
    loss_fn: LossFn | None = None
    """What `fit` was given; the default steps use it."""
    planned_steps: int | None = None
    """Updates that the schedule is made for: those that `fit` planned when it began, and after
    `resume` with `schedule="keep"` those of the run before. `run.planned_steps` follows the data.
    """

    @names_checked
    def __init__(
        self,
        *,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        strategy: arguments.StrategyName | Strategy = "auto",
        precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] | Precision = "auto",
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        callbacks: Iterable[Callback] | None = None,
        hparams: Any = None,
        output_dir: str | Path | None = None,
        new_run: bool = False,
        seed: int = 0,
        deterministic: bool = False,
        log_every_n_steps: int = 50,
        drop_last_window: bool = False,
        split_batches: bool = False,
        sample_seeding: bool = True,
        max_consecutive_skips: int = 64,
        compile: bool | Mapping[str, Any] = False,
        gradient_checkpointing: bool | Literal["selective", "offload"] = False,
        limit_train_batches: int | float | None = None,
        limit_eval_batches: int | float | None = None,
        overfit_batches: int | float | None = None,
        dry_run: bool | int = False,
        watchdog: Watchdog | None = None,
    ) -> None:
        arguments.check_steps(type(self), Trainer)
        self.config = TrainConfig(
            max_epochs=max_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
            seed=seed,
            deterministic=deterministic,
            log_every_n_steps=log_every_n_steps,
            drop_last_window=drop_last_window,
            split_batches=split_batches,
            sample_seeding=sample_seeding,
            max_consecutive_skips=max_consecutive_skips,
            gradient_checkpointing=gradient_checkpointing,
            limit_train_batches=limit_train_batches,
            limit_eval_batches=limit_eval_batches,
            overfit_batches=overfit_batches,
            dry_run=None if dry_run is False else 1 if dry_run is True else dry_run,
        )
        self._objects, self._calls = dict[str, Stateful](), Calls()
        check_argument("watchdog", watchdog, Watchdog | None)
        self.hparams = arguments.read_hparams(hparams)
        given = None if output_dir is None else absolute(output_dir, "output_dir", stored=True)
        self.output_dir = given
        self.new_run = arguments.check_new_run(new_run, output_dir)
        arguments.check_callbacks(callbacks)
        if callbacks is None:
            callbacks = ask("default_callbacks")(self.output_dir)
        self.callbacks = CallbackList(callbacks)
        self._watchdog = watchdog
        self.strategy, self.precision = arguments.set_up(strategy, precision)
        if watchdog is not None and (timeout := watchdog.group_timeout()) is not None:
            self.strategy.processes.set_timeout(timeout)
        device = self.strategy.device
        many = self.config.gradient_accumulation_steps > 1
        self._compile = arguments.check_compile(compile, device, accumulates=many)
        self.processes = Communicator(processes=self.strategy.processes, device=device)

    # What people override.

    @default_steps.default
    def training_step(
        self, model: nn.Module, batch: Batch
    ) -> Tensor | Mapping[str, Any] | StepOutput | None:
        """Return the mean loss of `batch`, or a `StepOutput` with its weight.

        With several optimizers it may give losses to `run.optimize` instead, and return nothing or
        values to log.

        Args:
            model: As wrapped by the strategy. Call it; the user's own module is `run.module`.
            batch: What the loader yields, on the device.
        """
        return default_steps.training_step(
            model, self.strategy.unwrap(model), batch, self.loss_fn, self._is_first
        )

    @default_steps.default
    def evaluation_step(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Return `scores`, `references` and `loss` of `batch`; see `Evaluator.evaluate`.

        `scores` are what the model returns. Classes are read from them by the convention of the
        loss, where a metric wants some, unless `predictions` say what every metric gets.
        """
        return default_steps.evaluation_step(
            model, self.strategy.unwrap(model), batch, self.loss_fn, self._is_first
        )

    def configure_optimizer(
        self, model: nn.Module, optimizer: Optimizer | OptimizerFactory | None
    ) -> Optimizer:
        """Return the optimizer of `model`; `optimizer` is what `fit` was given."""
        return arguments.make_optimizer(optimizer, model)

    def configure_optimizers(
        self, model: nn.Module, optimizers: Any
    ) -> Mapping[str, Optimizer] | Alternating:
        """Return several optimizers by name; `optimizers` is the mapping that `fit` was given.

        Whoever overrides it has several; else `fit` has several where it is given a mapping.
        """
        from trainkit.training.several import optimizer_arguments  # many runs have one

        return optimizer_arguments.make_optimizers(optimizers, model)

    def configure_lr_scheduler(
        self,
        optimizer: Optimizer,
        lr_scheduler: AnyScheduler | LRSchedule | SchedulerFactory | None,
    ) -> AnyScheduler | LRSchedule | None:
        """Return the scheduler of `optimizer`, for `planned_steps` updates.

        Args:
            optimizer: What `configure_optimizer` returned.
            lr_scheduler: What `fit` was given; a name is a callable by now.
        """
        return make_lr_schedule(lr_scheduler, optimizer)

    # What people call.

    @names_checked
    def fit(
        self,
        model: nn.Module,
        loaders: Any,
        *,
        optimizer: Optimizer | OptimizerFactory | ByName | Alternating | None = None,
        lr_scheduler: AnyScheduler | LRSchedule | SchedulerFactory | str | ByName | None = None,
        warmup: float = 0,
        loss_fn: LossFn | None = None,
        resume: str | Path | None = None,
        schedule: Literal["keep", "rescale"] | None = None,
        restore_best: bool = False,
    ) -> FitResult:
        """Train `model` in place; a second call is a new training.

        Args:
            model: Any module.
            loaders: A DataLoader, a pair `(train, eval)`, or a mapping with "train" and "eval",
                where "eval" may be a mapping of named loaders. Ordinary loaders: they are shared
                out over the processes here. Several to train on: `Combined`.
            optimizer: A callable `params -> Optimizer` such as `partial(AdamW, lr=3e-4)`, or an
                optimizer on the model's parameters. Several: a mapping from names to optimizers,
                or to callables, which get the parameters of the part of the model of that name,
                or the parameter itself. In every window `training_step` gives losses to
                `run.optimize`, or one to all; `Alternating` lets them take turns.
            lr_scheduler: "constant", "linear", "cosine" or "wsd" over all updates of the run; or a
                callable `optimizer -> LRScheduler`, or a ready-made one. It advances once for
                each update; `LRSchedule` says otherwise. `planned_steps` is known when the
                callable runs. Of several optimizers a mapping by name, or the same for all.
            warmup: Of a schedule by name: a fraction of the run such as 0.1, or a whole number of
                updates.
            loss_fn: `(outputs, targets) -> loss`, a mean over samples, for loaders of pairs
                `(inputs, targets)`; a module, or the tensors of a `partial`, are moved to the
                device. Without it the model computes its own loss.
            resume: None: a new training. "auto": from the newest checkpoint in `output_dir`, with
                `new_run` in the newest run there, that verifies, afresh without one. "must": as
                "auto", but an error without one. A path: from the checkpoint in this folder.
            schedule: Needed where a resume changes `max_epochs` or `max_steps`, and rates have a
                schedule. "keep": it goes on as it was. "rescale": it is that of the new horizon.
            restore_best: Leave the best weights in the model at the end, by what
                `Checkpoint(keep_best=...)` says is best, instead of the last.

        Raises:
            ConfigError: Where an argument cannot work, before the first step.
            CheckpointError: Where the run cannot be resumed, a save failed, or nothing is best.
            Interrupted: After SIGTERM, SIGINT, SIGUSR1 or the time limit, when all is saved;
                leaves the program with the code 143, 130 or 75. In a notebook, and wherever
                somebody goes on typing, `fit` returns after SIGINT.
        """
        settings = arguments.FitSettings(
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            warmup=warmup,
            loss_fn=loss_fn,
            resume=resume,
            schedule=schedule,
            restore_best=restore_best,
        )
        return self._fit(model, loaders, settings, course_of(settings))

    def _fit(
        self, model: nn.Module, loaders: Any, settings: arguments.FitSettings, course: Course
    ) -> FitResult:
        """Train a model; a course says from where, what else runs, and what comes after it."""
        from trainkit.basics import console  # only where something runs
        from trainkit.training.modes import in_training_mode
        from trainkit.training.setup.run_folder import check_outputs, own_folder

        with ExitStack() as stack:
            stack.enter_context(self._calls.enter("fit"))
            arguments.warn_of_settings(self.config, vars(self))
            self._take_loss_fn(settings.loss_fn)
            stack.enter_context(console.lasting())
            self.processes.data_processes = self.strategy.adopt(model)
            loader, evaluations = self._prepare_all(stack, loaders)
            # Before the strategy wraps: an own `train()` may freeze what it keeps still.
            stack.enter_context(in_training_mode(arguments.check_model(model)))
            self.run = run = self._make_run(model, loader, evaluations, settings)
            stack.enter_context(course)
            checkpoint, callbacks = course.begin(run, self.callbacks, self.new_run)
            run.internals.attributes.watch(callbacks.callbacks)
            stack.enter_context(own_folder(run))
            stack.enter_context(watched(run, self._watchdog))
            stack.enter_context(rng.lent(self.processes.device))
            seed = rng.device_seed(self.config.seed, self.strategy.data_processes.rank)
            rng.seed_all(seed, self.processes.device)
            stack.enter_context(conditions(run, self._compile))
            if checkpoint is not None:
                from trainkit.training.resume.restore import restore  # on demand

                remake = partial(self._make_schedule, settings, run.objectives)
                restore(run, callbacks, checkpoint, settings.schedule, remake)
            check_outputs(run, callbacks)
            stack.enter_context(run.internals.interrupts)
            stack.callback(close, run)
            run.internals.weights.train()
            loop.fit(run, callbacks)
        return course.end(run)

    @names_checked
    def evaluate(
        self,
        model: nn.Module,
        loader: Any,
        *,
        metrics: Iterable[Any] | None = None,
        loss_fn: LossFn | None = None,
        checkpoint: str | Path | None = None,
    ) -> Scalars:
        """Return the metrics of `model` on `loader`, equal on all processes.

        Every process must call it; callbacks and steps of a `fit` may. What `evaluation_step`
        gives to `run.log` is a metric too.

        Args:
            model: Any module; it is moved to the device.
            loader: A DataLoader, or a mapping of named ones.
            metrics: Names, functions `(predictions, references) -> float | dict`, metrics of
                `evaluate` or of torchmetrics. The mean loss is always there, if there is one.
            loss_fn: As for `fit`; what the latest `fit` was given, if left out.
            checkpoint: Whose weights the model holds meanwhile, those that were evaluated: "best"
                or "last" of `output_dir`, or what `load_checkpoint_in_model` reads. Not inside
                `fit`. The model's own are then put back.
        """
        chosen = arguments.make_metrics(metrics)
        values: Scalars = {}
        with self._evaluation("evaluate", model, loss_fn, checkpoint) as evaluator:
            for name, data in arguments.name_loaders(loader).items():
                with self._to_evaluate(data, chosen) as prepared:
                    values |= evaluator.evaluate(
                        self.strategy.to_device(model), prepared, chosen, name
                    )
        if not (values or chosen) and type(self).evaluation_step is Trainer.evaluation_step:
            arguments.warn_of_nothing()
        return values

    def test(self, model: nn.Module, loader: Any, **options: Any) -> Scalars:
        """Return what `evaluate` does with these options, under names that begin with `test/`."""
        values = self.evaluate(model, loader, **options)
        return {f"test{name.removeprefix('eval')}": value for name, value in values.items()}

    @names_checked
    def predict(
        self,
        model: nn.Module,
        loader: Any,
        *,
        outputs: str = "raw",
        loss_fn: LossFn | None = None,
        checkpoint: str | Path | None = None,
    ) -> Any:
        """Return what the model says of every sample, once, in the loader's order, on the CPU.

        Every process must call it, and gets it all; callbacks and steps of a `fit` may.

        Args:
            model: Any module; it is moved to the device.
            loader: A DataLoader, with or without references.
            outputs: "raw": what the model returns; of a mapping, its `logits`. "classes" and
                "probabilities" are read from that by the convention of the loss.
            loss_fn: As for `fit`; what the latest `fit` was given, if left out.
            checkpoint: As for `evaluate`.

        Raises:
            ConfigError: `outputs` is none of these.
            DataError: It cannot be told which classes the outputs stand for.
        """
        arguments.warn_of_shuffling(loader)
        with (
            self._evaluation("predict", model, loss_fn, checkpoint) as evaluator,
            self._to_evaluate(arguments.check_one_loader(loader)) as prepared,
        ):
            return evaluator.predict(self.strategy.to_device(model), prepared, outputs)

    def replay(
        self,
        model: nn.Module,
        loaders: Any,
        *,
        step: int | None = None,
        process: int | None = None,
        until_nonfinite: bool = False,
        **as_fit: Any,
    ) -> "Replayed":
        """Make a step of the run in `output_dir` once more, open it, and say whether it is equal.

        From the newest checkpoint before it the run is made again, and written nowhere. Batch,
        samples, and figures of each module and parameter go to `<output_dir>/replay/step-<n>`.
        Every process must call it. `trainkit replay` does the same from outside of the program.

        Args:
            model: As for `fit`, as it was before it.
            loaders: As for `fit`.
            step: Which update, from 1 on; with `until_nonfinite` where to begin, at the latest.
            process: The one to be opened; None: all.
            until_nonfinite: Go on to the first window with a loss, gradient or parameter that is
                not finite, or that raises; say in which module it begins, and of which samples.
            **as_fit: All else that `fit` was given.

        Raises:
            ConfigError: There is no such step, no checkpoint, or no journal of `Checkpoint`.
        """
        replay: Replay = ask("Replay")(step=step, process=process, until_nonfinite=until_nonfinite)
        try:
            settings = arguments.FitSettings(**as_fit)
        except TypeError:
            ask("refuse_unknown")(Trainer.fit, as_fit)
            raise
        self._fit(model, loaders, settings, replay)
        assert replay.result is not None
        return replay.result

    def explain(self, model: nn.Module | None = None, loaders: Any = None, **given: Any) -> None:
        """Print what `fit` would do: make-up, order of hooks, saving, and every default.

        It changes nothing and starts nothing. Every process may call it; the main one prints.

        Args:
            model: As for `fit`; its parameters are then counted.
            loaders: As for `fit`; the window and the planned steps are then known.
            **given: `optimizer`, `lr_scheduler` and `warmup`, as for `fit`; with model and loaders
                the learning rates are known. `memory=True`: with these, the bytes of a process.
        """
        with ExitStack() as stack:
            prepared = None if loaders is None else self._prepare_all(stack, loaders)
            present = self.planned_steps
            if prepared is not None:  # a callable that makes a schedule may ask for it
                self.planned_steps = arguments.planned_steps(self.config, prepared[0])
            stack.callback(setattr, self, "planned_steps", present)
            ask("Explanation")(
                processes=self.processes,
                callbacks=self.callbacks,
                config=self.config,
                output_dir=self.output_dir and self.output_dir / ("<date>_<n>" * self.new_run),
                precision=self.precision,
                strategy=self.strategy,
                model=None if model is None else arguments.check_model(model),
                prepared=prepared,
                given=given,
            ).print()

    def register_for_checkpointing(self, *objects: Stateful, **named: Stateful) -> None:
        """Save and restore more objects with every checkpoint.

        Args:
            *objects: With `state_dict` and `load_state_dict`; called by the name of their class.
            **named: The same, under names of your own.

        Raises:
            ConfigError: An object has no state, or a name is taken.
            CheckpointError: A state holds what cannot be saved; names it by its path.
        """
        for name, part in [*((type(o).__name__, o) for o in objects), *named.items()]:
            arguments.check_stateful(name, part, self._objects)
            self._objects[name] = part

    def save_checkpoint(self) -> Path:
        """Save a checkpoint after `fit`; every process calls it. Returns its folder."""
        from trainkit.training.resume.checkpointing import save_now

        return save_now(self.run, self.callbacks)

    def save_model(
        self,
        directory: str | Path,
        max_shard_size: Size = "5GB",
        safe_serialization: bool = True,
        *,
        checkpoint: str | Path | None = None,
        tokenizer: Any = None,
        merge: bool = False,
    ) -> None:
        """Write the model of the latest `fit` for other programs; every process calls it.

        Args:
            directory: Where `model.safetensors` goes, or several files with an index; for models
                of transformers also `config.json`, so that `from_pretrained` reads it. Of a
                `PeftModel` its adapter, which `PeftModel.from_pretrained` reads.
            max_shard_size: Largest size of a file, such as "5GB".
            safe_serialization: False writes pickles (`pytorch_model.bin`) for old readers.
            tokenizer: A tokenizer or processor with `save_pretrained`; its files go beside.
            merge: Of a `PeftModel`, write the whole model with its adapter merged into it.
            checkpoint: Whose weights are written, as for `evaluate`; None: those of the model.

        Raises:
            ConfigError: There was no `fit`, or the model cannot be written.
            CheckpointError: Writing failed; an earlier export is as it was.
        """
        from trainkit.export import save_model

        if self.run is None:
            raise ConfigError(
                "`save_model` writes the model of the latest `fit`, but there was none. For any "
                "model, call `trainkit.export.save_model(model, directory)`; for one that was "
                "trained before, `trainkit checkpoint export RUN DIRECTORY --best`."
            )
        if checkpoint is not None:
            check_called_by_all(self.strategy.processes, "save_model")
        if self.run.internals.scratch is not None:
            directory = self.run.place(absolute(directory, "directory", stored=True))
            self.processes.print(f"trainkit: dry run: the model goes to `{directory}` instead.")
        module = self.run.module
        with self._weights(module, checkpoint), self.run.evaluation_weights():
            save_model(
                module,
                directory,
                max_shard_size,
                safe_serialization,
                tokenizer=tokenizer,
                merge=merge,
                processes=self.strategy.processes,
            )

    def close(self) -> None:
        """Leave the process group, if trainkit made it; all trainers of a program share it."""
        self.strategy.close()

    # How the parts are put together.

    if not TYPE_CHECKING:  # which would take every name for one

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(arguments.missing_attribute(type(self), name), name=name, obj=self)

    def _is_first(self) -> bool:
        """Return whether no update of a `fit` was tried."""
        return not isinstance(self.run, Run) or self.run.state.attempts == 0

    def _make_run(
        self,
        module: nn.Module,
        loader: PreparedLoader,
        evaluations: dict[str, PreparedLoader],
        settings: arguments.FitSettings,
    ) -> Run:
        from trainkit.training.closure import give_closure
        from trainkit.training.setup import consistency
        from trainkit.training.several import optimizer_arguments  # on demand

        config, processes = self.config, self.strategy.processes
        arguments.check_evaluations(evaluations)
        others = {name: getattr(settings, name) for name in ("resume", "schedule", "restore_best")}
        others |= {name: getattr(self, name) for name in _ALIKE} | {"compile": self._compile}
        by_name = consistency.settings_by_name(
            config, module, loader, evaluations, others, self.callbacks.alike
        )
        consistency.check_alike(processes, by_name)
        self.planned_steps = steps = arguments.planned_steps(config, loader)
        self.precision.setup(self.processes.device)  # its state is that of one training
        self.strategy.called_apart = [one for one in [self.loss_fn] if isinstance(one, nn.Module)]
        model = self.strategy.wrap(module, self.precision, config.seed)
        # One process alone may have a logger, but all must reduce.
        log = Log(is_read=first_with(processes, self.callbacks.logs) is not None)
        accumulation = config.gradient_accumulation_steps
        evaluates = bool(evaluations) and not self.callbacks.schedule_evaluation
        made, objectives = optimizer_arguments.make(
            self,
            lambda name: getattr(type(self), name) is not getattr(Trainer, name),
            settings.optimizer,
            module,
            model,
            partial(make_weighting, loader, accumulation, self.strategy, module, log),
        )
        run = Run(
            config=config,
            processes=self.processes,
            strategy=self.strategy,
            precision=self.precision,
            module=module,
            optimizer=made,
            objectives=objectives,
            lr_schedule=self._make_schedule(settings, objectives, steps),
            train_loader=loader,
            training_step=default_steps.for_loader(self.training_step, loader),
            planned_steps=steps,
            logging=log,
            evaluation=RunEvaluation(
                evaluator=self._evaluator(log),
                loaders=evaluations,
                after_epochs=evaluates,
                at_end=evaluates,
            ),
            checkpoints=RunCheckpoints(objects=self._objects, restore_best=settings.restore_best),
            output_dir=self.output_dir,
            hparams=self.hparams,
        )
        give_closure(run)
        return run

    def _take_loss_fn(self, given: LossFn | None) -> None:
        given, device = type(self).loss_fn if given is None else given, self.processes.device
        self.loss_fn = None if given is None else default_steps.make_loss_fn(given, device)

    def _make_schedule(
        self, settings: arguments.FitSettings, objectives: Objectives, planned_steps: int | None
    ) -> LRSchedule | LRSchedules | None:
        """Return the schedule for a horizon; those of several optimizers as one."""

        def make(given: Any, optimizer: Optimizer, planned: int | None) -> LRSchedule | None:
            self.planned_steps = planned  # a callable that makes a schedule may ask for it
            given = by_name(given, planned, settings.warmup)
            return make_lr_schedule(self.configure_lr_scheduler(optimizer, given), optimizer)

        arguments.check_override(self.configure_lr_scheduler, "optimizer, lr_scheduler")
        if not objectives.by_name:
            return make(settings.lr_scheduler, objectives.active[0].optimizer, planned_steps)
        from trainkit.training.several.optimizer_arguments import make_schedules  # on demand

        schedules = make_schedules(make, settings.lr_scheduler, objectives, planned_steps)
        self.planned_steps = planned_steps
        return schedules

    def _evaluator(self, log: Log) -> Evaluator:
        return Evaluator(
            communicator=self.processes,
            precision=self.precision,
            step=self.evaluation_step,
            loss_fn=self.loss_fn,
            log=log,
        )

    def _prepare(
        self, make: Callable[..., PreparedLoader], data: Any, limit: float | None, **options: Any
    ) -> closing[PreparedLoader]:
        loader = make(
            data,
            processes=self.processes.data_processes,
            device=self.processes.device,
            seed=self.config.seed,
            sample_seeding=self.config.sample_seeding,
            active=self.processes.loaders,
            **options,
        )
        loader.limit_to(limit)
        return closing(loader)

    def _prepare_all(
        self, stack: ExitStack, loaders: Any
    ) -> tuple[PreparedLoader, dict[str, PreparedLoader]]:
        """Return the training loader and the evaluation loaders, which `stack` closes."""
        train, evaluations = arguments.split_loaders(loaders)
        split, (most, most_evaluated) = self.config.split_batches, self.config.limits
        loader = self._prepare(training_loaders, train, most, split_batches=split)
        return stack.enter_context(loader), {
            name: stack.enter_context(self._prepare(evaluation_loader, data, most_evaluated))
            for name, data in evaluations.items()
        }

    @contextmanager
    def _weights(self, model: nn.Module, checkpoint: str | Path | None) -> Iterator[None]:
        """Let a model hold the weights of a checkpoint inside, if one is given."""
        if checkpoint is None:
            yield
            return
        from trainkit.training.resume.saved_weights import held  # on demand

        in_fit = "fit" in self._calls.names
        directory = self.run.output_dir if isinstance(self.run, Run) else self.output_dir
        model = self.strategy.to_device(model)
        with held(model, checkpoint, directory, self.strategy.processes, in_fit=in_fit):
            yield

    @contextmanager
    def _evaluation(
        self, call: str, model: nn.Module, loss_fn: LossFn | None, checkpoint: str | Path | None
    ) -> Iterator[Evaluator]:
        """Hold what is to hold while a model is evaluated, perhaps that of a fit under way."""
        run, given = self.run, self.loss_fn
        with self._calls.enter(call), compiling(model, self._compile):
            check_called_by_all(self.strategy.processes, call)
            arguments.hold_weights(model)
            self.processes.data_processes = self.strategy.adopt(model)
            is_trained = isinstance(run, Run) and model in (run.model, run.module)
            present: Any = run or NoRun(processes=self.processes)
            try:
                self.run = present
                if loss_fn is not None:
                    self._take_loss_fn(loss_fn)
                own = present.evaluation_weights() if is_trained else nullcontext()
                with self._weights(model, checkpoint), own:
                    if is_trained:  # as in the evaluations of the fit
                        self.strategy.share_buffers(present.module)
                    if self.processes.num_processes > 1 and (
                        not isinstance(present, Run) or present.evaluation.check_replicas
                    ):
                        from trainkit.training.resume.replicas import check_parameters  # on demand

                        check_parameters(self.strategy, model, f"in `{call}`")
                    yield self._evaluator(present.logging)
            finally:
                self.run, self.loss_fn = run, given

    @contextmanager
    def _to_evaluate(self, data: Any, metrics: Sequence[Metric] = ()) -> Iterator[PreparedLoader]:
        """Prepare a loader, and close it; on several processes they must have the same."""
        if (limit := self.config.dry_run) is not None:
            self.processes.print(f"trainkit: dry run: the first batches of the loader, {limit}.")
        with self._prepare(evaluation_loader, data, limit) as loader:
            if self.processes.num_processes > 1:
                from trainkit.training.setup.consistency import check_evaluation  # on demand

                names = [metric.name for metric in metrics]
                check_evaluation(self.strategy.processes, loader, names)
            run = self.run
            if isinstance(run, Run) and run.phase != "done" and run.train_loader.stream is not None:
                run.train_loader.stream.check_evaluations([loader])
            yield loader
