"""The weights of trainkit are those of a plain loop, bit by bit (issue: parity; rule 6)."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Trainer
from trainkit.basics import rng
from trainkit.precision import FP16

SAMPLES, BATCH, ACCUMULATION, STEPS, SEED = 50, 4, 3, 200, 7
SPOILED = 11  # the sample whose target makes fp16 overflow
GROWTH_INTERVAL = 2  # windows: the scale recovers from the spoiled one of each epoch
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))


def make_loader(*, spoiled: bool) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    targets = torch.randn(SAMPLES, 2, generator=generator)
    if spoiled:
        targets[SPOILED] = 1e18
    return DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, shuffle=True)


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))


def plain_loop(precision: str, *, spoiled: bool) -> tuple[nn.Module, int]:
    model, loader = make_model(), make_loader(spoiled=spoiled)
    data: Any = loader.dataset
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scheduler = schedule(optimizer)
    scaler = torch.amp.GradScaler(
        "cpu", growth_interval=GROWTH_INTERVAL, enabled=precision == "fp16"
    )
    rng.seed_all(rng.device_seed(SEED, 0), torch.device("cpu"))
    step = skipped = epoch = 0
    while step < STEPS:
        state = rng.save_host()
        rng.seed_host(rng.order_seed(SEED, epoch))
        order = list(loader.sampler)
        rng.restore_host(state)
        batches = [order[i : i + BATCH] for i in range(0, SAMPLES, BATCH)]
        for first in range(0, len(batches), ACCUMULATION):
            window = batches[first : first + ACCUMULATION]
            total = sum(len(batch) for batch in window)
            for batch in window:
                inputs, targets = data[batch]
                dtype = DTYPES.get(precision)
                with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
                    loss = nn.functional.mse_loss(model(inputs), targets)
                scaler.scale(loss * (len(batch) / total)).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() < before:
                skipped += 1
                continue
            scheduler.step()
            step += 1
            if step == STEPS:
                break
        epoch += 1
    return model, skipped


@pytest.mark.parametrize(
    ("precision", "spoiled"), [("fp32", False), ("bf16", False), ("fp16", False), ("fp16", True)]
)
def test_weights_equal_those_of_a_plain_loop(precision: str, spoiled: bool) -> None:
    expected, skipped = plain_loop(precision, spoiled=spoiled)
    model = make_model()
    trainer = Trainer(
        max_steps=STEPS,
        precision=FP16(growth_interval=GROWTH_INTERVAL) if precision == "fp16" else precision,  # type: ignore[arg-type]
        gradient_accumulation_steps=ACCUMULATION,
        max_grad_norm=0.5,
        callbacks=[],
        seed=SEED,
    )
    result = trainer.fit(
        model,
        make_loader(spoiled=spoiled),
        optimizer=partial(AdamW, lr=1e-2),
        lr_scheduler=schedule,
        loss_fn=nn.functional.mse_loss,
    )
    assert result.step == STEPS
    assert result.skipped_steps == skipped
    assert skipped > 0 or not spoiled
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_ready_made_optimizer_gives_the_same_weights() -> None:
    weights = []
    for ready_made in (False, True):
        model = make_model()
        make = partial(SGD, lr=1e-2)
        Trainer(max_steps=20, callbacks=[]).fit(
            model,
            make_loader(spoiled=False),
            optimizer=make(model.parameters()) if ready_made else make,
            loss_fn=nn.functional.mse_loss,
        )
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
