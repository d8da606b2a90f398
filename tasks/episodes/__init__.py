"""All episodes of a run, from its shards and batches.

batches ─▶ sequence_fates ─┐
shards ────────────────────┴─▶ index ─▶ selection ─▶ tables of `astraflow episodes`
                                              token_view (one episode), page files
"""
