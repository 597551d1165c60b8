"""A training as it is drawn: what it trains, on what, and how."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["LATER", "MODELS", "Program", "draw", "fitting"]

LATER: dict[str, str] = {
    "several terms": "the loop by hand has one weight a step; see gradient/test_loss_terms.py",
    "models of transformers": "benchmarks/model_losses tries each of their classes",
}
"""What is not drawn yet, and why."""

BATCH_NORM = ("convolution", "images", "volumes", "batch norm blocks")
BLOCKS = ("blocks", "batch norm blocks")
BY_POSITION = (
    *("dense", "dropout", "normalised", "blocks", "tied", "part frozen", "reparametrised"),
)
MODELS = (
    *BY_POSITION,
    *BATCH_NORM,
    *("attention", "embedding", "sparse embedding", "lstm", "gru", "unused head"),
    *("several outputs", "unused output", "counting", "turned convolution"),
)
SEVERAL = ("several outputs", "unused output")
LAYOUTS = ("channels last", "turned", "permuted")

LOSSES = (
    *("cross entropy", "smoothed", "class weights", "ignored class", "partial", "function"),
    *("module", "margin", "yes or no", "learned"),
)
STEPS = ("step", "step as mapping", "step by weight", "step by number")

MAPS = ("tensors", "map", "augmented", "subset")
STREAMS = ("stream", "random stream", "stateful stream", "lasting stream", "shards")
ORDERS = ("in order", "shuffled", "own generator", "own sampler", "by epoch", "weighted")
BATCHES = ("uneven batches", "keys of batches")

OPTIMIZERS: tuple[str, ...] = (
    *("SGD", "SGD", "Adam", "AdamW", "AdamW", "ASGD", "Adadelta", "Adafactor", "Adagrad"),
    *("Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam"),
)
METRICS = ("accuracy", "share", "perplexity")
BY_NAME = ("constant", "linear", "cosine", "wsd")
SCHEDULES = (
    *("ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts"),
    *("CyclicLR", "ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR"),
    *("OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "SWALR", "SequentialLR", "StepLR"),
)

CALLBACKS = (
    *("LRMonitor", "GradientMonitor", "Throughput", "Timer", "Summary", "ModelSummary"),
    *("GarbageCollection", "NaNGuard", "ReplicaCheck", "TimeLimit", "ProgressBar"),
    *("DeviceMonitor", "JSONLLogger", "CSVLogger", "TensorBoardLogger", "Journal"),
)
"""Those that change no number."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One training."""

    seed: int
    processes: int
    strategy: str = "single"

    model: str = "dense"
    layout: str = "row by row"  # how parameters lie in memory
    double: bool = False  # parameters of float64
    precision: str = "fp32"
    checkpointing: bool = False

    form: str = "pairs"  # of a batch; or "mapping", "ragged"
    source: str = "tensors"
    order: str = "in order"
    collate: str = "usual"  # or "noisy", "drops", "repeats"
    samples: int = 8
    batch_size: int = 2
    workers: int = 0
    drop_last: bool = False
    split_batches: bool = False
    limit: int | float | None = None
    limit_evaluation: int | None = None
    overfit: int | None = None

    loss: str = "cross entropy"
    optimizer: str = "SGD"
    flags: int = 0  # which of the optimizer's settings
    optimizer_as: str = "partial"  # or "factory", "instance", "override", "by name"
    groups: int = 1
    schedule: str | None = None
    unit: str = "step"  # or "epoch", "metric"
    schedule_as: str = "factory"  # or "LRSchedule", "instance", "LRSchedule instance", "override"
    length: float = 1.0  # of the schedule, in lengths of the run
    strength: float = 0.5  # how much it lowers the rate
    warmup: float = 0

    epochs: int = 1
    max_steps: int | None = None  # instead of the epochs
    accumulation: int = 1
    drop_last_window: bool = False
    max_grad_norm: float | None = None
    max_grad_value: float | None = None

    evaluated: str = "never"  # or "by default", "steps", "epochs", "both", "asked for"
    every: int = 1
    at_end: bool = True
    metrics: tuple[str, ...] = ()
    evaluation_samples: int = 5
    evaluation_batch: int = 2
    log_every: int = 1

    ema: float | None = None
    ema_of_buffers: bool = False
    freeze: tuple[str, int] | None = None  # the unit, and when it thaws
    frozen_by: str = "FreezeUntil"  # or "hooks", "step"
    past: bool = False  # whether the step calls the user's own module
    skips_nan: bool = False
    patience: int | None = None
    callbacks: tuple[str, ...] = ()
    saves: int = 0  # updates between two checkpoints; 0: none
    background: bool = False

    @property
    def is_stream(self) -> bool:
        """Whether the length is not known ahead."""
        return self.source in STREAMS

    @property
    def by_weight(self) -> bool:
        """Whether losses are means over something else than samples."""
        return self.loss in ("class weights", "ignored class", "step by weight", "step by number")

    @property
    def is_exact(self) -> bool:
        """Whether the loop by hand does the same arithmetic in the same order.

        Where the total of a window is known only at its end, losses are divided by what is known
        before, and gradients corrected (rule 6); torch adds sparse gradients and shards in orders
        of its own; schedules by name are written otherwise in the loop by hand, and so is the loss
        that a line search looks at.
        """
        known = not (self.by_weight or self.is_stream or self.order in BATCHES[1:])
        known &= self.collate not in ("drops", "repeats")
        alone = self.processes == 1 and self.accumulation == 1
        by_torch = self.processes > 1 and (self.model == "sparse embedding" or self.is_sharded)
        by_torch |= self.model == "sparse embedding" and self.max_grad_norm is not None
        by_name = self.schedule in BY_NAME or self.optimizer == "LBFGS"
        return (known or alone) and not by_torch and not by_name

    @property
    def first_scale(self) -> float:
        """The loss scale of fp16: one that overflows at first, where that happens alike."""
        return 2.0**16 if self.is_exact else 2.0**8

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a part of the model."""
        return self.strategy == "fsdp"

    def __str__(self) -> str:
        default = vars(Program(seed=-1, processes=0))
        told = {name: value for name, value in vars(self).items() if value != default[name]}
        return f"Program({', '.join(f'{name}={value!r}' for name, value in told.items())})"


class _Chance(random.Random):
    """Draws one choice after the other."""

    def of(self, *choices: Any) -> Any:
        """Return one of some choices, each as likely as the others."""
        return self.choice(choices)

    def rarely(self, value: Any, other: Any, chance: float = 0.15) -> Any:
        """Return the first value rarely, else the other."""
        return value if self.random() < chance else other


def draw(seed: int, processes: int = 1) -> Program:
    """Return the program of a seed: each part drawn for itself, then what goes together."""
    chance = _Chance(f"{seed} {processes}")
    of, rarely = chance.of, chance.rarely
    program = Program(
        seed=seed,
        processes=processes,
        strategy=of("single", "single", "ddp") if processes == 1 else rarely("fsdp", "ddp", 0.2),
        model=of(*MODELS),
        double=rarely(True, False),
        precision=of("fp32", "fp32", "bf16", "fp16"),
        checkpointing=rarely(True, False, 0.5),
        form=of("pairs", "pairs", "mapping", "ragged"),
        source=of(*MAPS, *MAPS, *STREAMS),
        order=of(*ORDERS, *ORDERS, *BATCHES),
        collate=rarely(of("noisy", "drops", "repeats"), "usual", 0.3),
        samples=chance.randint(processes, 22),
        batch_size=chance.randint(1, 5),
        workers=rarely(1, 0, 0.03),
        drop_last=rarely(True, False),
        split_batches=rarely(True, False),
        limit=rarely(of(1, 2, 3, 0.5), None),
        limit_evaluation=rarely(of(1, 2), None),
        overfit=rarely(of(1, 2), None, 0.05),
        loss=of(*LOSSES, *STEPS, "the model's own"),
        optimizer=of(*OPTIMIZERS),
        flags=chance.randrange(1000),
        optimizer_as=of("partial", "factory", "instance", "override", "by name"),
        groups=of(1, 1, 2),
        schedule=rarely(None, of(*SCHEDULES, *SCHEDULES, *BY_NAME), 0.2),
        unit=of("step", "step", "epoch"),
        schedule_as=of("factory", "LRSchedule", "instance", "LRSchedule instance", "override"),
        length=of(0.3, 0.6, 1.0, 1.0, 1.2, 2.0),
        strength=chance.random(),
        warmup=of(0, 1, 0.2),
        epochs=chance.randint(1, 3),
        max_steps=rarely(chance.randint(1, 12), None, 0.3),
        accumulation=of(1, 1, 2, 3),
        drop_last_window=rarely(True, False),
        max_grad_norm=rarely(of(0.1, 1, 30.0), None, 0.3),
        max_grad_value=rarely(of(0.01, 1), None, 0.2),
        evaluated=of("never", "by default", "steps", "epochs", "both", "asked for"),
        every=chance.randint(1, 4),
        at_end=of(True, False),
        metrics=tuple(chance.sample(METRICS, of(0, 1, 2))),
        evaluation_samples=chance.randint(1, 12),
        evaluation_batch=chance.randint(1, 5),
        log_every=of(1, 2, 3, 50),
        ema=rarely(of(0.0, 0.5, 0.999), None, 0.2),
        ema_of_buffers=of(True, False),
        freeze=rarely((of("step", "epoch"), of(1, 2)), None, 0.1),
        skips_nan=rarely(True, False, 0.08),
        patience=rarely(of(1, 2), None),
        callbacks=tuple(chance.sample(CALLBACKS, of(0, 0, 1, 2, 4))),
        saves=of(0, 1, 2, 3),
        background=of(True, False),
        frozen_by=of("FreezeUntil", "hooks", "step"),
        past=rarely(True, False, 0.3),
        layout=rarely(of(*LAYOUTS), "row by row", 0.5),
    )
    return fitting(program)


def fitting(program: Program) -> Program:
    """Return the nearest program that plain torch, and the docs, let a user write."""
    for _ in range(3):  # one change may ask for another
        for applies, change in _RULES:
            if applies(program):
                program = replace(program, **change(program))
    return program


_Rule = tuple[Callable[[Program], Any], Callable[[Program], dict[str, Any]]]


def _to(**changes: Any) -> Callable[[Program], dict[str, Any]]:
    return lambda program: changes


def _unit(p: Program) -> int:
    """Return the samples of a global batch."""
    return p.batch_size * (1 if p.split_batches else p.processes)


def _window(p: Program) -> int:
    """Return the samples of a whole window."""
    return _unit(p) * p.accumulation


_RULES: list[_Rule] = [
    # What a batch is made of.
    (lambda p: p.model not in BY_POSITION and p.form == "ragged", _to(form="pairs")),
    (lambda p: p.form != "pairs" and p.source == "tensors", _to(source="map")),
    (lambda p: p.form != "mapping" and p.loss == "the model's own", _to(loss="step")),
    (lambda p: p.form != "pairs" and p.loss in LOSSES, _to(loss="step by weight")),
    (
        lambda p: p.model in SEVERAL and p.loss not in ("function", *STEPS),
        lambda p: {"loss": "function" if p.form == "pairs" else "step"},
    ),
    (
        lambda p: p.loss == "learned" and p.model == "sparse embedding",
        _to(model="dense"),
    ),
    # How it comes.
    (lambda p: p.is_stream, _to(order="in order", overfit=None)),
    (lambda p: p.is_stream and type(p.limit) is float, _to(limit=2)),
    (lambda p: p.order in BATCHES, _to(drop_last=False, split_batches=False)),
    (
        lambda p: p.order == "keys of batches",
        _to(source="map", collate="usual", limit=None, form="pairs"),
    ),
    (lambda p: p.processes == 1, _to(split_batches=False)),
    (lambda p: p.overfit, _to(limit=None, limit_evaluation=None)),
    (
        lambda p: p.split_batches and p.batch_size % p.processes,
        lambda p: {"batch_size": p.batch_size * p.processes},
    ),
    # Something must be left to train on.
    (lambda p: p.drop_last and p.samples < _unit(p), _to(drop_last=False)),
    (lambda p: type(p.limit) is float and p.samples < 2 * _unit(p), _to(limit=1)),
    (
        lambda p: (
            p.drop_last_window
            and (p.limit or p.overfit or p.samples < _window(p) or p.order in BATCHES)
        ),
        _to(drop_last_window=False),
    ),
    # What torch cannot compute.
    (lambda p: p.double, _to(precision="fp32")),
    (lambda p: p.precision == "fp16" and p.model in ("lstm", "gru"), _to(precision="bf16")),
    (lambda p: p.precision == "bf16" and p.model == "lstm", _to(precision="fp32")),  # on some CPUs
    (lambda p: p.optimizer == "Muon" and p.model in BATCH_NORM, _to(optimizer="AdamW")),
    (
        lambda p: p.model == "sparse embedding",
        lambda p: {
            "optimizer": p.optimizer if p.optimizer in ("SGD", "Adagrad") else "SparseAdam",
            "max_grad_value": None,
        },
    ),
    (lambda p: p.optimizer == "LBFGS" and p.precision == "fp16", _to(precision="bf16")),
    (  # whose line search divides by the rate, which ends at 0
        lambda p: p.optimizer == "LBFGS" and p.schedule == "PolynomialLR",
        _to(schedule="ExponentialLR"),
    ),
    (
        lambda p: p.optimizer == "SparseAdam" and p.model != "sparse embedding",
        _to(optimizer="Adam"),
    ),
    (lambda p: p.optimizer in ("LBFGS", "Muon", "SparseAdam"), _to(groups=1)),
    (
        lambda p: p.optimizer in ("Muon", "SparseAdam") and p.optimizer_as == "partial",
        _to(optimizer_as="factory"),
    ),
    (lambda p: p.optimizer_as == "by name" and p.groups == 1, _to(optimizer_as="partial")),
    (
        lambda p: p.is_sharded,
        lambda p: {
            "model": "dense" if p.model in ("sparse embedding", "tied", "counting") else p.model,
            "optimizer": p.optimizer if p.optimizer in ("SGD", "AdamW", "RMSprop") else "Adam",
            "optimizer_as": p.optimizer_as.replace("instance", "factory"),
            "checkpointing": False,
            "precision": "fp32",  # it computes in the other format throughout, without autocast
        },
    ),
    # What says where a schedule is.
    (lambda p: p.schedule in BY_NAME, _to(unit="step", schedule_as="name")),
    (
        lambda p: (
            p.schedule not in BY_NAME
            or (type(p.warmup) is int and (p.max_steps or p.samples // _window(p)) <= p.warmup)
            or (type(p.warmup) is int and p.max_steps is None and (p.limit or p.overfit))
        ),
        _to(warmup=0),
    ),
    (
        lambda p: p.schedule in BY_NAME and p.is_stream and p.max_steps is None,
        lambda p: {"schedule": "constant", "warmup": round(p.warmup)},
    ),
    (
        lambda p: p.schedule not in BY_NAME and p.schedule_as == "name",
        _to(schedule_as="factory"),
    ),
    (
        lambda p: p.schedule == "ReduceLROnPlateau",
        lambda p: {
            "unit": "metric",
            "evaluated": "by default" if p.evaluated in ("never", "asked for") else p.evaluated,
        },
    ),
    (lambda p: p.schedule != "ReduceLROnPlateau" and p.unit == "metric", _to(unit="epoch")),
    (  # one that has not said its unit is taken for a mistake where it ends early
        lambda p: (
            p.length < 1
            and (p.schedule == "OneCycleLR" or p.schedule_as in ("factory", "instance"))
        ),
        _to(length=1.0),
    ),
    (lambda p: p.schedule == "OneCycleLR" and p.unit == "epoch", _to(max_steps=None)),
    (
        lambda p: p.unit != "step" and not p.schedule_as.startswith(("LRSchedule", "override")),
        lambda p: {
            "schedule_as": "LRSchedule instance" if "instance" in p.schedule_as else "LRSchedule"
        },
    ),
    (
        lambda p: p.schedule is not None and "instance" in p.schedule_as,
        _to(optimizer_as="instance"),
    ),
    # What numbers are comparable.
    (lambda p: not p.is_exact and p.precision == "fp32", _to(double=True)),
    (lambda p: not p.is_exact and p.optimizer in ("Rprop", "Muon"), _to(optimizer="AdamW")),
    (  # what is rounded to half precision must not be divided by its own size
        lambda p: not p.is_exact and p.precision != "fp32" and p.optimizer != "SparseAdam",
        _to(optimizer="SGD"),
    ),
    (lambda p: p.evaluated in ("never", "asked for"), _to(patience=None)),
    (lambda p: p.evaluated in ("never", "by default"), _to(metrics=())),
    (
        lambda p: p.loss == "yes or no" or (p.model in SEVERAL and p.loss in LOSSES),
        lambda p: {"metrics": tuple(each for each in p.metrics if each == "perplexity")},
    ),
    (
        lambda p: p.form == "ragged",
        lambda p: {"metrics": tuple(each for each in p.metrics if each != "accuracy")},
    ),
    # What goes with what else.
    (lambda p: p.is_sharded or p.optimizer == "LBFGS", _to(layout="row by row")),
    (lambda p: p.model not in BATCH_NORM, _to(ema_of_buffers=False)),
    (lambda p: p.model not in ("dense", "dropout", "attention", "blocks"), _to(freeze=None)),
    (lambda p: p.optimizer == "Muon", _to(freeze=None)),
    (lambda p: p.loss not in STEPS and p.frozen_by == "step", _to(frozen_by="hooks")),
    (lambda p: p.loss not in STEPS or p.is_sharded, _to(past=False)),
    (
        lambda p: (
            p.model in (*BATCH_NORM, "counting", "embedding", "sparse embedding")
            or p.form != "pairs"
            or p.samples < 2 * _window(p)  # something must be left to train on
            or p.limit
            or p.overfit
        ),
        _to(skips_nan=False),
    ),
    (lambda p: p.model not in BLOCKS, _to(checkpointing=False)),
    (
        lambda p: p.skips_nan and "NaNGuard" in p.callbacks,
        lambda p: {"callbacks": tuple(each for each in p.callbacks if each != "NaNGuard")},
    ),
]
