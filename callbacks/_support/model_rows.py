"""The modules of a model as rows: what they are, give, and hold."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from trainkit.containers.tree import children
from trainkit.types import class_name

__all__ = ["Row", "describe_output", "model_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One module, or several like it that follow one another.

    Attributes:
        level: How many modules it lies inside.
        name: Under which the module around it knows it; "0-11" for several.
        kind: Its class.
        repeats: How many they are.
        output: What one gives, as text; empty where it was not called.
        parameters: Elements of the parameters of one, those of modules inside it too.
        trained: How many of them require a gradient.
        shared: Whether a row above holds some of them too.
        inside: Rows of the modules inside one.
    """

    level: int
    name: str
    kind: str
    repeats: int = 1
    output: str
    parameters: int
    trained: int
    shared: bool
    inside: tuple["Row", ...] = ()


def model_rows(model: nn.Module, depth: int, outputs: Mapping[nn.Module, str]) -> list[Row]:
    """Return the rows of a model from the outermost one down.

    Modules in a list that are alike, and give alike outputs, are one row.

    Args:
        model: Any module.
        depth: Levels of modules to show below the model.
        outputs: What modules gave, as text.
    """
    seen: set[nn.Parameter] = set()  # those of the rows that are complete

    def read(module: nn.Module, name: str, level: int) -> Row:
        parameters = set(module.parameters())
        is_shared = not parameters.isdisjoint(seen)
        is_opened = level < depth
        seen.update(module.parameters(recurse=False) if is_opened else parameters)
        parts = module.named_children() if is_opened else ()
        return Row(
            level=level,
            name=name,
            kind=class_name(module),
            output=outputs.get(module, ""),
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            shared=is_shared,
            inside=_merged(read(child, own_name, level + 1) for own_name, child in parts),
        )

    return list(_flat(read(model, "", 0)))


def _flat(row: Row) -> Iterator[Row]:
    yield row
    for inner in row.inside:
        yield from _flat(inner)


def _merged(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return rows with those of lists put together that follow one another and are alike."""
    merged: list[Row] = []
    for row in rows:
        last = merged[-1] if merged else None
        if last is not None and row.name.isdigit() and _is_alike(last, row):
            first = last.name.split("-")[0]
            merged[-1] = replace(last, name=f"{first}-{row.name}", repeats=last.repeats + 1)
        else:
            merged.append(row)
    return tuple(merged)


def _is_alike(row: Row, other: Row) -> bool:
    """Return whether two rows say the same but for their names."""
    return replace(row, name=other.name, repeats=1) == other


def describe_output(output: Any) -> str:
    """Return the shape of what a module gave: of `logits`, else of its first tensor."""
    tensor = _first_tensor(output)
    return "" if tensor is None else str(list(tensor.shape))


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and output.get("logits") is not None:
        return _first_tensor(output["logits"])
    found = map(_first_tensor, children(output))
    return next((tensor for tensor in found if tensor is not None), None)
