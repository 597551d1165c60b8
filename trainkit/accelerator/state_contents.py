"""What a state holds of all that was prepared and registered, and how it is put back (rule 22)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.gradients import Gradients
from trainkit.accelerator.preparer import Registry
from trainkit.accelerator.scheduler import shares_of
from trainkit.accelerator.zero_loop import LoopDeepSpeed
from trainkit.basics import rng
from trainkit.basics.torch_internals import sparse_parts
from trainkit.checkpoint import Checkpoint
from trainkit.checkpoint.checkpoint import open_share
from trainkit.checkpoint.exact import as_parameter, load_model, load_state
from trainkit.checkpoint.format.names import process_part
from trainkit.checkpoint.forms import at_least, check_form, maybe
from trainkit.checkpoint.per_process import put_own, states_for, take_states
from trainkit.checkpoint.training_state import (
    SCALE,
    STREAM,
    STREAMS,
    applying,
    check_optimizer,
    check_rank_parts,
    check_schedule,
    load_named_optimizer_state,
    named_optimizer_state,
    parameter_names,
    parts_of_rank,
    read_rank_parts,
    refuse,
    same_torch,
    torch_state,
)
from trainkit.distributed import Processes, collective_guard
from trainkit.errors import CheckpointError, ConfigError, quoted
from trainkit.strategies import Strategy
from trainkit.training.resume.fingerprint import model_problems
from trainkit.training.resume.replicas import check_replicas
from trainkit.training.resume.restore import check_model_form

_OBJECT = "custom_checkpoint_"

_ORDER = {
    "host": (STREAMS["python"], STREAMS["numpy"], STREAMS["torch"]),
    "generators": [torch_state],
    "generators_inside": [torch_state],
    "generators_after": [torch_state],
    "epoch?": int,  # this and others that end so: older states, or some loaders, have none
    "runs?": int,
}
_LOADER = {
    "epoch": int,
    "batches": int,
    "has_ended": bool,
    "order": maybe(_ORDER),
    "facts?": {str: Any},
    "digest?": str | None,
    "stream?": STREAM,
    "generators?": [torch_state],
}
_WINDOWS = {"count": int, "in_window": int, "divisor": int}
_LOOP = {
    "schedulers": [Any],
    "paces?": [(at_least(1), at_least(1))],  # older states have neither this nor the next
    "micro_batches?": at_least(1),
    "loaders": [_LOADER],
    "scaler": {},
    "accumulation": _WINDOWS,
}
"""The form of what all processes have alike beside models and optimizers."""
_PROCESS = {
    **STREAMS,
    "gradients": {str: Tensor},
    "sparse_gradients?": {
        str: {"indices": Tensor, "values": Tensor, "size": [int], "is_coalesced": bool}
    },
    "is_open?": bool,
    "loaders?": [_LOADER],
    "accumulation?": _WINDOWS,
    "objects?": {str: Any},
}
"""The form of what a process has for itself."""
_LEFT_OUT = "no {0} is prepared: what the state has of any {0} is left out."
_LACKING = (
    "it was saved by process 0 alone: the random streams of the other processes are new ones, "
    "derived from it."
)


def _open_gradients(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of an open window that a process has saved, by parameter."""
    sparse = state.get("sparse_gradients", {})
    return {**state.get("gradients", {})} | {
        name: torch.sparse_coo_tensor(**parts, check_invariants=True)
        for name, parts in sparse.items()
    }


def part_name(kind: str, index: int) -> str:
    """Return the part of a model or optimizer."""
    return kind if index == 0 else f"{kind}_{index}"


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A state in memory, verified and compared with what is prepared."""

    path: Path
    parts: Mapping[str, Any]
    objects: Mapping[str, Any]  # of what is registered
    own: Mapping[str, Any] | None  # of this process; None where another number of them trained
    anew: frozenset[int]  # the loaders whose pass cannot go on
    news: list[str]  # what to say of it


@dataclass(frozen=True, slots=True)
class StateContents:
    """All that is saved."""

    registry: Registry
    strategy: Strategy
    gradients: Gradients
    accumulation: Accumulation
    processes: Processes
    device: torch.device

    @property
    def is_open(self) -> bool:
        """Whether there are gradients of a window, also of one that the loop counts by itself."""
        return self.accumulation.is_open or self.gradients.are_unused

    def models(self) -> dict[str, nn.Module]:
        """Return the prepared models by their parts."""
        models = map(self.strategy.unwrap, self.registry.models)
        return {part_name("model", index): model for index, model in enumerate(models)}

    def check_replicas(self) -> None:
        """Raise `DistributedError` where processes that should hold the same do not."""
        optimizers = self.registry.optimizers
        check_replicas(self.strategy, self._parameters(), optimizers, "in `save_state`")

    def of_all(self, take_models: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what this process writes where all of them save."""

        def take() -> tuple[tuple[dict[str, Any], dict[str, Any]], dict[str, Any]]:
            models = take_models()
            entries = {
                part: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
                for part, state in models.items()
            }
            return (self._own(), models | self._common()), entries

        if isinstance(self.strategy, LoopDeepSpeed):
            self.strategy.check_closed()
        with ExitStack() as stack:
            for optimizer in self._optimizers().values():
                stack.enter_context(self.strategy.whole_state(optimizer))
            (own, parts), alike, differing = take_states(
                self.processes, {"objects": self._objects()}, take
            )
        parts |= alike["objects"]
        return parts_of_rank(self.processes, parts, own | differing, sharded=self.strategy.sharded)

    def of_main(self, take_models: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what process 0 writes where it saves alone."""
        with collective_guard.only("save_state"):  # also what hooks and objects call
            parts = take_models() | {process_part(0): self._own(alone=True)} | self._common()
            return parts | {name: thing.state_dict() for name, thing in self._objects().items()}

    def read(self, path: Path, models: Mapping[str, nn.Module], strict: bool = True) -> LoadedState:
        """Return a state, of the models only those in `models`.

        Args:
            strict: False: entries that a model lacks are left out, and those that the state lacks
                keep their values.
        """
        checkpoint, registry = open_share(path, self.processes.world), self.registry
        optimizers, parameters = self._optimizers(), self._parameters()
        names = set(checkpoint.names())
        objects = {name for name in names if name.startswith(_OBJECT) and "-shard-" not in name}
        missing = sorted({*models, *optimizers} - names)
        unknown = set(filter(_is_state, names)) - objects - {*self.models(), *optimizers}
        news = []
        if not optimizers and (left := {n for n in unknown if n.startswith("optimizer")}):
            unknown -= left
            news.append(_LEFT_OUT.format("optimizer"))
        if missing or unknown:
            why = (
                f"it lacks {missing or 'nothing'}, and has {sorted(unknown) or 'nothing'} that is "
                "not wanted. Prepare and register as many models, optimizers and objects as when "
                "it was saved"
            )
            refuse(path, [why])
        like = {"state": parameters} if self.strategy.sharded else None
        likes: dict[str, Any] = {name: model.state_dict() for name, model in models.items()}
        likes |= dict.fromkeys(optimizers, like) | dict.fromkeys(sorted(objects)) | {"loop": None}
        parts = {name: checkpoint.read(name, like) for name, like in likes.items()}
        check_rank_parts(checkpoint)
        trained = _trained(checkpoint)
        ranks = read_rank_parts(checkpoint, self.processes, trained)
        checkpoint.verify_rest()
        self._check_forms(checkpoint, parts, ranks, models)

        same_size, rank = trained == self.processes.size, self.processes.rank
        if not strict:
            news += [_fitted(parts, name, likes[name]) for name in models]
        own = self._own_parts(checkpoint, ranks, trained)
        news += [put_own(parts[name], name, own, same_size=same_size) for name in models]
        if same_size and checkpoint.manifest.world_size < trained:
            news.append(_LACKING)
        saved = {"objects": {name: parts[name] for name in objects}}
        kept, unfit = states_for(
            {"objects": self._objects()}, saved, own, rank=rank, same_size=same_size
        )
        streams = own[0] if same_size else None
        position = parts["loop"] | (streams or {})  # older states have it in `loop` alone
        for kind, present in (("scheduler", registry.schedulers), ("loader", registry.loaders)):
            states = position[f"{kind}s"]
            if states and not present:
                news.append(_LEFT_OUT.format(kind))
            elif len(states) != len(present):
                unfit.append(
                    f"it has {len(states)} {kind}s, but {len(present)} are prepared. Prepare as "
                    "many as when it was saved"
                )
        unfit += self._problems(parts, models, parameters, position, goes_on=same_size)
        refuse(path, unfit)
        if not same_size and any(map(_open_gradients, ranks.values())):
            news.append("gradients that an optimizer had not used yet are left out.")
        lost = {} if same_size else self._lost(parts["loop"]["loaders"])
        news += [f"the loader {index} begins a new pass: {why}." for index, why in lost.items()]
        anew = frozenset(lost)
        return LoadedState(path, parts, kept["objects"], streams, anew, list(filter(None, news)))

    def _check_forms(
        self,
        checkpoint: Checkpoint,
        parts: Mapping[str, Any],
        ranks: Mapping[int, Any],
        models: Mapping[str, nn.Module],
    ) -> None:
        """Raise `CheckpointCorrupt` where something that is taken is not what it must be."""
        strict, parameters = same_torch(checkpoint), self._parameters()
        for name, model in models.items():
            check_model_form(checkpoint, name, parts[name], model)
        for name, optimizer in self._optimizers().items():
            with checkpoint.blaming(name):
                check_optimizer(parts[name], optimizer, parameters, strict=strict)
        with checkpoint.blaming("loop"):
            loop = parts["loop"]
            check_form(loop, _LOOP)
            if self.gradients.scaler is not None and loop["scaler"]:
                check_form(loop["scaler"], SCALE, "scaler")
            pairs = zip(self.registry.schedulers, loop["schedulers"], strict=False)
            for index, (scheduler, state) in enumerate(pairs):
                check = partial(check_schedule, scheduler=scheduler.scheduler, strict=strict)
                check_form(state, check, "schedulers", index)
        of_process = _PROCESS | {f"{name}?": {str: Any} for name in models}
        for rank, part in ranks.items():
            with checkpoint.blaming(process_part(rank)):
                check_form(part, of_process)
            with checkpoint.blaming(process_part(rank), (RuntimeError, TypeError)):
                _open_gradients(part)

    def _problems(
        self,
        parts: Mapping[str, Any],
        models: Mapping[str, nn.Module],
        parameters: Mapping[str, Tensor],
        position: Mapping[str, Any],
        *,
        goes_on: bool,
    ) -> list[str]:
        """Return, in words, why a state is not that of what is prepared.

        Args:
            parts: The parts for all processes, in their form.
            parameters: The parameters by their names in states of optimizers.
            position: Where the loaders are, and the open gradients.
            goes_on: Whether passes of loaders go on where they were.
        """
        problems = [
            f"its {name}: {problem}"
            for name, model in models.items()
            for problem in model_problems(parts[name], model)
        ]
        for name, optimizer in self._optimizers().items():
            saved = [group["params"] for group in parts[name]["groups"]]
            known = parameter_names(optimizer, parameters)
            present = [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            if saved != present:
                problems.append(
                    f"its optimizer is over {_shown(saved)}, but here it is over "
                    f"{_shown(present)}. Make the optimizers as when it was saved"
                )
        for name, gradient in _open_gradients(position).items():
            like = parameters.get(name)
            if like is None or (gradient.shape, gradient.dtype) != (like.shape, like.dtype):
                problems.append(f"its open gradient of `{name}` is that of another parameter")
        pairs = zip(self.registry.loaders, position["loaders"], strict=False)
        for index, (loader, state) in enumerate(pairs):
            inside = goes_on and state["batches"] and not state["has_ended"]
            if inside and (changed := loader.unfit(state)):
                problems.append(
                    f"it was saved inside a pass of the loader {index}, which goes on in another "
                    f"order: {'; '.join(changed)}. Prepare the same loader, or load a state that "
                    "was saved between two passes"
                )
            if not inside and (why := loader.come_to(state, self.registry.objects)):
                problems.append(f"the loader {index}: {why}")
        return problems

    def _lost(self, states: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """Return why passes under way cannot go on, by the number of the loader."""
        lost = {}
        for index, (loader, state) in enumerate(zip(self.registry.loaders, states, strict=False)):
            inside = state["batches"] and not state["has_ended"]
            if inside and (why := loader.loses_place(dict(state))):
                lost[index] = why
        return lost

    def apply(self, loaded: LoadedState, models: Mapping[str, nn.Module]) -> None:
        """Put back what `read` returned for the same `models`."""
        path, parts, own = loaded.path, loaded.parts, loaded.own
        for name, model in models.items():
            with applying("The model", path):
                load_model(model, parts[name], older=True)
        saved = {
            f"{index}.{key}": value
            for index, name in enumerate(self.models())
            for key, value in parts.get(name, {}).items()
        }
        for name, optimizer in self._optimizers().items():
            with applying("The optimizer", path):
                load_named_optimizer_state(optimizer, parts[name], saved)
        for name, thing in self._objects().items():
            with applying(f"The registered `{type(thing).__name__}`", path):
                load_state(thing, loaded.objects[name])
        loop, schedulers = parts["loop"], self.registry.schedulers
        paces = loop.get("paces") or [scheduler.pace for scheduler in schedulers]
        shares = shares_of(self.registry.loaders, loop, self.accumulation.num_steps)
        for scheduler, state, pace in zip(schedulers, loop["schedulers"], paces, strict=False):
            with applying("The scheduler", path):
                scheduler.go_on(state, pace, **shares)
        if self.gradients.scaler is not None and loop["scaler"]:
            self.gradients.scaler.load_state_dict(loop["scaler"])
        self.gradients.forget()
        position = {**loop, **(own or {})}  # older states have it in `loop` alone
        self.accumulation.load_state_dict(position["accumulation"])
        pairs = zip(self.registry.loaders, position["loaders"], strict=False)
        for index, (loader, state) in enumerate(pairs):
            if index in loaded.anew:
                loader.set_epoch(state["epoch"])
            else:
                loader.load_state_dict(state)
        if own is not None:
            self._restore(own)

    def _restore(self, own: Mapping[str, Any]) -> None:
        """Put back the open gradients and the random streams of this process."""
        parameters = self._parameters()
        for parameter in parameters.values():
            parameter.grad = None
        for name, gradient in _open_gradients(own).items():
            parameter = parameters[name]
            there = gradient.to(parameter.device)
            parameter.grad = there if there.is_sparse else as_parameter(there, parameter)
        if "seed" in own:
            rng.seed_all(own["seed"], self.device)
        else:
            rng.load_state_dict(own, self.device)

    def _own_parts(
        self, checkpoint: Checkpoint, ranks: Mapping[int, Any], trained: int
    ) -> list[Any]:
        """Return what each process saved for itself, or where it did not, a new seed."""
        if trained == self.processes.size:
            rank, files = self.processes.rank, sorted(checkpoint.manifest.files.items())
            digests = [info.xxh3_128 for _, info in files]
            return [ranks.get(rank) or {"seed": rng.derive(rank, *digests), "gradients": {}}]
        if any(part.get("is_open", True) and _open_gradients(part) for part in ranks.values()):
            raise CheckpointError(
                f"The state `{checkpoint.path}` was saved inside a window by {trained} processes, "
                "which others cannot complete. Load it on as many.",
                path=checkpoint.path,
            )
        return list(ranks.values())

    def _own(self, *, alone: bool = False) -> dict[str, Any]:
        """Return what this process saves for itself, with the gradients that are still to be used.

        Where one optimizer has made its step and another has not, nobody knows whether the other
        will use or clear its gradients. They are saved where every process can save its own.
        """
        if self.is_open and self.strategy.sharded:
            raise ConfigError(
                "A state of a sharded model cannot be saved inside a window. Save it "
                "`if accelerator.sync_gradients:`."
            )
        kept = {} if alone or self.strategy.sharded else self._parameters()
        if not self.accumulation.is_open:
            unused = set(map(id, self.gradients.unused()))
            kept = {name: p for name, p in kept.items() if id(p) in unused}
        open_ = {name: p.grad for name, p in kept.items() if p.grad is not None}
        return rng.state_dict(self.device) | {
            "gradients": {name: one for name, one in open_.items() if not one.is_sparse},
            "sparse_gradients": {
                name: sparse_parts(one) for name, one in open_.items() if one.is_sparse
            },
            "is_open": self.is_open,
            "loaders": [loader.state_dict() for loader in self.registry.loaders],
            "accumulation": self.accumulation.state_dict(),
        }

    def _common(self) -> dict[str, Any]:
        """Return what all processes have alike, or hold together, beside models and objects."""
        parameters = self._parameters()
        parts = {
            name: named_optimizer_state(optimizer, parameters)
            for name, optimizer in self._optimizers().items()
        }
        parts["loop"] = {
            "schedulers": [scheduler.state_dict() for scheduler in self.registry.schedulers],
            "paces": [scheduler.pace for scheduler in self.registry.schedulers],
            "micro_batches": self.accumulation.num_steps,
            "loaders": [loader.state_dict() for loader in self.registry.loaders],
            "scaler": self.gradients.scale_state(),
            "accumulation": self.accumulation.state_dict(),
        }
        return parts

    def _optimizers(self) -> dict[str, Optimizer]:
        optimizers = enumerate(self.registry.optimizers)
        return {part_name("optimizer", index): one.optimizer for index, one in optimizers}

    def _objects(self) -> dict[str, Any]:
        return {f"{_OBJECT}{index}": thing for index, thing in enumerate(self.registry.objects)}

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the prepared models as states of optimizers call them."""
        return {
            f"{index}.{name}": parameter
            for index, model in enumerate(self.models().values())
            for name, parameter in model.named_parameters()
        }


def _shown(groups: Sequence[Sequence[str]]) -> str:
    names = [name for group in groups for name in group]
    listed = ", ".join(f"`{name}`" for name in names[:3])
    return f"{len(names)} parameters in {len(groups)} groups ({listed}, ...)"


def _trained(checkpoint: Checkpoint) -> int:
    """Return how many processes trained when a state was saved, perhaps by process 0 alone."""
    manifest = checkpoint.manifest
    trained = manifest.metadata.get("processes")
    return trained if type(trained) is int else manifest.world_size


def _fitted(parts: dict[str, Any], name: str, present: Mapping[str, Any]) -> str:
    """Make the state of a model that of its present entries; return what there is to say of it."""
    saved = parts[name]
    left, kept = sorted(set(saved) - set(present)), sorted(set(present) - set(saved))
    parts[name] = {key: saved.get(key, value) for key, value in present.items()}
    words = [f"{len(left)} entries are left out ({quoted(left)})"] if left else []
    words += [f"{len(kept)} keep their values ({quoted(kept)})"] if kept else []
    return f"`strict=False`: of the {name} {', and '.join(words)}." if words else ""


def _is_state(part: str) -> bool:
    """Return whether a part holds the state of something that was prepared or registered."""
    return not part.startswith("process-") and "-shard-" not in part and part != "loop"
