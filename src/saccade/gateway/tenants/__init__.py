"""The tenants that send requests: their keys file, their limits per minute, and their usage.

Other packages use `ApiKeyStore` (the constructor), `Account`, `Tenant`, and the report of each tenant's usage.
"""
