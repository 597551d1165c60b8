"""What is evaluated, when, and what is said of it."""
