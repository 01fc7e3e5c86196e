"""Who sends requests: tenants, the file of their keys, their limits per minute and their usage.

Other packages use `ApiKeyStore` (the constructor), `Account`, `Tenant`, and the report of each tenant's usage.
"""
