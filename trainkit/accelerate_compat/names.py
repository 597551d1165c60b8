"""Where each name of Accelerate is found in trainkit, and what to write instead of the others."""

from functools import cache
from importlib import import_module
from typing import Any

from typing_extensions import override

from trainkit.basics.parsing import nearest
from trainkit.errors import ConfigError

_FACE = import_module("trainkit")
PUBLIC: list[str] = _FACE.__all__
"""The public names of trainkit, which are Accelerate's where that has such a thing."""

VERSION = "1.15.0"
"""The Accelerate that trainkit is compared with."""

_MODULES = """
    accelerator big_modeling checkpointing commands commands.config commands.config.config_args
    commands.launch data_loader hooks inference launchers local_sgd logging memory_utils optimizer
    parallelism_config scheduler state test_utils test_utils.testing test_utils.training tracking
    utils utils.ao utils.bnb utils.constants utils.dataclasses utils.deepspeed utils.environment
    utils.fsdp_utils utils.imports utils.launch utils.megatron_lm utils.memory utils.modeling
    utils.offload utils.operations utils.other utils.random utils.rich utils.torch_xla utils.tqdm
    utils.transformer_engine utils.versions
"""
MODULES = frozenset(_MODULES.split())
"""The modules of Accelerate."""

_AVAILABLE = """
    4bit_bnb 8bit_bnb aim amdsmi bf16 bitsandbytes_multi_backend bnb boto3 clearml comet_ml cuda
    datasets deepspeed dvclive fp16 fp8 hpu import_timer lomo matplotlib megatron_lm mlflow mlu mps
    msamp musa neuron npu pandas peft pippy pynvml pytest rich rocm sagemaker schedulefree sdaa
    swanlab tensorboard timm torch_xla torchao torchdata torchdata_stateful_dataloader torchvision
    tqdm trackio transformer_engine transformer_engine_mxfp8 transformers triton wandb weights_only
    xccl xpu
"""

# Besides the public names of trainkit; `theirs=ours` where it is called otherwise.
_HOMES = {
    "accelerate_compat.availability": "compare_versions is_torch_version "
    + " ".join(f"is_{what}_available" for what in _AVAILABLE.split()),
    "accelerate_compat.functions": """
        clear_device_cache clear_environment convert_outputs_to_fp32 debug_launcher find_batch_size
        fsdp2_prepare_model get_backend get_int_from_env get_module_class_from_name
        get_parameters_from_modules honor_type
        is_compiled_module is_peft_model listify merge_dicts named_module_tensors on_main_process
        parse_choice_from_env parse_flag_from_env patch_environment recursively_apply save
        set_module_tensor_to_device str_to_bool torch_device tqdm CustomDtype FSDP_MODEL_NAME
        LoggerType MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME
        SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME
        SCHEDULER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME
    """,
    "accelerate_compat.around_forward": """
        AlignDevicesHook CpuOffload ModelHook SequentialHook UserCpuOffloadHook add_hook_to_module
        cpu_offload_with_hook remove_hook_from_module remove_hook_from_submodules
    """,
    "accelerate_compat.config_files": """
        default_config_file default_yaml_config_file load_config_from_file
    """,
    "accelerate_compat.large": """
        compute_module_sizes cpu_offload disk_offload dtype_byte_size find_tied_parameters
        get_balanced_memory
    """,
    "accelerate_compat.loading": """
        BatchSamplerShard DataLoader DataLoaderDispatcher DataLoaderShard IterableDatasetShard
        SeedableRandomSampler SkipBatchSampler SkipDataLoader prepare_data_loader
        synchronize_rng_state synchronize_rng_states
    """,
    "accelerate_compat.testing": """
        SubprocessCallException execute_subprocess_async get_torch_dist_unique_port
        mocked_dataloaders mocked_dataloaders_for_autoregressive_models run_command
    """,
    "accelerator.autocasting": "convert_to_fp32=in_fp32",
    "accelerator.loader": "DataLoaderStateMixin=SharedLoader",
    "accelerator.deepspeed_plugin": """
        DeepSpeedPlugin DummyOptim DummyScheduler get_active_deepspeed_plugin
    """,
    "accelerator.logging": "MultiProcessAdapter=ProcessLogger",
    "accelerator.parallelism": "ParallelismConfig TorchContextParallelConfig",
    "accelerator.optimizer": "AcceleratedOptimizer=PreparedOptimizer",
    "accelerator.scheduler": "AcceleratedScheduler=PreparedScheduler",
    "accelerator.settings": "AORecipeKwargs KwargsHandler",
    "accelerator.state": "AcceleratorState GradientState is_initialized",
    "accelerator.tracking": "LOGGER_TYPE_TO_CLASS=KINDS register_tracker_class",
    "large_models.devices": """
        convert_file_size_to_int get_max_memory=room infer_auto_device_map
    """,
    "large_models.dispatch": "dispatch_model",
    "large_models.empty": "init_on_device",
    "launch.config": "write_basic_config",
    "trackers.mlflow": "MLflowTracker",
    "trackers.tensorboard": "TensorBoardTracker",
    "trackers.trackio": "TrackioTracker",
    "trackers.wandb": "WandBTracker",
}

REFUSED = {
    "DeepSpeed's engine is not driven: pass `Accelerator(deepspeed_plugin=DeepSpeedPlugin(...))`, "
    "whose `hf_ds_config` takes a mapping or a JSON file": """
        DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper
        DeepSpeedSequenceParallelConfig HfDeepSpeedConfig map_pytorch_optim_to_deepspeed
    """,
    "Megatron-LM is not driven: write the loop without it, and shard with "
    "`Accelerator(strategy=trainkit.strategies.FSDP())`": """
        AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader
        MegatronLMDummyScheduler MegatronLMPlugin T5TrainStep
    """,
    '`prepare` converts by torchao under `mixed_precision="fp8"`: write that, and `AORecipeKwargs` '
    "for which layers and how": """
        FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs apply_fp8_autowrap contextual_fp8_autocast
        convert_model convert_model_to_fp8_ao filter_first_and_last_linear_layers
        filter_linear_layers find_first_last_linear_layers has_ao_layers
        has_transformer_engine_layers
    """,
    "`Accelerator` trains no model that is cut into parallel parts: leave it out, and shard with "
    "`Accelerator(strategy=trainkit.strategies.FSDP())`": """
        TorchTensorParallelConfig TorchTensorParallelPlugin
    """,
    "each process computes all layers of a model: spread them over its devices by "
    '`load_checkpoint_and_dispatch(model, checkpoint, device_map="auto")`, or share out the inputs '
    "by `split_between_processes`": "prepare_pippy",
    "`cpu_offload(module, device)`, `disk_offload` and `dispatch_model` bring weights and inputs "
    "to where a module runs, and `load_checkpoint_in_model` what is in files": """
        attach_align_device_hook load_offloaded_weights offload_state_dict
        offload_weight save_offload_index
    """,
    "a model stays whole on one device: load it by `load_checkpoint_and_dispatch(model, "
    "checkpoint)`, or shard it with `Accelerator(strategy=trainkit.strategies.FSDP())`": """
        LayerwiseCastingHook attach_layerwise_casting_hooks
    """,
    "use torch's own: `torch.amp.GradScaler(device)`": "get_grad_scaler",
    "write the values themselves as texts": "DynamoBackend PrecisionType RNGType",
    "use torch's own: `torch.compile(model)`, or `Accelerator(dynamo_backend=...)`": """
        compile_regions compile_regions_deepspeed compile_regions_fsdp2
    """,
    "quantized training is not there: load the model by `transformers`": """
        BnbQuantizationConfig load_and_quantize_model
    """,
    "start processes by `trainkit launch`, or by `notebook_launcher`": """
        PrepareForLaunch launch_command launch_command_parser
    """,
    "use the method of `Accelerator`: `prepare`, `save_state`, `load_state`, `get_state_dict`": """
        fsdp2_prepare_auto_wrap_policy get_module_children_bottom_up
        get_non_persistent_buffers
        load_accelerator_state load_fsdp_model load_fsdp_optimizer merge_fsdp_weights
        save_accelerator_state save_custom_state save_fsdp_model save_fsdp_optimizer
    """,
    "pass an object of your own class over `GeneralTracker`, which writes there": """
        AimTracker ClearMLTracker CometMLTracker DVCLiveTracker SwanLabTracker
    """,
}
"""What to do instead, and the names that can be imported and raise that when they are used."""


class _Refused(type):
    """The type of classes that stand for what trainkit has not; they can be compared with."""

    sentence: str

    @override
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise what to do instead."""
        raise ConfigError(cls.sentence)

    def __getattr__(cls, name: str) -> Any:
        """Raise the same for a member, such as one of an enumeration."""
        raise AttributeError(name if name.startswith("__") else cls.sentence)


@cache
def known() -> frozenset[str]:
    """Return all names that can be imported."""
    return frozenset({*_ours(), *PUBLIC, *_refused()})


@cache
def find(name: str) -> Any:
    """Return what a name of Accelerate stands for."""
    if name in _ours():
        home, ours = _ours()[name]
        return getattr(import_module(f"trainkit.{home}"), ours)
    if name in PUBLIC:
        return getattr(_FACE, name)
    sentence = refusal(name)
    return _Refused(name, (), {"__doc__": sentence, "sentence": sentence})


def refusal(name: str) -> str | None:
    """Return why a name cannot be used, and what to do instead; None where it can be."""
    if name in _ours() or name in PUBLIC or name not in _refused():
        return None
    return f"`{name}` cannot be used: {_refused()[name]}."


def missing(path: str) -> str:
    """Return what to say of a name that is not there, such as "utils.set_sed"."""
    name = path.rpartition(".")[2]
    return (
        f"`accelerate.{path}` is not there in trainkit.{nearest(name, known())} What differs from "
        "Accelerate stands in docs/migrating-from-accelerate.md."
    )


@cache
def _ours() -> dict[str, tuple[str, str]]:
    """Return the module and our name of each name in `_HOMES`."""
    pairs = ((home, *each.partition("=")) for home, text in _HOMES.items() for each in text.split())
    return {theirs: (home, ours or theirs) for home, theirs, _, ours in pairs}


@cache
def _refused() -> dict[str, str]:
    return {name: sentence for sentence, text in REFUSED.items() for name in text.split()}
