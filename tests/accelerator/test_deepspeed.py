"""`Accelerator` under DeepSpeed's ZeRO trains as it does under DDP."""

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import run_ranks
from trainkit import Accelerator, ConfigError, load_checkpoint_in_model
from trainkit.accelerator.deepspeed_plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs the extra `deepspeed`"
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*all_gather_into_tensor.* is deprecated", "ignore:.*reduce_scatter_tensor.* is"
)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 17), nn.GELU(), nn.LayerNorm(17), nn.Linear(17, 3))


def data() -> TensorDataset:
    torch.manual_seed(0)
    inputs = torch.randn(83, 6)
    return TensorDataset(inputs, (inputs[:, 0] * 2).long() % 3)


class Loop:
    """A loop of a user's own."""

    def __init__(self, clip: float | None = 0.3, **options: Any) -> None:
        dummies, self.drops = options.pop("dummies", False), options.pop("drops", None)
        self.accelerator = Accelerator(cpu=True, **options)
        self.clip = clip
        model: Any = net()
        parameters: list[Any] = [*model.parameters()]
        groups: list[dict[str, Any]] = [
            {"params": parameters[:2], "lr": 2e-2},
            {"params": parameters[2:]},
        ]
        optimizer: Any = AdamW(groups, lr=1e-2, weight_decay=0.1)
        schedule: Any = CosineAnnealingLR(optimizer, 60)
        if dummies:
            optimizer = DummyOptim(parameters, lr=1e-2, weight_decay=0.1)
            schedule = DummyScheduler(optimizer, total_num_steps=40, warmup_num_steps=4)
        loader = DataLoader(data(), batch_size=4, shuffle=True)
        torch.manual_seed(7)
        made = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = made
        self.figures: list[float] = []

    def train(self, steps: int) -> None:
        accelerator, done = self.accelerator, 0
        while True:
            for number, (inputs, labels) in enumerate(self.loader):
                with accelerator.accumulate(self.model):
                    loss = nn.functional.cross_entropy(self.model(inputs), labels)
                    accelerator.backward(loss)
                    if number % 6 == self.drops:  # what the loop does not want
                        (self.optimizer if self.drops == 1 else self.model).zero_grad()
                        if accelerator.sync_gradients:
                            continue
                    if accelerator.sync_gradients and self.clip is not None:
                        norm = accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                        self.figures.append(float(norm))
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.figures += [float(loss), *self.schedule.get_last_lr()]
                done += accelerator.sync_gradients
                if done == steps:
                    return

    def metrics(self) -> float:
        found = [
            self.accelerator.gather_for_metrics((self.model(inputs).argmax(1), labels))
            for inputs, labels in self.accelerator.prepare(DataLoader(data(), batch_size=5))
        ]
        right, total = sum(int((a == b).sum()) for a, b in found), sum(len(a) for a, _ in found)
        assert total == 83
        return right / total

    def weights(self) -> dict[str, torch.Tensor]:
        return {k: v.clone() for k, v in self.accelerator.get_state_dict(self.model).items()}


def apart(one: Loop, other: Loop) -> float:
    pairs = [(torch.tensor(one.figures), torch.tensor(other.figures))]
    pairs += [(value, other.weights()[key]) for key, value in one.weights().items()]
    return max(float((a - b).abs().max()) for a, b in pairs)


def trained_both_ways(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    own = None
    cases = ((1, "no", 2), (2, "no", 1), (2, "fp16", None), (1, "bf16", 3))
    for stage, precision, drops in cases:
        options: Any = {"mixed_precision": precision, "drops": drops}
        same = Loop(gradient_accumulation_steps=2, **options)
        same.train(20)
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2)
        own = Loop(deepspeed_plugin=plugin, **options)
        own.train(20)
        assert own.metrics() == same.metrics()
        found[f"{stage} {precision}"] = apart(own, same)
        assert plugin.deepspeed_config["train_batch_size"] == 16
    assert own is not None
    own.accelerator.save_model(own.model, folder / "model")
    read = net()
    load_checkpoint_in_model(read, folder / "model")
    assert all(torch.equal(v, own.weights()[k]) for k, v in read.state_dict().items())
    with pytest.raises(ConfigError, match="in parts, one on each process"):
        own.optimizer.state_dict()
    own.accelerator.free_memory()
    return found


@needs_deepspeed
@pytest.mark.e2e
def test_a_loop_trains_as_under_ddp(tmp_path: Path) -> None:
    found = run_ranks(2, trained_both_ways, tmp_path)[0]
    print(found)
    assert all(difference < 1e-6 for difference in found.values()), found


def saved_and_loaded(rank: int, folder: Path) -> None:
    def made() -> Loop:
        return Loop(deepspeed_plugin=DeepSpeedPlugin(), gradient_accumulation_steps=2)

    whole = made()
    whole.train(5)
    whole.accelerator.save_state(folder / "state")
    after = len(whole.figures)
    whole.train(6)
    again = made()
    again.accelerator.load_state(folder / "state")
    again.train(6)
    assert again.figures == whole.figures[after:]
    assert all(torch.equal(v, whole.weights()[k]) for k, v in again.weights().items())
    again.accelerator.backward(again.model(torch.randn(2, 6)).sum())
    with pytest.raises(ConfigError, match=r"gradients that no update has used"):
        again.accelerator.save_state(folder / "other")


@needs_deepspeed
def test_a_loop_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(2, saved_and_loaded, tmp_path)


JSON: dict[str, Any] = {
    "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.8, 0.9], "eps": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_max_lr": "auto"},
    },
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
    "bf16": {"enabled": True},
}


def placeholders(rank: int, folder: Path) -> None:
    path = folder / "ds.json"
    path.write_text(json.dumps(JSON))
    loop = Loop(clip=None, deepspeed_plugin=DeepSpeedPlugin(str(path)), dummies=True)
    accelerator = loop.accelerator
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 2)
    assert accelerator.distributed_type == "DEEPSPEED"
    group = loop.optimizer.param_groups[0]
    assert type(loop.optimizer.optimizer) is AdamW  # which DeepSpeed's Adam is
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-8, 0.1)
    config = accelerator.deepspeed_config
    assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (4, 8)
    assert config["scheduler"]["params"]["total_num_steps"] == 40
    loop.train(20)
    assert loop.schedule.get_last_lr() == pytest.approx(
        [1e-2 * 21 / 36]
    )  # one step for each update


@needs_deepspeed
def test_placeholders_become_what_the_configuration_says(tmp_path: Path) -> None:
    run_ranks(1, placeholders, tmp_path)


@needs_deepspeed
def test_clipping_of_the_configuration_is_done_where_the_loop_does_none() -> None:
    def trained(**options: Any) -> dict[str, torch.Tensor]:
        loop = Loop(**options)
        loop.train(5)
        return loop.weights()

    asked = trained(clip=None, deepspeed_plugin=DeepSpeedPlugin(gradient_clipping=0.05))
    both = trained(clip=0.05, deepspeed_plugin=DeepSpeedPlugin(gradient_clipping=0.05))
    same, other = trained(clip=0.05), trained(clip=None)
    assert all(torch.equal(value, both[key]) for key, value in asked.items())
    assert all(torch.allclose(value, same[key], atol=1e-6) for key, value in asked.items())
    assert not all(torch.allclose(v, other[k], atol=1e-6) for k, v in asked.items())


@needs_deepspeed
@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, {}, "is 8, but the batch size of the loader is 4"),
        ({"train_batch_size": 6}, {}, "`train_batch_size` of the DeepSpeed configuration is 6"),
        ({"gradient_accumulation_steps": 3}, {"gradient_accumulation_steps": 2}, "is 3, but that"),
        ({"fp16": {"enabled": True}}, {"mixed_precision": "bf16"}, "True, but `mixed_precision`"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, "'WarmupLR', but the prepared schedule is Cos"),
        ({"optimizer": {"type": "SGD"}}, {}, "is 'SGD', but the optimizer is AdamW"),
        ({}, {"dummies": True}, "whose `type` is None, but must be one of Adam"),
        ({"gradient_clipping": 1.0}, {}, "is 1.0, but `max_norm` of the loop is 0.3"),
    ],
)
def test_what_contradicts_the_loop_is_refused(
    config: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 2}, **config})

    def train() -> None:
        Loop(deepspeed_plugin=plugin, **options).train(1)

    with pytest.raises(ConfigError, match=words):
        train()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero_stage": 3}, "For ZeRO-3 pass `Accelerator\\(strategy=trainkit.strategies.FSDP"),
        ({"zero_stage": 0}, "for ZeRO-0 pass neither"),
        ({"enable_msamp": True}, 'mixed_precision="fp8"'),
        ({"hf_ds_config": {"train_batch_size": 1}}, "no section `zero_optimization`"),
        ({"hf_ds_config": "none.json"}, "a JSON file with one"),
        ({"hf_ds_config": {"zero_optimization": {"stage": 1}}, "zero_stage": 2}, "is 1, but `Dee"),
        ({"offload_optimizer_device": "nvme"}, "strategy=FSDP.cpu_offload=True"),
    ],
)
def test_a_plugin_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DeepSpeedPlugin(**options)


def unbound(rank: int) -> None:
    def accelerator() -> Accelerator:
        return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())

    one, model = accelerator(), net()
    with pytest.raises(ConfigError, match="needs the model and its optimizer"):
        one.prepare(AdamW(model.parameters()))
    one, model = accelerator(), net()
    prepared, optimizer = one.prepare(model, AdamW(model.parameters()))
    with pytest.raises(ConfigError, match="one model with one optimizer, but another model"):
        one.prepare(net())
    one.backward(prepared(torch.ones(2, 6)).sum())
    with pytest.raises(ConfigError, match="by the L2 norm, but `norm_type` is 1"):
        one.clip_grad_norm_(prepared.parameters(), 1.0, norm_type=1)
    optimizer.step()
    one.free_memory()
    one.prepare(other := net(), AdamW(other.parameters()))
    one.free_memory()
    cleared()


def by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def cleared() -> None:
    """Clear what a backward has left, which is sent already where buckets are small."""
    for bucket, clear in (
        (10, nn.Module.zero_grad),
        (10, partial(nn.Module.zero_grad, set_to_none=False)),
        (1000, lambda model: by_hand(model[0])),
    ):
        config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": bucket}}
        loop = Loop(deepspeed_plugin=DeepSpeedPlugin(config), gradient_accumulation_steps=2)
        accelerator, model = loop.accelerator, loop.model
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 6)).sum())
        clear(model)
        with pytest.raises(ConfigError, match="cleared or changed inside of a window"):
            accelerator.backward(model(torch.ones(2, 6)).sum())
        accelerator.gradient_state._set_sync_gradients(True)
        loop.optimizer.zero_grad()  # drops all, on all processes
        before = loop.weights()
        loop.train(1)
        assert not any(torch.equal(value, before[key]) for key, value in loop.weights().items())
        accelerator.backward(model(torch.ones(2, 6)).sum())
        clear(model)
        with pytest.raises(ConfigError, match="cleared or changed inside of a window"):
            loop.optimizer.step()
        accelerator.free_memory()


@needs_deepspeed
def test_what_would_train_without_reduced_gradients_is_refused() -> None:
    run_ranks(2, unbound)
