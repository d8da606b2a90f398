"""The processes of a node that train one policy together; nothing of a certain engine."""
