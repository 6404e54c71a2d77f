"""Problems that are generated, for runs that learn within minutes."""
