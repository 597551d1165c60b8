"""The gradient that is applied, whatever the model, the loss, the split and the optimizer."""
