"""One spelling for each of the many that LaTeX has."""
