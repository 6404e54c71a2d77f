"""What each rank of a job holds, seen on one machine without GPUs: the real modules and the real optimizer, without memory."""
