"""Reads parts of tensors from safetensors files, as `save_pretrained` writes them."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainkit.errors import ConfigError
from trainkit.strategies.shards import local, put, rows

__all__ = ["WeightFiles"]

INDEX = "model.safetensors.index.json"


class WeightFiles:
    """The safetensors files of a folder, open.

    Args:
        folder: Holds `model.safetensors`, or `model.safetensors.index.json` and the files that
            it names.

    Raises:
        ConfigError: There is no such file, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}  # by the name of the tensor
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        names = ["model.safetensors"]
        index = self._folder / INDEX
        if index.exists():
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        missing = [name for name in names if not (self._folder / name).is_file()]
        if missing:
            raise ConfigError(
                f"`weights={str(self._folder)!r}` lacks {', '.join(missing)}. Pass a folder that "
                "`save_model` or `save_pretrained` has written."
            )
        for name in names:
            try:
                file = self._stack.enter_context(safe_open(self._folder / name, "pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"`{self._folder / name}` cannot be read: {error}.") from error
            self._files.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def read(self, wanted: Mapping[str, tuple[Tensor, list[str]]]) -> None:
        """Fill tensors, each with the rows that lie on this process.

        Args:
            wanted: A tensor and all the names that it may have in a file, by its own name.

        Raises:
            ConfigError: Tensors are missing or have other shapes; names all of them.
        """
        found = {
            name: next((alias for alias in aliases if alias in self._files), None)
            for name, (_, aliases) in wanted.items()
        }
        problems = [f"`{name}` is missing" for name, alias in found.items() if alias is None]
        present = {name: alias for name, alias in found.items() if alias is not None}
        for name, alias in present.items():
            shape = tuple(self._files[alias].get_slice(alias).get_shape())
            expected = tuple(wanted[name][0].shape)
            if shape != expected:
                problems.append(f"`{name}` has the shape {shape}, the model {expected}")
        if problems:
            raise ConfigError(
                f"`weights={str(self._folder)!r}` does not fit the model: {'; '.join(problems)}."
            )
        for name, alias in present.items():
            tensor, file = wanted[name][0], self._files[alias]
            if tensor.ndim == 0 or not tensor.shape[0]:
                put(file.get_tensor(alias), tensor)
            else:
                _copy_rows(file.get_slice(alias), tensor)


def _copy_rows(source: Any, tensor: Tensor) -> None:
    """Copy into `tensor` the rows of it that lie here, and read no others."""
    own = rows(tensor)
    part = local(tensor)
    if part.numel():
        part.detach().copy_(source[own])
