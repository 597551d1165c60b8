"""float8: equal to a loop by hand with torchao, put back afterwards, and refused where it fails."""

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.needs import late
from tests.helpers.ranks import in_turn, run_ranks
from trainkit import Accelerator, Callback, CheckpointError, ConfigError, Run, Trainer
from trainkit.accelerator.settings import AORecipeKwargs
from trainkit.callbacks import Checkpoint
from trainkit.precision import FP8
from trainkit.testing import check_precision

torchao = late("torchao.float8")
pytestmark = pytest.mark.filterwarnings("ignore:FSDP gains nothing")

STEPS, ROWS = 20, 4  # rows of a process in each step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))  # type: ignore[no-any-return]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(), Block())
    return nn.Sequential(nn.Linear(6, 16), blocks, nn.Linear(16, 3))


def data(world: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * ROWS * world, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def trained(model: nn.Module | None = None, *, world: int = 1, **settings: Any) -> Trainer:
    """Return a trainer after a fit."""
    settings.setdefault("max_steps", STEPS)
    trainer = Trainer(**{"precision": "fp8", "callbacks": [], **settings})
    again(trainer, model or net(), world)
    return trainer


def again(trainer: Trainer, model: nn.Module, world: int = 1, **options: Any) -> None:
    trainer.fit(
        model,
        DataLoader(data(world), batch_size=ROWS),
        optimizer=partial(AdamW, lr=1e-2),
        loss_fn=nn.CrossEntropyLoss(),
        **options,
    )


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        key: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for key, value in model.state_dict().items()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def by_hand(
    rank: int, world: int, strategy: str, recipe: str = "tensorwise", *, loss_in_fp32: bool = False
) -> dict[str, Tensor]:
    """Return the weights of torchao's own loop."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = net()
    convert_to_float8_training(
        model,
        config=config,
        module_filter_fn=lambda m, _: m.in_features % 16 == 0 == m.out_features % 16,
    )
    called: Any = model
    if strategy == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model[1].children(), model):
            fully_shard(part, mp_policy=policy)
    elif world > 1:
        called = DistributedDataParallel(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    inputs, targets = data(world).tensors
    for step in range(STEPS):
        first = (step * world + rank) * ROWS
        rows = slice(first, first + ROWS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = called(inputs[rows])
            loss = nn.functional.cross_entropy(
                outputs.float() if loss_in_fp32 else outputs, targets[rows]
            )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def case(rank: int, strategy: str) -> tuple[bool, bool]:
    """Return whether float8 equals a loop by hand, and bf16 on the same model is bf16."""
    model, plain = net(), net()
    trainer = trained(model, world=2, strategy=strategy)
    equal = same(values(model), by_hand(rank, 2, strategy))
    trained(plain, world=2, strategy=strategy, max_steps=1)
    with torch.no_grad():
        for p, value in zip(model.parameters(), plain.parameters(), strict=True):
            p.copy_(value)
    for one in (model, plain):
        trained(one, world=2, strategy=strategy, precision="bf16", max_steps=1)
    alike = same(values(model), values(plain))
    trainer.close()
    return equal, alike


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_training_equals_a_loop_with_torchao_to_the_bit(recipe: str) -> None:
    model = net()
    trained(model, precision=FP8(recipe))
    assert same(values(model), by_hand(0, 1, "single", recipe))
    plain = net()
    trained(plain, precision="bf16")
    assert not same(values(model), values(plain))


@pytest.mark.e2e
def test_two_processes_equal_a_loop_with_torchao_to_the_bit() -> None:
    assert run_ranks(2, in_turn, case, [("ddp",), ("fsdp",)]) == [[(True, True)] * 2] * 2


def bf16_after(model: nn.Module, **settings: Any) -> bool:
    """Return whether a model trains in bf16 as a copy of it does that was never converted."""
    other = copy.deepcopy(model)
    trained(model, precision="bf16", **settings)
    trained(other, precision="bf16", **settings)
    return same(values(model), values(other))


class Fails(Callback):
    @override
    def on_step_end(self, run: Run, result: Any) -> None:
        raise RuntimeError("mine")


def test_layers_are_their_own_again_afterwards() -> None:
    model = net()
    kept = dict(model.named_parameters())
    trained(model)
    assert all(kept[name] is p for name, p in model.named_parameters())
    assert bf16_after(model)
    with pytest.raises(RuntimeError, match="mine"):
        trained(model, callbacks=[Fails()])
    assert bf16_after(model)
    with pytest.raises(ConfigError, match="must be"):
        trained(model, gradient_checkpointing="sometimes")
    assert bf16_after(model)


@pytest.mark.slow
def test_compiled_code_does_not_outlive_float8() -> None:
    model, plain = net(), net()
    options: Any = {"compile": {"backend": "aot_eager"}, "max_steps": 3}
    trained(model, **options)
    trained(plain, max_steps=3)
    largest = max(
        float((value - plain.state_dict()[key]).abs().max()) for key, value in values(model).items()
    )
    assert largest < 1e-3  # other fusions; bf16 in place of float8 is off by more than 1e-2
    assert bf16_after(model, **options)


class Watches(Callback):
    """Evaluates and copies in the middle of a training."""

    def __init__(self, trainer: Callable[[], Trainer]) -> None:
        self.trainer = trainer
        self.found: dict[str, Any] = {}
        self.file = io.BytesIO()

    @override
    def on_step_end(self, run: Run, result: Any) -> None:
        self.found = self.trainer().evaluate(run.module, DataLoader(data(), batch_size=8))

    @override
    def on_fit_end(self, run: Run) -> None:
        self.copied = copy.deepcopy(run.module)
        torch.save(run.module, self.file)


@pytest.mark.e2e
def test_an_evaluation_is_in_float8_and_a_copy_is_not() -> None:
    watch: Watches = Watches(lambda: trainer)
    trainer = Trainer(max_steps=3, precision="fp8", callbacks=[watch])
    again(trainer, model := net())
    trained(unwatched := net(), max_steps=3)
    assert same(values(model), values(unwatched))
    loader = DataLoader(data(), batch_size=8)
    assert trainer.evaluate(model, loader) == watch.found
    plain = Trainer(max_steps=1, precision="bf16", callbacks=[])
    options: Any = {"loss_fn": nn.CrossEntropyLoss()}
    in_bf16 = plain.evaluate(model, loader, **options)
    assert in_bf16 != watch.found
    watch.file.seek(0)
    for other in (watch.copied, torch.load(watch.file, weights_only=False)):
        assert plain.evaluate(other, loader, **options) == in_bf16
        assert trainer.evaluate(other, loader) == watch.found
        assert torch.equal(trainer.predict(other, loader), trainer.predict(model, loader))


@pytest.mark.parametrize("how", [True, "selective"])
def test_activations_computed_again_change_nothing(how: Any) -> None:
    for make in (Block, lambda: nn.Linear(16, 16)):
        models = [net(), net()]
        for model in models:
            torch.manual_seed(1)
            model[1] = nn.Sequential(make(), make())
        trained(models[0], gradient_checkpointing=how)
        trained(models[1])
        assert same(values(models[0]), values(models[1]))
        assert bf16_after(models[0])


def test_a_resumed_run_is_exact_and_of_the_same_precision(tmp_path: Path) -> None:
    def run(steps: int, **options: Any) -> dict[str, Tensor]:
        precision = options.pop("precision", "fp8")
        callbacks = [Checkpoint(every_n_steps=5)]
        trainer = Trainer(
            max_steps=steps, precision=precision, callbacks=callbacks, output_dir=tmp_path
        )
        again(trainer, model := net(), **options)
        return values(model)

    run(10)
    whole = net()
    trained(whole)
    going_on = {"resume": "must", "schedule": "keep"}
    with pytest.raises(CheckpointError, match=r"precision: 'fp8 .*' in the checkpoint, 'bf16'"):
        run(20, precision="bf16", **going_on)
    with pytest.raises(CheckpointError, match=r"'fp8 rowwise of 4 layers .*' now"):
        run(20, precision=FP8("rowwise"), **going_on)
    with pytest.raises(CheckpointError, match=r"'fp8 tensorwise of 3 layers .*' now"):
        run(20, precision=FP8(convert=lambda layer, name: name != "1.1.down"), **going_on)
    assert same(run(20, **going_on), values(whole))


def test_a_loop_of_ones_own_equals_one_with_torchao_to_the_bit() -> None:
    model = net()  # whose first and last linear layer would not be converted anyway
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    called, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))
    inputs, targets = data().tensors
    for rows in torch.arange(STEPS * ROWS).split(ROWS):  # type: ignore[no-untyped-call]
        with accelerator.autocast():
            loss = nn.functional.cross_entropy(called(inputs[rows]), targets[rows])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    with_loss_in_fp32 = by_hand(0, 1, "single", loss_in_fp32=True)
    assert same(values(model), with_loss_in_fp32)
    inner = Accelerator(mixed_precision="fp8", cpu=True)._preparer.precision
    five = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    assert [*inner.layers(five)] == ["1", "2", "3"]  # type: ignore[attr-defined]
    accelerator.unwrap_model(called, keep_fp32_wrapper=False)
    assert bf16_after(model)
    Accelerator(mixed_precision="fp8", cpu=True).prepare(model)
    Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    assert bf16_after(accelerator.unwrap_model(model, keep_fp32_wrapper=False))
    with pytest.raises(ConfigError, match='is for `mixed_precision="fp8"`'):
        Accelerator(kwargs_handlers=[AORecipeKwargs(config=1)], cpu=True)


class Other(nn.Linear):
    pass


def test_only_plain_layers_that_fit_are_converted(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(
        nn.Linear(6, 16), *(nn.Linear(16, 16) for _ in range(5)), Other(16, 16), nn.Linear(16, 3)
    )
    nn.utils.parametrizations.weight_norm(model[1])
    nn.utils.spectral_norm(model[2])
    model[3].double()
    called = []
    model[4].register_forward_hook(lambda *_: called.append(4))
    model[5].register_forward_hook(lambda *_: called.append(5))
    assert [*FP8().layers(model)] == ["4", "5"]
    model[3].float()
    precision = FP8(convert=lambda layer, name: layer is model[4])
    trainer = trained(model, precision=precision, max_steps=1)
    assert called == [4, 5]
    trainer.evaluate(model, DataLoader(data(), batch_size=8))
    said = "trainkit: 1 of 8 linear layers multiply in float8 (`4`), emulated."
    assert capsys.readouterr().out.count(said) == 1


def test_no_rows_are_no_error() -> None:
    model = net()
    undo = FP8().convert(model)
    assert model(torch.ones(0, 6)).shape == (0, 3)
    undo()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: trained(nn.Linear(6, 3)), "converts no layer of `Linear`"),
        (lambda: trained(precision=FP8(convert=lambda *_: False)), "converts no layer of"),
        (lambda: FP8("delayed"), "`recipe` must be `tensorwise`"),
        (lambda: trained(precision=FP8("rowwise_with_gw_hp")), "`cpu` cannot multiply so"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_adapters_train_over_converted_layers() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        settings = peft.LoraConfig(r=16, target_modules=["up", "down"])
        torch.manual_seed(0)
        return peft.get_peft_model(net(), settings)

    model, precision = adapted(), FP8(convert=lambda layer, name: "lora" not in name)
    before = values(model)
    trained(model, precision=precision, max_steps=2)
    names = [*precision.layers(model)]
    assert len(names) == 4
    assert all(name.endswith("base_layer") for name in names)
    changed = {key for key, value in values(model).items() if not torch.equal(value, before[key])}
    assert changed
    assert all("lora" in key for key in changed)


def test_float8_keeps_the_contract() -> None:
    check_precision(FP8, processes=[1])


def test_batches_that_no_product_takes_are_padded() -> None:
    model, padded = net(), net()
    emulated = trained(model, precision=FP8(emulate=True), max_steps=3)
    trained(padded, precision=FP8(emulate=False), max_steps=3)  # torch has them on the CPU too
    assert emulated.run is not None
    assert (
        max(
            float((value - model.state_dict()[key]).abs().max())
            for key, value in values(padded).items()
        )
        < 0.02
    )
