"""The frozen part of a model in a checkpoint: by digest and source, instead of by its values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainkit.basics.quantized import made_by, with_scales
from trainkit.checkpoint import Checkpoint
from trainkit.checkpoint.format.manifest import read_manifest
from trainkit.checkpoint.format.names import MANIFEST
from trainkit.checkpoint.training_state import refuse
from trainkit.distributed import run_on_all
from trainkit.errors import CheckpointError, ConfigError, quoted
from trainkit.export.loading import Loading
from trainkit.export.state import whole
from trainkit.training.resume.replicas import digests_of
from trainkit.training.run import Run
from trainkit.training.run_parts import Base

KEY = "reference"
"""In the manifest of a checkpoint that refers to its base."""


def left_out(run: Run) -> list[str]:
    """Return which entries of the model's state are not saved; tied ones by all names."""
    base = run.checkpoints.base
    return [] if base is None else [name for name in _frozen(run) if name in base.whole]


def _named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def _frozen(run: Run) -> dict[str, nn.Parameter]:
    held, named = set(map(id, run.parameters)), _named(run.module).items()
    return {name: p for name, p in named if not p.requires_grad and id(p) not in held}


def _source(module: nn.Module) -> str:
    source = getattr(module, "name_or_path", "")  # of a model of transformers
    return source if isinstance(source, str) else ""


def base_of(run: Run) -> Base:
    """Return the frozen part of a model, which the checkpoints of a run are to refer to.

    Every process must call it before the first step. It reads all frozen parameters.
    """
    frozen = _frozen(run)
    if not frozen:
        raise ConfigError(
            '`Checkpoint(frozen="reference")` leaves out what is frozen, but every parameter of '
            "the model is trained, or held by the optimizer. Set `requires_grad` to False on the "
            "base before `fit`, or leave `frozen` out."
        )
    return Base(whole=_digests(frozen), local=digests_of(frozen))


def describe_base(run: Run) -> dict[str, Any]:
    """Return what the manifest says of the base; nothing where checkpoints hold all.

    Every process must call it.

    Raises:
        CheckpointError: Frozen parameters are not what they were; on all processes.
    """
    base, names = run.checkpoints.base, left_out(run)
    if base is None:
        return {}

    def check() -> None:
        local = digests_of(_frozen(run))
        changed = [name for name in names if local[name] != base.local[name]]
        if changed:
            raise CheckpointError(
                f"{len(changed)} frozen parameters have changed since `fit` began: "
                f"{quoted(changed)}. No checkpoint can refer to them: pass "
                '`Checkpoint(frozen="save")`.'
            )

    run_on_all(run.strategy.processes, check)
    digests = {name: base.whole[name] for name in names}
    made = {name: words for name, words in made_by(run.module).items() if name in digests}
    return {KEY: {"source": _source(run.module), "digests": digests, "made": made}}


def check_base(path: Path, metadata: Mapping[str, Any], module: nn.Module) -> None:
    """Compare a model with the base that a checkpoint refers to, if it does.

    Every process must call it where the model is sharded.

    Raises:
        CheckpointError: It is another one.
    """
    told = metadata.get(KEY)
    if told is None:
        return
    saved = told["digests"]
    present = _digests({name: p for name, p in _named(module).items() if name in saved})
    made, same_source = made_by(module), bool(told["source"]) and told["source"] == _source(module)
    alike = {n for n, words in told.get("made", {}).items() if same_source and made.get(n) == words}
    if other := [n for n in saved if present.get(n) != saved[n] and n not in alike]:
        source = f" `{told['source']}`" if told["source"] else ""
        why = (
            f"it holds what was trained, and refers to its base{source} for the rest, but "
            f"{len(other)} of {len(saved)} frozen parameters have other values now: "
            f"{quoted(other)}. Load the same base, in the same dtype"
        )
        refuse(path, [why])


def load_onto_base(module: nn.Module, path: Path, of: Sequence[str] | None = None) -> None:
    """Load the weights that the evaluation of a checkpoint looked at, such as the average of `EMA`.

    A base that the checkpoint refers to is compared first. `of` is the callback that has the
    weights, and the key of its state; else what the checkpoint tells. Where it is broken, does not
    fit, or has no such callback, CheckpointError is raised.
    """
    module.state_dict()  # shards what a forward has gathered
    told = read_manifest(path).metadata if (path / MANIFEST).is_file() else {}
    check_base(path, told, module)
    loading = Loading(module)
    loading.may_lack = told.get(KEY, {}).get("digests", {})  # the model has its base
    loading.run(path, strict=True, of=told.get("evaluated_weights") if of is None else of)


def read_model(checkpoint: Checkpoint, module: nn.Module, like: Any = None) -> dict[str, Any]:
    """Return the state of the model in a checkpoint, with the base that it refers to.

    Args:
        module: Has the base of what was saved, as `check_base` says.
    """
    state: dict[str, Any] = checkpoint.read("model", like)
    if KEY in checkpoint.manifest.metadata and isinstance(state, dict):  # as it will be checked
        present, told = module.state_dict(), checkpoint.manifest.metadata[KEY]
        base = with_scales(module, told["digests"])
        state |= {name: present[name] for name in base if name in present}
    return state


def _digests(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return digests of whole parameters, which lie on the CPU one after the other."""
    known: dict[int, str] = {}
    for parameter in parameters.values():
        if id(parameter) not in known:
            known[id(parameter)] = digests_of({"": whole(parameter).cpu()})[""]
    return {name: known[id(parameter)] for name, parameter in parameters.items()}
