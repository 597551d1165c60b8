# mypy: ignore-errors
"""In the style of examples of text classification: windows, clipping, a metric of the whole set."""

import math

import torch
from accelerate import Accelerator, DeepSpeedPlugin, DistributedType, prepare_pippy  # noqa: F401
from accelerate.logging import get_logger
from accelerate.parallelism_config import ParallelismConfig  # noqa: F401
from accelerate.utils import (  # noqa: F401
    AORecipeKwargs,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    set_seed,
    tqdm,
)
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import DataLoader

logger = get_logger(__name__, log_level="INFO")


def get_dataloaders(accelerator, batch_size):
    def collate_fn(examples):
        max_length = 12 if accelerator.distributed_type == DistributedType.XLA else None
        multiple = {"fp8": 16, "no": None}.get(accelerator.mixed_precision, 8)
        longest = max_length or max(len(ids) for ids, _ in examples)
        if multiple:
            longest = math.ceil(longest / multiple) * multiple
        rows = torch.zeros(len(examples), longest, dtype=torch.long)
        for row, (ids, _) in zip(rows, examples, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        return {"input_ids": rows, "labels": torch.tensor([label for _, label in examples])}

    with accelerator.main_process_first():
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 9, (34,), generator=generator).tolist()
        examples = [
            (torch.randint(1, 30, (length,), generator=generator).tolist(), length % 2)
            for length in lengths
        ]
    train = DataLoader(examples[:24], shuffle=True, collate_fn=collate_fn, batch_size=batch_size)
    evaluation = DataLoader(examples[24:], shuffle=False, collate_fn=collate_fn, batch_size=4)
    return train, evaluation


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8, padding_idx=0)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids, labels):
        logits = self.head(self.dropout(self.embedding(input_ids).mean(1)))
        return nn.functional.cross_entropy(logits, labels), logits


def main(folder):
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        deepspeed_plugin=None,
        parallelism_config=None,
    )
    logger.info(accelerator.state, main_process_only=False)
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, 3)
    set_seed(7)
    with accelerator.local_main_process_first():
        assert accelerator.torch_device_mesh is None
    model = Classifier().to(accelerator.device)
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None or "optimizer" not in plugin.deepspeed_config:
        optimizer_class = torch.optim.AdamW
    else:
        optimizer_class = DummyOptim
    optimizer = optimizer_class(model.parameters(), lr=3e-2)
    total = len(train_dataloader) * 2
    if plugin is None:
        lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(0.0, 1 - step / total)
        )
    else:
        lr_scheduler = DummyScheduler(optimizer, total_num_steps=total)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    figures = []
    progress_bar = tqdm(range(2), disable=not accelerator.is_local_main_process)
    for _ in range(2):
        model.train()
        total_loss = 0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss, _ = model(**batch)
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        figures.append(accelerator.reduce(total_loss, reduction="sum").item())
        model.eval()
        hits, losses = [], []
        for batch in eval_dataloader:
            with torch.no_grad():
                loss, logits = model(**batch)
            predictions, references = accelerator.gather_for_metrics(
                (logits.argmax(dim=-1), batch["labels"])
            )
            hits.append(predictions == references)
            losses.append(accelerator.gather_for_metrics(loss.repeat(4)))
        hits, losses = torch.cat(hits), torch.cat(losses)
        figures += [len(hits), hits.float().mean().item(), losses.mean().item()]
        progress_bar.update(1)
        accelerator.print(f"perplexity {math.exp(losses.mean())}")
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    accelerator.save(unwrapped_model.state_dict(), f"{folder}/model.pt")
    accelerator.end_training()
    weights = [value.flatten().tolist() for value in unwrapped_model.parameters()]
    return {"weights": weights, "figures": figures, "rate": lr_scheduler.get_last_lr()}
