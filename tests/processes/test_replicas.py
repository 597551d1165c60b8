"""Replicas that differ are found before a checkpoint is written from them (rule 22)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from typing_extensions import override

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import fit, toy_dataset, toy_loaders
from trainkit import Accelerator, DistributedError, Run, StepResult, Trainer
from trainkit.callbacks import EMA, Checkpoint, FreezeUntil, ReplicaCheck
from trainkit.strategies import DDP, FSDP
from trainkit.training.callback import Callback
from trainkit.training.resume.replicas import _checksums, check_replicas

STEP = 3  # after which a process edits what it holds
EDITS: dict[str, Callable[[Run], Any]] = {
    "parameter `0.weight` on process 1": lambda run: run.module[0].weight[0, 0].add_(1e-6),  # type: ignore[index]
    "parameter `2.bias` on process 1": lambda run: run.module[2].bias.mul_(-1.0),  # type: ignore[index]
    "`exp_avg` of `0.weight`": lambda run: run.optimizer.state[run.module[0].weight][  # type: ignore[index]
        "exp_avg"
    ][0].copy_(torch.tensor(float("nan"))),
    "`step` of `0.bias`": lambda run: run.optimizer.state[run.module[0].bias]["step"].add_(1),  # type: ignore[index]
    "`noise` of `2.bias`": lambda run: run.optimizer.state[run.module[2].bias].update(  # type: ignore[index]
        noise=torch.ones(1)
    ),
    "`weight_decay` of `param_groups[0]`": lambda run: run.optimizer.param_groups[0].update(
        weight_decay=0.5
    ),
}
WHOLE_EDITS: dict[str, Callable[[Run], Any]] = {
    "`lr` of `param_groups[1]` of optimizer 0": lambda run: run.optimizer.param_groups[1].update(
        lr=0.02
    ),
    "`weight_decay` of `param_groups[0]`": lambda run: run.optimizer.param_groups[0].update(
        weight_decay=0.5
    ),
    "`params` of `param_groups[0]`": lambda run: run.optimizer.param_groups[1]["params"].append(
        run.optimizer.param_groups[0]["params"].pop()
    ),
    "`step` of `1.weight` in optimizer 0": lambda run: run.optimizer.state[run.module[1].weight][  # type: ignore[index]
        "step"
    ].add_(1),
}


class Edits(Callback):
    """Changes something on the last process, as a script under `if rank == ...` would."""

    def __init__(self, edit: Callable[[Run], Any]) -> None:
        self.edit = edit

    @override
    @torch.no_grad()
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == STEP and run.processes.process_index == 1:
            self.edit(run)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def unevaluated() -> Any:
    """Return loaders without an evaluation, which would be the first to compare the processes."""
    return toy_loaders()[0], None


def diverge(rank: int, folder: Path) -> list[tuple[str, list[str]]]:
    found = []
    for index, edit in enumerate(EDITS.values()):
        save = Checkpoint(every_n_steps=2, keep_last=None, background=index % 2 == 1)
        output_dir = folder / str(index)
        trainer = Trainer(max_steps=6, callbacks=[Edits(edit), save], output_dir=output_dir)
        with pytest.raises(DistributedError) as caught:
            fit(trainer, unevaluated(), optimizer=partial(AdamW, lr=0.01))
        found.append((str(caught.value), saved(output_dir)))
    return found


@pytest.mark.parametrize("size", with_few([2], [2, 3]))
def test_a_difference_ends_the_run_and_no_checkpoint_is_written(size: int, tmp_path: Path) -> None:
    found = run_ranks(size, diverge, tmp_path)
    assert all(each == found[0] for each in found)
    for (text, folders), place in zip(found[0], EDITS, strict=True):
        assert "hold different models after step 4" in text
        assert place in text
        assert "on process 1 is not that of process 0" in text
        assert "parameter" in text or "optimizer 0" in text
        assert folders == ["step-00000002"]


def find_first(rank: int, folder: Path) -> list[Any]:
    """Return what `ReplicaCheck` says: of each step, without a checkpoint, and switched off."""
    edit = next(iter(EDITS.values()))
    texts: list[Any] = []
    for every in (1, 100):  # the last planned step is looked at too
        trainer = Trainer(max_steps=6, callbacks=[Edits(edit), ReplicaCheck(every_n_steps=every)])
        with pytest.raises(DistributedError, match=r"parameter `0\.weight`") as caught:
            fit(trainer, unevaluated())
        texts.append(str(caught.value).partition("hold different models ")[2].partition(":")[0])
    quiet = [Edits(edit), ReplicaCheck(at_checkpoints=False), Checkpoint(every_n_steps=6)]
    fit(Trainer(max_steps=6, callbacks=quiet, output_dir=folder))
    trainer = Trainer(max_steps=6, callbacks=[], output_dir=folder / "late")
    fit(trainer)
    assert trainer.run is not None
    if rank == 1:
        with torch.no_grad():
            edit(trainer.run)
    with pytest.raises(DistributedError, match="after step 6"):
        trainer.save_checkpoint()
    return [*texts, saved(folder), saved(folder / "late")]


def test_the_callback_names_the_first_step(tmp_path: Path) -> None:
    expected = ["after step 3", "after step 6", ["step-00000006"], []]
    assert run_ranks(2, find_first, tmp_path) == [expected] * 2


def edit_what_is_whole(rank: int, folder: Path, replicas: int) -> list[tuple[str, list[str]]]:
    """Edit, on one process, what FSDP keeps whole on each."""
    found = []
    for index, edit in enumerate(WHOLE_EDITS.values()):
        output_dir = folder / str(index)
        trainer = Trainer(
            max_steps=6,
            strategy=FSDP(replicas=replicas),
            callbacks=[Edits(edit), Checkpoint(every_n_steps=2, keep_last=None)],
            output_dir=output_dir,
        )
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        groups = [{"params": layer.parameters()} for layer in model]
        with pytest.raises(DistributedError) as caught:
            fit(trainer, model=model, optimizer=AdamW(groups, lr=0.01))
        found.append((str(caught.value), saved(output_dir)))
    return found


@pytest.mark.parametrize(("size", "replicas"), with_few([(2, 1)], [(2, 1), (4, 2)]))
def test_what_fsdp_keeps_whole_is_compared(size: int, replicas: int, tmp_path: Path) -> None:
    found = run_ranks(size, edit_what_is_whole, tmp_path, replicas)
    assert all(each == found[0] for each in found)
    for (text, folders), place in zip(found[0], WHOLE_EDITS, strict=True):
        assert place in text
        assert "on process 1 is not that of process 0" in text
        assert folders == ["step-00000002"]


class Statistics(nn.Sequential):
    """With buffers that differ by process, and a parameter that nothing trains."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self[0].bias.requires_grad_(False)


def loaders(batch_size: int = 3) -> Any:
    return torch.utils.data.DataLoader(toy_dataset(26), batch_size=batch_size, shuffle=True)


def train_all_ways(rank: int, size: int, folder: Path) -> int:
    from schedulefree import AdamWScheduleFree

    torch.manual_seed(rank)  # replicas start alike all the same
    adam = partial(AdamW, lr=0.01)
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"optimizer": partial(SGD, lr=0.1, momentum=0.9)}),
        ({"precision": "bf16", "max_grad_norm": 0.1}, {"optimizer": adam}),
        ({"precision": "fp16"}, {"optimizer": adam, "lr_scheduler": partial(StepLR, step_size=2)}),
        ({"gradient_accumulation_steps": 2}, {"optimizer": partial(AdamW, lr=0.01, fused=True)}),
        ({"callbacks": [EMA(), FreezeUntil(step={"3": 3})]}, {"optimizer": adam}),
        ({}, {"optimizer": partial(AdamWScheduleFree, lr=0.01)}),
        ({"strategy": DDP(find_unused_parameters=True)}, {"optimizer": adam}),
        ({"strategy": "fsdp"}, {"optimizer": adam}),
        ({"strategy": FSDP(replicas="processes")}, {"optimizer": adam}),
    ]
    for index, (settings, of_fit) in enumerate(ways):
        callbacks = [ReplicaCheck(every_n_steps=1), *settings.pop("callbacks", [])]
        for epochs, resume in ((1, None), (2, "auto")):
            trainer = Trainer(
                max_epochs=epochs,
                callbacks=[*callbacks, Checkpoint(every_n_steps=2)],
                output_dir=folder / str(index),
                **settings,
            )
            schedule: Any = None if resume is None else "keep"
            model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)) if "fsdp" in settings else None
            fit(trainer, loaders(), Statistics() if model is None else model, resume=resume,
                schedule=schedule, **of_fit)  # fmt: skip
    return len(ways)


@pytest.mark.e2e
@pytest.mark.parametrize("size", [2, 3])
def test_no_training_that_is_right_is_stopped(size: int, tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    assert run_ranks(size, train_all_ways, size, tmp_path, timeout=300) == [9] * size


def resume_on(rank: int, folder: Path, epochs: int) -> None:
    checks = [ReplicaCheck(every_n_steps=1), Checkpoint(every_n_steps=2)]
    trainer = Trainer(max_epochs=epochs, callbacks=checks, output_dir=folder)
    size = trainer.processes.num_processes
    fit(
        trainer,
        loaders(12 // size),
        resume="auto",
        schedule="keep",
        optimizer=partial(AdamW, lr=0.1),
    )


@pytest.mark.e2e
def test_an_elastic_resume_is_alike(tmp_path: Path) -> None:
    for size, epochs in ((1, 1), (3, 2), (2, 3)):
        run_ranks(size, resume_on, tmp_path, epochs)


def hybrid(rank: int) -> list[str]:
    """Return what is said where one copy of one shard differs: by which process, on all."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    strategy = FSDP(replicas=2)
    trainer = Trainer(max_steps=2, strategy=strategy, callbacks=[ReplicaCheck(every_n_steps=1)])
    fit(trainer, model=model, optimizer=partial(AdamW, lr=0.1))
    assert trainer.run is not None
    texts = []
    for other in (1, 3):
        if rank == other:
            with torch.no_grad():
                model[1].weight.to_local().add_(other)  # type: ignore[operator,union-attr]
        with pytest.raises(DistributedError) as caught:
            check_replicas(strategy, dict(model.named_parameters()), [], "now")
        texts.append(str(caught.value))
    return texts


@pytest.mark.e2e
def test_copies_of_one_shard_are_compared() -> None:
    found = run_ranks(4, hybrid)
    assert all(texts == found[0] for texts in found)
    assert "now: parameter `1.weight` on process 3 is not that of process 1. " in found[0][0]


def own_loop(rank: int, folder: Path) -> list[str]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    nn.init.ones_(frozen.weight)
    nn.init.zeros_(frozen.bias)
    model, optimizer, frozen = accelerator.prepare(model, AdamW(model.parameters()), frozen)
    accelerator.backward(model(torch.ones(2, 2) * (rank + 1)).sum())
    optimizer.step()
    accelerator.save_state(str(folder / "good"))
    inner = accelerator.unwrap_model(model)
    if rank == 1:
        with torch.no_grad():
            optimizer.state[inner.bias]["exp_avg"][1] = -0.0
    with pytest.raises(
        DistributedError, match=r"in `save_state`: `exp_avg` of `0\.bias`.*process 1"
    ):
        accelerator.save_state(str(folder / "good"))
    accelerator.load_state(str(folder / "good"))  # what stood there is as it was
    accelerator.save_state(str(folder / "after"))
    if rank == 1:
        frozen.bias.fill_(-0.0)
    with pytest.raises(DistributedError, match=r"parameter `1\.bias` on process 1"):
        accelerator.save_state(str(folder / "bad"))
    accelerator.save_state(str(folder / "asked"), check_replicas=False)
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.e2e
def test_an_own_loop_saves_no_state_of_replicas_that_differ(tmp_path: Path) -> None:
    assert run_ranks(2, own_loop, tmp_path) == [["after", "asked", "good"]] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_the_checksum_of_a_device_sees_every_bit_and_its_place(dtype: torch.dtype) -> None:
    base = torch.arange(1, 8193).to(dtype)[1:]  # where no word begins

    tensors = [base, base.flip(0), -base]
    for place in (0, 1, 4095, 8190):
        for value in (0.0, -0.0, float("nan"), 99) if dtype.is_floating_point else (0, 99):
            tensors.append(base.clone())
            tensors[-1][place] = value
    data = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
    sums = [[int(each) for each in _checksums(each)] for each in data]
    assert len({tuple(each) for each in sums}) == len({bytes(each.numpy()) for each in data})
    assert sums[0] == [int(each) for each in _checksums(data[0].clone())]
