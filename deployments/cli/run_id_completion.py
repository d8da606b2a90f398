"""Run ids for a shell's completion of arguments."""

from dataclasses import replace

PATIENCE_S = 0.5
"""Time after which a failing store is not read again: a person waits for it at a prompt."""
SUGGESTED_MAX = 100


def suggest(incomplete: str) -> list[str]:
    """Return the run ids of a store on disk that begin with `incomplete`, the last ones by name.

    Only names of folders are read. No server is asked, so there is none for a store on S3. Nothing
    is printed when the store cannot be read: the text would end up in the person's command line.
    """
    from deployments.paths import home
    from deployments.stack import environment, plan, state
    from storage import layout
    from storage.errors import AstraFlowError
    from storage.plain_names import RUN_ID
    from storage.store.object_store import open_store

    try:
        folder = home()
        url = environment.store_url(folder, plan.if_running(state.load(folder)))
        if not url.startswith("file:"):
            return []
        names = replace(open_store(url), patience_s=PATIENCE_S).folders(layout.RUNS)
    except (AstraFlowError, OSError):
        return []
    ids = [name for name in names if RUN_ID.fullmatch(name) and name.startswith(incomplete)]
    return sorted(ids)[-SUGGESTED_MAX:]
