"""What a run saves, and how another goes on from it."""
