"""Small models of transformers, made from the defaults of their configurations."""

import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
import transformers
from torch import nn
from transformers import (
    PretrainedConfig,  # the name before transformers 5, too
    PreTrainedModel,
    ResNetConfig,
    TimmBackboneConfig,
)

WORDS = 99
EXPERTS = "output_router_logits"
"""The setting by which a mixture of experts has a loss that balances them."""

SPECIAL = 20  # the last words of the vocabulary, for special tokens

Limits: TypeAlias = tuple[tuple[str, int], ...]
"""The first that fits a name holds: a number above its limit becomes that limit."""

DEEP: Limits = (
    (r"vocab_size", WORDS),
    (r"(^|_)(layers?|blocks|depths?)$", 2),
    (r"experts_per_tok|topk$|^moe_k$|top_k_experts", 2),
    (r"^(n_group|topk_group|first_k_dense_replace|attn_layer_offset)$", 1),
    (r"attn_layer_period", 2),
    (r"num_.*experts$|^n_routed_experts", 4),
)
WIDE: Limits = (
    *DEEP,
    (r"heads?$", 2),
    (r"max_position|n_positions|max_seq|max_(source|target)_positions|max_text_len", 128),
    (r"intermediate_size|ffn|d_ff|mlp_dim|d_inner|feedforward", 48),
    (r"hidden|embd|embed|(^|_)(d_model|dim|dims|size|width|channels|projection_dim)$", 256),
)
SMALL: Limits = (
    (r"qk_(nope|rope)_head_dim", 8),
    (r"head_dim|^d_kv$|kv_channels|(q|kv)_lora_rank|attention_head_size", 16),
    (r"rotary_dim|sliding_window|num_buckets", 8),
    *WIDE[:-1],
    (WIDE[-1][0], 32),
)
LEFT_OUT = ("dtype", "id2label", "label2id", "transformers_version")
OF_LAYERS = re.compile(r"layer_types|layers_block_type|block_types?$")
TOKEN = re.compile(r"(token_id|token_index|_token|_id|_index)$")
MORE: dict[str, dict[str, Any]] = {  # what does not follow from limits
    "AutoformerConfig": {"prediction_length": 4},
    "BambaConfig": {"mamba_n_heads": 2, "mamba_d_head": 32},
    "Blip2QFormerConfig": {"intermediate_size": 48},
    "EsmConfig": {"vocab_size": WORDS},
    "FalconH1Config": {"mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_ssm": 64},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 2, "mamba_d_head": 32},
    "InformerConfig": {"prediction_length": 4},
    "Mamba2Config": {"num_heads": 4},
    "TimeSeriesTransformerConfig": {"prediction_length": 4},
    "Wav2Vec2BertConfig": {"vocab_size": WORDS},
    "Wav2Vec2ConformerConfig": {"vocab_size": WORDS},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "XLNetConfig": {"d_head": 16},
    "XmodConfig": {"default_language": "en_XX"},
    "ReformerConfig": {"axial_pos_embds": False},
}


def classes() -> Iterator[type[PreTrainedModel]]:
    """Yield every class for a task, by name."""
    for name in dir(transformers):
        if re.search(r"For[A-Z]|LMHead|DoubleHeads", name) and not name.startswith("AutoModel"):
            kind = getattr(transformers, name, None)
            if inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and kind.config_class:
                yield kind


def configs(kind: Any) -> Iterator[PretrainedConfig]:
    """Yield configurations of a class, the smallest first; some need wider layers or images."""
    for limits, image in ((SMALL, 32), (SMALL, 64), (WIDE, 64), (DEEP, 224)):
        yield _small(kind.config_class(), limits, image, iter(range(WORDS - 1, 0, -1)))


def _small(
    default: PretrainedConfig, limits: Limits, image: int, special: Iterator[int]
) -> PretrainedConfig:
    if isinstance(default, TimmBackboneConfig):
        resnet: Any = ResNetConfig
        return _small(resnet(out_indices=default.out_indices), limits, image, special)
    given: dict[str, Any] = {}
    for name, usual in _settings(type(default)):
        value = default.__dict__.get(name, usual)
        if name in LEFT_OUT or (name == "rope_parameters" and not usual):
            continue
        if isinstance(value, PretrainedConfig):
            given[name] = _small(value, limits, image, special)
        elif value is None and limits is SMALL:
            given[name] = {"head_dim": 16, "num_key_value_heads": 2}.get(name)
        elif OF_LAYERS.search(name) and isinstance(value, list | tuple):
            given[name] = (list(dict.fromkeys(value)) * 2)[:2]
        elif isinstance(value, float) and re.search("drop|jitter|mask_(time|feature)_prob", name):
            given[name] = 0.0
        elif type(value) is int and TOKEN.search(name) and value >= WORDS - SPECIAL:
            given[name] = next(special)
        elif name == "image_size" and value:
            given[name] = image if type(value) is int else [image] * len(value)
        elif name == "patch_size" and type(value) is int and limits is SMALL:
            given[name] = min(value, 8)
        else:
            given[name] = _limited(name, value, limits)
    given |= MORE.get(type(default).__name__, {})
    if hasattr(default, "apply_spec_augment"):
        given["apply_spec_augment"] = False
    config = type(default)(**given)
    if hasattr(config, "ctc_loss_reduction"):
        config.ctc_loss_reduction = "mean"
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def _settings(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield what configurations of a class are made of, and the defaults."""
    if dataclasses.is_dataclass(kind):  # since transformers 5
        yield from ((field.name, field.default) for field in dataclasses.fields(kind) if field.init)
    else:
        taken = [*inspect.signature(kind).parameters.values()]
        yield from ((p.name, p.default) for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD)


def _limited(name: str, value: Any, limits: Limits) -> Any:
    if type(value) is int:
        return next((min(value, limit) for kind, limit in limits if re.search(kind, name)), value)
    if isinstance(value, dict) and "mrope_section" in value:
        return value | {"mrope_section": [2, 3, 3] if len(value["mrope_section"]) == 3 else [4, 4]}
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        return copy.deepcopy(value)
    if re.search(r"depths?$|layers$|blocks$|repeats$", name):
        return [min(item, 1) for item in value]
    if limits is SMALL and re.search("heads$", name):
        return [min(item, 2) for item in value]
    is_width = re.search(r"hidden|dim|channels|width|embed", name) and value and min(value) >= 16
    return [max(8, item // 16) for item in value] if limits is SMALL and is_width else list(value)


def make(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Return a model without dropout, whose batch norms keep still and whose losses differ."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > 2e7:
        raise MemoryError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = kind(config)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
            vars(module)["train"] = lambda mode=True, still=module: still
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model
