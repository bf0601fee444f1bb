"""The options of the source and the sink: their declaration, and the parsing of their values."""
