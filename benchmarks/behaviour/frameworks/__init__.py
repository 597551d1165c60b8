"""The frameworks of the table, each used as its documentation recommends."""

from importlib import import_module
from importlib.util import find_spec

from benchmarks.behaviour.job import Framework

NAMES = {  # by their names on the command line: heading, the module here, what must be installed
    "trainkit": ("trainkit", "with_trainkit", "trainkit"),
    "accelerate": ("Accelerate", "with_accelerate", "accelerate"),
    "lightning": ("Lightning", "with_lightning", "lightning"),
    "fabric": ("Fabric", "with_fabric", "lightning"),
    "transformers": ("transformers", "with_transformers", "transformers"),
    "ignite": ("ignite", "with_ignite", "ignite"),
    "torchtnt": ("torchtnt", "with_torchtnt", "torchtnt"),
    "pytorch-accelerated": (
        "pytorch-accelerated",
        "with_pytorch_accelerated",
        "pytorch_accelerated",
    ),
}


def installed() -> list[str]:
    """Return the names of the frameworks that can be run here."""
    return [name for name, (_, _, needed) in NAMES.items() if find_spec(needed) is not None]


def load(name: str) -> Framework:
    """Import a framework; only this one."""
    module = import_module(f"benchmarks.behaviour.frameworks.{NAMES[name][1]}")
    framework: Framework = module.FRAMEWORK
    framework.key = name
    return framework
