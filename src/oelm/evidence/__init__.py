"""From run records to a verdict: tidy results, statistics, figures, reports, the ledger of claims.

Owns every number that is published. Works without torch (but its probes, which look into a trained model).
Refuses numbers that no program wrote and verdicts from one seed.
"""
