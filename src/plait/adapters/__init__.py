"""What plait knows of other libraries by name; each file is one library, which need not be installed."""
