# mypy: ignore-errors
"""In the style of distributed inference: prompts shared out, answers brought together."""

import os

import torch
from accelerate import (
    Accelerator,
    PartialState,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.state import is_initialized
from accelerate.utils import (
    broadcast_object_list,
    extract_model_from_parallel,
    gather_object,
    set_seed,
    write_basic_config,
)
from torch import nn
from torch.utils.data import DataLoader


def main(folder):
    distributed_state = PartialState(cpu=True)
    with distributed_state.split_between_processes(["a dog", "a cat", "a chicken"]) as prompts:
        answers = [f"{prompt}!" for prompt in prompts]
    everywhere = gather_object(answers)
    named = {"prompt": ["x", "y", "z"], "number": torch.arange(3)}
    with distributed_state.split_between_processes(named, apply_padding=True) as part:
        numbers = part["number"].tolist()
    choice = broadcast_object_list([{"seed": distributed_state.process_index}], from_process=0)

    accelerator = Accelerator(cpu=True, project_dir=folder)
    assert is_initialized()
    if accelerator.is_main_process:
        write_basic_config(save_location=os.path.join(folder, "config.yaml"))
    set_seed(2, device_specific=True)
    own = torch.arange(accelerator.process_index + 2.0)[None]
    padded = accelerator.pad_across_processes(own, dim=1, pad_index=-100)
    gathered = accelerator.gather(padded)
    largest = accelerator.reduce(own.max(), reduction="max")

    set_seed(2)
    source = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    if accelerator.is_local_main_process:
        torch.save(source.state_dict(), os.path.join(folder, "pytorch_model.bin"))
    accelerator.wait_for_everyone()
    with init_empty_weights(include_buffers=True):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    checkpoint = os.path.join(folder, "pytorch_model.bin")
    model = load_checkpoint_and_dispatch(model, checkpoint, device_map={"": "cpu"})
    model = accelerator.prepare_model(model, device_placement=True, evaluation_mode=True)
    model.eval()
    loader = accelerator.prepare(DataLoader(torch.randn(7, 3), batch_size=2))
    outputs = []
    with torch.inference_mode():
        for batch in loader:
            outputs.append(accelerator.gather_for_metrics(model(batch)))  # noqa: PERF401
    inside = extract_model_from_parallel(model)
    return {
        "answers": everywhere,
        "numbers": numbers,
        "choice": choice,
        "gathered": gathered.tolist(),
        "largest": largest.item(),
        "outputs": torch.cat(outputs).tolist(),
        "where": (accelerator.process_index, accelerator.local_process_index),
        "layers": len(list(inside.children())),
    }
