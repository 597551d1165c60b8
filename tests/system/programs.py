"""Programs with a feature each, for runs that are killed and resumed."""

import io
import os
import random
import tarfile
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, AdamW, Muon
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset, default_collate
from typing_extensions import override

from tests.strategies.toys import Texts, gpt2
from tests.system.toys import Program
from trainkit import Alternating, Trainer
from trainkit.data import pack, presharded

if TYPE_CHECKING:
    from tests.system.features import Mix

__all__ = ["ADAMW", "BATCH", "PROGRAMS", "mlp"]

BATCH = 6  # of all processes together, where their number may change


def mlp(*widths: int, dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers with ReLU and dropout between."""
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])


class Pair(nn.Module):
    """Two networks, the second of which corrects the first."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(5, 6, 6, 1), mlp(5, 6, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.left(inputs), self.right(inputs)
        return left, right + left.detach()


class OnOneLoss(Trainer):
    """Trains both on one loss."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        left, right = model(batch[1])
        return mse_loss(left, batch[2]) + mse_loss(right, batch[2])

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(model(batch[1])[1], batch[2]).nan_to_num(posinf=1e9)}


class InTurns(OnOneLoss):
    """Trains one after the other."""

    def training_step_left(self, model: nn.Module, batch: Any) -> Tensor:
        return mse_loss(model(batch[1])[0], batch[2])

    def training_step_right(self, model: nn.Module, batch: Any) -> Tensor:
        return mse_loss(model(batch[1])[1], batch[2])


class Called(OnOneLoss):
    """Gives each optimizer its loss."""

    @override
    def training_step(self, model: nn.Module, batch: Any) -> None:
        left, right = model(batch[1])
        assert self.run is not None
        self.run.optimize("left", mse_loss(left, batch[2]))
        self.run.optimize("right", mse_loss(right, batch[2]))


ADAMW = partial(AdamW, lr=1e-2)
MOMENTUM = partial(SGD, lr=1e-2, momentum=0.9)


def of_noise(mix: "Mix", model: nn.Module | None = None, **arguments: Any) -> Program:
    """Return a program on samples that are drawn anew in each epoch."""
    return Program(
        model=model or mlp(5, 9, 1, dropout=0.0 if mix.resized else 0.2),
        loaders=(mix.loader(mix.noise(), shuffle=True), mix.held_out()),
        arguments={"optimizer": ADAMW, "lr_scheduler": None, **arguments},
    )


def in_turns(mix: "Mix", folder: Path) -> Program:
    optimizers = Alternating({"left": ADAMW, "right": MOMENTUM}, {"left": 2, "right": 1})
    program = of_noise(mix, Pair(), optimizer=optimizers)
    program.trainer = InTurns
    return program


def called(mix: "Mix", folder: Path) -> Program:
    program = of_noise(mix, Pair(), optimizer={"left": ADAMW, "right": MOMENTUM})
    program.trainer = Called
    return program


def on_one_loss(mix: "Mix", folder: Path) -> Program:
    model = Pair().to(mix.dtype)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    sharded = mix.strategy == "fsdp"  # torch's Muon takes no DTensor
    first = MOMENTUM(matrices) if sharded else Muon(matrices, lr=1e-2)
    program = of_noise(mix, model, optimizer={"matrices": first, "rest": ADAMW(rest)})
    program.trainer = OnOneLoss
    return program


def of_rows(rows: list[Any]) -> list[Tensor]:
    """Return the batch of rows that have an index each."""
    indices = [int(row["index"]) for row in rows]
    inputs = [torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in indices]
    found = torch.stack(inputs)
    return [torch.tensor(indices), found, found.sum(1, keepdim=True)]


def of_rows64(rows: list[Any]) -> list[Tensor]:
    """The same in fp64."""
    indices, *values = of_rows(rows)
    return [indices, *(value.double() for value in values)]


def hugging_face(mix: "Mix", folder: Path) -> Program:
    from datasets import Dataset

    program, columns = of_noise(mix), {"index": [*range(mix.samples)]}
    stream = Dataset.from_dict(columns).to_iterable_dataset(num_shards=6)
    stream = stream.shuffle(seed=3, buffer_size=5)
    program.loaders = (mix.loader(stream, collate_fn=of_rows), mix.held_out())
    return program


def stateful_loader(mix: "Mix", folder: Path) -> Program:
    from torchdata.stateful_dataloader import StatefulDataLoader

    program, size = of_noise(mix), BATCH if mix.resized else mix.batch_size
    loader = StatefulDataLoader(mix.noise(), size, shuffle=True, num_workers=mix.workers)
    program.loaders = (loader, mix.held_out())
    return program


def nodes(mix: "Mix", folder: Path) -> Program:
    import torchdata.nodes as tn

    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    program, data = of_noise(mix), Subset(mix.noise(), range(rank, mix.samples, size))
    node: Any = tn.MapStyleWrapper(data, RandomSampler(data))
    node = tn.Mapper(tn.Batcher(node, mix.batch_size, drop_last=False), default_collate)
    program.loaders = (presharded(tn.Loader(node)), mix.held_out())
    return program


def web_dataset(mix: "Mix", folder: Path) -> Program:
    import webdataset

    path = folder / f"data-{os.getpid()}.tar"
    with tarfile.open(path, "w") as archive:
        for index in range(mix.samples):
            text = str(index).encode()
            entry = tarfile.TarInfo(f"{index:04}.index")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    split: Any = {"shardshuffle": False, "nodesplitter": None, "workersplitter": None}
    stream = webdataset.WebDataset([str(path)], **split).shuffle(5, rng=random)
    program = of_noise(mix)
    collate = of_rows64 if mix.resized else of_rows
    program.loaders = (mix.loader(stream, collate_fn=collate), mix.held_out())
    return program


def texts(mix: "Mix", model: nn.Module, data: Any) -> Program:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    return Program(
        model=model,
        loaders=(
            mix.loader(data, shuffle=True),
            DataLoader(Texts(torch.float32), 16),
        ),
        arguments={"optimizer": ADAMW, "lr_scheduler": "cosine"},
        trainer=Trainer,
        sharded=GPT2Block,
    )


def packed(mix: "Mix", folder: Path) -> Program:
    chance = random.Random(1)
    items = [
        {"input_ids": torch.tensor([chance.randrange(37) for _ in range(chance.randint(2, 6))])}
        for _ in range(2 * mix.samples)
    ]
    return texts(mix, gpt2(), pack(items, 8))


def adapter(mix: "Mix", folder: Path) -> Program:
    import peft

    names = ["c_attn", "c_fc"]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=names, fan_in_fan_out=True, lora_dropout=0.1
    )
    return texts(mix, peft.get_peft_model(gpt2(), config), Texts(torch.float32))


def quantized(bits: int) -> nn.Module:
    """Return a tiny Llama in 4 or 8 bits, by bitsandbytes, with adapters; always the same."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, use_cache=False,
        )
    )  # fmt: skip
    settings: Any = BitsAndBytesConfig
    how = settings(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        small = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=how, dtype=torch.float32, device_map="cpu"
        )
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(small, config)


def small_adapter(bits: int, mix: "Mix", folder: Path) -> Program:
    return texts(mix, quantized(bits), Texts(torch.float32))


class Angles(nn.Module):
    """A loss with class centres."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 4))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs @ self.centres.T, targets)


class Embedding(nn.Module):
    """A model that holds its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.loss_fn = mlp(5, 6, 4), Angles()

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.body(inputs)
        return found


def learning_loss(mix: "Mix", folder: Path) -> Program:
    inputs = torch.randn(mix.samples, 5, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(inputs.to(mix.dtype), inputs.argmax(1) % 3)
    model = Embedding()
    return Program(
        model=model,
        loaders=(mix.loader(data, shuffle=True), DataLoader(data, 8)),
        arguments={"optimizer": ADAMW, "loss_fn": model.loss_fn},
        trainer=Trainer,
    )


class Block(nn.Sequential):
    """What is computed again in backward."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2))


class Blocks(nn.Module):
    """Blocks of one class, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        found: Tensor = self.head(inputs)
        return found


def recomputed(mix: "Mix", folder: Path) -> Program:
    program = of_noise(mix, Blocks())
    program.loaders = (mix.loader(mix.noise(), shuffle=True, drop_last=True), mix.held_out())
    program.settings["gradient_checkpointing"] = True
    return program


class Remembering(nn.Module):
    """A model whose state is in attributes that no `state_dict` holds."""

    windows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.forwards = mlp(5, 9, 1, dropout=0.1), 0
        self.generator, self.latest = random.Random(1), deque[Tensor](maxlen=4)
        self.register_buffer("windows", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs)
        if self.training:
            self.forwards += 1
            self.windows += self.generator.random()
            outputs = outputs + sum(self.latest) * 0.1 + 0.01 * self.forwards + 0.1 * self.windows
            self.latest.append(outputs.detach().mean())
        return outputs


def remembering(mix: "Mix", folder: Path) -> Program:
    return of_noise(mix, Remembering())


def cut(model: nn.Module) -> None:
    """Cut the two linear layers over pairs of processes, and shard the model over the pairs."""
    pairs = torch.distributed.get_world_size() // 2
    mesh = init_device_mesh("cpu", (pairs, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    if pairs > 1:
        fully_shard(model, mesh=mesh["data"])


def cut_over_mesh(mix: "Mix", folder: Path) -> Program:
    program = of_noise(mix, mlp(5, 8, 1, dropout=0.2))
    program.cut = cut
    return program


PROGRAMS: dict[str, Callable[["Mix", Path], Program]] = {
    "optimizers in turns": in_turns,
    "optimizers, run.optimize": called,
    "optimizers on one loss": on_one_loss,
    "stream of datasets, shuffled": hugging_face,
    "StatefulDataLoader": stateful_loader,
    "torchdata.nodes": nodes,
    "webdataset": web_dataset,
    "packed rows": packed,
    "adapter by reference": adapter,
    "adapter on 4 bits": partial(small_adapter, 4),
    "adapter on 8 bits": partial(small_adapter, 8),
    "loss with parameters": learning_loss,
    "gradient checkpointing, batch norm": recomputed,
    "state in attributes": remembering,
    "cut over a mesh": cut_over_mesh,
}
