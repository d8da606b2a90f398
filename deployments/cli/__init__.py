"""The command `astraflow`. It ends at once where another folder shadows a package of AstraFlow."""

from deployments import shadowing

shadowing.refuse()
