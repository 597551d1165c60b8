"""A table of frameworks and behaviours, where every cell comes from a run.

`python -m benchmarks.behaviour` in the root of the repository runs each probe (`rows`) against each
framework that is installed (`frameworks`), each in a process group of its own with a time limit.
A probe describes a small training (`job.Job`), lets the framework do it in the way that its
documentation recommends, and looks at what happened through the toys (`toys`): a model with one
parameter for each sample, whose gradients say which samples an update was made of, with which
weights. Nothing is asked of a framework that it does not say it does: that is "not offered".
"""
