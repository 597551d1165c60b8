"""Models for other programs: weights written and read as transformers and Accelerate do."""

from typing import TYPE_CHECKING

from trainkit.lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.export.loading import LoadedKeys as LoadedKeys
    from trainkit.export.saving import save_model as save_model
    from trainkit.large_models.dispatch import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from trainkit.large_models.empty import init_empty_weights as init_empty_weights

__all__, __getattr__, __dir__ = lazy_exports(__name__)
