"""The dataflow service: writes orders, ingests shards, assembles batches."""
