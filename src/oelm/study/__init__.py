"""Studies as data: TOML -> runs; planning, running on devices or Slurm, watching.

Owns which runs are wanted, done, partial and failed. Works without torch: each run is a process of its own.
Refuses to train or to judge.
"""
