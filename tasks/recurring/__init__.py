"""Recurring training: each night a run that begins with the champion, a gate, and a decision.

    planning  which night this is, and what it does       nights/{name}/{night}/plan.json
    restarts  how often it may be started again            nights/{name}/{night}/starts/
    settings  the recipe of its run
    ending    how it ended, for the store, Prefect and MLflow

The flow is in `flows/run_recurring.py`.
"""
