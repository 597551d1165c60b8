"""A training in a real notebook: what a saved one shows, and what an interrupt leaves."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

TRAINING = """
import time
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback
from trainkit.callbacks import Checkpoint, Evaluation, ProgressBar

class Slow(Callback):
    def on_step_end(self, run, result):
        if run.state.step == 3:
            print("from a callback")

fit(make_trainer(callbacks=[ProgressBar(), Evaluation(), Slow()], max_epochs=2)).step
"""
INTERRUPTED = """
import os, pathlib
class Waits(Callback):
    def on_step_end(self, run, result):
        if run.state.step == 5:
            pathlib.Path("PLACE/ready").write_text(str(os.getpid()))
        if run.state.step >= 5:
            time.sleep(0.1)

trainer = make_trainer(
    callbacks=[ProgressBar(), Checkpoint(), Waits()], max_steps=100_000, output_dir="PLACE/run"
)
result = fit(trainer)
print("and then", result.stop_reason, result.checkpoint.name == trainer.run.checkpoint.name)
"""
AFTERWARDS = "print('alive', result.step == trainer.run.state.step >= 5)"


def _interrupt(flag: Path) -> None:
    """Send the kernel what the button of a notebook sends, once it trains."""
    deadline = time.monotonic() + 120
    while not (flag.exists() and flag.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(int(flag.read_text()), signal.SIGINT)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own libraries
def test_a_notebook_that_is_saved_and_opened_again(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    cells = [TRAINING, INTERRUPTED.replace("PLACE", str(tmp_path)), AFTERWARDS]
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    runner = client.NotebookClient(notebook, timeout=120, kernel_name="python3")
    watcher = threading.Thread(target=_interrupt, args=[tmp_path / "ready"])
    watcher.start()
    runner.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    watcher.join()
    nbformat.write(notebook, tmp_path / "saved.ipynb")
    outputs: list[list[Any]] = [
        cell.outputs for cell in nbformat.read(tmp_path / "saved.ipynb", 4).cells
    ]
    (bar,) = [output.data for output in outputs[0] if output.output_type == "display_data"]
    assert bar["text/plain"].startswith("epoch 2/2, step 16/16, 00:0")
    assert '<progress value="16" max="16">' in bar["text/html"]
    texts = ["".join(o.text for o in of if o.output_type == "stream") for of in outputs]
    assert "from a callback" in texts[0]
    assert texts[0].count("eval loss") == 2
    assert outputs[0][-1].data["text/plain"] == "16"
    assert "trainkit: ended by SIGINT at step" in texts[1]
    assert "checkpoint `" in texts[1]
    assert "and then signal 2 True" in texts[1]
    assert texts[2] == "alive True\n"
