"""Rows of whole items: filled well, and each token has the loss and gradient it had alone."""

import pickle
import random
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.callbacks import OfOneRun, StopsAt
from tests.helpers.needs import needs_transformers
from tests.helpers.ranks import run_ranks
from trainkit import ConfigError, DataError, StepOutput, Trainer
from trainkit.callbacks import Checkpoint, Throughput
from trainkit.data import group_by_length, pack
from trainkit.training.callback import Callback
from trainkit.training.run import Run

WORDS, ROW = 23, 16


def items(count: int = 12, longest: int = ROW) -> list[dict[str, Any]]:
    """Return token lists whose labels are ignored here and there."""
    draw = random.Random(3)
    made = []
    for _ in range(count):
        tokens = [draw.randrange(1, WORDS) for _ in range(draw.randrange(2, longest + 1))]
        labels = [token if draw.random() < 0.6 else -100 for token in tokens]
        made.append({"input_ids": tokens, "labels": labels})
    return made


def filled(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch filled up on the right, as one does without packing."""
    longest = max(len(item["input_ids"]) for item in batch)
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    batch = [item | {"attention_mask": [1] * len(item["input_ids"])} for item in batch]
    return {
        name: torch.tensor([i[name] + [fill] * (longest - len(i[name])) for i in batch])
        for name, fill in fills.items()
    }


def test_every_token_is_in_one_row_and_positions_begin_anew_with_each_item() -> None:
    data = items(40)
    rows = pack(data, ROW)
    found = []
    for row in (rows[index] for index in range(len(rows))):
        assert {name: tuple(value.shape) for name, value in row.items()} == dict.fromkeys(
            ("input_ids", "labels", "position_ids"), (ROW,)
        ) | {"attention_mask": (1, ROW, ROW)}
        starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), ROW]
        for start, stop in pairwise(starts):
            assert row["position_ids"][start:stop].tolist() == list(range(stop - start))
            assert row["labels"][start] == -100
            found.append(row["input_ids"][start:stop].tolist())
    wanted = [item["input_ids"] for item in data]
    assert sorted(tokens for tokens in found if any(tokens)) == sorted(wanted)
    tokens = sum(map(len, wanted))
    assert rows.padding == 1 - tokens / (len(rows) * ROW)
    assert len(rows) <= -(-tokens // ROW) + 2  # close to the fewest that there could be


def test_rows_are_filled_far_better_than_batches() -> None:
    data = items(400, longest=ROW // 2)
    assert pack(data, ROW).padding < 0.03


def test_tokens_that_a_mask_hides_are_left_out_and_other_fields_follow() -> None:
    item = {
        "input_ids": torch.tensor([0, 7, 8, 9]),
        "attention_mask": torch.tensor([0, 1, 1, 1]),
        "token_type_ids": torch.tensor([0, 1, 1, 1]),
    }
    row = pack([item], 5, pad_id=4)[0]
    assert row["input_ids"].tolist() == [7, 8, 9, 4, 4]
    assert row["labels"].tolist() == [-100, 8, 9, -100, -100]
    assert row["token_type_ids"].tolist() == [1, 1, 1, 0, 0]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("longer", "rows"), [("truncate", [[1, 2, 3]]), ("split", [[1, 2, 3], [4, 5, 0]]), ("drop", [])]
)
def test_longer_items_are_an_error_unless_it_is_said_what_becomes_of_them(
    longer: Any, rows: list[list[int]]
) -> None:
    data = [{"input_ids": [6, 6, 6]}, {"input_ids": [1, 2, 3, 4, 5]}]
    with pytest.raises(DataError, match="Item 1 has 5 tokens, more than the 3 of a row"):
        pack(data, 3)
    packed = pack(data, 3, longer=longer)
    found = sorted(packed[index]["input_ids"].tolist() for index in range(len(packed)))
    assert found == sorted([*rows, [6, 6, 6]])


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(ConfigError, match="`longer` must be one of"):
        pack(items(), ROW, longer="cut")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`max_length`"):
        pack(items(), 0)
    with pytest.raises(ConfigError, match=r"item 0 of the data set is one with \['text'\]"):
        pack([{"text": "a"}], ROW)
    with pytest.raises(ConfigError, match="has no length"):
        pack(iter(items()), ROW)
    with pytest.raises(DataError, match="None of the 1 items"):
        pack([{"input_ids": []}], ROW)
    for other in (1, "a text", [1, 2, 3]):
        with pytest.raises(
            DataError, match="`label` of item 0 has not one value for each of its 2"
        ):
            pack([{"input_ids": [1, 2], "label": other}], ROW)[0]
    mixed = [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "token_type_ids": [0, 0]}]
    with pytest.raises(DataError, match="must hold the same"):
        pack(mixed, ROW)[0]


def test_items_that_change_their_length_are_found() -> None:
    data = [{"input_ids": [1, 2]}]
    rows = pack(data, ROW)
    data[0] = {"input_ids": [1, 2, 3]}
    with pytest.raises(DataError, match="has 3 tokens, but had 2 when it was packed"):
        rows[0]


def test_workers_get_a_packed_data_set() -> None:
    rows = pack(items(), ROW)
    again = pickle.loads(pickle.dumps(rows))
    assert all(again[i]["labels"].equal(rows[i]["labels"]) for i in range(len(rows)))


class Causal(Trainer):
    """Computes the loss in the dtype of the model: transformers does so in fp32."""

    losses: list[Tensor]

    @override
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return StepOutput(loss, (labels != -100).sum())


class FirstUpdate(Callback):
    """Keeps loss and gradients of the first window."""

    @override
    def on_gradients(self, run: Run) -> None:
        if run.state.step == 0:
            self.loss = run.objectives.loss()
            named = run.module.named_parameters()
            self.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=WORDS, num_attention_heads=2, pad_token_id=0, **shape)
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=WORDS, n_positions=ROW, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, **none
    )
    return GPT2LMHeadModel(config)


def first_update(make: Any, data: Any, batch: int, attention: str, **loader: Any) -> FirstUpdate:
    torch.manual_seed(0)
    model = make().double()
    model.set_attn_implementation(attention)
    model.config.use_cache = False  # as the default steps say
    seen = FirstUpdate()
    trainer = Causal(max_steps=1, callbacks=[seen], gradient_accumulation_steps=2)
    trainer.fit(model, DataLoader(data, batch, **loader), optimizer=partial(SGD, lr=0.1))
    return seen


@needs_transformers
@pytest.mark.parametrize(
    ("make", "attention", "mask"),
    [
        pytest.param(llama, "sdpa", True, marks=pytest.mark.e2e),
        pytest.param(llama, "eager", True, marks=pytest.mark.e2e),
        pytest.param(llama, "eager", False, marks=pytest.mark.e2e),
        pytest.param(llama, "sdpa", False, marks=pytest.mark.e2e),
        pytest.param(gpt2, "sdpa", True, marks=pytest.mark.e2e),
        pytest.param(gpt2, "sdpa", False, marks=pytest.mark.e2e),
        pytest.param(llama, "sdpa", torch.bool, marks=pytest.mark.e2e),
    ],
)
def test_loss_and_gradients_are_those_of_the_batch_that_is_not_packed(
    make: Any, attention: str, mask: Any
) -> None:
    data = items()
    plain = first_update(make, data, len(data) // 2, attention, collate_fn=filled)
    rows = pack(data, ROW, mask=torch.float64 if mask is True else mask)
    packed = first_update(make, rows, -(-len(rows) // 2), attention)
    # Sums have another order, and some steps inside of the models are in fp32 at all times. A token
    # that saw another item would move the loss by 1e-4.
    torch.testing.assert_close(packed.loss, plain.loss, rtol=1e-10, atol=0)
    assert packed.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(packed.gradients[name], gradient, rtol=0, atol=1e-8)


@pytest.mark.e2e
def test_the_default_steps_keep_items_apart_without_a_mask() -> None:
    def loss(mask: bool) -> float:
        torch.manual_seed(0)
        model: Any = llama()
        assert model.config.use_cache
        rows = DataLoader(pack(items(), ROW, mask=mask), 4)
        trainer = Trainer(max_steps=1, callbacks=[])
        evaluated = trainer.evaluate(model, rows)["eval/loss"]
        trainer.fit(model, rows, optimizer=partial(SGD, lr=1.0))
        return evaluated + trainer.evaluate(model, rows)["eval/loss"]

    assert loss(False) == pytest.approx(loss(True), rel=1e-6)


class Logged(Callback):
    """Keeps the latest log."""

    @override
    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.values = values


def padding_of(data: Any, **loader: Any) -> float:
    logged = Logged()
    trainer = Causal(max_epochs=1, callbacks=[Throughput(), logged], log_every_n_steps=100)
    trainer.fit(llama(), DataLoader(data, 4, **loader), optimizer=partial(SGD, lr=0.1))
    return logged.values["data/padding"]


@needs_transformers
def test_the_share_of_padding_is_logged() -> None:
    data = items()
    batches = [filled(data[start : start + 4]) for start in range(0, 12, 4)]
    places = sum(batch["input_ids"].numel() for batch in batches)
    tokens = sum(len(item["input_ids"]) for item in data)
    assert padding_of(data, collate_fn=filled) == pytest.approx(1 - tokens / places, abs=1e-6)
    rows = pack(data, ROW)
    assert padding_of(rows) == pytest.approx(rows.padding, abs=1e-6)


def test_batches_of_similar_length_follow_from_seed_and_epoch_alone() -> None:
    data = items(230)
    lengths = [len(item["input_ids"]) for item in data]

    def epochs(seed: int, size: int) -> list[list[int]]:
        orders: list[list[int]] = []

        class Seen(Callback):
            @override
            def on_microbatch_start(self, run: Run, batch: Any) -> None:
                place = run.state.epoch
                orders.extend([] for _ in range(place + 1 - len(orders)))
                orders[place] += batch["index"].tolist()

        rows: Any = [item | {"index": torch.tensor(index)} for index, item in enumerate(data)]
        loader: Any = DataLoader(
            rows,
            size,
            sampler=group_by_length(rows, 8),
            collate_fn=lambda batch: {"index": torch.stack([one["index"] for one in batch])},
        )

        class Nothing(Trainer):
            @override
            def training_step(self, model: nn.Module, batch: Any) -> Tensor:
                outputs: Tensor = model(batch["index"][:, None].float())
                return outputs.mean()

        Nothing(max_epochs=2, seed=seed, callbacks=[Seen()]).fit(
            nn.Linear(1, 1), loader, optimizer=partial(SGD, lr=0.1)
        )
        return orders

    first = epochs(0, 8)
    assert first == epochs(0, 4)  # of other batches, and of another call
    assert first[0] != first[1]
    assert first != epochs(1, 8)
    for order in first:
        assert sorted(order) == list(range(230))
        batches = [order[start : start + 8] for start in range(0, 230, 8)]
        assert len(batches[-1]) == 230 % 8
        of_batches = [[lengths[index] for index in batch] for batch in batches]
        spread = [max(of_batch) - min(of_batch) for of_batch in of_batches]
        assert sum(spread) / len(spread) < 2  # of 14; at random it would be 12


class Steps(OfOneRun):
    """Keeps which items each step had, in their order."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    @override
    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        self.steps.append(sorted(batch[1].tolist()))


def grouped(
    rank: int, folder: Path, size: int, stop_at: int = -1, resume: Any = None
) -> list[list[int]]:
    """Return the items of each step on this process, with batches of `size` over all of them."""
    data = items(61)
    seen = Steps()
    trainer = Trainer(
        max_epochs=2,
        split_batches=True,
        output_dir=folder,
        callbacks=[seen, StopsAt(stop_at), Checkpoint(every_n_epochs=2)],
    )
    rows = TensorDataset(torch.ones(61, 1), torch.arange(61))
    lengths = [len(item["input_ids"]) for item in data]
    loader = DataLoader(rows, size, sampler=group_by_length(data, size, lengths=lengths))
    model, optimizer = nn.Linear(1, 1), partial(SGD, lr=0.1)
    trainer.fit(model, loader, optimizer=optimizer, loss_fn=mean_of_outputs, resume=resume)
    return seen.steps


def mean_of_outputs(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.mean()


@pytest.mark.e2e
def test_batches_of_similar_length_are_shared_out_and_gone_on_with(tmp_path: Path) -> None:
    (whole,) = run_ranks(1, grouped, tmp_path / "whole", 8)
    assert len(whole) == 16
    for split in (3, 8):  # inside an epoch, and at its end
        folder = tmp_path / str(split)
        begun = run_ranks(2, grouped, folder, 8, stop_at=split)
        shutil.copytree(folder, again := tmp_path / f"again-{split}")
        ended = run_ranks(2, grouped, folder, 8, resume="must")
        both = [a + b for a, b in zip(*begun, strict=True)]
        both += [a + b for a, b in zip(*ended, strict=True)]
        assert [sorted(step) for step in both] == whole
        (alone,) = run_ranks(1, grouped, again, 8, resume="must")  # on one process now
        assert alone == whole[split:]


def test_the_longest_batch_is_the_first() -> None:
    lengths = [*range(1, 1000), 5000, *range(1000, 1500)]
    for epoch in range(3):
        torch.manual_seed(epoch)
        order = list(group_by_length([None] * 1500, 8, lengths=lengths))
        assert sorted(order) == list(range(1500))
        batches = [[lengths[i] for i in order[at : at + 8]] for at in range(0, 1496, 8)]
        assert max(batches[0]) == 5000
        assert batches[1:] != sorted(batches[1:], reverse=True)


def test_lengths_that_are_known_need_not_be_read() -> None:
    assert sorted(group_by_length([None] * 5, 2, lengths=[5, 4, 3, 2, 1])) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="`lengths` must have one for each item"):
        group_by_length(items(), 2, lengths=[1])
    with pytest.raises(ConfigError, match="`batch_size`"):
        group_by_length(items(), 0)
    assert list(group_by_length([None], 2, lengths=[3])) == [0]
