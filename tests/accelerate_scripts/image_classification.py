# mypy: ignore-errors
"""In the style of examples of image classification: states by epoch and by step, and resumes."""

import os

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ListTracker(GeneralTracker):
    name = "list"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.lines = []

    @property
    def tracker(self):
        return self.lines

    def store_init_configuration(self, values):
        self.lines.append(dict(values))

    def log(self, values, step=None, **kwargs):
        self.lines.append((step, {name: float(value) for name, value in values.items()}, kwargs))


def training_function(folder, checkpointing_steps, resume_from=None, stop_after=None):
    own = ListTracker()
    project = ProjectConfiguration(
        project_dir=folder,
        logging_dir=os.path.join(folder, "logs"),
        automatic_checkpoint_naming=checkpointing_steps == "epoch",
        total_limit=2,
        iteration=0 if resume_from is None else 1,
    )
    accelerator_kwargs = {"log_with": [own], "project_config": project}
    accelerator = Accelerator(cpu=True, **accelerator_kwargs)
    accelerator.init_trackers(project_name="cv", config={"lr": 0.1}, init_kwargs={"list": {}})
    if accelerator.is_main_process:
        assert accelerator.get_tracker("list", unwrap=True) is own.lines
    set_seed(3)
    images = torch.randn(24, 1, 6, 6)
    dataset = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())
    train_dataloader = DataLoader(dataset, shuffle=False, batch_size=2, drop_last=True)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )
    mean = images.mean().to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.1 / 25)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer=optimizer, max_lr=0.1, epochs=2, steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    overall_step, starting_epoch, resume_step = 0, 0, None
    if resume_from is not None:
        accelerator.print(f"Resumed from checkpoint: {resume_from}")
        if checkpointing_steps == "epoch":
            accelerator.load_state()
        else:
            accelerator.load_state(input_dir=resume_from)
        name = os.path.basename(resume_from)
        if "epoch" in name:
            starting_epoch = int(name.replace("epoch_", "")) + 1
        else:
            resume_step = int(name.replace("step_", ""))
            starting_epoch = resume_step // len(train_dataloader)
            resume_step -= starting_epoch * len(train_dataloader)
            overall_step = resume_step
    for epoch in range(starting_epoch, 2):
        model.train()
        total_loss = 0
        if resume_from is not None and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for inputs, labels in active_dataloader:
            loss = nn.functional.cross_entropy(model(inputs - mean), labels)
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if isinstance(checkpointing_steps, int) and overall_step % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(folder, f"step_{overall_step}"))
                if overall_step == stop_after:
                    accelerator.end_training()
                    return None
        accelerator.log({"train_loss": total_loss.item(), "epoch": epoch}, step=overall_step)
        if checkpointing_steps == "epoch":
            accelerator.save_state()
            if epoch == stop_after:
                accelerator.end_training()
                return None
    accelerator.wait_for_everyone()
    lines = own.lines if accelerator.is_main_process else []
    state_dict = accelerator.get_state_dict(model)
    accelerator.end_training()
    accelerator.free_memory()
    folders = sorted(os.listdir(os.path.join(folder, "checkpoints"))) if "epochs" in folder else []
    return [value.flatten().tolist() for value in state_dict.values()], lines, folders


def main(folder):
    steps, epochs = os.path.join(folder, "steps"), os.path.join(folder, "epochs")
    training_function(steps, 3, stop_after=3)
    by_step = training_function(steps, 3, resume_from=os.path.join(steps, "step_3"))
    training_function(epochs, "epoch", stop_after=0)
    by_epoch = training_function(epochs, "epoch", resume_from=os.path.join(epochs, "epoch_0"))
    return {"by step": by_step, "by epoch": by_epoch}
