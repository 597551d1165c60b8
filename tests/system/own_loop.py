"""A loop of one's own with an `Accelerator`, for runs that are killed and resumed."""

import copy
import json
import pickle
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR

from tests.system.programs import ADAMW, mlp
from tests.system.toys import Announcer, Ema, plain
from trainkit import Accelerator, set_seed
from trainkit.accelerator.settings import ProjectConfiguration
from trainkit.strategies import FSDP

if TYPE_CHECKING:
    from tests.system.features import Mix

__all__ = ["OwnLoop", "loop_outcome"]


class Counted:
    """How far a loop of one's own is, and what it has seen."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"batches": 0, "updates": 0, "losses": [], "samples": []}

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = copy.deepcopy(state)


class OwnLoop:
    """One process's part of a loop of one's own."""

    def __init__(self, rank: int, folder: Path, mix: "Mix", pipe: int) -> None:
        self.rank, self.folder, self.mix = rank, folder, mix
        self.announcer = Announcer(rank, pipe)
        set_seed(mix.seed)
        folder.mkdir(parents=True, exist_ok=True)
        numbered = ProjectConfiguration(
            folder, automatic_checkpoint_naming=True, total_limit=mix.saving.keep_last
        )
        self.accelerator = Accelerator(
            cpu=True,
            project_config=numbered,
            log_with=["jsonl", "csv"],
            mixed_precision="no" if mix.precision == "fp32" else mix.precision,
            gradient_accumulation_steps=mix.accumulation,
            strategy=FSDP(wrap_policy=[nn.Linear]) if mix.strategy == "fsdp" else None,
        )
        self.model: Any = mlp(5, 9, 1, dropout=0.2).to(mix.dtype)
        self.counted = Counted()

    def fit(self) -> None:
        """Train to the end, from the newest state if there is one."""
        mix, accelerator, state = self.mix, self.accelerator, self.counted
        loader: Any = mix.loader(mix.noise(), shuffle=True)
        optimizer: Any = ADAMW(self.model.parameters())
        scheduler: Any = StepLR(optimizer, 5, 0.8)
        self.model, optimizer, loader, scheduler = accelerator.prepare(
            self.model, optimizer, loader, scheduler
        )
        # A whole average comes back, which does not go with shards.
        parts = nn.Module() if mix.strategy == "fsdp" else self.model
        self.optimizer, self.ema = optimizer, Ema(parts)
        accelerator.register_for_checkpointing(self.counted, self.ema)
        accelerator.init_trackers("run")
        self.announcer.say(-1)
        if mix.newest(self.folder) >= 0:
            accelerator.load_state()
        first, done = divmod(state.state["batches"], len(loader))
        assert mix.max_epochs is not None
        for epoch in range(first, mix.max_epochs):
            skips = epoch == first and done > 0
            for batch in accelerator.skip_first_batches(loader, done) if skips else loader:
                self.step(batch, optimizer, scheduler)
            self.announcer.at("epoch end")
        accelerator.end_training()

    def step(self, batch: Any, optimizer: Any, scheduler: Any) -> None:
        """Train on one micro-batch; save now and then."""
        accelerator, state = self.accelerator, self.counted.state
        with accelerator.accumulate(self.model):
            loss = mse_loss(self.model(batch[1]), batch[2])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        self.announcer.at("update")
        state["batches"] += 1
        state["samples"].append(batch[0].tolist())
        state["losses"].append(float(loss).hex())
        if accelerator.sync_gradients:
            state["updates"] += 1
            self.ema.update()
            accelerator.log({"loss": loss.item()}, step=state["updates"])
        is_due = state["batches"] % (self.mix.saving.every_n_steps or 3) == 0
        if is_due and (accelerator.sync_gradients or self.mix.strategy != "fsdp"):
            self.announcer.at("save")
            place = accelerator.save_state()
            self.announcer.say(int(Path(place).name.rpartition("_")[2]))

    def keep_outcome(self) -> None:
        """Leave the outcome for the process that started the run."""
        found = plain(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "ema": self.ema.state_dict(),
                "counted": self.counted.state,
                "draws": [torch.rand(3), random.random()],
            }
        )
        (self.folder / f"outcome-{self.rank}").write_bytes(pickle.dumps(found))

    def close(self) -> None:
        """Nothing to do."""


def loop_outcome(folder: Path, size: int) -> dict[str, Any]:
    """Return all that a loop of one's own left, by name."""
    logged: dict[int, Any] = {}
    for path in folder.glob("**/metrics.jsonl"):
        for line in path.read_text().splitlines():  # what is logged again stands there twice
            row = json.loads(line)
            logged[row["step"]] = row["loss"]
    found: dict[str, Any] = {"metrics.jsonl": logged}
    for rank in range(size):
        path = folder / f"outcome-{rank}"
        outcome = pickle.loads(path.read_bytes()) if path.exists() else {"outcome": "missing"}
        found |= {f"{name} of process {rank}": value for name, value in outcome.items()}
    return found
