"""What objects lie in: folders, memory, S3. A `Backend` moves bytes by key and knows nothing else; `storage.objects` is over it."""
