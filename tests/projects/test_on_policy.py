"""A policy that learns from what it does itself: each sample comes from the newest weights."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.callbacks import On, StopsAt
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Callback, StepOutput, Trainer
from trainkit.callbacks import Checkpoint

ARMS = torch.tensor([0.1, 0.9, 0.4, 0.2], dtype=torch.float64)
PLAYS = 8  # of all processes, for each update


def _one(policy: nn.Module) -> Tensor:
    return torch.ones(1).to(next(policy.parameters()))


class Plays(IterableDataset[Any]):
    """Endless plays of a bandit by the policy: the arm, its reward, and which weights chose it."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        self.played = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            with torch.no_grad():
                chances = self.policy(_one(self.policy)).softmax(-1).cpu()
            arm = torch.multinomial(chances, 1)[0]  # under the key of this sample
            self.played += 1
            yield {"arm": arm, "reward": ARMS[arm], "chance": chances[arm]}

    def state_dict(self) -> dict[str, int]:
        return {"played": self.played}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.played = state["played"]


class Reinforce(Trainer):
    """The gradient of the expected reward."""

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        logs = model(_one(model)).log_softmax(-1)[batch["arm"]]
        # The weights that chose are those that are updated: else the chances differ.
        assert torch.allclose(logs.exp(), batch["chance"], rtol=1e-12)
        loss = -(logs * (batch["reward"] - 0.4)).mean()
        return StepOutput(loss, weight=len(batch["arm"]))


def _learn(
    rank: int, folder: Path, stop_at: int | None = None, **options: Any
) -> tuple[list[list[int]], list[float]]:
    torch.manual_seed(0)
    policy = nn.Linear(1, len(ARMS)).double()
    played: list[list[int]] = []
    notes = On(
        Callback.on_microbatch_start,
        lambda run, batch: played.append(batch["arm"].tolist()),
    )
    trainer = Reinforce(
        max_steps=60, callbacks=[notes, StopsAt(stop_at), Checkpoint()], output_dir=folder
    )
    batch = PLAYS // trainer.processes.num_processes
    data: Any = DataLoader(Plays(policy), batch)
    trainer.fit(policy, data, optimizer=partial(torch.optim.SGD, lr=1.0), **options)
    return played, policy(_one(policy)).softmax(-1).tolist()


@pytest.mark.parametrize("size", with_few([1], [1, 2]))
def test_a_policy_learns_from_its_newest_weights(size: int, tmp_path: Path) -> None:
    ((arms, chances),) = run_ranks(1, _learn, tmp_path / "alone")
    whole = run_ranks(size, _learn, tmp_path / "whole")
    first = run_ranks(size, _learn, tmp_path, 23)
    rest = run_ranks(size, _learn, tmp_path, resume="must")
    assert chances[1] > 0.8  # it has found the best arm
    rounds = zip(*(played for played, _ in whole), strict=True)
    together = [[arm for part in parts for arm in part] for parts in rounds]
    assert together == arms  # the same plays, whoever made them
    for (played, last), (before, _), (after, again) in zip(whole, first, rest, strict=True):
        assert last == pytest.approx(chances, rel=1e-9)  # the order of sums
        assert (before + after, again) == (played, last)
