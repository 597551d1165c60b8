"""What processes do together, and what must be alike on all of them."""
