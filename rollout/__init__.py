"""Prompts become graded groups: the ledger, its server and clients, and the engines that sample."""
