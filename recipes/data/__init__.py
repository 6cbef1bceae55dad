"""The data: files, exports and data sets as splits of texts and labels."""
