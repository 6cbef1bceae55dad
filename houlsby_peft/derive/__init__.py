"""New adapters from existing ones: without some layers, combined, or initialized from a saved one."""
