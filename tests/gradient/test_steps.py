"""The default steps know how many labels the loss of a transformers model averages."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.needs import late
from trainkit.training.default_steps import training_step

transformers = late("transformers")

WORDS = 32
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "vocab_size": WORDS,
}
MODELS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM/Bert": SMALL,
    "BertLMHeadModel/Bert": SMALL | {"is_decoder": True},
    "GPT2LMHeadModel/GPT2": {
        "n_embd": 16,
        "n_head": 2,
        "n_layer": 1,
        "vocab_size": WORDS,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "LlamaForCausalLM/Llama": SMALL,
    "MptForCausalLM/Mpt": {"d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": WORDS},
    "OPTForCausalLM/OPT": {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "ffn_dim": 16,
        "vocab_size": WORDS,
        "word_embed_proj_dim": 16,
    },
    "T5ForConditionalGeneration/T5": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": WORDS,
        "decoder_start_token_id": 0,
    },
    "XLNetLMHeadModel/XLNet": {
        "vocab_size": WORDS,
        "d_model": 16,
        "n_layer": 1,
        "n_head": 2,
        "d_inner": 16,
    },
    "XLMWithLMHeadModel/XLM": {"vocab_size": WORDS, "emb_dim": 16, "n_layers": 1, "n_heads": 2},
}


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).detach())


@pytest.mark.parametrize("kind", MODELS)
def test_the_weight_is_the_number_of_labels_in_the_loss(kind: str) -> None:
    model_name, config_name = kind.split("/")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, f"{config_name}Config")(**MODELS[kind])
    model = getattr(transformers, model_name)(config).eval()
    tokens = torch.randint(3, WORDS - 2, (2, 8))
    labels = tokens.clone()
    labels[0, 4:] = -100
    batch = {"input_ids": tokens, "labels": labels}
    output = training_step(model, model, batch, None)
    logits = model(**batch).logits
    # Which labels were averaged is seen from the loss itself.
    shifted, plain = mean_loss(logits[:, :-1], labels[:, 1:]), mean_loss(logits, labels)
    expected = 10 if abs(float(output.loss.detach()) - shifted) < 1e-4 else 12
    assert float(output.loss.detach()) == pytest.approx(
        shifted if expected == 10 else plain, abs=1e-4
    )
    assert output.weight is not None
    assert int(output.weight) == expected


def test_other_models_weigh_by_samples() -> None:
    class Plain(nn.Linear):
        def forward(self, inputs: Any, labels: Any) -> Any:  # type: ignore[override]
            return {"loss": super().forward(inputs).mean()}

    model = Plain(3, 1)
    batch = {"inputs": torch.randn(4, 3), "labels": torch.zeros(4, dtype=torch.long)}
    assert training_step(model, model, batch, None).weight is None
