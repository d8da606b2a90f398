"""The recipes that come with AstraFlow, one YAML file each."""
