"""`Trainer.explain` says what `fit` does, and does nothing itself."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer, toy_loaders, toy_model
from trainkit import Callback, ConfigError, Run
from trainkit.basics.config import TrainConfig
from trainkit.callbacks import Checkpoint, Evaluation, JSONLLogger, NaNGuard, main_process_only
from trainkit.training.callback import HOOKS


def _said(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what was printed, each text on one line."""
    return re.sub(r"\n {5,}(?=\S)", " ", capsys.readouterr().out)


def _row(text: str, label: str) -> str:
    found = re.search(rf"^[* ] {re.escape(label)} +(.*)", text, re.MULTILINE)
    assert found is not None, f"no row {label!r} in:\n{text}"
    return re.sub(r" +", " ", found[1])


def test_it_says_what_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(max_epochs=3, gradient_accumulation_steps=2)
    trainer.explain(toy_model(), toy_loaders(samples=43))
    said = _said(capsys)
    assert _row(said, "model") == "Sequential, 58 parameters, 58 of them trained"
    assert _row(said, "strategy") == "single: 1 process on cpu"
    assert _row(said, "window") == "8 samples (4 x 1 process x 2 micro-batches)"
    assert _row(said, "length") == (
        "3 epochs, 18 steps; an epoch is 6 steps over 43 samples, the last of them on 3 samples, "
        "applied"
    )
    assert _row(said, "evaluated on").startswith("21 samples, each exactly once; after each epoch")
    assert fit(trainer, toy_loaders(samples=43)).step == 18  # it told the truth


def test_without_arguments_it_says_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(max_steps=10).explain()
    said = _said(capsys)
    assert _row(said, "length").startswith("10 steps; pass `loaders` to see")
    assert "\n  window" not in said.split("CALLBACKS")[0]


def test_the_optimizer_is_told_group_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    model = toy_model()
    first, last = model[0], model[2]  # type: ignore[index]
    groups = [{"params": first.parameters()}, {"params": [last.weight], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    make_trainer(max_epochs=2).explain(model, toy_loaders(), optimizer=optimizer)
    assert _row(_said(capsys), "optimizer") == (
        "AdamW: 40 parameters, lr 0.01, betas (0.9, 0.999), eps 1e-08, weight_decay 0.1; "
        "AdamW: 16 parameters, lr 0.01, betas (0.9, 0.999), eps 1e-08; nobody trains `2.bias`"
    )


def test_limits_and_a_dry_run_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    limits = {"limit_train_batches": 3, "limit_eval_batches": 0.5}
    make_trainer(max_epochs=2, **limits).explain(toy_model(), toy_loaders())
    said = _said(capsys)
    assert _row(said, "length") == "2 epochs, 6 steps; an epoch is 3 steps over 12 samples"
    assert _row(said, "evaluated on").startswith("8 samples, each exactly once")
    assert re.findall(r"^\* (\w+)", said, re.MULTILINE) == [*limits]
    make_trainer(max_epochs=2, dry_run=2).explain(toy_model(), toy_loaders())
    assert _row(_said(capsys), "length").endswith("32 samples; a dry run ends after 2 steps")


def _idle(self: Callback, *arguments: Any) -> None:
    pass


def test_the_hooks_stand_in_the_order_of_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    everything = type("Everything", (Callback,), dict.fromkeys(HOOKS, _idle))
    make_trainer(callbacks=[everything()]).explain()
    told = re.findall(r"^ +(on_\w+) +Everything$", capsys.readouterr().out, re.MULTILINE)
    # `tests/test_hooks.py` compares that with the order in which they run.
    assert told == re.findall(r"\bon_\w+", (Callback.__doc__ or "").split("\n\n")[2])
    assert set(told) == set(HOOKS)


def test_each_hook_names_its_callbacks_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(callbacks=[Evaluation(), JSONLLogger("log.jsonl"), NaNGuard()]).explain()
    said = capsys.readouterr().out
    assert re.search(r"on_fit_start +Evaluation, JSONLLogger, NaNGuard\n", said)
    assert re.search(r"on_evaluation_end +JSONLLogger\n", said)
    assert "Used by nobody, at no cost: " in said


def test_saving_is_told_or_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saving = Checkpoint(every_n_steps=100, keep_last=2, keep_best=("eval/loss", "min"))
    make_trainer(callbacks=[saving], output_dir=tmp_path).explain()
    said = _said(capsys)
    assert _row(said, "Checkpoint") == (
        "Saves every 100 steps, after each evaluation and at the last step; keeps the newest 2, "
        "the best by eval/loss (min); training waits meanwhile."
    )
    assert _row(said, "output_dir") == str(tmp_path)
    assert "no checkpoints" not in said
    make_trainer().explain()
    assert _row(_said(capsys), "no checkpoints").startswith("A run that ends early is lost")


def test_every_setting_stands_there_and_changed_ones_are_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_trainer(max_grad_norm=2.0, seed=7).explain()
    said = _said(capsys).split("SETTINGS")[1]
    lengths = {"max_epochs", "max_steps"}
    for name in set(TrainConfig.__dataclass_fields__) - lengths:
        assert _row(said, name)
    marked = re.findall(r"^\* (\w+)", said, re.MULTILINE)
    assert marked == ["max_grad_norm", "seed"]
    assert _row(said, "seed").startswith("7. ")


class Mine(Callback):
    """Does what I want. And more."""

    def __init__(self, often: int = 1, place: Path | None = None) -> None:
        self.often = often
        self.place = place

    @main_process_only
    def on_log(self, run: Run, values: Any) -> None:
        pass


def test_a_callback_is_told_by_its_first_words_and_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_trainer(callbacks=[Mine(often=3)]).explain()
    assert _row(_said(capsys), "Mine") == "Does what I want. And more. (often=3)"


def test_it_changes_nothing(tmp_path: Path) -> None:
    model, trainer = toy_model(), make_trainer(output_dir=tmp_path / "run")
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    trainer.explain(model, toy_loaders())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert (trainer.run, trainer.planned_steps) == (None, None)
    assert not (tmp_path / "run").exists()
    explained = fit(trainer, model=model).metrics
    assert explained == fit(make_trainer()).metrics


def test_what_cannot_work_is_the_error_of_fit() -> None:
    with pytest.raises(ConfigError, match="`model` must be a"):
        make_trainer().explain(model=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="as a mapping must have the key"):
        make_trainer().explain(loaders={"training": []})


def _two(rank: int, folder: Path) -> None:
    trainer = make_trainer(gradient_accumulation_steps=2)
    said: list[str] = []
    vars(trainer.processes)["print"] = said.append
    trainer.explain(toy_model(), toy_loaders())
    (folder / str(rank)).write_text(said[0])
    trainer.close()


@pytest.mark.e2e
def test_two_processes(tmp_path: Path) -> None:
    run_ranks(2, _two, tmp_path)
    said = (tmp_path / "0").read_text()
    assert _row(said, "window") == "16 samples (4 x 2 processes x 2 micro-batches)"
    assert _row(said, "strategy") == "ddp: 2 processes on cpu"
