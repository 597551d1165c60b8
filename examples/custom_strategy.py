"""A strategy of your own: data parallelism that sends its gradients in bfloat16.

Half the bytes travel. What is given up: each gradient is rounded to 8 bits before it is sent, so
the training is no longer that of one device (rule 6); it still is the same on all processes,
and a resumed run is the same run. The sum itself is taken in fp32, in the order of the ranks.

    python examples/custom_strategy.py
    torchrun --standalone --nproc-per-node 2 examples/custom_strategy.py
"""

import argparse
from functools import partial

import torch
import torch.distributed
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split
from typing_extensions import override

from trainkit import Trainer
from trainkit.callbacks import Evaluation
from trainkit.distributed import Processes
from trainkit.precision import Precision
from trainkit.strategies import DDP


class CompressedDDP(DDP):
    """Averages gradients that were rounded to bfloat16."""

    name = "compressed-ddp"

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        wrapped = super().wrap(model, precision, seed)
        if isinstance(wrapped, DistributedDataParallel):  # not on one process
            wrapped.register_comm_hook(self.processes, mean_in_bf16)
        return wrapped


def mean_in_bf16(processes: Processes, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients, sent in bfloat16; every process sums alike."""
    gradient = bucket.buffer()
    sent = gradient.bfloat16()
    received = [torch.empty_like(sent) for _ in range(processes.size)]
    torch.distributed.all_gather(received, sent)
    gradient.copy_(torch.stack(received).to(gradient.dtype).sum(0) / processes.size)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradient)
    return done


def train(strategy: DDP, epochs: int) -> tuple[float, Trainer]:
    """Return the accuracy on held-out digits after training with `strategy`, and the trainer."""
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    held_out, training = random_split(data, [0.2, 0.8], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    trainer = Trainer(
        max_epochs=epochs,
        strategy=strategy,
        split_batches=True,  # the same global batch on any number of processes
        callbacks=[Evaluation(["accuracy"])],
    )
    result = trainer.fit(
        model,
        (DataLoader(training, 64, shuffle=True), DataLoader(held_out, 256)),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        loss_fn=nn.CrossEntropyLoss(),
    )
    return result.metrics["eval/accuracy"], trainer


def main() -> None:
    """Train with whole and with compressed gradients and print what comes of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="two epochs, to see that it runs")
    epochs = 2 if parser.parse_args().tiny else 15
    whole, _ = train(DDP(), epochs)
    compressed, trainer = train(CompressedDDP(), epochs)
    trainer.processes.print(f"gradients in fp32: accuracy {whole:.3f}")
    trainer.processes.print(f"gradients in bfloat16: accuracy {compressed:.3f}")
    trainer.close()


if __name__ == "__main__":
    main()
