"""Marks of tests that need what may be missing."""

from importlib import metadata
from importlib.util import find_spec

import pytest

HAS_TRANSFORMERS = find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(
    not HAS_TRANSFORMERS, reason="needs the extra `transformers`, whose models it trains"
)
HAS_TRANSFORMERS_5 = (
    HAS_TRANSFORMERS and int(metadata.version("transformers").partition(".")[0]) >= 5
)
