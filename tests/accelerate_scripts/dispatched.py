# mypy: ignore-errors
"""In the style of trainings whose data one process reads, in fp32 and with several optimizers."""

from datetime import timedelta

import torch
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
from accelerate.utils import is_peft_model, set_module_tensor_to_device, set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Numbers(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


def main(folder):
    accelerator = Accelerator(
        cpu=True,
        split_batches=False,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=True),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=600))],
    )
    set_seed(9)
    rows = torch.randn(26, 4)
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    assert not is_peft_model(generator)
    set_module_tensor_to_device(critic, "bias", "cpu", value=torch.ones(1))
    first = torch.optim.Adam(generator.parameters(), lr=1e-2)
    second = torch.optim.SGD(critic.parameters(), lr=1e-2)
    loader = DataLoader(Numbers(rows), batch_size=4)
    generator, critic, first, second, loader = accelerator.prepare(
        generator, critic, first, second, loader, device_placement=[True] * 5
    )
    sizes, seen = [], []
    for _ in range(2):
        for batch in loader:
            sizes.append(len(batch))
            seen.append(accelerator.gather_for_metrics(batch[:, 0]))
            judged = critic(generator(batch).detach()).mean()
            accelerator.backward(-judged)
            second.step()
            second.zero_grad()
            loss = critic(generator(batch)).square().mean()
            accelerator.backward(loss)
            first.step()
            first.zero_grad()
            second.zero_grad()
    skipped = accelerator.optimizer_step_was_skipped
    scale = accelerator.scaler
    weights = [
        value.flatten().tolist()
        for model in (generator, critic)
        for value in accelerator.get_state_dict(model).values()
    ]
    return {
        "weights": weights,
        "sizes": sizes,
        "seen": torch.cat(seen).tolist(),
        "skipped": (skipped, scale, accelerator.use_distributed, accelerator.state.num_processes),
    }
