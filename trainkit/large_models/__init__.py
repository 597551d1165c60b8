"""Models that are larger than the memory of a device, for inference."""
