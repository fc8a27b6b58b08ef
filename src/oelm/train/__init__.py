"""THE loop: one step, one checkpoint format, one clock, for every task.

Owns the Run value, the optimiser, the fast step, checkpoints and resuming.
Refuses to know what a study is: it trains one run in one folder.
"""
