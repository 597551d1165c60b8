# mypy: ignore-errors
"""In the style of small repositories: a class with two networks, files of its own, no epochs."""

import copy
import os
from itertools import islice

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset


def exists(value):
    return value is not None


def cycle(loader):
    while True:
        yield from loader


class Adversaries(nn.Module):
    def __init__(self, folder, *, grad_accum_every=2):
        super().__init__()
        kwargs = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
        self.path, self.grad_accum_every = os.path.join(folder, "model.pt"), grad_accum_every
        self.G = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
        self.D = nn.Sequential(nn.Linear(3, 6), nn.SiLU(), nn.Linear(6, 1))
        if self.accelerator.is_main_process:
            self.ema = copy.deepcopy(self.G).requires_grad_(False).to(self.accelerator.device)
        self.G_opt = Adam(self.G.parameters(), lr=1e-2, betas=(0.5, 0.9))
        self.D_opt = Adam(self.D.parameters(), lr=1e-2, betas=(0.5, 0.9))
        data = TensorDataset(torch.randn(26, 3, generator=torch.Generator().manual_seed(1)))
        loader = self.accelerator.prepare(DataLoader(data, 4, drop_last=True))
        self.batches = self.accelerator.prepare(cycle(loader))
        self.G, self.D, self.G_opt, self.D_opt = self.accelerator.prepare(
            self.G, self.D, self.G_opt, self.D_opt
        )
        self.register_buffer("steps", torch.zeros(1, dtype=torch.long))

    @property
    def is_distributed(self):
        accelerator = self.accelerator
        return not (
            accelerator.distributed_type == DistributedType.NO and accelerator.num_processes == 1
        )

    def save(self):
        if not self.accelerator.is_local_main_process:
            return
        package = {
            "G": self.accelerator.get_state_dict(self.G),
            "D": self.accelerator.unwrap_model(self.D).state_dict(),
            "G_opt": self.G_opt.state_dict(),
            "D_opt": self.D_opt.state_dict(),
            "ema": self.ema.state_dict(),
            "steps": self.steps.item(),
        }
        if exists(self.G_opt.scaler):
            package["scaler"] = self.G_opt.scaler.state_dict()
        torch.save(package, self.path)

    def load(self):
        package = torch.load(self.path, map_location="cpu", weights_only=True)
        self.accelerator.unwrap_model(self.G).load_state_dict(package["G"])
        self.accelerator.unwrap_model(self.D).load_state_dict(package["D"])
        self.G_opt.load_state_dict(package["G_opt"])
        self.D_opt.load_state_dict(package["D_opt"])
        self.steps.fill_(package["steps"])
        if self.accelerator.is_main_process:
            self.ema.load_state_dict(package["ema"])

    def penalty(self, real, scores):
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def forward(self, steps):
        losses = []
        for _ in range(steps):
            self.G.train()
            self.D.train()
            self.D_opt.zero_grad()
            for (real,) in islice(self.batches, self.grad_accum_every):
                real = real.to(self.accelerator.device).requires_grad_()
                with torch.no_grad(), self.accelerator.autocast():
                    fake = self.G(torch.randn(len(real), 2))
                with self.accelerator.autocast():
                    scores = self.D(real)
                    loss = nn.functional.softplus(self.D(fake) - scores).mean()
                loss = loss + self.penalty(real, scores)
                self.accelerator.backward(loss / self.grad_accum_every)
            self.D_opt.step()
            self.accelerator.wait_for_everyone()
            self.G_opt.zero_grad()
            for _ in range(self.grad_accum_every):
                with self.accelerator.autocast():
                    loss = -self.D(self.G(torch.randn(4, 2))).mean()
                self.accelerator.backward(loss / self.grad_accum_every, retain_graph=True)
            self.accelerator.clip_grad_norm_(self.G.parameters(), 0.5)
            self.G_opt.step()
            self.accelerator.wait_for_everyone()
            self.steps += 1
            losses.append(loss.item())
            if self.accelerator.is_main_process:
                inside = self.accelerator.unwrap_model(self.G)
                for own, new in zip(self.ema.parameters(), inside.parameters(), strict=True):
                    own.lerp_(new.detach().to(own), 0.5)
                self.save()
            self.accelerator.wait_for_everyone()
        return losses


def main(folder):
    set_seed(3)
    losses = Adversaries(folder)(4)
    set_seed(4)
    again = Adversaries(folder)
    again.load()
    resumed = again(1), again.steps.item(), again.is_distributed
    state = again.accelerator.unwrap_model(again.G).state_dict()
    weights = {name: value.tolist() for name, value in state.items()}
    return {"losses": losses, "resumed": resumed, "weights": weights}
