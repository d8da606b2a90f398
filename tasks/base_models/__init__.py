"""Version 0 of a policy: the embedded tiny model, a folder, or the hub."""
