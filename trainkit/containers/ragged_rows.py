"""Rows of different width made equally wide, with what cannot be taken for data."""

import functools
import math
import sys
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import DataError
from trainkit.types import IGNORED


def filled_up(rows: list[Any], pad_value: float | None, path: str) -> list[Any]:
    """Return tensors, or arrays, of one type, as large in later dimensions as the largest.

    Args:
        rows: Of as many dimensions each.
        pad_value: What they are filled up with, at the end. None: -100 for signed integers, NaN
            for floating and complex numbers, neither of which a loss or metric takes for data.
        path: Names the value in errors.

    Raises:
        DataError: `pad_value` is needed, or is none of the type.
    """
    is_tensor = isinstance(rows[0], Tensor)
    if is_tensor:
        dtype = functools.reduce(torch.promote_types, [values.dtype for values in rows])
    else:
        dtype = sys.modules["numpy"].result_type(*rows)
    later = tuple(max(sizes) for sizes in zip(*(values.shape[1:] for values in rows), strict=True))
    value = _fill(dtype, pad_value, path)
    filled = []
    for values in rows:
        shape = (values.shape[0], *later)
        if is_tensor:
            full = torch.full(shape, value, dtype=dtype, device=values.device)
        else:
            full = sys.modules["numpy"].full(shape, value, dtype=dtype)
        full[tuple(slice(size) for size in values.shape)] = values
        filled.append(full)
    return filled


def _fill(dtype: Any, pad_value: float | None, path: str) -> Any:
    """Return what rows of `dtype` are filled up with.

    Raises:
        DataError: There is no value that cannot be data, or `pad_value` is none of that type.
    """
    is_float, is_signed, limits = _kind_of(dtype)
    if pad_value is None:
        if is_float or is_signed:
            return math.nan if is_float else IGNORED
        raise DataError(
            f"`{path}` has rows of different width, and {dtype} has no value that cannot be data. "
            "Say by `pad_value=` what they are filled up with, or make them equally wide first; "
            "where a `Trainer` gathers, do that in `evaluation_step`, or return integers or floats."
        )
    if limits is not None and not (
        pad_value == pad_value // 1 and limits[0] <= pad_value <= limits[1]
    ):
        raise DataError(
            f"`pad_value` is {pad_value}, which {dtype}, the type of `{path}`, cannot hold. Give "
            f"a whole number from {limits[0]} to {limits[1]}."
        )
    return pad_value if limits is None else int(pad_value)


def _kind_of(dtype: Any) -> tuple[bool, bool, tuple[int, int] | None]:
    """Return whether a type is floating or complex, or signed whole numbers, and its limits."""
    if isinstance(dtype, torch.dtype):
        if dtype.is_floating_point or dtype.is_complex:
            return True, True, None
        if dtype is torch.bool:
            return False, False, (0, 1)
        info: Any = torch.iinfo(dtype)
        return False, dtype.is_signed, (info.min, info.max)
    if dtype.kind in "iu":
        info = sys.modules["numpy"].iinfo(dtype)
        return False, dtype.kind == "i", (int(info.min), int(info.max))
    return dtype.kind in "fc", dtype.kind in "fc", (0, 1) if dtype.kind == "b" else None
