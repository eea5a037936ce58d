"""What became of each attempt and group, who runs what, and which candidates make a batch."""
