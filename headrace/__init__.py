"""Command line, settings, supervisor and development broker: how a person's words reach the parts."""
