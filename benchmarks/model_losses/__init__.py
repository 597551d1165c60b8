"""Which losses of transformers are exact on any split, tried on every class for a task.

`python -m benchmarks.model_losses` makes a small model of each class (`small`) and samples for it
(`batches`), trains a window of micro-batches of different sizes through `Trainer.fit`, and compares
its gradient, and `eval/loss`, with one backward over all samples (`measure`). It writes the table
of docs/migrate/transformers.md.
"""
