"""Tell benign tumours from malignant ones by thirty measurements; seconds on one core.

python examples/tabular.py
trainkit launch --num_processes 2 examples/tabular.py
"""

from functools import partial

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainkit import Trainer
from trainkit.callbacks import Evaluation, ProgressBar, Summary

table = load_breast_cancer()
inputs = torch.tensor(table.data, dtype=torch.float32)
data = TensorDataset(inputs, torch.tensor(table.target))
train, held_out = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
seen = inputs[train.indices]
inputs.sub_(seen.mean(0)).div_(seen.std(0))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))
trainer = Trainer(
    max_epochs=10,
    split_batches=True,  # 32 samples a step, on one process or on several
    callbacks=[ProgressBar(), Summary(), Evaluation(["accuracy", "f1"])],
)
result = trainer.fit(
    model,
    (DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=64)),
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    loss_fn=nn.CrossEntropyLoss(),
)
trainer.processes.print(f"accuracy: {result.metrics['eval/accuracy']:.4f}")
trainer.close()
