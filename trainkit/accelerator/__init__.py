"""What `Accelerator` is made of, for loops of the user's own; imported when it is first used."""
