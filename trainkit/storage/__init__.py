"""Folders that are mirrored to object storage: what is written there, and what is fetched."""
