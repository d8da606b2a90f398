"""The rollout worker: leases orders, runs episodes, commits shards, keeps weights fresh."""
