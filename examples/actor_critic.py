"""An actor and its critic, each with an optimizer and a loss of its own: a pole learns to stand.

    python examples/actor_critic.py
    trainkit launch --num_processes 2 examples/actor_critic.py

Each sample is an episode: where it begins, and the chances that its actions are drawn by. So an
epoch is a set of episodes played by the actor of that moment, the same ones on any number of
processes. One step plays them, and gives the actor its loss and the critic its own, each weighted
by the moments that were played; the update of each comes at the end of the window.
"""

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from trainkit import Trainer

MOMENTS = 100  # of an episode, at most
DISCOUNT = 0.98
ACTOR, CRITIC = partial(Adam, lr=1e-2), partial(Adam, lr=2e-2)


class Episodes(Dataset[tuple[Tensor, Tensor]]):
    """Where episodes begin, and a uniform number for each of their moments."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # trainkit seeds the generator for each sample of each epoch.
        return torch.rand(4) * 0.1 - 0.05, torch.rand(MOMENTS)


class ActorCritic(nn.Module):
    """What to do in a state, and what is still to come of it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    @override
    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return log_softmax(self.actor(states), -1), self.critic(states).squeeze(-1)


def move(states: Tensor, right: Tensor) -> Tensor:
    """Return the states of a cart with a pole 0.02 s later (Barto, Sutton and Anderson, 1983)."""
    _, speed, angle, turn = states.unbind(-1)
    force = torch.where(right, 10.0, -10.0)
    pull = (force + 0.05 * turn**2 * angle.sin()) / 1.1
    bend = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    push = pull - 0.05 * bend * angle.cos() / 1.1
    changes = torch.stack([speed, push, turn, bend], -1)
    return states + 0.02 * changes


@torch.no_grad()
def play(model: nn.Module, states: Tensor, chances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, actions, and which moments were played, each of (episodes, moments)."""
    seen, actions, played = [], [], []
    stands = torch.ones(len(states), dtype=torch.bool, device=states.device)
    for chance in chances.unbind(-1):
        right = chance < model(states)[0][:, 1].exp()
        seen.append(states)
        actions.append(right.long())
        played.append(stands)
        states = torch.where(stands[:, None], move(states, right), states)
        stands = stands & (states[:, 0].abs() < 2.4) & (states[:, 2].abs() < 0.21)
    return torch.stack(seen, 1), torch.stack(actions, 1), torch.stack(played, 1)


class ActorCriticTrainer(Trainer):
    """Plays the episodes of a batch, and learns from them."""

    @override
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert self.run is not None
        states, actions, played = play(model, *batch)
        to_come = torch.zeros_like(played[:, 0], dtype=torch.float32)
        returns = torch.zeros(played.shape, device=played.device)
        for moment in reversed(range(MOMENTS)):
            to_come = played[:, moment] * (1 + DISCOUNT * to_come)
            returns[:, moment] = to_come
        logs, values = model(states)
        advantages = (returns - values.detach()) / 10
        chosen = logs.gather(-1, actions[..., None]).squeeze(-1)
        surprise = -(logs.exp() * logs).sum(-1)
        count = played.sum()
        actor = -(advantages * chosen + 0.01 * surprise)[played].sum() / count
        critic = (returns - values)[played].square().sum() / count
        self.run.optimize("actor", actor, weight=count)
        self.run.optimize("critic", critic, weight=count)
        return {"moments": played.float().sum(1).mean()}

    @override
    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        assert self.run is not None
        self.run.log({"moments": play(model, *batch)[2].float().sum(1).mean()})
        return {}


def main() -> None:
    """Train, and print how long the pole stands before and after."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=30, help="of 128 episodes (default: 30)")
    torch.manual_seed(0)
    model = ActorCritic()
    trainer = ActorCriticTrainer(
        max_epochs=parser.parse_args().epochs, split_batches=True, max_grad_norm=1.0, callbacks=[]
    )
    unseen = DataLoader(Episodes(200), batch_size=100)
    before = trainer.evaluate(model, unseen)["eval/moments"]
    trainer.fit(
        model,
        DataLoader(Episodes(128), batch_size=32),
        optimizer={"actor": ACTOR, "critic": CRITIC},
        lr_scheduler={"actor": "linear"},
    )
    after = trainer.evaluate(model, unseen)["eval/moments"]
    trainer.processes.print(f"the pole stands for {before:.1f} moments before, {after:.1f} after")
    trainer.close()


if __name__ == "__main__":
    main()
