"""Who sends requests: tenants, the file of their keys, what they may use in a minute and what they have used."""
