"""Parts of a step as programs of their own, for pins and pipelines, and the list of dispatches that runs them."""
