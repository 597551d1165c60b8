"""A loop of one's own, on processes that share sequences, trains as on one process."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.helpers.needs import late
from tests.helpers.ranks import in_turn, run_ranks
from tests.strategies.test_context_parallel import BATCH, Sequences, llama
from trainkit import Accelerator, ConfigError, FullyShardedDataParallelPlugin
from trainkit.accelerator.parallelism import ParallelismConfig, TorchContextParallelConfig
from trainkit.strategies import DDP

transformers = late("transformers")


class Attending(nn.Module):
    """A causal model without transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(41, 16), nn.Embedding(64, 16)
        self.mix, self.scores = nn.Linear(16, 48), nn.Linear(16, 41)

    @override
    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        hidden = self.words(words) + self.places(places)
        heads = self.mix(hidden).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: Tensor = self.scores(hidden + seen.transpose(1, 2).flatten(2))
        return found


@dataclass
class Case:
    sizes: dict[str, Any]
    way: str = "labels"  # which the model is given; "buffers": the loop cuts; "own": its model too
    sharded: bool = False


def train(rank: int, case: Case, groups: int) -> list[float]:
    settings: dict[str, Any] = {
        "fsdp_plugin": FullyShardedDataParallelPlugin() if case.sharded else None
    }
    if groups:
        settings["parallelism_config"] = ParallelismConfig(
            **case.sizes, cp_handler=TorchContextParallelConfig()
        )
    accelerator = Accelerator(cpu=True, **settings)
    torch.manual_seed(3)
    made: nn.Module = Attending() if case.way == "own" else llama()
    loader = DataLoader(Sequences(), batch_size=BATCH // (groups or 1))
    model, optimizer, loader = accelerator.prepare(
        made, torch.optim.AdamW(made.parameters(), lr=3e-3), loader
    )
    found: list[float] = []
    for batch in loader:
        words, labels = batch["input_ids"], batch["labels"]
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        count = (shifted != -100).sum()
        total = accelerator.reduce(count)
        places = torch.arange(words.shape[1]).expand_as(words).clone()
        cut = case.way != "labels"
        buffers = [words, shifted, places]
        context = accelerator.maybe_context_parallel(buffers, [1, 1, 1], {places})
        with context if cut else nullcontext():
            if cut:
                scores = (
                    model(words, places)
                    if case.way == "own"
                    else model(input_ids=words, position_ids=places, use_cache=False).logits
                )
                loss = F.cross_entropy(scores.flatten(0, 1), shifted.flatten(), reduction="sum")
            else:
                loss = model(input_ids=words, labels=labels).loss * count
            many = accelerator.num_processes if cut else max(groups, 1)
            accelerator.backward(loss * many / total)
        assert words.shape[1] == 24
        assert places.shape[1] == (24 // case.sizes["cp_size"] if cut and groups else 24)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        everyone = accelerator.processes if cut else accelerator.data_processes
        found += [float(everyone.all_reduce(loss.detach().clone()) / total), float(norm)]
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    return [*found, *(float(each) for p in state.values() for each in p.flatten()[:5])]


def compare(processes: int, cases: list[Case]) -> None:
    alone = [(Case(case.sizes, case.way), 0) for case in cases]
    expected = run_ranks(1, in_turn, train, alone)[0]
    each = [(case, processes // case.sizes["cp_size"]) for case in cases]
    for case, one, other in zip(
        cases, expected, run_ranks(processes, in_turn, train, each)[0], strict=True
    ):
        apart = max(abs(a - b) for a, b in zip(one, other, strict=True))
        print(case, apart)
        assert apart <= 1e-5, case


@pytest.mark.e2e
def test_a_loop_trains_on_pieces_as_on_whole_sequences() -> None:
    compare(2, [Case({"cp_size": 2}, way) for way in ("labels", "buffers", "own")])
    sizes = {"cp_size": 2, "dp_replicate_size": 2}
    sharded = {"cp_size": 2, "dp_shard_size": 2}
    compare(
        4,
        [
            Case(sizes),
            Case(sizes, "own"),
            Case(sharded, "buffers", True),
            Case(sharded, "labels", True),
        ],
    )


def refused(rank: int) -> None:
    accelerator = Accelerator(cpu=True, strategy=DDP(context_parallel=2))
    model = accelerator.prepare(llama())
    words = Sequences().rows[0]["input_ids"][None]
    for buffers, dims, words_of in (
        ([words], [], "for each of the 1"),
        ([words[:, :22]], [1], "lengths `22`"),
    ):
        with pytest.raises(ConfigError, match=words_of):  # noqa: SIM117
            with accelerator.maybe_context_parallel(buffers, dims):
                pass
    with accelerator.maybe_context_parallel([words], [1]):
        mask = torch.ones_like(words)
        mask[:, :2] = 0
        with pytest.raises(ConfigError, match="leaves some out"):
            model(input_ids=words, attention_mask=mask)
        q = torch.rand(1, 1, 12, 4)
        with pytest.raises(ConfigError, match="there is a mask"):
            F.scaled_dot_product_attention(q, q, q, torch.ones(12, 12, dtype=torch.bool))
    with pytest.raises(ConfigError, match="no_restore_buffers"):  # noqa: SIM117
        with accelerator.maybe_context_parallel([words], [1], {mask}):
            pass
    assert words.shape == (1, 24)
    with pytest.raises(ConfigError, match="cp_size` is 2, but the strategy"):
        ParallelismConfig(cp_size=2).strategy(DDP(context_parallel=4))
    with pytest.raises(ConfigError, match="cp_comm_strategy"):
        TorchContextParallelConfig("alltoall")


@pytest.mark.e2e
def test_what_a_loop_cannot_cut_is_refused() -> None:
    run_ranks(2, refused)
