"""What usually causes an error of others, and what to do."""

import re

from trainkit.errors import text_of

_MEMORY = "Out of memory: use smaller batches and more accumulation, bf16, or fewer workers."
# What stands in an error's class or text, and what usually causes it.
_HINTS = (
    (r"worker .*(Bus error|SIGBUS)|shared memory", "The shared memory of this machine is full: "
     "enlarge it (`--shm-size` of a container), or use fewer or smaller prefetched batches."),
    (r"worker .*(Killed|SIGKILL)", "Usually the kernel's out-of-memory killer: use fewer workers "
     "or a smaller `prefetch_factor`, or read data without copying it into each worker."),
    (r"worker .*(Segmentation fault|SIGSEGV|exited unexpectedly|ended by itself)", "Set "
     "`num_workers=0` to see the worker's own error."),
    (r"MemoryError|out of memory|(can't|cannot|not enough) (allocate )?memory", _MEMORY),
    (r"Expected more than 1 value per channel", "BatchNorm has no spread in the last "
     "micro-batch of 1 sample: `DataLoader(drop_last=True)`, or another batch size."),
    (r"No space left", "The disk is full. Checkpoints that were committed before are intact."),
    (r"device-side assert", "Usually a label or index out of range: run once on the CPU, or with "
     "`CUDA_LAUNCH_BLOCKING=1`."),
    (r"not currently implemented for the MPS device", "Set `PYTORCH_ENABLE_MPS_FALLBACK=1` before "
     "Python starts: what this device lacks then runs on the CPU, slowly."),
    (r"[Ee]xpected all tensors to be on the same device", "Batch, model and `loss_fn` come to the "
     "device: make others there (`device=inputs.device`), and those of modules as buffers. What a "
     "`load_state_dict` of your own gets from a checkpoint is on the CPU: move it there."),
    (r"mixed torch.Tensor and DTensor", "Sharded parameters are whole only in the model's forward: "
     "a penalty on weights belongs there, or into the optimizer."),
    (r"non-empty donated buffers", "Several terms of a loss, each with its weight, need several "
     "backwards through one graph where a window has several micro-batches: set "
     "`torch._functorch.config.donated_buffer = False`, or `gradient_accumulation_steps=1`."),
    (r"computed under selective activation checkpoint", "Several terms of a loss, each with its "
     "weight, need several backwards through one graph where a window has several micro-batches: "
     "set `gradient_checkpointing=True`, or `gradient_accumulation_steps=1`."),
    (r"DDP expects same model across all ranks", "Some parameters are frozen on some processes "
     "only: freeze and thaw the same ones on all."),
    (r"'Reducing' object has no attribute", "On several processes this is DDP around your "
     "model: call it as a whole, or take the part of `self.run.module`."),
    (r"(MPS|device).*float64", "This device has no float64: make the model and its inputs "
     "float32 (`.float()`), or train with `device=\"cpu\"`."),
)  # fmt: skip


# The same for what collectives raise. Other code times out, too, and loses other connections.
_COLLECTIVE = re.compile(r"gloo|[a-z]ccl|c10d|TCPStore|\bDist\w*Error|collectives", re.IGNORECASE)
_HINTS_OF_COLLECTIVES = (
    (r"closed by peer|reset by peer|Broken pipe|Connection refused|remote process exited|"
     r"Connection closed|[a-z]cclRemoteError", "The connection to another process broke, and none "
     "has said why: see the output of the others."),
    (r"[Mm]ismatch between collectives|invalid tensor size|preamble|enforce",
     "Processes called different collectives, or the same one with tensors "
     "of different shapes or types. `TRAINKIT_DEBUG=1` names who had what."),
    (r"[Tt]imed out", "Another process did not come to this collective, or is slow."),
)  # fmt: skip


def hint_for(kind: str, text: str, *, alone: bool = False) -> str:
    """Return the usual cause of an error and what to do, empty where none is known.

    Args:
        kind: The name of its class.
        text: Its message.
        alone: There are no other processes.
    """
    whole = f"{kind}: {text}"
    hints: tuple[tuple[str, str], ...] = _HINTS
    if not alone and _COLLECTIVE.search(whole):
        hints = (*_HINTS_OF_COLLECTIVES, *_HINTS)
    return next((hint for pattern, hint in hints if re.search(pattern, whole)), "")


def tells_of_lost_peer(error: BaseException) -> bool:
    """Return whether a collective raised an error because another process is not there any more."""
    whole = f"{type(error).__name__}: {text_of(error)}"
    broken, _ = _HINTS_OF_COLLECTIVES[0]
    of_collective = isinstance(error, RuntimeError) and _COLLECTIVE.search(whole)
    return bool(of_collective and re.search(broken, whole))
