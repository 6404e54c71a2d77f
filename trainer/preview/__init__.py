"""Shows what each rank of a job would hold, on one machine without GPUs, with the real modules on the meta device."""
