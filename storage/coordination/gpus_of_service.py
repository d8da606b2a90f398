"""A service's hold on its GPUs: it waits while other processes use them."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from storage.coordination.lifetime import Lifetime
from storage.machine.gpu_locks import GpuBusyError, held_gpus
from storage.records.control import ServiceState, WaitReason

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Pause between two looks at GPUs that others use."""


@contextmanager
def gpus_of_service(lifetime: Lifetime, gpus: Sequence[int], share: float) -> Iterator[bool]:
    """Hold a share of these GPUs within the block, which is given True.

    While other processes use them, the service waits; its heartbeat names them. The block is given
    False when the service must stop before the GPUs are free.
    """
    heartbeat, before = lifetime.heartbeat, lifetime.heartbeat.last
    holder = f"{before.id} of {lifetime.run.prefix.strip('/') or 'a run'}"
    waited = False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(held_gpus(holder, gpus, share))
                break
            except GpuBusyError as error:
                heartbeat.update(
                    state=ServiceState.WAITING, wait_reason=WaitReason.GPU, note=str(error)
                )
                if not waited:
                    log.warning("%s waits: %s", holder, error)
                waited = True
                if lifetime.wait(POLL_S):
                    yield False
                    return
        if waited:
            heartbeat.update(state=ServiceState(before.state), note=before.note)
        yield True
