"""The workloads, in the order of the table."""

from benchmarks.compare.evaluation import Evaluation, Gathering
from benchmarks.compare.saving import Loading, Saving
from benchmarks.compare.sharding import Sharding
from benchmarks.compare.starting import FirstStep, Importing
from benchmarks.compare.training import Training
from benchmarks.compare.workload import Workload

__all__ = ["WORKLOADS"]

FILLED_UP = 1e-3
"""For peers that repeat samples to give every process as many; what they get wrong is shown."""

ROUNDING = 1e-4
"""For sums over the same samples in another order, or gradients scaled in another place."""

WORKLOADS: tuple[Workload, ...] = (
    Training(name="mlp-32", about="tiny MLP, tensor data set, batch 32"),
    Training(name="mlp-1", about="tiny MLP, tensor data set, batch 1", batch_size=1),
    Training(
        name="accumulate",
        about="tiny MLP, accumulation 4, clipping, bf16",
        bound=ROUNDING,
        steps=128,
        accumulation=4,
        max_norm=0.1,
        bf16=True,
    ),
    Training(
        name="extras",
        about="tiny MLP, progress bar, TensorBoard, checkpoints",
        steps=1024,
        extras=True,
    ),
    Training(name="ddp", about="tiny MLP, 2 processes DDP", bound=ROUNDING, processes=2, steps=256),
    Training(
        name="gpt2",
        about="GPT-2: 4 layers, width 256, 128 tokens",
        bound=ROUNDING,
        task="gpt2",
        batch_size=4,
        steps=4,
        epochs=3,
    ),
    Training(name="samples", about="NumPy work in __getitem__", task="samples", steps=64),
    Training(
        name="samples-w2",
        about="NumPy work in __getitem__, 2 workers",
        task="samples",
        steps=128,
        workers=2,
    ),
    Training(name="batches", about="NumPy work in __getitems__", task="batches", steps=64),
    Evaluation(
        name="evaluate",
        about="accuracy of 20,003 samples, 2 processes",
        bound=FILLED_UP,
        processes=2,
    ),
    Gathering(
        name="gather",
        about="the same, every batch gathered in an own loop",
        bound=FILLED_UP,
        processes=2,
    ),
    Sharding(
        name="fsdp",
        about="GPT-2: 4 layers, width 256, 128 tokens, 2 processes, sharded",
        bound=ROUNDING,
        processes=2,
        task="gpt2",
        batch_size=2,
        steps=4,
        epochs=3,
    ),
    Saving(name="save", about="25 M parameters with AdamW, until they are on the disk"),
    Loading(name="load", about="25 M parameters with AdamW"),
    Saving(name="save-125", about="125 M parameters with AdamW", layers=30, full=True),
    Loading(name="load-125", about="125 M parameters with AdamW", layers=30, full=True),
    Importing(name="import", about="imports over torch; raw: torch itself"),
    FirstStep(name="start", about="from starting Python to the first update"),
)
