"""Problems become prompts: read, rendered through the model's chat template, and drawn in an endless order."""
