"""Object stores: created-once and overwritten objects in local files, memory or S3."""
