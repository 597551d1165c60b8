"""Run a script on the workers of Ray Train: `python ray_train.py --workers 8 train.py --epochs 3`.

The script is one that also runs by `python train.py` and `trainkit launch train.py`. Ray makes the
process group, and trainkit joins it; checkpoints and resume are those of the script, which calls
`fit(..., resume="auto")` with an `output_dir` on storage that all workers see.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def run_script(settings: dict[str, Any]) -> None:
    """Be one worker: run the script as the main program, in the folder that Ray was started in."""
    os.chdir(settings["folder"])
    sys.argv = [settings["script"], *settings["arguments"]]
    runpy.run_path(settings["script"], run_name="__main__")


def main() -> None:
    """Start the workers, and wait for their end."""
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [options] SCRIPT ...")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--use_gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--storage", type=Path, default=Path("ray"), help="for what Ray writes")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    trainer = TorchTrainer(
        run_script,
        train_loop_config={
            "folder": str(Path.cwd()),
            "script": str(Path(options.script).absolute()),
            "arguments": options.arguments,
        },
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.use_gpu),
        run_config=RunConfig(storage_path=str(options.storage.absolute())),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
