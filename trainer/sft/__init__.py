"""Supervised fine-tuning: a model learns from chats before it learns from rewards."""
