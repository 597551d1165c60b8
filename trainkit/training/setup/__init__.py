"""What is made and checked before the first step."""
