"""The parts of a workflow: agents, chat templates, contexts, failures, seeds, time limits."""
