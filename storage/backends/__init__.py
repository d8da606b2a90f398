"""What objects lie in: folders, memory, S3. A `Backend` moves bytes by key and knows no more; `storage.objects` uses it."""
