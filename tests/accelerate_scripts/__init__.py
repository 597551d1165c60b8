"""Scripts of our own with the calls that public scripts make, word for word for Accelerate.

Each has a `main(folder)` that returns its weights and figures in plain values. Together they use
every call and keyword that three or more of the scanned public files use.
"""
