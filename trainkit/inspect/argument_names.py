"""What to say of an argument that does not exist: its name here, where it goes, the nearest one."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from trainkit.basics.parsing import nearest
from trainkit.errors import ConfigError, quoted

# fmt: off
PLACES = {
    "Trainer(max_epochs=...)": "epochs num_epochs num_train_epochs",
    "Trainer(max_steps=...)": "num_training_steps total_steps",
    "Trainer(gradient_accumulation_steps=...)": "accumulate_grad_batches accumulation_steps",
    "Trainer(max_grad_norm=...)": "clipnorm global_clipnorm gradient_clip_algorithm "
        "gradient_clip_val gradient_clipping",
    "Trainer(max_grad_value=...)": "clipvalue gradient_clip_algorithm",
    "Trainer(precision=...)": "amp bf16 dtype fp16 mixed_precision torch_dtype",
    "Trainer(strategy=...)": "deepspeed fsdp fsdp_config plugins",
    "Trainer(callbacks=...)": "callback",
    "Trainer(output_dir=...)": "default_root_dir dirpath log_dir logging_dir project_dir save_dir",
    "Trainer(seed=...)": "data_seed random_state",
    "Trainer(deterministic=...)": "full_determinism",
    "Trainer(log_every_n_steps=...)": "logging_steps update_freq",
    "Trainer(compile=...)": "jit_compile torch_compile torch_compile_backend torch_compile_mode",
    "Trainer(dry_run=...)": "fast_dev_run",
    "Trainer(limit_train_batches=...)": "steps_per_epoch train_subset_num_batches",
    "Trainer(limit_eval_batches=...)": "eval_subset_num_batches limit_test_batches "
        "limit_val_batches validation_steps",
    "Trainer(gradient_checkpointing=...)": "activation_checkpointing gradient_checkpointing_kwargs",
    "Trainer(hparams=...)": "config hyperparameters",
    "Trainer(watchdog=Watchdog(process_group_timeout=...))": "ddp_timeout process_group_timeout "
        "timeout",
    "fit(model=...)": "module",
    "fit(loaders=...)": "data datamodule dataloaders dataset eval_dataset loader train_dataloader "
        "train_dataloaders train_dataset train_loader val_dataloaders val_loader validation_data "
        "x y",
    "fit(optimizer=...)": "learning_rate lr optim optimizers weight_decay",
    "fit(lr_scheduler=...)": "lr_scheduler_kwargs lr_scheduler_type scheduler",
    "fit(warmup=...)": "num_warmup_steps warmup_epochs warmup_ratio warmup_steps",
    "fit(loss_fn=...)": "compute_loss_func criterion loss",
    'fit(model, Combined({"a": loader_a, "b": loader_b}, "min"))': "multiple_trainloader_mode "
        "policy",
    "fit(optimizer=Alternating({...}, {...}))": "alternate",
    "fit(restore_best=...)": "load_best_model_at_end restore_best_weights",
    "fit(resume=...)": "ckpt_path initial_epoch resume_from_checkpoint",
    "Evaluation(metrics=...)": "compute_metrics weighted_metrics",
    "Evaluation(every_n_steps=...)": "eval_steps eval_strategy val_check_interval",
    "Evaluation(every_n_epochs=...)": "check_val_every_n_epoch eval_strategy validation_freq",
    "Checkpoint(every_n_steps=...)": "every_n_train_steps save_freq save_steps save_strategy",
    "Checkpoint(every_n_epochs=...)": "save_freq save_strategy",
    "Checkpoint(every_minutes=...)": "train_time_interval",
    "Checkpoint(keep_last=...)": "save_last save_total_limit",
    "Checkpoint(keep_best=...)": "greater_is_better metric_for_best_model monitor save_best_only "
        "save_top_k",
    "Checkpoint(weights_only=...)": "save_only_model save_weights_only",
    "EarlyStopping(metric=...)": "monitor",
    "EarlyStopping(patience=...)": "early_stopping_patience",
    "EarlyStopping(min_delta=...)": "early_stopping_threshold",
    "TensorBoardLogger(directory=...)": "log_dir save_dir",
    "TimeLimit(minutes=...)": "max_time",
    "Trainer(callbacks=[ProgressBar(), ModelSummary(), Profiler(), JSONLLogger(), ...])":
        "disable_tqdm enable_model_summary enable_progress_bar log_with logger profiler report_to "
        "verbose",
    "Trainer(callbacks=[Checkpoint()])": "enable_checkpointing",
    "torch.utils.data.DataLoader(...)": "batch_size collate_fn data_collator dataloader_drop_last "
        "dataloader_num_workers drop_last num_workers per_device_eval_batch_size "
        "per_device_train_batch_size pin_memory shuffle",
    "trainkit launch --num_processes N SCRIPT": "devices gpus n_gpu num_devices num_processes",
    "trainkit launch --num_machines N SCRIPT": "num_machines num_nodes",
    "trainkit launch --cpu SCRIPT": "accelerator device no_cuda use_cpu",
}
# fmt: on
"""What to write, and names of it in Lightning, Keras, transformers and other loops."""


class _UnknownArgument(ConfigError, TypeError):
    """Also what Python raises for it."""


def refuse_unknown(target: Callable[..., Any], given: Iterable[str]) -> None:
    """Raise ConfigError where a function has no arguments of these names: says what to write."""
    parameters = inspect.signature(target).parameters
    unknown = [name for name in given if name not in parameters]
    if unknown and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        owner = target.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        is_told = target.__module__.startswith(("trainkit.trainer", "trainkit.callbacks"))
        known, places = [*parameters][1:], PLACES if is_told else {}
        texts = [f"`{owner}` has no argument `{n}`{_advice(n, known, places)}" for n in unknown]
        raise _UnknownArgument(" ".join(texts)) from None


def _advice(name: str, known: list[str], places: dict[str, str]) -> str:
    """Return the rest of a sentence on an unknown name."""
    own = {place: place.partition("(")[2].removesuffix("=...)") for place in places}
    near = nearest(name, known)
    settings = [place for place, names in places.items() if name in names.split()]
    settings = settings or [place for place in places if own[place] == name and not near]
    here = [own[place] for place in settings if own[place] in known]
    if settings:
        return f": it is {quoted(here)} here." if here else f": write `{'` or `'.join(settings)}`."
    return f".{near or f' It has {quoted(known)}.'}"
