"""Promotion: which version of each policy is in use, and by which decision.

    outcomes ──gate──▶ verdict ──▶ decision, created once in the store (decision_log)
                                        │ fold
                                        ▼
                    champion, previous, challenger ──▶ tags that gc respects (kept_versions)
                                                   ──▶ MLflow's aliases (aliases)

The log in the store is the truth. Tags and aliases follow from it, and are repaired from it.
"""
