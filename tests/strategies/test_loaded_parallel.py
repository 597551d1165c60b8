"""Models that transformers loads parallel train as they do on one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.needs import late
from tests.helpers.ranks import in_turn, run_ranks
from tests.strategies.test_model_parallel import BATCH, Moment, Outcome, difference
from tests.strategies.toys import WORDS, Figures, Texts, full
from trainkit import Trainer
from trainkit.callbacks import Checkpoint

transformers, distributed = late("transformers"), late("transformers.distributed")

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")


@pytest.fixture(autouse=True)
def _loads_parallel() -> None:
    config = getattr(distributed, "DistributedConfig", None)
    if "dp_replicate_size" not in getattr(config, "__dataclass_fields__", ()):
        pytest.skip("transformers 5.23 loads models parallel")


SIZES = {
    "vocab_size": WORDS + 3,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def saved(folder: Path) -> dict[str, Path]:
    """Write a Llama, and mixtures of experts, the second of which sums gradients up itself."""
    torch.manual_seed(3)
    experts = {**SIZES, "num_experts_per_tok": 2}
    models = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
        "mixtral": transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**experts, num_local_experts=4)
        ),
        "qwen": transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                **experts, num_experts=4, head_dim=4, moe_intermediate_size=16
            )
        ),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return {name: folder / name for name in models}


def train(
    rank: int, folder: Path, layout: dict[str, int], accumulation: int, steps: int
) -> Outcome:
    figures = Figures()
    trainer = Trainer(
        max_steps=steps,
        strategy="model_parallel" if layout else "single",
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.5,
        callbacks=[figures],
        log_every_n_steps=1,
    )
    options: dict[str, Any] = {}
    if layout:
        options["distributed_config"] = distributed.DistributedConfig(**layout)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **options
    )
    groups = layout.get("fsdp_size", 1) * layout.get("dp_replicate_size", 1)
    texts = Texts(torch.float32)
    trainer.fit(
        model,
        DataLoader(texts, batch_size=BATCH // groups // accumulation),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
    )
    metrics = trainer.evaluate(model, DataLoader(texts, batch_size=5))
    weights = {name: full(p) for name, p in model.named_parameters()}
    return Outcome(figures.losses, figures.norms, metrics, [], weights)


def compare(size: int, steps: int, cases: list[tuple[Path, dict[str, int], int]]) -> None:
    alone: list[Any] = [(folder, {}, accumulation, steps) for folder, _, accumulation in cases]
    expected = run_ranks(1, in_turn, train, alone)[0]
    for outcomes in run_ranks(size, in_turn, train, [(*case, steps) for case in cases]):
        for (folder, layout, accumulation), one, other in zip(
            cases, expected, outcomes, strict=True
        ):
            found = difference(one, other)
            print(folder.name, layout, accumulation, found)
            assert max(found.values()) <= 1e-5, (folder.name, layout, found)


@pytest.mark.e2e
def test_a_llama_and_a_mixture_of_experts_train_as_on_one_process(tmp_path: Path) -> None:
    folders = saved(tmp_path)
    layout = {"tp_size": 2, "fsdp_size": 2}
    compare(
        4, 3, [(folders["llama"], layout, 1), (folders["mixtral"], {**layout, "ep_size": 2}, 2)]
    )


@pytest.mark.slow
def test_twenty_steps_are_those_of_one_process(tmp_path: Path) -> None:
    folders, both = saved(tmp_path), {"tp_size": 2, "fsdp_size": 2}
    layouts = [both, {**both, "ep_size": 2}, {"fsdp_size": 2, "ep_size": 2, "dp_replicate_size": 2}]
    cases = [(folders["mixtral"], layout, 2) for layout in layouts]
    cases += [(folders["llama"], both, 1), (folders["qwen"], both, 2)]
    compare(4, 20, [*cases, (folders["llama"], {"fsdp_size": 2, "dp_replicate_size": 2}, 1)])
    compare(2, 20, [(folders["qwen"], {"tp_size": 2}, 2), (folders["mixtral"], {"tp_size": 2}, 1)])


@pytest.mark.slow
def test_eight_processes_hold_shards_and_replicas_of_a_model_cut_in_two(tmp_path: Path) -> None:
    folders = saved(tmp_path)
    layout = {"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2}
    compare(8, 20, [(folders["llama"], layout, 1), (folders["mixtral"], layout, 1)])


def moments(
    rank: int, folder: Path, layout: dict[str, int], output: Path, steps: int, resume: Any
) -> list[dict[str, torch.Tensor]]:
    """Train up to a step, perhaps from a checkpoint; return what was held before and after."""
    moment = Moment()
    trainer = Trainer(
        max_steps=steps,
        strategy="model_parallel" if layout else "single",
        callbacks=[Checkpoint(every_n_steps=2), moment],
        output_dir=output,
    )
    options: dict[str, Any] = {}
    if layout:
        options["distributed_config"] = distributed.DistributedConfig(**layout)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **options
    )
    trainer.fit(
        model,
        DataLoader(Texts(torch.float32), batch_size=BATCH // layout.get("fsdp_size", 1)),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        resume=resume,
        schedule=resume and "keep",
    )
    return moment.held


@pytest.mark.slow
def test_a_checkpoint_of_experts_in_pieces_goes_on_anywhere(tmp_path: Path) -> None:
    folder, output = saved(tmp_path)["mixtral"], tmp_path / "run"
    kept = run_ranks(2, moments, folder, {"tp_size": 2}, output, 2, None)[0][-1]
    assert [*output.rglob("model-piece-1-shard-00001.safetensors")]
    layout = {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}
    for size, now, steps in ((4, layout, 4), (2, {"tp_size": 2}, 6), (1, {}, 8)):
        before, after = run_ranks(size, moments, folder, now, output, steps, "must")[0]
        shared = before.keys() & kept.keys()
        assert len(shared) > 50
        assert all(torch.equal(before[key], kept[key]) for key in shared), now
        kept = after
