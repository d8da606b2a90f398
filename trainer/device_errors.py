"""Errors of a device, its memory and the links between devices."""


def device_errors() -> tuple[type[Exception], ...]:
    """Return torch's types of them: they pass through the code of users, since a restarted trainer
    may not have them.
    """
    import torch  # a recipe is checked without it
    import torch.distributed

    return torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError
