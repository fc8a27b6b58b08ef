"""Named data sets -> fingerprinted token stores -> deterministic batches of numpy arrays.

Owns where text comes from, its splits, its tokens and its scores (accuracy, entity F1, exact match).
Refuses models, devices and torch; a batch is a pure function of (seed, step, rank, world).
"""
