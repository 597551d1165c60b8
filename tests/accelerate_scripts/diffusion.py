# mypy: ignore-errors
"""In the style of the trainings of diffusion models: two models, hooks that save, an average."""

import copy
import logging
import os
import shutil

import accelerate
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__)


class Net(nn.Module):
    """Has the two methods that libraries of such models have."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.idle = nn.Linear(2, 2)

    def forward(self, values):
        return self.layer(values)

    def save_pretrained(self, folder):
        os.makedirs(folder, exist_ok=True)
        torch.save(self.state_dict(), os.path.join(folder, "weights.pt"))

    @classmethod
    def from_pretrained(cls, folder, inputs, outputs):
        model = cls(inputs, outputs)
        model.load_state_dict(torch.load(os.path.join(folder, "weights.pt")))
        return model


class Average:
    def __init__(self, parameters, decay=0.5):
        self.shadow, self.decay = [p.detach().clone() for p in parameters], decay

    def step(self, parameters):
        for own, new in zip(self.shadow, parameters, strict=True):
            own.lerp_(new.detach(), 1 - self.decay)

    def state_dict(self):
        return {"shadow": self.shadow, "decay": self.decay}

    def load_state_dict(self, state):
        self.shadow, self.decay = state["shadow"], state["decay"]


def train(folder, resume, max_train_steps):
    logging_dir = os.path.join(folder, "logs")
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        mixed_precision="no",
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=logging_dir),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    if accelerator.mixed_precision != "no":
        accelerator.native_amp = False
    logging.getLogger(__name__).debug(accelerator.state)
    logger.info(accelerator.state, main_process_only=False)
    if AcceleratorState().deepspeed_plugin is not None:
        raise NotImplementedError
    set_seed(11)
    unet, text_encoder, vae = Net(4, 4), Net(4, 4), Net(4, 4)
    vae.requires_grad_(False)
    average = Average(unet.parameters())

    def unwrap_model(model):
        return accelerator.unwrap_model(model)

    if accelerate.__version__ >= "0.16.0":

        def save_model_hook(models, weights, output_dir):
            if accelerator.is_main_process:
                for model in models:
                    is_unet = isinstance(model, type(unwrap_model(unet))) and model in (
                        unet,
                        unwrap_model(unet),
                    )
                    sub_dir = "unet" if is_unet else "text_encoder"
                    unwrap_model(model).save_pretrained(os.path.join(output_dir, sub_dir))
                    weights.pop()

        def load_model_hook(models, input_dir):
            while len(models) > 0:
                model = models.pop()
                is_unet = unwrap_model(model) is unwrap_model(unet)
                sub_dir = "unet" if is_unet else "text_encoder"
                loaded = Net.from_pretrained(os.path.join(input_dir, sub_dir), 4, 4)
                unwrap_model(model).load_state_dict(loaded.state_dict())

        accelerator.register_save_state_pre_hook(save_model_hook)
        accelerator.register_load_state_pre_hook(load_model_hook)

    params = [*unet.parameters(), *text_encoder.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 4))
    train_dataloader = DataLoader(data, shuffle=False, batch_size=3)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (4 * accelerator.num_processes))
    )
    unet, text_encoder, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, text_encoder, optimizer, train_dataloader, lr_scheduler
    )
    accelerator.register_for_checkpointing(average)
    weight_dtype = torch.float16 if accelerator.mixed_precision == "fp16" else torch.float32
    vae.to(accelerator.device, dtype=weight_dtype)
    if accelerator.is_main_process:
        accelerator.init_trackers("text2image", config={"steps": max_train_steps})
    global_step, losses = 0, []
    if resume:
        path = sorted(d for d in os.listdir(folder) if d.startswith("checkpoint"))[-1]
        accelerator.load_state(os.path.join(folder, path))
        global_step = int(path.split("-")[1])
    micro_batches = len(train_dataloader)
    first_epoch = global_step * 2 // micro_batches
    for epoch in range(first_epoch, 10):
        train_loss = 0.0
        for batch, target in train_dataloader:
            with accelerator.accumulate(unet, text_encoder):
                with accelerator.autocast():
                    latents = vae(batch.to(dtype=weight_dtype))
                    predicted = unet(latents + text_encoder(batch))
                loss = nn.functional.mse_loss(predicted.float(), target, reduction="mean")
                avg_loss = accelerator.gather(loss.repeat(3)).mean()
                train_loss += avg_loss.item() / accelerator.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(params, 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad(set_to_none=True)
            if accelerator.sync_gradients:
                average.step(unet.parameters())
                global_step += 1
                accelerator.log({"train_loss": train_loss}, step=global_step)
                losses.append((train_loss, accelerator.step))
                train_loss = 0.0
                if global_step % (micro_batches // 2) == 0:
                    if accelerator.is_main_process and os.path.exists(folder + "/old"):
                        shutil.rmtree(folder + "/old")
                    accelerator.save_state(os.path.join(folder, f"checkpoint-{global_step}"))
            if global_step >= max_train_steps:
                break
        if global_step >= max_train_steps:
            break
        if accelerator.is_main_process:
            for tracker in accelerator.trackers:
                if tracker.name == "tensorboard":
                    tracker.writer.add_scalar("validation", 1.0, epoch)
    accelerator.wait_for_everyone()
    found = {}
    if accelerator.is_main_process:
        unet_inside = copy.deepcopy(unwrap_model(unet)).to(torch.float32)
        found = {name: value.flatten().tolist() for name, value in unet_inside.state_dict().items()}
    accelerator.end_training()
    shadow = [value.flatten().tolist() for value in average.shadow]
    return found, shadow, losses, optimizer.param_groups[0]["lr"]


def main(folder):
    steps = 4 if torch.distributed.is_initialized() else 8
    first = train(folder, resume=False, max_train_steps=steps // 2)
    resumed = train(folder, resume=True, max_train_steps=steps)
    return {"first": first, "resumed": resumed}
