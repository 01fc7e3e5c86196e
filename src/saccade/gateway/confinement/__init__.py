"""What a process that reads hostile bytes may not do."""
