"""The options of the source and the sink: their declaration, and how their values are parsed."""
