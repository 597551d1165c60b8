"""What a checkpoint looks like on disk."""
