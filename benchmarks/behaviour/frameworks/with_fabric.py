"""Lightning Fabric: its set-up, and the user's own loop over it."""

from typing import Any, ClassVar

from lightning.fabric import Fabric as LightningFabric, seed_everything

from benchmarks.behaviour import toys
from benchmarks.behaviour.job import NO_CHECK, Framework, Job, Variant, size_of_world

_LOOP = "the loop is the user's"


class Fabric(Framework):
    """Only what Fabric does itself: set up, share out data, launch."""

    package = "lightning"
    variants: ClassVar = {
        "rank_augmentation": [
            Variant(
                "seed_everything(workers=True) and a worker",
                {"workers": 1, "options": {"seed_workers": True}},
            )
        ],
        "iterable": [
            Variant("a data set that splits itself over workers", {"data": toys.SplitStream})
        ],
    }
    left_to_users: ClassVar = {"rates_differ": NO_CHECK}
    not_offered: ClassVar = {
        **dict.fromkeys(
            ["last_window", "kwargs", "tokens_accumulation", "tokens_processes", "scheduler"], _LOOP
        ),
        **dict.fromkeys(["rows_left_out", "two_terms"], _LOOP),
        **dict.fromkeys(
            ["sum_loss", "schedule_unit", "auroc", "segmentation", "eval_figure"], _LOOP
        ),
        **dict.fromkeys(
            ["resume_order", "resume_augmentation", "elastic", "kill_one", "kill_three", "torn"],
            "the data's place is the user's",
        ),
        "background": _LOOP,
        "gather_texts": "all_gather is for tensors",
        "gather_ragged": "all_gather is for tensors of one shape",
        "overflow": "schedules are the user's",
        "break_early": _LOOP,
        "sigterm": _LOOP,
        "bit_flip": "what is saved is the user's",
        "replica": "what is saved is the user's",
    }

    def train(self, job: Job) -> None:
        self._train(job)

    def contrast(self, job: Job) -> None:
        self._train(job, over_processes=True)

    def _train(self, job: Job, *, over_processes: bool = False) -> None:
        size = job.options.get("devices", size_of_world())
        strategy = "ddp" if size > 1 else "auto"
        fabric = LightningFabric(accelerator="cpu", devices=size, strategy=strategy)
        fabric.launch()
        seed_everything(0, workers="seed_workers" in job.options, verbose=False)
        model: Any = job.model(job.samples)
        model, optimizer = fabric.setup(model, job.optimizer(model.parameters()))
        loader: Any = fabric.setup_dataloaders(job.loader())
        for _ in range(job.epochs):
            for x, y in loader:
                outputs = model(x)
                if over_processes:
                    others: Any = fabric.all_gather(outputs, sync_grads=True)
                    theirs: Any = fabric.all_gather(y)
                    loss = toys.contrastive(outputs, y, others.flatten(0, -2), theirs.flatten())
                else:
                    loss = job.loss(outputs, y)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    def command(self, size: int) -> list[str]:
        return []  # it starts the other processes itself


FRAMEWORK = Fabric()
