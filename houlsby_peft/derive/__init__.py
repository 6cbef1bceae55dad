"""New adapters from existing ones: with fewer layers, combined, or initialized from a saved one."""
