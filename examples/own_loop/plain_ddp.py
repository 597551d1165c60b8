"""The classification loop by hand: torch and nothing else.

    python examples/own_loop/plain_ddp.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/plain_ddp.py

Each process takes every second batch, or every n-th. `classification.py` is the same loop with an
`Accelerator`, and ends with the same weights, bit by bit.
"""

import argparse
import os

import torch
import torch.distributed as dist
from data import SAMPLES, checksum, make_data, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

EPOCHS = 3
BATCH = 20


def main() -> None:
    """Train, and print the weights' checksum and the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", help="a file for the weights")
    parser.add_argument("--init-method", default="env://", help="where the processes meet")
    arguments = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo", arguments.init_method, rank=rank, world_size=size)
    module = make_model()
    model = DistributedDataParallel(module) if size > 1 else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = make_data(SAMPLES, seed=1)
    generator = torch.Generator().manual_seed(7)
    order = BatchSampler(RandomSampler(data, generator=generator), BATCH, drop_last=True)
    for _ in range(EPOCHS):
        torch.empty((), dtype=torch.int64).random_(generator=generator)  # as `DataLoader` does
        batches = list(order)
        for features, classes in DataLoader(data, batch_sampler=batches[rank::size]):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), classes)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    if rank == 0:
        if arguments.save is not None:
            torch.save(module.state_dict(), arguments.save)
        print(f"weights {checksum(module)}")
    # A DistributedDataParallel that ends after its group waits for the group's threads while it
    # holds the interpreter lock, and they may wait for the lock.
    del model
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
