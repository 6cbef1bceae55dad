"""Convert adapters from the format of AdapterHub, which the `adapters` library writes."""
