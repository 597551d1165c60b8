"""Data and model that the scripts of this folder share: is the sum of the features positive?"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FEATURES = 16
SAMPLES = 480


def make_data(samples: int, seed: int) -> TensorDataset:
    """Return features and classes, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(features, (features.sum(1) > 0).long())


def make_model() -> nn.Module:
    """Return a classifier with the same first weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 2))


def checksum(model: nn.Module) -> str:
    """Return the bits of a model's weights, for comparison."""
    flat: list[Tensor] = [value.detach().flatten() for value in model.state_dict().values()]
    total = torch.cat(flat).view(torch.int32).sum(dtype=torch.int64)
    return f"{int(total) % 2**64:016x}"
