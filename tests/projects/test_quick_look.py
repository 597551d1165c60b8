"""One script from the first look to the run: dry, by heart, with which rate, on less, for real."""

from pathlib import Path

import pytest

from tests.helpers.scripts import run_forked
from tests.helpers.tiers import with_few

SCRIPT = """
import argparse
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Trainer
from trainkit.callbacks import Checkpoint, Evaluation, LRFinder, ProgressBar, Summary

parser = argparse.ArgumentParser()
parser.add_argument("look", choices=["dry", "overfit", "rate", "less", "real"])
parser.add_argument("folder", type=Path)
given = parser.parse_args()
look, saving = given.look, [Checkpoint()] * (given.look in ("dry", "real"))
settings = {
    "dry": {"dry_run": True, "max_epochs": 4},
    "overfit": {"overfit_batches": 1, "max_epochs": 150},
    "rate": {"max_epochs": 4},
    "less": {"limit_train_batches": 0.25, "limit_eval_batches": 2, "max_epochs": 4},
    "real": {"max_epochs": 4},
}[look]
torch.manual_seed(1)
inputs = torch.randn(256, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())
train, test = torch.utils.data.random_split(data, [192, 64])
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
finder = LRFinder(num_steps=60, max_lr=10.0)
callbacks = [ProgressBar(), Summary(), Evaluation(["accuracy"]), *saving]
trainer = Trainer(
    callbacks=[*callbacks, *([finder] if look == "rate" else [])],
    output_dir=given.folder if saving else None,
    split_batches=True,
    **settings,
)
result = trainer.fit(
    model,
    (DataLoader(train, 16, shuffle=True), DataLoader(test, 16 // trainer.processes.num_processes)),
    optimizer=partial(torch.optim.AdamW, lr=finder.suggestion or 1e-2),
    lr_scheduler="cosine",
    loss_fn=nn.CrossEntropyLoss(),
)
if trainer.processes.is_main_process:
    print("figures", result.step, result.samples_seen, trainer.run.planned_steps, finder.suggestion)
    print("loss", trainer.run.metrics.get("eval/loss"))
    files = given.folder.rglob("*") if given.folder.exists() else []
    print("files", [p.name for p in files if ".trainkit-dry-run" not in str(p)])
trainer.close()
"""


def said(output: str, word: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.startswith(word + " ")]
    return line.split()[1:]


@pytest.mark.parametrize("size", with_few([1], [1, 2]))
def test_a_project_from_the_first_look_to_the_run(size: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(look: str) -> str:
        return run_forked(script, look, str(tmp_path / "run"), size=size).output

    dry = run("dry")
    assert said(dry, "figures") == ["1", "16", "48", "None"]
    assert said(dry, "files") == ["[]"]
    assert "nothing is kept" in dry
    by_heart = run("overfit")
    assert said(by_heart, "figures")[:3] == ["150", "2400", "150"]
    rows = [line for line in by_heart.splitlines() if "eval loss" in line]
    assert len(rows) == 150
    assert float(rows[-1].split("train loss ")[1].split()[0]) < 0.1  # 16 samples
    rate = run("rate")
    steps, samples, planned, suggestion = said(rate, "figures")
    assert (steps, samples, planned) == ("0", "0", "48")
    assert 1e-4 < float(suggestion) < 1
    less = run("less")
    assert said(less, "figures")[:3] == ["12", "192", "12"]
    real = run("real")
    assert said(real, "figures")[:3] == ["48", "768", "48"]
    assert "checkpoints" in " ".join(said(real, "files"))
    assert all(len(line) < 80 for line in rows)
