"""`python -m deployments.watchdog`: the watchdog's process, which `astraflow up` starts."""

import sys

from deployments.paths import home
from deployments.watchdog.watch import watch

if __name__ == "__main__":
    sys.exit(watch(home()))
