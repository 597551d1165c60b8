"""The modules of a model as rows: what they are, give, and hold."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

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
        rows: Of the modules inside one.
    """

    level: int
    name: str
    kind: str
    repeats: int = 1
    output: str
    parameters: int
    trained: int
    shared: bool
    rows: tuple["Row", ...] = field(default=(), repr=False)

    def is_like(self, other: "Row") -> bool:
        """Return whether this row says the same as another but for its name."""
        inside = zip(self.rows, other.rows, strict=False)
        return (
            replace(self, name="", repeats=1, rows=())
            == replace(other, name="", repeats=1, rows=())
            and len(self.rows) == len(other.rows)
            and all(a.name == b.name and a.is_like(b) for a, b in inside)
        )

    def flat(self) -> Iterator["Row"]:
        """Yield this row, then those inside it."""
        yield self
        for row in self.rows:
            yield from row.flat()


def model_rows(model: nn.Module, depth: int, outputs: Mapping[nn.Module, str]) -> list[Row]:
    """Return the rows of a model from the outermost one down.

    Modules in a list that are alike, and give alike outputs, are one row.

    Args:
        model: Any module.
        depth: Levels of modules to show below the model.
        outputs: What modules gave, as text.
    """
    return list(_Reader(depth, outputs).row(model, "", 0).flat())


class _Reader:
    def __init__(self, depth: int, outputs: Mapping[nn.Module, str]) -> None:
        self._depth = depth
        self._outputs = outputs
        self._seen: set[nn.Parameter] = set()  # those of the rows that are complete

    def row(self, module: nn.Module, name: str, level: int) -> Row:
        parameters = set(module.parameters())
        is_shared = not parameters.isdisjoint(self._seen)
        is_opened = level < self._depth
        self._seen |= set(module.parameters(recurse=False)) if is_opened else parameters
        children = module.named_children() if is_opened else ()
        return Row(
            level=level,
            name=name,
            kind=class_name(module),
            output=self._outputs.get(module, ""),
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            shared=is_shared,
            rows=_merged(self.row(child, own_name, level + 1) for own_name, child in children),
        )


def _merged(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return rows with those of lists put together that follow one another and are alike."""
    merged: list[Row] = []
    for row in rows:
        last = merged[-1] if merged else None
        if last is not None and row.name.isdigit() and last.is_like(row):
            first = last.name.split("-")[0]
            merged[-1] = replace(last, name=f"{first}-{row.name}", repeats=last.repeats + 1)
        else:
            merged.append(row)
    return tuple(merged)


def describe_output(output: Any) -> str:
    """Return the shape of what a module gave: of `logits`, else of its first tensor."""
    tensor = _first_tensor(output)
    return "" if tensor is None else str(list(tensor.shape))


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        named = output.get("logits")
        values: Iterable[Any] = output.values() if named is None else [named]
    elif isinstance(output, list | tuple):
        values = output
    elif hasattr(output, "__dataclass_fields__"):
        values = (getattr(output, name) for name in output.__dataclass_fields__)
    else:
        return None
    found = (_first_tensor(value) for value in values)
    return next((tensor for tensor in found if tensor is not None), None)
