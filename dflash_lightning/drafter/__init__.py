"""The drafter: configuration, attention, model and file format."""
