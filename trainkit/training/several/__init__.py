"""Several optimizers, and several training loaders, in one training."""
