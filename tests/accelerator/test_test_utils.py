"""What `accelerate.test_utils` has, beside Accelerate's own."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit.accelerate_compat as accelerate
from tests.helpers.needs import late

OURS: Any = accelerate.test_utils
THEIRS = late("accelerate.test_utils")
BOTH: list[Any] = [OURS, THEIRS]
# Version 2 of datasets leaves the files open that it has read.
leaves_files_open = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
both = pytest.mark.parametrize("lib", BOTH, ids=["trainkit", "accelerate"])
PROGRAM = "import sys; print('one\\ntwo'); print('bad', file=sys.stderr); sys.exit({})"


@both
def test_a_program_is_run_and_its_lines_are_there(
    lib: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run = lib.execute_subprocess_async
    done = run([Path(sys.executable), "-c", PROGRAM.format(0)], env={"A": "b"})
    assert (done.returncode, done.stdout, done.stderr) == (0, ["one", "two"], ["bad"])
    out, errors = capfd.readouterr()
    assert f"Running:  {sys.executable} -c" in out
    assert "stdout: one\nstdout: two\n" in out
    assert errors == "stderr: bad\n"
    with pytest.raises(RuntimeError, match=r"(?s)-c import.* 3\W.*bad"):
        run([sys.executable, "-c", PROGRAM.format(3)], quiet=True, echo=False)
    assert capfd.readouterr() == ("", "")


@both
def test_a_command_returns_its_output_where_that_is_asked_for(lib: Any) -> None:
    run, command = lib.testing.run_command, [Path(sys.executable), "-c", "print(1)"]
    assert run(command) is None
    assert run(command, return_stdout=True) == "1\n"
    with pytest.raises(lib.testing.SubprocessCallException, match=r"(?s)-c.*bad"):
        run([sys.executable, "-c", PROGRAM.format(1)])


def test_a_program_that_a_signal_ends_has_failed_and_one_that_is_late_is_killed() -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(RuntimeError, match="ended with -9"):
        OURS.execute_subprocess_async([sys.executable, "-c", code])
    with pytest.raises(subprocess.TimeoutExpired):
        # What it has started holds its streams open, and goes with it.
        OURS.execute_subprocess_async(["sh", "-c", "sleep 600 & wait"], timeout=0.1)


@pytest.mark.filterwarnings("ignore:'count' is passed:DeprecationWarning")  # of Accelerate
@pytest.mark.parametrize("worker", [None, "gw0", "gw3"])
def test_each_worker_of_a_suite_has_a_port(
    monkeypatch: pytest.MonkeyPatch, worker: str | None
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker is not None:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    ours, theirs = (lib.testing.get_torch_dist_unique_port() for lib in BOTH)
    assert ours == theirs


def write_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write what the examples read under the working folder, which is `folder` then."""
    datasets, transformers = map(pytest.importorskip, ("datasets", "transformers"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog", "cat", "ran", "slept"]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"), model_max_length=12)
    tokenizer.save_pretrained(folder / "bert-base-cased")
    data = folder / "tests" / "test_samples" / "MRPC"
    data.mkdir(parents=True)
    rows = ["a dog ran,a cat slept,not_equivalent", "a dog,dog,equivalent", "cat,a cat,equivalent"]
    for name in ("train", "dev"):
        (data / f"{name}.csv").write_text("\n".join(["sentence1,sentence2,label", *rows]))


@leaves_files_open
def test_the_data_of_their_examples_is_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_samples(tmp_path, monkeypatch)
    found: list[list[list[Any]]] = []
    for lib in BOTH:
        accelerator: Any = importlib.import_module("accelerate").Accelerator(cpu=True)
        loaders = lib.training.mocked_dataloaders(accelerator, batch_size=16)
        assert [len(loader) for loader in loaders] == [2, 3]
        torch.manual_seed(0)  # of the shuffling; what loads the data may draw, too
        found.append([[dict(batch) for batch in loader] for loader in loaders])
    for ours, theirs in zip(*found, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.keys() == other.keys() >= {"input_ids", "attention_mask", "labels"}
            assert all(torch.equal(one[name], other[name]) for name in one)


@leaves_files_open
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_data_for_the_next_token_is_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: str
) -> None:
    write_samples(tmp_path, monkeypatch)
    words = ["<eos>", "a", "dog", "cat", "ran", "slept"]
    tokenizers, transformers = map(importlib.import_module, ("tokenizers", "transformers"))
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<eos>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", model_max_length=12
    )
    fast.save_pretrained(tmp_path / "HuggingFaceTB" / "SmolLM-360M")
    found: list[list[list[Any]]] = []
    for lib in BOTH:
        home: Any = importlib.import_module("accelerate")
        home.state.AcceleratorState._reset_state(True)
        loaders = lib.training.mocked_dataloaders_for_autoregressive_models(
            home.Accelerator(cpu=True, mixed_precision=precision)
        )
        found.append([[dict(batch) for batch in loader] for loader in loaders])
    assert [len(loader) for loader in found[0]] == [2, 3]
    for ours, theirs in zip(*found, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.keys() == other.keys() >= {"input_ids", "attention_mask", "labels"}
            # Kinds of tokens, which some versions of transformers give, are not cut there.
            names = one.keys() - {"token_type_ids"}
            assert all(torch.equal(one[name], other[name]) for name in names)


def test_placeholders_hold_what_they_were_given_and_prepare_hands_them_back() -> None:
    for lib, home in (
        (accelerate, accelerate.utils.deepspeed),
        *(
            (
                importlib.import_module(name)
                for name in ("accelerate", "accelerate.utils.deepspeed")
            ),
        ),
    ):
        optimizer = home.DummyOptim([1], lr=0.5, weight_decay=0.1, betas=(0.9, 0.95))
        scheduler = home.DummyScheduler(optimizer, total_num_steps=9, warmup_num_steps=1, x=2)
        assert vars(optimizer) == {
            "params": [1], "lr": 0.5, "weight_decay": 0.1, "kwargs": {"betas": (0.9, 0.95)}
        }  # fmt: skip
        assert vars(scheduler) == {
            "optimizer": optimizer, "total_num_steps": 9, "warmup_num_steps": 1,
            "lr_scheduler_callable": None, "kwargs": {"x": 2},
        }  # fmt: skip
        prepared = lib.Accelerator(cpu=True).prepare(optimizer, scheduler)
        assert prepared == (optimizer, scheduler)
