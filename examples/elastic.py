"""Tell handwritten digits apart, on machines that come and go.

Each machine runs the same command, whenever it is there, and again when it is back:

trainkit launch --num_machines 4 --min_machines 1 --max_restarts 100 --num_processes 4 \
    --main_process_ip HOST examples/elastic.py --output_dir /shared/runs/digits

Every epoch uses each sample once, whoever computes it; `python examples/elastic.py` gives the same
accuracy.
"""

import argparse
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainkit import Trainer
from trainkit.callbacks import Checkpoint, Evaluation, JSONLLogger, Summary

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="runs/digits", help="on storage that all machines see")
parser.add_argument("--epochs", type=int, default=20)
options = parser.parse_args()

digits = load_digits()
data = TensorDataset(
    torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
)
train, held_out = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
trainer = Trainer(
    max_epochs=options.epochs,
    split_batches=True,  # 24 samples a step: shared out over 1, 2, 3 or 4 processes
    output_dir=options.output_dir,
    # A machine that is lost costs what came after the newest checkpoint.
    callbacks=[Checkpoint(every_n_steps=20), Evaluation(["accuracy"]), JSONLLogger(), Summary()],
)
result = trainer.fit(
    model,
    (DataLoader(train, batch_size=24, shuffle=True), DataLoader(held_out, batch_size=120)),
    optimizer=partial(torch.optim.AdamW, lr=1e-2),
    loss_fn=nn.CrossEntropyLoss(),
    resume="auto",  # every start goes on from the newest checkpoint
)
trainer.processes.print(f"accuracy: {result.metrics['eval/accuracy']:.4f}")
trainer.close()
