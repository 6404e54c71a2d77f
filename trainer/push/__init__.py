"""The weight push: from Megatron ranks to engines over collective groups, never through storage."""
