"""What the checks train, a small network on small data, and what they have in common."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from trainkit.checkpoint import KeepPolicy
from trainkit.checkpoint.format.codec import encode
from trainkit.trainer import Trainer
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import IGNORED, Scalars, StepOutput, StepResult

FEATURES, WIDTH, CLASSES = 6, 16, 3
GLOBAL_BATCH = 12  # samples of a step, all processes together
SAMPLES = 44  # the last step of an epoch has 8: some processes have fewer, or none
STEPS_PER_EPOCH = 4
SAVED_STEP = STEPS_PER_EPOCH + 2  # in the middle of an epoch


class Network(nn.Module):
    """A classifier with repeated blocks, and always the same initial values."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(FEATURES, WIDTH, dtype=dtype)
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2))
            self.last = nn.Linear(WIDTH, CLASSES, dtype=dtype)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        logits: Tensor = self.last(hidden)
        return logits


class WeightedTrainer(Trainer):
    """Leaves some samples out, so that micro-batches weigh differently (rule 6)."""

    @override
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return the mean loss of the samples that count, and how many they are."""
        inputs, targets = batch
        targets = targets.masked_fill(inputs[:, 0] > 0.5, IGNORED)
        loss = nn.functional.cross_entropy(model(inputs), targets, ignore_index=IGNORED)
        return StepOutput(loss, (targets != IGNORED).sum())


class Record(Callback):
    """Keeps what the loop told: the logged losses, the norms, and how often each hook came."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.hooks: dict[str, int] = {}

    @override
    def on_step_start(self, run: Run) -> None:
        self._count("on_step_start")

    @override
    def on_gradients(self, run: Run) -> None:
        self._count("on_gradients")

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        self._count("on_step_end")
        if result.grad_norm is not None:
            self.norms.append(float(result.grad_norm))

    @override
    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        self._count("on_step_skipped")

    @override
    def on_log(self, run: Run, values: Scalars) -> None:
        if "loss" in values:
            self.losses.append(values["loss"])

    def _count(self, hook: str) -> None:
        self.hooks[hook] = self.hooks.get(hook, 0) + 1


class Save(Callback):
    """Saves a checkpoint at one step, and the last one, unless another callback saves already."""

    def __init__(self, step: int) -> None:
        self.step = step

    @override
    def on_fit_start(self, run: Run) -> None:
        if run.checkpoints.saver is None:
            run.save_checkpoints(KeepPolicy(keep_last=None))

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == self.step:
            run.request_checkpoint(agreed=True)


def loaders(
    batch_size: int, dtype: torch.dtype = torch.float64, spoiled: int | None = None
) -> tuple[Any, Any]:
    """Return a training and an evaluation loader.

    Args:
        batch_size: Samples of a micro-batch of one process.
        spoiled: Index of a sample so large that its gradient is not finite; the order of the
            training data is then that of the data set.
    """
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    targets = (inputs[:, :CLASSES]).argmax(1)
    evaluation = TensorDataset(inputs[:17].clone(), targets[:17])
    if spoiled is not None:
        inputs[spoiled] = torch.inf
    train = DataLoader(TensorDataset(inputs, targets), batch_size, shuffle=spoiled is None)
    return train, DataLoader(evaluation, batch_size)


def fit(
    trainer: Trainer,
    model: nn.Module,
    data: Any,
    *,
    lr: float = 0.05,
    resume: str | Path | None = None,
) -> Any:
    """Train `model` by AdamW on the cross entropy; return the result."""
    return trainer.fit(
        model,
        data,
        optimizer=partial(torch.optim.AdamW, lr=lr),
        loss_fn=nn.CrossEntropyLoss(),
        resume=resume,
    )


def train(
    batch: int,
    callbacks: Sequence[Callback],
    *,
    dtype: torch.dtype = torch.float64,
    folder: Path | None = None,
    resume: Path | None = None,
    trainer_class: type[Trainer] = Trainer,
    model_class: type[Network] = Network,
    evaluates: bool = True,
    **options: Any,
) -> tuple[Trainer, Any, Network]:
    """Train a network; return the trainer, the result, and the model.

    Args:
        batch: Samples of a step of one process, in two micro-batches unless `options` say else.
        callbacks: Besides one that saves at `SAVED_STEP` where there is a folder.
        resume: A checkpoint; the model then begins with other weights.
        evaluates: Whether each epoch ends with an evaluation.
        **options: Of the trainer.
    """
    model = model_class(dtype, seed=0 if resume is None else 1)
    usual = {"max_epochs": 2, "gradient_accumulation_steps": 2, "log_every_n_steps": 1}
    options = {**usual, "max_grad_norm": 0.5, "output_dir": folder, **options}
    saves = [] if folder is None else [Save(SAVED_STEP)]
    trainer = trainer_class(callbacks=[*callbacks, *saves], **options)
    data = loaders(batch // options["gradient_accumulation_steps"], dtype)
    result = fit(trainer, model, data if evaluates else data[0], resume=resume)
    return trainer, result, model


def outcome(result: Any, model: nn.Module) -> dict[str, Any]:
    """Return how a training ended, without its places on disk."""
    counters = ("step", "skipped_steps", "epoch", "samples_seen")
    names = (*counters, "metrics", "best_metrics", "stop_reason")
    return {**{name: getattr(result, name) for name in names}, "weights": weights(model)}


def check_resume(
    part: str, batch: int, folder: Path, make_options: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Check that a training resumed from its middle ends as one that was never stopped.

    Args:
        part: What is checked, such as "a precision".
        make_options: Returns arguments of `train`, with new parts each time.

    Returns:
        The end of the training.
    """
    ends: list[dict[str, Any]] = []
    saved = folder / "first" / "checkpoints" / f"step-{SAVED_STEP:08d}"
    for name, resume in (("first", None), ("second", saved)):
        if resume is not None and not resume.exists():
            break  # a callback decides which checkpoints stay
        record, options = Record(), make_options()
        callbacks = [record, *options.pop("callbacks", ())]
        _, result, model = train(batch, callbacks, folder=folder / name, resume=resume, **options)
        ends.append({"losses": record.losses, **outcome(result, model)})
    straight, resumed = ends[0], ends[-1]
    late = len(straight["losses"]) - len(resumed["losses"])
    for key, value in {**straight, "losses": straight["losses"][late:]}.items():
        assert same([value, resumed[key]]), (
            f"After a resume at step {SAVED_STEP}, `{key}` is not to the last bit that of the "
            f"training that was never stopped: {shown(resumed[key])} instead of {shown(value)}. "
            f"What {part} draws or adapts belongs in `state_dict`, and must be alike on all "
            "processes."
        )
    return straight


def check_state(used: Any, fresh: Any, name: str) -> None:
    """Check that the state of a used part can be saved, and comes back out of a new one."""
    state = copy.deepcopy(used.state_dict())
    encode(state, name)
    fresh.load_state_dict(state)
    assert same([state, fresh.state_dict()]), (
        f"After `load_state_dict`, the `state_dict` of `{name}` must be what it was: "
        f"{state!r}, but is {fresh.state_dict()!r}."
    )


def shown(values: Any) -> str:
    """Return values as text that is not too long."""
    text = repr(values)
    return text if len(text) < 300 else f"{text[:300]}..."


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole values of a model by key, on the CPU; every process calls it."""
    return {
        key: (value.full_tensor() if hasattr(value, "full_tensor") else value)
        .detach()
        .cpu()
        .clone()
        for key, value in model.state_dict().items()
    }


def same(results: Sequence[Any]) -> bool:
    """Return whether all results are equal, tensors to the last bit, NaN to NaN."""
    return all(_equal(results[0], other) for other in results[1:])


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b or (a != a and b != b))
