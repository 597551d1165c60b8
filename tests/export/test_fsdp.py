"""A model trained by FSDP on two processes, in the hands of transformers."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.export.toys import TOKENS, gpt2, read_export
from tests.helpers.needs import needs_transformers
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import make_trainer
from trainkit.cli.main import main
from trainkit.export import load_checkpoint_in_model

LIMIT = "2kB"


def _train(rank: int, folder: str) -> Any:
    trainer = make_trainer(strategy="fsdp", max_steps=3, output_dir=Path(folder, "run"))
    model = gpt2()
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).reshape(16, 4) % 17]
    loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    trainer.fit(model, loader, optimizer=partial(torch.optim.AdamW, lr=0.01))
    trainer.save_checkpoint()
    trainer.save_model(Path(folder, "export"), max_shard_size=LIMIT)
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
    return logits


@needs_transformers
def test_a_model_from_fsdp(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    logits = run_ranks(2, _train, str(tmp_path))[0]
    export = tmp_path / "export"
    files = list(export.glob("*.safetensors"))
    assert len(files) > 1
    assert all(path.stat().st_size <= 2000 for path in files)
    loaded = AutoModelForCausalLM.from_pretrained(export)
    assert type(loaded).__name__ == "GPT2LMHeadModel"
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, logits)
        hidden = AutoModel.from_pretrained(export)(TOKENS).last_hidden_state
        assert torch.equal(loaded.lm_head(hidden), logits)

    # The sharded checkpoint holds the same, for the command and for a model on one process.
    arguments = [str(tmp_path / "run"), str(tmp_path / "again"), "--max-shard-size", LIMIT]
    assert main(["checkpoint", "export", *arguments]) == 0
    one, two = read_export(export), read_export(tmp_path / "again")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    model = gpt2(1)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert (checkpoint / "model-shard-00001.safetensors").exists()
    load_checkpoint_in_model(model, checkpoint, strict=True)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, logits)
