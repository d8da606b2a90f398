"""Objects of a run: run.json, orders, shards, batches, evaluations, checkpoints, base models,
quarantine.
"""
