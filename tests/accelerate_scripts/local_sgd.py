# mypy: ignore-errors
"""In the style of the example of local SGD, and of one with a batch size that is found."""

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import find_executable_batch_size, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(folder):
    accelerator = Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=2)
    set_seed(5)
    dataset = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    found = []

    @find_executable_batch_size(starting_batch_size=5)
    def inner_training_loop(batch_size):
        if batch_size > 4:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        accelerator.free_memory()
        set_seed(6, device_specific=False)
        model = nn.Linear(4, 1).to(accelerator.device)
        optimizer = torch.optim.SGD(params=model.parameters(), lr=0.05)
        train_dataloader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
        model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
        for _ in range(2):
            model.train()
            with LocalSGD(
                accelerator=accelerator, model=model, local_sgd_steps=3, enabled=True
            ) as local_sgd:
                for inputs, targets in train_dataloader:
                    with accelerator.accumulate(model):
                        loss = nn.functional.mse_loss(model(inputs), targets)
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                        local_sgd.step()
            found.append([value.flatten().tolist() for value in model.parameters()])

    inner_training_loop()
    return {"weights": found}
