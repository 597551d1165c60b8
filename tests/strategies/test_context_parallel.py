"""Processes that share sequences train as one process does that has them whole."""

import copy
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from tests.helpers.needs import HAS_TRANSFORMERS_5, late
from tests.helpers.ranks import RanksError, in_turn, run_ranks
from tests.strategies.test_model_parallel import Moment, Outcome, difference
from tests.strategies.toys import Figures, full
from trainkit import Callback, ConfigError, Run, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.distributed import Processes
from trainkit.distributed.group import on_its_own
from trainkit.strategies import DDP, FSDP, Strategy
from trainkit.strategies.context_parallel import ContextParallel, Cut
from trainkit.types import StepResult

transformers = late("transformers")

SIZES = {
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
BATCH, SAMPLES = 4, 24
STRATEGIES: dict[str, Callable[..., Strategy]] = {"ddp": DDP, "fsdp": FSDP}


class Sequences(Dataset[dict[str, Tensor]]):
    """Long rows of words, of which some count for nothing.

    Args:
        length: Of a row.
        how: "plain", "late" or "early" (filled up there), or "packed" (documents in a row).
    """

    def __init__(self, length: int = 24, how: str = "plain") -> None:
        generator = torch.Generator().manual_seed(7)
        self.rows: list[dict[str, Tensor]] = []
        for index in range(SAMPLES):
            words = torch.randint(0, 41, (length,), generator=generator)
            # Labels lie in one half more often: pieces have unlike weights.
            ignored = torch.rand(length, generator=generator) < torch.linspace(0.8, 0.0, length)
            row = {"input_ids": words, "labels": words.masked_fill(ignored, -100)}
            places, padding = torch.arange(length), torch.ones(length, dtype=torch.int64)
            if how == "packed":
                cut = 3 + index % 7
                row["position_ids"] = torch.cat([places[:cut], places[: length - cut]])
            elif how != "plain":
                fill = 1 + index % 5
                hole = slice(length - fill, None) if how == "late" else slice(fill)
                padding[hole], row["labels"][hole] = 0, -100
                row["attention_mask"] = padding
                if how == "early":
                    row["position_ids"] = (padding.cumsum(0) - 1).clamp_min(0)
            self.rows.append(row)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def llama(**options: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**SIZES, **options})
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def gpt2(**options: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=41, n_positions=64, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")


MODELS: dict[str, Callable[..., Any]] = {"llama": llama, "gpt2": gpt2}


def right(predictions: Tensor, references: Tensor) -> float:
    counted = references != -100
    return float((predictions == references)[counted].float().mean())


@dataclass
class Case:
    strategy: str = "ddp"
    size: int = 2  # of the groups that share a sequence
    model: str = "llama"
    data: tuple[int, str] = (24, "plain")
    steps: int = 10
    options: dict[str, Any] = field(default_factory=dict)  # of the trainer
    apart: float = 1e-5
    metrics: list[Any] | None = None


def train(rank: int, case: Case, groups: int) -> Outcome:
    figures = Figures()
    strategy: Any = "single"
    if groups:
        strategy = STRATEGIES[case.strategy](context_parallel=case.size)
    options = {"max_grad_norm": 0.5, **case.options}
    accumulation = options.get("gradient_accumulation_steps", 1)
    trainer = Trainer(
        max_steps=case.steps,
        strategy=strategy,
        callbacks=[figures],
        log_every_n_steps=1,
        **options,
    )
    model = MODELS[case.model]()
    data = Sequences(*case.data)
    batch = BATCH // (groups or 1) // accumulation
    trainer.fit(
        model,
        (DataLoader(data, batch_size=batch, shuffle=True), DataLoader(data, batch_size=5)),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
    )
    metrics = trainer.evaluate(model, DataLoader(data, batch_size=5), metrics=case.metrics)
    weights = {name: full(p) for name, p in model.named_parameters()}
    return Outcome(figures.losses, figures.norms, metrics, [], weights)


def compare(processes: int, cases: list[Case]) -> None:
    expected = run_ranks(1, in_turn, train, [(case, 0) for case in cases])[0]
    each = [(case, processes // case.size) for case in cases]
    for outcomes in run_ranks(processes, in_turn, train, each):
        for case, one, other in zip(cases, expected, outcomes, strict=True):
            assert len(one.losses) == case.steps
            found = difference(one, other)
            print(case, found)
            assert max(found.values()) <= case.apart, (case, found)


def test_two_processes_share_sequences_and_train_as_one() -> None:
    compare(2, [Case()])


@pytest.mark.e2e
def test_models_rows_and_lengths_of_all_kinds_train_as_on_one_process() -> None:
    again = {"gradient_checkpointing": True}
    compare(
        2,
        [
            Case("fsdp"),
            # Filled up to 24. The GPT-2 of transformers 4 is refused: nothing reaches its layers.
            Case(
                model="gpt2" if HAS_TRANSFORMERS_5 else "llama",
                data=(21, "plain"),
                metrics=[right],
            ),
            Case(data=(22, "packed"), options={"gradient_accumulation_steps": 2}),
            Case(data=(24, "late"), metrics=[right]),
            Case(data=(22, "early"), options=again),
            Case("fsdp", data=(23, "packed"), options=again),
            # A rounding of bfloat16 moves a weight by as much as the rate.
            Case("fsdp", data=(22, "early"), options={"precision": "bf16"}, apart=2e-2),
        ],
    )


@pytest.mark.e2e
def test_groups_beside_each_other_and_larger_ones_train_as_on_one_process() -> None:
    compare(4, [Case(), Case("fsdp", data=(22, "packed")), Case("fsdp", 4), Case(size=4)])


@pytest.mark.filterwarnings("ignore:.*(kernel|attention|Flash|CuDNN|cuDNN)")
def test_what_kernels_need_no_tensor_for_is_the_same_mask() -> None:
    cut = Cut(ContextParallel(Processes(on_its_own(), torch.device("cpu")), 1))
    for rows, end in ((3, 3), (3, 6), (2, 8)):
        query, key, value = torch.rand(3, 1, 2, end, 4)
        masks = [cut.mask(rows, end, torch.device(kind)) for kind in ("cpu", "meta")]
        own = query[..., :rows, :]
        seen = [F.scaled_dot_product_attention(own, key, value, m, 0.0, m is None) for m in masks]
        assert torch.equal(*seen)
        assert (masks[0] is None) == (rows == end)


class Killed(Callback):
    """Kills process 1 after 5 steps."""

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == 5 and run.processes.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def resumed(
    rank: int, groups: int, folder: Path, steps: int, resume: Any, *others: Callback
) -> list[dict[str, Tensor]]:
    moment = Moment()
    trainer = Trainer(
        max_steps=steps,
        strategy=STRATEGIES["ddp" if groups < 2 else "fsdp"](context_parallel=2)
        if groups
        else "single",
        callbacks=[Checkpoint(every_n_steps=2), moment, *others],
        output_dir=folder,
    )
    trainer.fit(
        llama(),
        DataLoader(Sequences(), batch_size=BATCH // (groups or 1), shuffle=True),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        resume=resume,
        schedule=resume and "keep",
    )
    return moment.held


@pytest.mark.e2e
def test_what_was_killed_goes_on_alone_and_back(tmp_path: Path) -> None:
    (_, whole), folder = run_ranks(1, resumed, 0, tmp_path / "whole", 9, None)[0], tmp_path / "run"
    with pytest.raises(RanksError):
        run_ranks(2, resumed, 1, folder, 9, None, Killed())
    run_ranks(1, resumed, 0, folder, 6, "must")
    for held in run_ranks(4, resumed, 2, folder, 9, "must"):
        apart = [float((held[-1][key] - whole[key]).abs().max()) for key in whole]
        print(max(apart))
        assert len(apart) > 60
        assert max(apart) <= 1e-5


def refused(rank: int) -> list[str]:
    found = []

    def note(model: Any, words: str, rows: Any = None, **settings: Any) -> None:
        data: Any = Sequences() if rows is None else rows
        strategy = settings.pop("strategy", None) or DDP(context_parallel=2)
        with pytest.raises(ConfigError, match=words) as error:
            Trainer(max_steps=1, callbacks=[], strategy=strategy, **settings).fit(
                model, DataLoader(data, batch_size=2), optimizer=torch.optim.SGD
            )
        found.append(str(error.value))

    eager = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**SIZES), attn_implementation="eager"
    )
    note(eager, '"eager".*attn_implementation="sdpa"')
    note(torch.nn.Linear(1, 1), "no causal model of transformers")
    mistral = transformers.MistralConfig(**SIZES, sliding_window=8)
    note(transformers.MistralForCausalLM(mistral), "sliding_attention")
    note(llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "scaled by the length")
    note(llama(), "`torch.compile`", compile={"backend": "eager"})
    unlike = [{**row, "input_ids": (row["input_ids"] + rank) % 41} for row in Sequences().rows]
    note(llama(), "must see the same batch", unlike)
    early = [{**row} for row in Sequences(24, "early").rows]
    for row in early:
        del row["position_ids"]
    note(llama(), "no `position_ids`", early)
    unlabelled = [{"input_ids": row["input_ids"]} for row in Sequences().rows]
    note(llama(), "Pass `labels`", unlabelled)
    note(llama(), "must divide the number of processes", strategy=DDP(context_parallel=3))
    return found


@pytest.mark.e2e
def test_what_cannot_be_cut_is_refused_by_a_sentence() -> None:
    for found in run_ranks(2, refused):
        assert len(found) == 9


def again_alone(rank: int) -> list[dict[str, float]]:
    """Evaluate a model that was cut, under a strategy that cuts nothing, and cut again."""
    model, loader = llama(), DataLoader(Sequences(), batch_size=5)
    found = []
    for strategy in (DDP(context_parallel=2), DDP(), DDP(context_parallel=2)):
        trainer = Trainer(max_steps=1, callbacks=[], strategy=strategy)
        found.append(trainer.evaluate(model, loader, metrics=[right]))
    assert copy.deepcopy(model).config._attn_implementation == "context_parallel"
    return found


@pytest.mark.e2e
def test_the_next_strategy_cuts_nothing_unless_it_is_told() -> None:
    for first, *others in run_ranks(2, again_alone):
        assert 0 < first["eval/right"] < 1
        assert all(each == pytest.approx(first, abs=1e-6) for each in others)
