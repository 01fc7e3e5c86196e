"""Two engines up at once and asked in turn, so that the machine's noise meets both."""
