"""THE METHOD: draws, ties, freezes, thaws and proves attention projections in any PyTorch model.

Owns everything a stranger installs the package for. Needs torch alone; knows nothing of tasks, data or training,
and refuses to choose a learning rate.
"""
